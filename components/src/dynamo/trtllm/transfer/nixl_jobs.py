"""What the event loop asks of the transfer thread, and how the thread answers."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dynamo.trtllm.transfer.nixl_pace import IDLE_PAUSE_S
from dynamo.trtllm.transfer.transport import ConnectionLost

Job = Callable[[], None]


class Jobs:
    """A queue from the event loop, on which this is made, to one thread.
    That thread calls `next` and `tell_loop` only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.asleep = False
        """True while the thread waits although nothing is outstanding:
        it then sees nothing unless it is roused."""

    def put(self, job: Job) -> None:
        """Let the thread do `job`, after what is queued."""
        self._queue.put(job)

    def rouse(self) -> None:
        """Let the thread look around, if it sleeps."""
        if self.asleep:
            self._queue.put(lambda: None)

    async def call(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done on the thread.
        It is done, and its result dropped, if the caller leaves."""
        finished: asyncio.Future[Any] = self._loop.create_future()

        def done(result: Any, error: Exception | None) -> None:
            if finished.done():
                return
            if error is None:
                finished.set_result(result)
            else:
                finished.set_exception(error)

        def job() -> None:
            try:
                self.tell_loop(done, work(), None)
            except Exception as error:
                self.tell_loop(done, None, error)

        self._queue.put(job)
        return await asyncio.shield(finished)

    def put_unless_late(self, job: Job, finished: asyncio.Future[None], within_s: float) -> None:
        """As `put`, but if the thread does not come to it in time,
        `finished` fails with `ConnectionLost` and it is not done."""
        taken = threading.Lock()  # by whoever acquires it: the thread, or the end of the time

        def begin() -> None:
            if taken.acquire(blocking=False):
                job()

        def give_up() -> None:
            if not finished.done() and taken.acquire(blocking=False):
                finished.set_exception(ConnectionLost())

        timer = self._loop.call_later(within_s, give_up)
        finished.add_done_callback(lambda _: timer.cancel())
        self._queue.put(begin)

    def next(self, pause_s: float) -> Job | None:
        """What is queued; if nothing is, what comes within `pause_s`, or None."""
        self.asleep = pause_s >= IDLE_PAUSE_S
        try:
            if not pause_s:
                time.sleep(0)
                return self._queue.get_nowait()
            return self._queue.get(timeout=pause_s)
        except queue.Empty:
            return None
        finally:
            self.asleep = False

    def tell_loop(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call on the event loop, at once where this is it."""
        if threading.get_ident() == self._loop_thread:
            call(*args)
            return
        # The loop may be closed while the thread ends; nobody waits for the answer then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)
