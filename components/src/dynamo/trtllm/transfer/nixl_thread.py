"""The thread that makes those calls of a NIXL agent which take long, and finds out what has ended.

A thread because connecting takes milliseconds, and because posting a READ may copy the whole payload before it returns
(UCX within a machine does), which must not hold up the event loop. Short calls to a known peer are made on the event loop
itself, where they save two changes of thread. One lock guards the agent; the event loop never waits for it. NIXL's own
progress thread is left out: it keeps one core busy for as long as the process lives. In its place the thread looks again
after a pause that grows with the time it has waited.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dynamo.trtllm.errors import StartupError, TransferDead
from dynamo.trtllm.transfer.descriptor import PeerIdentity
from dynamo.trtllm.transfer.nixl_agent import SPIN_S, Agent, Operation
from dynamo.trtllm.transfer.transport import INLINE_COPY_BYTES, ConnectionLost, Place

logger = logging.getLogger(__name__)

MOVE_PAUSE_S = 0.001
"""Longest pause between two looks at reads and writes in flight."""
OFFER_PAUSES_S = (250e-6, 0.002)
"""Shortest and longest pause between two looks for acknowledgements: they free memory, nobody waits for them."""
FIRST_LOOK_S = 0.001
"""From an offer to the first look for its acknowledgement: until then the thread would only take time from the hand-over."""
IDLE_PAUSE_S = 0.02
"""Pause while nothing is outstanding. A peer that connects needs a few looks of this side before its first read can end."""
LONGEST_CALL_S = 30.0
"""What one call of the library may take, or the time after which moves are given up if that is longer: 16 GiB take seconds."""
START_S = 120.0
"""What the library may take to start."""
STOP_S = 1.0
"""What the thread may take to end; after that it is left behind, with all memory that it knows."""
COMPLAINT_PAUSE_S = 10.0
"""Between two lines of the log about errors of the thread."""
_LONGEST_CHECK_PAUSE_S = 1.0


class AgentThread:
    """Owner of a NIXL agent. Public methods are called on the event loop, the others on the thread unless they say otherwise.

    `_turns` counts the thread's rounds without an error; while it stands still, a call of the library does not return or fails.
    """

    def __init__(self, name: str, *, abandon_after_s: float) -> None:
        """`name` and `abandon_after_s` are the agent's."""
        self._name = name
        self._abandon_after_s = abandon_after_s
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nixl-transfer", daemon=True)
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._stopping = False
        self._asleep = False
        self._look: Callable[[], list[int] | None] | None = None
        self._on_arrival: Callable[[list[int]], None] | None = None
        self._expecting = False
        self._first_look: asyncio.TimerHandle | None = None
        self._last_offer = time.perf_counter()
        self._turns = 0
        self._watch = _Watch()
        self._next_complaint = -math.inf

    @property
    def metadata(self) -> str:
        """What peers need to read from this process; see `Agent`."""
        return self._require_agent().metadata

    async def start(self) -> None:
        """Make the agent. Raises `StartupError` when NIXL or its UCX backend is not usable."""
        self._thread.start()
        try:
            await asyncio.wait_for(self._call(self._make_agent), START_S)
        except asyncio.TimeoutError:
            await self.stop()
            raise StartupError(f"NIXL did not start within {START_S:g} s") from None
        except Exception as error:
            await self.stop()
            if isinstance(error, StartupError):
                raise
            raise StartupError("NIXL cannot start on this machine; install nixl with its UCX backend") from error

    async def stop(self) -> None:
        """End moves in flight, drop the agent and end the thread. Calling again does nothing.

        A thread that does not come back from the library is left behind; the agent keeps the memory that it knows.
        """
        if self._first_look is not None:
            self._first_look.cancel()
        if self._thread.is_alive():
            self._jobs.put(self._stop)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, STOP_S)
            if self._thread.is_alive():
                logger.error("NIXL does not return: its thread is left behind")

    def check_health(self) -> None:
        """As `Transport.check_health`: the thread must have gone round without an error since long ago."""
        if self._stopping or self._agent is None:
            return
        limit_s = max(LONGEST_CALL_S, self._abandon_after_s)
        if not self._thread.is_alive() or self._watch.still_s(self._turns) > limit_s:
            raise TransferDead(f"no call of the transfer library NIXL has returned or succeeded for {limit_s:g} s")

    def watch(self, look: Callable[[], list[int] | None], on_arrival: Callable[[list[int]], None]) -> None:
        """Ask `look` for what peers have written into this process (None while nothing is expected), and call `on_arrival`
        with it on the event loop. `look` is called on the thread.
        """
        self._on_arrival, self._look = on_arrival, look

    async def register(self, memory: Any) -> Any:
        """Register a tensor with the agent; returns what `unregister` takes."""
        return await self._call(lambda: self._require_agent().register(memory))

    async def unregister(self, registration: Any) -> None:
        """Undo `register`. The tensor must live until this returns."""
        await self._call(lambda: self._require_agent().unregister(registration))

    def move(self, operation: Operation, peer: PeerIdentity, there: Place, here: Place) -> asyncio.Future[None]:
        """Start to copy `there`, of `peer`, to `here` (READ) or back (WRITE).

        The future completes when the transport will not touch `here` any more. It fails with `ConnectionLost` or `PeerFault`.
        """
        finished: asyncio.Future[None] = self._loop.create_future()

        def post() -> None:
            self._require_agent().post(operation, peer, there, here, finished)

        if here.nbytes > INLINE_COPY_BYTES or not self._at_once(peer, post):
            self._post_later(post, finished)
        elif not finished.done():
            self._rouse()
        return finished

    def _post_later(self, post: Callable[[], None], finished: asyncio.Future[None]) -> None:
        """On the event loop: let the thread post a move, unless it does not come to it in time."""
        taken = threading.Lock()  # by whoever acquires it: the thread, or the end of the time

        def job() -> None:
            if taken.acquire(blocking=False):
                post()

        def give_up() -> None:
            if not finished.done() and taken.acquire(blocking=False):
                finished.set_exception(ConnectionLost())

        timer = self._loop.call_later(self._abandon_after_s, give_up)
        finished.add_done_callback(lambda _: timer.cancel())
        self._jobs.put(job)

    def expect_arrival(self) -> None:
        """An offer was made: look for its acknowledgement from now on."""
        self._last_offer = time.perf_counter()
        if self._asleep and self._first_look is None:
            self._first_look = self._loop.call_later(FIRST_LOOK_S, self._look_now)

    def _require_agent(self) -> Agent:
        if self._agent is None:
            raise RuntimeError("the transfer is not started")
        return self._agent

    def _look_now(self) -> None:
        """On the event loop."""
        self._first_look = None
        self._rouse()

    def _at_once(self, peer: PeerIdentity, work: Callable[[], None]) -> bool:
        """On the event loop: do `work` here if `peer` is connected and the agent is free; true when it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._agent is None or not self._agent.knows(peer):
                return False
            work()
            return True
        finally:
            self._lock.release()

    def _rouse(self) -> None:
        """On the event loop: let the thread look, if it sleeps."""
        if self._asleep:
            self._jobs.put(lambda: None)

    async def _call(self, work: Callable[[], Any]) -> Any:
        """On the event loop: the result of `work`, done on the thread."""
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
                self._tell_loop(done, work(), None)
            except Exception as error:
                self._tell_loop(done, None, error)

        self._jobs.put(job)
        return await asyncio.shield(finished)

    def _run(self) -> None:
        while not self._stopping:
            try:
                job = self._next_job()
                self._take_lock()
                try:
                    self._turn(job)
                finally:
                    self._lock.release()
                self._turns += 1
            except Exception:
                self._complain()

    def _take_lock(self) -> None:
        while not self._lock.acquire(timeout=LONGEST_CALL_S):
            logger.critical("the event loop does not come back from a call of NIXL: this worker answers nothing any more")

    def _turn(self, job: Callable[[], None] | None) -> None:
        """One round. What fails in it fails alone; the first error is raised at the end."""
        errors: list[Exception] = []
        for step in (job, self._progress, self._look_at_arrivals):
            try:
                if step is not None:
                    step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _progress(self) -> None:
        if self._agent is not None:
            self._agent.look_at_moves()
            self._agent.progress()

    def _complain(self) -> None:
        now = time.perf_counter()
        if now >= self._next_complaint:
            self._next_complaint = now + COMPLAINT_PAUSE_S
            logger.exception("the transfer thread met an error and goes on")

    def _next_job(self) -> Callable[[], None] | None:
        """What is queued; if nothing is, wait for it as long as the outstanding transfers allow."""
        pause_s = self._pause_s()
        self._asleep = pause_s >= IDLE_PAUSE_S
        try:
            if pause_s < SPIN_S:
                time.sleep(0)
                return self._jobs.get_nowait()
            return self._jobs.get(timeout=pause_s)
        except queue.Empty:
            return None
        finally:
            self._asleep = False

    def _pause_s(self) -> float:
        now = time.perf_counter()
        posted = self._agent.last_posted if self._agent is not None else None
        if posted is not None:
            return min((now - posted) / 16, MOVE_PAUSE_S)
        if self._expecting:
            shortest, longest = OFFER_PAUSES_S
            return min(max((now - self._last_offer) / 8, shortest), longest)
        return IDLE_PAUSE_S

    def _make_agent(self) -> None:
        self._agent = Agent(self._name, self._abandon_after_s, self._tell_loop)

    def _look_at_arrivals(self) -> None:
        if self._agent is None or self._look is None or self._on_arrival is None:
            return
        arrived = self._look()
        self._expecting = arrived is not None
        if arrived:
            self._tell_loop(self._on_arrival, arrived)

    def _stop(self) -> None:
        self._stopping = True
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop()

    def _tell_loop(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call on the event loop, at once where this is it."""
        if threading.current_thread() is not self._thread:
            call(*args)
            return
        # The loop may be closed while the thread ends; nobody waits for the answer then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)


class _Watch:
    """For how long a counter has stood still, as seen by someone who looks about once a second.

    A look that comes late counts as one second: a process that was stopped for a while is no thread that hangs.
    """

    def __init__(self) -> None:
        self._seen = -1
        self._still_s = 0.0
        self._looked = time.monotonic()

    def still_s(self, count: int) -> float:
        """Seconds of attention since `count` last changed."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_CHECK_PAUSE_S), now
        self._still_s = self._still_s + passed if count == self._seen else 0.0
        self._seen = count
        return self._still_s
