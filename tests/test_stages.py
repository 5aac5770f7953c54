"""What is told of a request's time, by stage and by how it ended:
through an endpoint, by a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import pytest

from dynamo.trtllm import metrics, stages
from dynamo.trtllm.core import Context
from dynamo.trtllm.errors import ClientFault, EngineFault
from dynamo.trtllm.frontend import endpoint
from dynamo.trtllm.frontend.endpoint import DIRECT_CHUNKS, EndpointServer
from dynamo.trtllm.frontend.response import Chunk
from dynamo.trtllm.metrics import BUCKETS_S, REQUEST_DURATION, STAGE_DURATION, TIME_TO_FIRST_TOKEN, Stage
from dynamo.trtllm.stages import measure_until_first_output, measured, waited_for_the_engine
from fakes import FakeContext, FakeSender, collect, ignore_death, outcome, until

Work = Callable[["Clock"], Awaitable[None]]


class Clock:
    """Stands still but for `pass_s`. Seconds are powers of two, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stages, "perf_counter", clock)
    monkeypatch.setattr(endpoint, "perf_counter", clock)
    return clock


class Staged:
    """A handler that does `work`, then gives `count` chunks, one a second."""

    def __init__(self, clock: Clock, work: Work, count: int = 1) -> None:
        self._clock, self._work, self._count = clock, work, count

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        await self._work(self._clock)
        for index in range(self._count):
            self._clock.pass_s(1.0)
            yield {"token_ids": [index]}


async def nothing(clock: Clock) -> None: ...


def server_of(clock: Clock, work: Work, count: int = 1) -> EndpointServer:
    return EndpointServer(Staged(clock, work, count), on_dead=ignore_death)


def ask(server: EndpointServer, sender: FakeSender | None = None) -> AsyncGenerator[Chunk, None]:
    return server.serve({}, FakeContext(), response_sender=sender)


def told(server: EndpointServer) -> dict[tuple[str, ...], tuple[int, float]]:
    """Count and sum of each distribution, by its metric's short name and labels."""
    return {
        (series.metric.name.removeprefix("dynamo_trtllm_"), *series.labels): (sum(each.counts), each.sum_s)
        for series, each in server.durations.readings().items()
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("sender", [FakeSender(), None], ids=["push", "pull"])
async def test_a_request_has_its_queue_its_stages_its_first_output_and_its_whole(
    clock: Clock, sender: FakeSender | None
) -> None:
    async def work(clock: Clock) -> None:
        with measured(Stage.FETCH):
            clock.pass_s(4.0)
        with measured(Stage.ENCODE):
            clock.pass_s(8.0)
        with measured(Stage.ENCODE):
            clock.pass_s(16.0)
        measure_until_first_output(Stage.PREFILL)
        clock.pass_s(32.0)

    server = server_of(clock, work, count=3)
    asked = ask(server, sender)
    if sender is not None:
        clock.pass_s(2.0)  # between the call and the task's first turn
    await collect(asked)
    arrival_s = 2.0 if sender is not None else 0.0
    assert told(server) == {
        ("request_duration_seconds", "completed"): (1, arrival_s + 63.0),
        ("time_to_first_token_seconds", "completed"): (1, arrival_s + 61.0),
        ("stage_duration_seconds", "queue", "completed"): (1, arrival_s),
        ("stage_duration_seconds", "fetch", "completed"): (1, 4.0),
        ("stage_duration_seconds", "encode", "completed"): (1, 24.0),
        ("stage_duration_seconds", "prefill", "completed"): (1, 33.0),
    }


@pytest.mark.asyncio
async def test_media_that_are_decoded_side_by_side_count_once(clock: Clock) -> None:
    async def work(clock: Clock) -> None:
        started, release = asyncio.Event(), asyncio.Event()

        async def one() -> None:
            with measured(Stage.MEDIA_DECODE):
                started.set()
                await release.wait()

        tasks = [asyncio.create_task(one()) for _ in range(3)]
        await started.wait()
        clock.pass_s(4.0)
        release.set()
        await asyncio.gather(*tasks)

    server = server_of(clock, work)
    await collect(ask(server, FakeSender()))
    assert told(server)["stage_duration_seconds", "media_decode", "completed"] == (1, 4.0)


@pytest.mark.asyncio
async def test_waiting_in_the_engine_is_queue_and_not_prefill(clock: Clock) -> None:
    async def work(clock: Clock) -> None:
        with measured(Stage.PREFILL):
            clock.pass_s(8.0)
        waited_for_the_engine(2.0)

    server = server_of(clock, work)
    await collect(ask(server, FakeSender()))
    assert told(server)["stage_duration_seconds", "queue", "completed"] == (1, 2.0)
    assert told(server)["stage_duration_seconds", "prefill", "completed"] == (1, 6.0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "ended"),
    [(ClientFault("no"), "refused"), (EngineFault("no"), "failed")],
    ids=["refused", "failed"],
)
async def test_stages_of_a_request_that_fails_are_told_apart_and_there_is_no_first_output(
    clock: Clock, error: Exception, ended: str
) -> None:
    async def work(clock: Clock) -> None:
        with measured(Stage.FETCH):
            clock.pass_s(4.0)
        measure_until_first_output(Stage.PREFILL)
        clock.pass_s(8.0)
        raise error

    server = server_of(clock, work)
    await outcome(collect(ask(server, FakeSender())))
    assert told(server) == {
        ("request_duration_seconds", ended): (1, 12.0),
        ("stage_duration_seconds", "queue", ended): (1, 0.0),
        ("stage_duration_seconds", "fetch", ended): (1, 4.0),
        ("stage_duration_seconds", "prefill", ended): (1, 8.0),
    }


@pytest.mark.asyncio
async def test_a_stage_that_a_client_left_ends_with_its_request(clock: Clock) -> None:
    entered = asyncio.Event()

    async def work(clock: Clock) -> None:
        with measured(Stage.FETCH):
            clock.pass_s(4.0)
            entered.set()
            await asyncio.Event().wait()

    server = server_of(clock, work)
    context = FakeContext()
    task = asyncio.create_task(outcome(collect(server.serve({}, context, response_sender=FakeSender()))))
    await entered.wait()
    context.stop_generating()
    await task
    assert told(server)["stage_duration_seconds", "fetch", "cancelled"] == (1, 4.0)


@pytest.mark.asyncio
async def test_requests_that_run_at_once_keep_their_times_apart(clock: Clock) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    numbers = iter((0, 1))
    entered: list[int] = []

    async def work(clock: Clock) -> None:
        number = next(numbers)
        with measured(Stage.FETCH if number else Stage.ENCODE):
            entered.append(number)
            await gates[number].wait()

    server = server_of(clock, work)
    tasks = [asyncio.create_task(collect(ask(server, FakeSender()))) for _ in range(2)]
    await until(lambda: len(entered) == 2)
    for gate, task in zip(gates, tasks, strict=True):
        clock.pass_s(4.0)
        gate.set()
        await task
    found = told(server)
    assert found["stage_duration_seconds", "encode", "completed"] == (1, 4.0)
    assert found["stage_duration_seconds", "fetch", "completed"] == (
        1,
        9.0,
    )  # the first one's token took a second


@pytest.mark.asyncio
async def test_outside_of_a_request_nothing_is_measured(clock: Clock) -> None:
    with measured(Stage.FETCH):
        measure_until_first_output(Stage.PREFILL)
        waited_for_the_engine(1.0)
    server = server_of(clock, nothing)
    await collect(ask(server, FakeSender()))
    assert ("stage_duration_seconds", "fetch", "completed") not in told(server)
    with measured(Stage.FETCH):
        clock.pass_s(4.0)
    assert ("stage_duration_seconds", "fetch", "completed") not in told(server)


@pytest.mark.asyncio
async def test_a_long_answer_is_one_observation_of_each(clock: Clock) -> None:
    server, sender = server_of(clock, nothing, count=DIRECT_CHUNKS + 10), FakeSender()
    await collect(ask(server, sender))
    assert len(sender.chunks) == DIRECT_CHUNKS + 10
    assert told(server)["time_to_first_token_seconds", "completed"] == (1, 1.0)
    assert told(server)["request_duration_seconds", "completed"] == (1, DIRECT_CHUNKS + 10.0)


@pytest.mark.asyncio
async def test_a_duration_falls_into_the_bucket_that_it_does_not_exceed(clock: Clock) -> None:
    durations = iter((BUCKETS_S[2], BUCKETS_S[2] * 1.5, BUCKETS_S[-1] * 2))

    async def work(clock: Clock) -> None:
        with measured(Stage.FETCH):
            clock.now = 0.0
        with measured(Stage.ENCODE):
            clock.now = next(durations)

    server = server_of(clock, work)
    for _ in range(3):
        clock.now = 0.0
        await collect(ask(server, FakeSender()))
    counts = server.durations.readings()[STAGE_DURATION.of("encode", "completed")].counts
    assert {at: count for at, count in enumerate(counts) if count} == {2: 1, 3: 1, len(BUCKETS_S): 1}


def test_every_stage_is_explained_and_belongs_to_roles() -> None:
    assert list(metrics.STAGES) == list(Stage)
    assert all(roles and text for text, roles in metrics.STAGES.values())
    for metric in (REQUEST_DURATION, TIME_TO_FIRST_TOKEN, STAGE_DURATION):
        assert metric.labels[-2:] == (metrics.ROLE, "outcome")
