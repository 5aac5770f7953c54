"""How long each stage of a request takes in this process: measured where it happens, kept with the request until it ends.

The task that serves a request carries its times in a context variable, which the tasks that it starts inherit. So `measured`
needs no parameter, and outside of a request it measures nothing. Work that requests share (a picture that two of them ask for at
once) belongs to the one that began it. Nothing here runs once per token.
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


class RequestTimes:
    """One request's times in seconds, from `arrived`, a value of `perf_counter`. Written by the request's tasks alone.

    A stage that runs several times at once, as for several pictures, counts once: while at least one of them runs.
    """

    __slots__ = ("_has_waited", "_open", "_running", "arrived", "first_output_s", "spent_s")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.first_output_s: float | None = None
        self.spent_s: dict[Stage, float] = {Stage.QUEUE: perf_counter() - arrived}
        self._running: dict[Stage, tuple[int, float]] = {}
        self._open: Stage | None = None
        self._has_waited = False

    def begin(self, stage: Stage) -> None:
        count, since = self._running.get(stage, (0, 0.0))
        self._running[stage] = (count + 1, since if count else perf_counter())

    def end(self, stage: Stage) -> None:
        count, since = self._running.pop(stage)
        if count > 1:
            self._running[stage] = (count - 1, since)
        else:
            self.spent_s[stage] = self.spent_s.get(stage, 0.0) + perf_counter() - since

    def begin_until_first_output(self, stage: Stage) -> None:
        """`stage` ends with the first output, or with the request."""
        self._open = stage
        self.begin(stage)

    def had_first_output(self) -> None:
        self.first_output_s = perf_counter() - self.arrived
        self._close()

    def waited(self, seconds: float) -> None:
        """So much of the engine's context stage was waiting for a place in it. Of several choices, the first counts."""
        if self.first_output_s is not None or self._has_waited:
            return
        self._has_waited = True
        self.spent_s[Stage.QUEUE] += seconds
        self.spent_s[Stage.PREFILL] = self.spent_s.get(Stage.PREFILL, 0.0) - seconds

    def finish(self) -> None:
        """The request is over: what still runs ends here."""
        self._open = None
        for stage, (_, since) in self._running.items():
            self.spent_s[stage] = self.spent_s.get(stage, 0.0) + perf_counter() - since
        self._running = {}

    def _close(self) -> None:
        stage, self._open = self._open, None
        if stage is not None:
            self.end(stage)


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


def measure_until_first_output(stage: Stage) -> None:
    """`stage` of the present request begins, and ends with the request's first output."""
    times = _current.get()
    if times is not None:
        times.begin_until_first_output(stage)


def waited_for_the_engine(seconds: float) -> None:
    """The present request waited so long before its context stage began, counted within that stage until now."""
    times = _current.get()
    if times is not None:
        times.waited(max(seconds, 0.0))


class Distribution:
    """Durations of one series: how many by bucket, the last one without a bound, and their sum.

    A dozen times cheaper than `prometheus_client.Histogram`, whose lock this needs not: one event loop writes.
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
        self._series: dict[tuple[str, str], Distribution] = {}

    def take(self, times: RequestTimes, outcome: str) -> None:
        """Account for a request that ended as `outcome`."""
        times.finish()
        self._observe("", outcome, perf_counter() - times.arrived)
        if times.first_output_s is not None:
            self._observe(_FIRST, outcome, times.first_output_s)
        for stage, seconds in times.spent_s.items():
            self._observe(stage, outcome, max(seconds, 0.0))

    def readings(self) -> Mapping[Series, Distribution]:
        """The present distributions; each one is written on."""
        return {_series(name, outcome): each for (name, outcome), each in list(self._series.items())}

    def _observe(self, name: str, outcome: str, seconds: float) -> None:
        found = self._series.get((name, outcome))
        if found is None:
            found = self._series[name, outcome] = Distribution()
        found.observe(seconds)


_FIRST = "first output"


def _series(name: str, outcome: str) -> Series:
    if name == "":
        return REQUEST_DURATION.of(outcome)
    if name == _FIRST:
        return TIME_TO_FIRST_TOKEN.of(outcome)
    return STAGE_DURATION.of(Stage(name).value, outcome)
