"""When a decode step comes between the layers of other work: as often as its own time and theirs ask for."""

from __future__ import annotations

import pytest
import torch

from dynamo.trtllm.engines.transformers.interleave import SHARE, Interleave, Pace


class Device:
    """A device that works through what was launched; its marks are times in milliseconds."""

    def __init__(self, step_ms: float) -> None:
        self.now = 0.0
        self.step_ms = step_ms
        self.steps = 0

    def mark(self) -> float:
        return self.now

    def between_ms(self, first: float, second: float) -> float | None:
        return second - first

    def step(self) -> None:
        self.now += self.step_ms
        self.steps += 1


@pytest.mark.parametrize("layer_ms", [0.1, 0.7, 1.9])
@pytest.mark.parametrize("step_ms", [2.0, 6.0, 30.0])
def test_work_between_two_steps_takes_its_share_of_a_step_once_both_were_measured(
    layer_ms: float, step_ms: float
) -> None:
    device = Device(step_ms)
    pace, gaps, began = Pace(device), [], 0.0
    for _ in range(3000):
        device.now += layer_ms
        pace.worked(10**9, 64)
        if pace.due:
            gaps.append(device.now - began)
            pace.step(device.step)
            began = device.now
    assert gaps[10:]
    assert all(SHARE * step_ms - 1e-6 <= gap <= SHARE * step_ms + layer_ms + 1e-6 for gap in gaps[10:])


def test_layers_of_two_sizes_are_measured_apart() -> None:
    device = Device(6.0)
    pace, gaps, began = Pace(device), [], 0.0
    for number in range(4000):
        small = number // 500 % 2 == 0
        device.now += 1.0 if small else 0.2
        pace.worked(10**9 if small else 10**8, 64)
        if pace.due:
            if number >= 1000:  # each has had its turn
                gaps.append(device.now - began)
            pace.step(device.step)
            began = device.now
    assert max(gaps) <= SHARE * 6.0 + 1.0 + 1e-6


def test_one_step_that_takes_long_does_not_change_the_pace() -> None:
    device = Device(5.0)
    pace = Pace(device)
    counts = []
    for number in range(40):
        count = 0
        while not pace.due:
            device.now += 0.5
            pace.worked(10**9, 64)
            count += 1
        counts.append(count)
        device.step_ms = 80.0 if number == 20 else 5.0
        pace.step(device.step)
    assert set(counts[6:]) == {6}  # 0.6 of 5 ms


def _layers(count: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(count))
    return model


def _run(model: torch.nn.Module, interleave: Interleave, device: Device) -> None:
    values = torch.ones(3, 4)
    with interleave.block():
        for layer in model.layers:  # type: ignore[union-attr]
            device.now += 1.0
            values = layer(values)


def test_nothing_comes_between_layers_where_nobody_waits_for_a_token() -> None:
    device, model = Device(2.0), _layers(8)
    interleave = Interleave(model, device)
    waiting = False
    interleave.serve(lambda: waiting, device.step)
    for _ in range(20):
        _run(model, interleave, device)
        interleave.step()
    assert device.steps == 0
    waiting = True
    for _ in range(20):
        interleave.step()
        _run(model, interleave, device)
    assert device.steps > 40


def test_an_error_of_a_step_is_raised_outside_of_the_pass() -> None:
    device, model = Device(0.001), _layers(8)
    interleave = Interleave(model, device)
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("lost")

    interleave.serve(lambda: True, device.step)
    for _ in range(20):
        interleave.step()
        _run(model, interleave, device)
    interleave.serve(lambda: True, fail)
    for _ in range(5):
        _run(model, interleave, device)
    assert calls == [1]
    assert interleave.due
    with pytest.raises(RuntimeError, match="lost"):
        interleave.step()
