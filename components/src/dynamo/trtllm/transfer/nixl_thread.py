"""The thread that makes those calls of a NIXL agent which take long, and finds out what has ended.

A thread because connecting takes milliseconds, and because posting a READ may copy the whole payload before
it returns (UCX within a machine does), which must not hold up the event loop. Short calls to a known peer are
made on the event loop itself, where they save two changes of thread. One lock guards the agent; the event
loop never waits for it. NIXL's own progress thread is left out: it keeps one core busy for as long as the
process lives. In its place the thread looks again after a pause that grows with the time it has waited.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from dynamo.trtllm.errors import StartupError, TransferDead
from dynamo.trtllm.transfer.descriptor import PeerIdentity
from dynamo.trtllm.transfer.nixl_agent import Agent, Operation
from dynamo.trtllm.transfer.nixl_jobs import Job, Jobs
from dynamo.trtllm.transfer.nixl_pace import Pace, StandstillWatch
from dynamo.trtllm.transfer.transport import INLINE_COPY_BYTES, Place

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 0.001
"""From an offer to the first look for its acknowledgement:
until then the thread would only take time from the hand-over."""
LONGEST_CALL_S = 30.0
"""What one call of the library may take, or the time after which moves are given up if that is longer:
16 GiB take seconds."""
START_S = 120.0
"""What the library may take to start."""
STOP_S = 1.0
"""What the thread may take to end; after that it is left behind, with all memory that it knows."""


class AgentThread:
    """Owner of a NIXL agent. Public methods are called on the event loop,
    the others on the thread unless they say otherwise.

    `_turns` counts the thread's rounds without an error; while it stands still,
    a call of the library does not return or fails.
    """

    def __init__(self, name: str, *, abandon_after_s: float) -> None:
        """`name` and `abandon_after_s` are the agent's."""
        self._name = name
        self._abandon_after_s = abandon_after_s
        self._loop = asyncio.get_running_loop()
        self._jobs = Jobs()
        self._thread = threading.Thread(target=self._run, name="nixl-transfer", daemon=True)
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._stopping = False
        self._look: Callable[[], list[int] | None] | None = None
        self._on_arrival: Callable[[list[int]], None] | None = None
        self._first_look: asyncio.TimerHandle | None = None
        self._pace = Pace()
        self._turns = 0
        self._standstill = StandstillWatch()

    @property
    def metadata(self) -> str:
        """What peers need to read from this process; see `Agent`."""
        return self._require_agent().metadata

    async def start(self) -> None:
        """Make the agent. Raises `StartupError` when NIXL or its UCX backend is not usable."""
        self._thread.start()
        try:
            await asyncio.wait_for(self._jobs.call(self._make_agent), START_S)
        except asyncio.TimeoutError:
            await self.stop()
            raise StartupError(f"NIXL did not start within {START_S:g} s") from None
        except Exception as error:
            await self.stop()
            if isinstance(error, StartupError):
                raise
            raise StartupError(
                "NIXL cannot start on this machine; install nixl with its UCX backend"
            ) from error

    async def stop(self) -> None:
        """End moves in flight, drop the agent and end the thread. Calling again does nothing.

        A thread that does not come back from the library is left behind;
        the agent keeps the memory that it knows.
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
        if not self._thread.is_alive() or self._standstill.still_s(self._turns) > limit_s:
            logger.critical(
                "the transfer thread has been in these calls for %g s: %s", limit_s, self._calls_under_way()
            )
            raise TransferDead(
                f"no call of the transfer library NIXL has returned or succeeded for {limit_s:g} s"
            )

    def _calls_under_way(self) -> str:
        """On the event loop: names of the functions that the thread is in, outermost first."""
        frame, names = sys._current_frames().get(self._thread.ident or 0), list[str]()
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return " > ".join(reversed(names)) or "none, it has ended"

    def watch(self, look: Callable[[], list[int] | None], on_arrival: Callable[[list[int]], None]) -> None:
        """Ask `look` for what peers have written into this process (None while nothing is expected),
        and call `on_arrival` with it on the event loop. `look` is called on the thread.
        """
        self._on_arrival, self._look = on_arrival, look

    async def register(self, memory: Any) -> Any:
        """Register a tensor with the agent; returns what `unregister` takes."""
        return await self._jobs.call(lambda: self._require_agent().register(memory))

    async def unregister(self, registration: Any) -> None:
        """Undo `register`. The tensor must live until this returns."""
        await self._jobs.call(lambda: self._require_agent().unregister(registration))

    def move(
        self, operation: Operation, peer: PeerIdentity, there: Place, here: Place
    ) -> asyncio.Future[None]:
        """Start to copy `there`, of `peer`, to `here` (READ) or back (WRITE).

        The future completes when the transport will not touch `here` any more.
        It fails with `ConnectionLost` or `PeerFault`.
        """
        finished: asyncio.Future[None] = self._loop.create_future()

        def post() -> None:
            self._require_agent().post(operation, peer, there, here, finished)

        if here.nbytes > INLINE_COPY_BYTES or not self._at_once(peer, post):
            self._jobs.put_unless_late(post, finished, self._abandon_after_s)
        elif not finished.done():
            self._jobs.rouse()
        return finished

    def expect_arrival(self) -> None:
        """An offer was made: look for its acknowledgement from now on."""
        self._pace.last_offer = time.perf_counter()
        if self._jobs.asleep and self._first_look is None:
            self._first_look = self._loop.call_later(FIRST_LOOK_S, self._look_now)

    def _require_agent(self) -> Agent:
        if self._agent is None:
            raise RuntimeError("the transfer is not started")
        return self._agent

    def _look_now(self) -> None:
        """On the event loop."""
        self._first_look = None
        self._jobs.rouse()

    def _at_once(self, peer: PeerIdentity, work: Callable[[], None]) -> bool:
        """On the event loop: do `work` here if `peer` is connected and the agent is free;
        true when it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._agent is None or not self._agent.knows(peer):
                return False
            work()
            return True
        finally:
            self._lock.release()

    def _run(self) -> None:
        while not self._stopping:
            try:
                job = self._jobs.next(
                    self._pace.pause_s(self._agent.last_posted if self._agent is not None else None)
                )
                self._take_lock()
                try:
                    self._turn(job)
                finally:
                    self._lock.release()
                self._turns += 1
            except Exception:
                if self._pace.may_complain():
                    logger.exception("the transfer thread met an error and goes on")

    def _take_lock(self) -> None:
        while not self._lock.acquire(timeout=LONGEST_CALL_S):
            logger.critical(
                "the event loop does not come back from a call of NIXL: this worker answers nothing any more"
            )

    def _turn(self, job: Job | None) -> None:
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

    def _make_agent(self) -> None:
        self._agent = Agent(self._name, self._abandon_after_s, self._jobs.tell_loop)

    def _look_at_arrivals(self) -> None:
        if self._agent is None or self._look is None or self._on_arrival is None:
            return
        arrived = self._look()
        self._pace.expecting = arrived is not None
        if arrived:
            self._jobs.tell_loop(self._on_arrival, arrived)

    def _stop(self) -> None:
        self._stopping = True
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop()
