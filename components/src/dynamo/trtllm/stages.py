"""How long each stage of a request takes in this process:
measured where it happens, kept until the request ends.

The task that serves a request carries its times in a context variable, which the tasks that it starts
inherit. So `measured` needs no parameter, and outside of a request it measures nothing. Work that
requests share (an image that two of them ask for at once) belongs to the one that began it. Nothing
here runs once per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextvars import ContextVar
from time import perf_counter

from dynamo.trtllm.metrics import (
    BUCKETS_S,
    REQUEST_DURATION,
    STAGE_DURATION,
    TIME_TO_FIRST_TOKEN,
    Series,
    Stage,
)

_QUEUE, _PREFILL = Stage.QUEUE, Stage.PREFILL


class RequestTimes:
    """One request's times in seconds, from `arrived`, a value of `perf_counter`.
    Written by its own tasks alone.

    A stage that runs several times at once, as for several images, counts once: while at least one runs.
    """

    # Most requests need none of these; made for each of them they would cost a microsecond.
    first_output_s: float | None = None
    _until_output: Stage | None = None
    _until_output_since = 0.0
    _has_waited = False
    _running: dict[Stage, tuple[int, float]] | None = None

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self._marked = now = perf_counter()
        self.spent_s: dict[Stage, float] = {_QUEUE: now - arrived}

    def add(self, stage: Stage, seconds: float) -> None:
        self.spent_s[stage] = self.spent_s.get(stage, 0.0) + seconds

    def passed(self, stage: Stage) -> None:
        """What passed since the request began here, or since the last call, was `stage`."""
        now = perf_counter()
        self.add(stage, now - self._marked)
        self._marked = now

    def begin(self, stage: Stage) -> None:
        if self._running is None:
            self._running = {}
        count, since = self._running.get(stage, (0, 0.0))
        self._running[stage] = (count + 1, since if count else perf_counter())

    def end(self, stage: Stage) -> None:
        """Undo one `begin`. Does nothing where the request is over."""
        count, since = self._running.pop(stage, (0, 0.0)) if self._running is not None else (0, 0.0)
        if count > 1 and self._running is not None:
            self._running[stage] = (count - 1, since)
        elif count:
            self.add(stage, perf_counter() - since)

    def begin_until_first_output(self, stage: Stage) -> None:
        """`stage` ends with the first output, or with the request."""
        self._until_output = stage
        self._until_output_since = perf_counter()

    def had_first_output(self) -> None:
        now = perf_counter()
        self.first_output_s = now - self.arrived
        if self._until_output is not None:
            self.add(self._until_output, now - self._until_output_since)
            self._until_output = None

    def waited(self, seconds: float) -> None:
        """So much of the engine's context stage was waiting for a place in it;
        of several choices, the first."""
        if self.first_output_s is not None or self._has_waited:
            return
        self._has_waited = True
        self.add(_QUEUE, seconds)
        self.add(_PREFILL, -seconds)

    def finish(self) -> float:
        """The request is over: what still runs ends here. Gives the whole duration."""
        now = perf_counter()
        if self._until_output is not None:
            self.add(self._until_output, now - self._until_output_since)
            self._until_output = None
        if self._running:
            for stage, (_, since) in self._running.items():
                self.add(stage, now - since)
            self._running = None
        return now - self.arrived


_current: ContextVar[RequestTimes | None] = ContextVar("request_times", default=None)


def carry(times: RequestTimes | None) -> None:
    """From here on the present task measures for `times`."""
    _current.set(times)


class measured:
    """The block is a stage of the present request. Not a generator, since every request passes several."""

    __slots__ = ("_stage", "_times")

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._times = _current.get()

    def __enter__(self) -> None:
        if self._times is not None:
            self._times.begin(self._stage)

    def __exit__(self, *error: object) -> None:
        if self._times is not None:
            self._times.end(self._stage)


def passed(stage: Stage) -> None:
    """What the present request has been through since it began here, or since the last call, was `stage`."""
    times = _current.get()
    if times is not None:
        times.passed(stage)


def measure_until_first_output(stage: Stage) -> None:
    """`stage` of the present request begins, and ends with the request's first output."""
    times = _current.get()
    if times is not None:
        times.begin_until_first_output(stage)


def waited_for_the_engine(seconds: float) -> None:
    """The present request waited so long in its context stage before anything was computed."""
    times = _current.get()
    if times is not None:
        times.waited(max(seconds, 0.0))


class Distribution:
    """Durations of one series: how many by bucket, the last one without a bound, and their sum.

    Several times cheaper than `prometheus_client.Histogram`,
    whose lock it can do without: one event loop writes.
    """

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class Durations:
    """The durations of all requests that have ended, by metric and labels. Shared by requests."""

    def __init__(self) -> None:
        self._by_outcome: dict[str, _Outcome] = {}

    def take(self, times: RequestTimes, outcome: str) -> None:
        """Account for a request that ended as `outcome`."""
        found = self._by_outcome.get(outcome)
        if found is None:
            found = self._by_outcome[outcome] = _Outcome()
        found.whole.observe(times.finish())
        if times.first_output_s is not None:
            found.first_output.observe(times.first_output_s)
        for stage, seconds in times.spent_s.items():
            found.stages[stage].observe(seconds)

    def readings(self) -> Mapping[Series, Distribution]:
        """The present distributions, but for those without any duration; each one is written on."""
        found: dict[Series, Distribution] = {}
        for outcome, each in list(self._by_outcome.items()):
            found[REQUEST_DURATION.of(outcome)] = each.whole
            found[TIME_TO_FIRST_TOKEN.of(outcome)] = each.first_output
            found.update({STAGE_DURATION.of(stage.value, outcome): of for stage, of in each.stages.items()})
        return {series: each for series, each in found.items() if any(each.counts)}


class _Outcome:
    """The distributions of the requests that ended in one way."""

    def __init__(self) -> None:
        self.whole = Distribution()
        self.first_output = Distribution()
        self.stages = {stage: Distribution() for stage in Stage}
