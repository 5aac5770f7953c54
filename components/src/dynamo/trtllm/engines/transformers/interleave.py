"""Work between the layers of a long forward pass, so that running requests do not wait until it has ended.

A GPU works through what was launched in order. A large image in the vision tower, or a long prompt, is tens
of milliseconds of it; a decode step that is launched after a few layers takes its turn in between. How many
layers, follows from how long they take and how long a step takes, both measured while they run.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

SHARE = 0.6
"""Between two decode steps other work may take this part of a step's time, so gaps between tokens stay
below twice a step.
"""
_STACK = 4
"""Layers of the same kind from which on they are taken for the bulk of a model."""
_FIRST_UNIT_MS = 5e-12
"""400 TFLOP/s, until it was measured."""
_FIRST_STEP_MS = 5.0
_EVENTS = 64
"""More than there are marks between a decode step that is launched and one that is done."""
_NEWEST = 5
"""Measurements whose median counts."""


class Clock(Protocol):
    """Times on the device, in its order of work."""

    def mark(self) -> Any:
        """The moment at which all that was launched so far is done."""

    def between_ms(self, first: Any, second: Any) -> float | None:
        """Milliseconds between two marks; None while the second is still to come."""


def clock_of(device: torch.device) -> Clock:
    return _CudaClock() if device.type == "cuda" else _HostClock()


class _HostClock:
    """For a device that has done what was launched when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def between_ms(self, first: float, second: float) -> float | None:
        return (second - first) * 1e3


class _CudaClock:
    """Marks in the current stream. Events are used again and again: making and destroying one may wait for
    the device.
    """

    def __init__(self) -> None:
        self._events: deque[torch.cuda.Event] = deque(
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(_EVENTS)
        )

    def mark(self) -> torch.cuda.Event:
        event = self._events[0]
        self._events.rotate(-1)
        event.record()
        return event

    def between_ms(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float | None:
        return first.elapsed_time(second) if second.query() else None  # type: ignore[no-untyped-call]


class _Turn(NamedTuple):
    """Work, then a decode step."""

    units: dict[int, int]
    began: Any
    ended: Any
    stepped: Any


class Pace:
    """When the next decode step is due. A unit of work is one parameter of a layer applied to one token.

    What a unit takes differs between the layers of a vision tower and those of a language model, whose
    attention is not in it; so it is measured for each size of layer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._units: dict[int, int] = {}
        self._began: Any = None
        self._open: deque[_Turn] = deque()
        self._unit_ms: dict[int, _Typical] = {}
        self._step_ms = _Typical(_FIRST_STEP_MS)

    def worked(self, size: int, tokens: int) -> None:
        """A layer of `size` parameters was launched for `tokens` tokens."""
        self._units[size] = self._units.get(size, 0) + size * tokens

    @property
    def due(self) -> bool:
        """Whether what was launched since the last step takes as long as it may."""
        work_ms = sum(units * self._of(size).value for size, units in self._units.items())
        return work_ms >= SHARE * self._step_ms.value

    def step(self, launch: Callable[[], None]) -> None:
        """Do `launch`, which launches a decode step."""
        ended = self._clock.mark()
        launch()
        stepped = self._clock.mark()
        if self._began is not None:
            self._open.append(_Turn(self._units, self._began, ended, stepped))
        self._units, self._began = {}, stepped
        self._learn()

    def rest(self) -> None:
        """There is nobody to decode for."""
        self._units, self._began = {}, None

    def _of(self, size: int) -> _Typical:
        return self._unit_ms.setdefault(size, _Typical(_FIRST_UNIT_MS))

    def _learn(self) -> None:
        """Take over what has been measured meanwhile."""
        while self._open:
            turn = self._open[0]
            step_ms = self._clock.between_ms(turn.ended, turn.stepped)
            if step_ms is None:
                return
            self._open.popleft()
            self._step_ms.add(step_ms)
            if len(turn.units) == 1:
                ((size, units),) = turn.units.items()
                self._of(size).add((self._clock.between_ms(turn.began, turn.ended) or 0.0) / units)


class _Typical:
    """The median of the newest measurements: recording a graph takes long once, not every step."""

    def __init__(self, first: float) -> None:
        self._newest: deque[float] = deque(maxlen=_NEWEST)
        self.value = first

    def add(self, measured: float) -> None:
        self._newest.append(measured)
        self.value = statistics.median(self._newest)


class Interleave:
    """Within `block`, decodes between layers of `model` whenever a step is due. For one thread.

    `launch` launches a decode step; `running` says whether there is a request to decode for. An error of
    `launch` does not pass through the model, where it would look like the model's: it is kept, and nothing
    more is launched.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock) -> None:
        self._running: Callable[[], bool] = bool
        self._launch: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._pace = Pace(clock)
        self._open = False
        for stack in model.modules():
            if isinstance(stack, torch.nn.ModuleList) and len(stack) >= _STACK:
                for layer in stack:
                    size = sum(p.numel() for p in layer.parameters())
                    layer.register_forward_hook(partial(self._after, size))

    def serve(self, running: Callable[[], bool], launch: Callable[[], None]) -> None:
        """From now on decode by `launch` while `running`."""
        self._running, self._launch = running, launch

    @property
    def due(self) -> bool:
        """Whether `step` should be called now."""
        return self._error is not None or self._pace.due

    @contextmanager
    def block(self) -> Iterator[None]:
        """A forward pass that may be interrupted."""
        self._open = self._running()
        try:
            yield
        finally:
            self._open = False

    def step(self) -> None:
        """Launch a decode step, if any request is running. Raises what `launch` raised, now or within
        `block`.
        """
        self._step()
        if self._error is not None:
            raise self._error

    def _after(self, size: int, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not self._open:
            return
        first = output[0] if isinstance(output, tuple) else output
        self._pace.worked(size, first.numel() // first.shape[-1])
        if self._pace.due:
            self._open = False  # what is launched may run layers of its own
            self._step()
            self._open = self._error is None and self._running()

    def _step(self) -> None:
        if self._launch is None or self._error is not None:
            return
        if not self._running():
            self._pace.rest()
            return
        try:
            self._pace.step(self._launch)
        except Exception as error:
            self._error = error
