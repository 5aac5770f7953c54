"""Requests in flight and the engine's pulse: finds a dead or stuck engine and ends those who wait for it.

After a fatal error TensorRT-LLM raises it in whichever request steps next and may leave the others waiting
for ever, and there is no public way to ask whether the engine lives. So the adapter watches: requests in
flight and no step of any of them for `stall_s` means a stuck engine.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from dynamo.trtllm.errors import EngineDead, WorkerError


class Flight:
    """One request that the engine works on, for the task that began to read it; a context manager.

    `waiting` says that the request waits for the engine. Looking up the task of each step would cost more
    than the step itself, so a stream that changes tasks (pull) is ended by the process's exit instead.
    """

    __slots__ = ("_flights", "ended_by", "task", "waiting")

    def __init__(self, flights: set[Flight]) -> None:
        self._flights = flights
        self.task = asyncio.current_task()
        self.waiting = True
        self.ended_by: WorkerError | None = None

    def __enter__(self) -> Flight:
        self._flights.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A wait that the watch ended turns into the reason, as if the engine had raised it."""
        self._flights.discard(self)
        if self.ended_by is not None and isinstance(error, asyncio.CancelledError):
            _uncancel(self.task)
            raise type(self.ended_by)(self.ended_by.message) from self.ended_by


class Watch:
    """State shared by requests: the flights, the step counter and what ended the engine."""

    def __init__(self, stall_s: float) -> None:
        self.steps = 0
        """Counts engine steps of all requests; whoever receives one adds to it."""
        self._stall_s = stall_s
        self._flights: set[Flight] = set()
        self._over: WorkerError | None = None

    @property
    def active(self) -> int:
        return len(self._flights)

    def require_alive(self) -> None:
        """Raise what ended the engine, if anything has."""
        if self._over is not None:
            raise type(self._over)(self._over.message) from self._over

    def flight(self) -> Flight:
        """Registers a request while the returned context is open.
        Raises what ended the engine, if anything has."""
        self.require_alive()
        self.steps += 1
        return Flight(self._flights)

    def end(self, reason: WorkerError) -> None:
        """No request will be served any more; those that wait end with `reason`. The first reason counts."""
        if self._over is None:
            self._over = reason
        for flight in list(self._flights):
            flight.ended_by = self._over
            if flight.waiting and flight.task is not None and flight.task is not asyncio.current_task():
                flight.task.cancel()

    async def run(self) -> None:
        """Ends with the engine's death; looks four times per deadline."""
        seen, since = -1, time.monotonic()
        while self._over is None:
            await asyncio.sleep(self._stall_s / 4)
            if not self._flights or self.steps != seen:
                seen, since = self.steps, time.monotonic()
            elif time.monotonic() - since >= self._stall_s:
                self.end(EngineDead(f"the engine has made no step for {self._stall_s:g} s"))


def _uncancel(task: asyncio.Task[object] | None) -> None:
    """The cancellation was ours and is dealt with; Python 3.10 does not count cancellations."""
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
