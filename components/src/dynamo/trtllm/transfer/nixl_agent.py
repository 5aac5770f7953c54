"""One NIXL agent, and the thread that makes the calls which take long and finds completions.

A thread because connecting takes milliseconds, and because posting a READ may copy the whole payload before it returns
(UCX within a machine does), which must not hold up the event loop. Short calls to a known peer are made on the event loop
itself, where they save two changes of thread. One lock guards the agent; the event loop never waits for it. NIXL's own
progress thread is left out: it keeps one core busy for as long as the process lives. In its place the thread looks again
after a pause that grows with the time it has waited. Knows addresses and peers, not tensors or offers.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dynamo.trtllm.errors import PeerFault, StartupError
from dynamo.trtllm.transfer.descriptor import PeerIdentity
from dynamo.trtllm.transfer.pooled import INLINE_COPY_BYTES, ConnectionLost

logger = logging.getLogger(__name__)

MOVE_PAUSE_S = 0.001
"""Longest pause between two looks at reads and writes in flight."""
OFFER_PAUSES_S = (250e-6, 0.002)
"""Shortest and longest pause between two looks for acknowledgements: they free memory, nobody waits for them."""
FIRST_LOOK_S = 0.001
"""From an offer to the first look for its acknowledgement: until then the thread would only take time from the hand-over."""
IDLE_PAUSE_S = 0.02
"""Pause while nothing is outstanding. A peer that connects needs a few looks of this side before its first read can end."""
SPIN_S = 50e-6
"""Shorter pauses only yield: the kernel's timers are no finer."""
MAX_PEERS = 1024
"""Connections that are kept; the one unused for longest goes first."""


class Place(NamedTuple):
    """Bytes on a device. `device` is `cpu` or `cuda`."""

    device: str
    device_index: int
    address: int
    nbytes: int

    @property
    def memory_type(self) -> str:
        """NIXL's name for the kind of memory."""
        return "VRAM" if self.device == "cuda" else "DRAM"


@dataclass(eq=False)
class _Move:
    peer: str
    handle: Any
    posted: float
    finished: asyncio.Future[None]


class AgentThread:
    """Owner of a NIXL agent. Public methods are called on the event loop; those with an underscore hold the lock.

    `watch` is asked on the thread for what peers have written into this process, None while nothing is expected; `on_arrival` is
    called with it on the event loop. A read or write that has not ended after `abandon_after_s` is given up together with the
    connection to its peer.
    """

    def __init__(
        self,
        name: str,
        *,
        abandon_after_s: float,
        watch: Callable[[], list[int] | None],
        on_arrival: Callable[[list[int]], None],
    ) -> None:
        self.name = name
        self.metadata = ""
        """Base64 of what peers need to read all memory registered so far. Written by the thread, read anywhere."""
        self._abandon_after_s = abandon_after_s
        self._watch = watch
        self._on_arrival = on_arrival
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nixl-transfer", daemon=True)
        self._lock = threading.Lock()
        self._stopping = False
        self._asleep = False
        self._agent: Any = None
        self._registrations: dict[int, Any] = {}
        self._peers: dict[str, PeerIdentity] = {}
        self._moves: list[_Move] = []
        self._expecting = False
        self._first_look: asyncio.TimerHandle | None = None
        self._last_offer = time.perf_counter()

    # On the event loop.

    async def start(self) -> None:
        """Make the agent. Raises `StartupError` when NIXL or its UCX backend is not usable."""
        self._thread.start()
        try:
            await self._call(self._make_agent)
        except Exception as error:
            await self.stop()
            if isinstance(error, StartupError):
                raise
            raise StartupError("NIXL cannot start on this machine; install nixl with its UCX backend") from error

    async def stop(self) -> None:
        """End reads in flight, drop the agent and end the thread. Calling again does nothing."""
        if self._first_look is not None:
            self._first_look.cancel()
        if self._thread.is_alive():
            self._jobs.put(self._stop)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def register(self, memory: Any) -> Any:
        """Register a tensor with the agent; returns what `unregister` takes."""
        return await self._call(lambda: self._register(memory))

    async def unregister(self, registration: Any) -> None:
        """Undo `register`. The tensor must live until this returns."""
        await self._call(lambda: self._unregister(registration))

    def move(self, operation: Literal["READ", "WRITE"], peer: PeerIdentity, there: Place, here: Place) -> asyncio.Future[None]:
        """Start to copy `there`, of `peer`, to `here` (READ) or back (WRITE).

        The future completes when the transport will not touch `here` any more. It fails with `ConnectionLost` or `PeerFault`.
        """
        finished: asyncio.Future[None] = self._loop.create_future()

        def post() -> None:
            self._post(operation, peer, there, here, finished)

        if here.nbytes > INLINE_COPY_BYTES or not self._at_once(peer, post):
            self._jobs.put(post)
        elif not finished.done():
            self._rouse()
        return finished

    def expect_arrival(self) -> None:
        """An offer was made: look for its acknowledgement from now on."""
        self._last_offer = time.perf_counter()
        if self._asleep and self._first_look is None:
            self._first_look = self._loop.call_later(FIRST_LOOK_S, self._look_now)

    def _look_now(self) -> None:
        self._first_look = None
        self._rouse()

    def _at_once(self, peer: PeerIdentity, work: Callable[[], None]) -> bool:
        """Do `work` here if `peer` is connected and the agent is free; true when it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            known = self._peers.get(peer.agent)
            if known is None or known.metadata != peer.metadata:
                return False
            work()
            return True
        finally:
            self._lock.release()

    def _rouse(self) -> None:
        """Let the thread look, if it sleeps."""
        if self._asleep:
            self._jobs.put(lambda: None)

    async def _call(self, work: Callable[[], Any]) -> Any:
        finished: asyncio.Future[Any] = self._loop.create_future()

        def job() -> None:
            try:
                self._finish(finished, work())
            except Exception as error:
                self._fail(finished, error)

        self._jobs.put(job)
        return await asyncio.shield(finished)

    # On the thread.

    def _run(self) -> None:
        while not self._stopping:
            job = self._next_job()
            try:
                with self._lock:
                    self._turn(job)
            except Exception:
                logger.exception("the transfer thread met an error and goes on")

    def _turn(self, job: Callable[[], None] | None) -> None:
        if job is not None:
            job()
        if self._moves:
            self._look_at_moves()
        if self._agent is not None:
            self._look_at_arrivals()

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
        if self._moves:
            return min((now - self._moves[-1].posted) / 16, MOVE_PAUSE_S)
        if self._expecting:
            shortest, longest = OFFER_PAUSES_S
            return min(max((now - self._last_offer) / 8, shortest), longest)
        return IDLE_PAUSE_S

    def _make_agent(self) -> None:
        # The libraries read these when they are loaded; without them every lost peer is a line on stderr.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        raise_log_errors = logging.raiseExceptions
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise StartupError("NIXL is not installed; install the nixl package") from error
        finally:
            logging.raiseExceptions = raise_log_errors
        library_logger = logging.getLogger("nixl")
        library_logger.handlers.clear()
        library_logger.propagate = True
        library_logger.setLevel(logging.WARNING)
        agent = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        if "UCX" not in agent.backends:
            raise StartupError("NIXL has no UCX backend on this machine; install nixl with UCX")
        self._agent = agent
        self._renew_metadata()

    def _renew_metadata(self) -> None:
        self.metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()

    def _register(self, memory: Any) -> Any:
        if memory.is_cuda:
            import torch

            torch.cuda.set_device(memory.device)
        registration = self._agent.register_memory(memory)
        self._registrations[id(registration)] = registration
        self._renew_metadata()
        return registration

    def _unregister(self, registration: Any) -> None:
        self._registrations.pop(id(registration))
        self._agent.deregister_memory(registration)
        self._renew_metadata()

    def _require_peer(self, peer: PeerIdentity) -> str:
        """Connect to `peer` unless that is done. Raises `ConnectionLost` or `PeerFault`."""
        known = self._peers.pop(peer.agent, None)
        if known is None:
            for agent in [agent for agent, other in self._peers.items() if other.name == peer.name]:
                self._forget(agent)
            while len(self._peers) >= MAX_PEERS:
                self._forget(next(iter(self._peers)))
        if known is None or known.metadata != peer.metadata:
            self._load_metadata(peer)
        self._peers[peer.agent] = peer
        return peer.agent

    def _load_metadata(self, peer: PeerIdentity) -> None:
        from nixl._bindings import nixlMismatchError

        try:
            agent = self._agent.add_remote_agent(base64.b64decode(peer.metadata, validate=True))
        except (binascii.Error, nixlMismatchError) as error:
            raise PeerFault("the other worker's connection data cannot be used by this one") from error
        except Exception as error:
            self._forget(peer.agent)
            raise ConnectionLost from error
        if (agent.decode() if isinstance(agent, bytes) else agent) != peer.agent:
            raise PeerFault("the other worker's connection data belongs to another one")

    def _forget(self, agent: str) -> None:
        self._peers.pop(agent, None)
        with suppress(Exception):
            self._agent.remove_remote_agent(agent)

    def _post(self, operation: str, peer: PeerIdentity, there: Place, here: Place, finished: asyncio.Future[None]) -> None:
        from nixl._bindings import nixlNotFoundError

        try:
            agent = self._require_peer(peer)
            handle = self._agent.initialize_xfer(operation, self._describe(here), self._describe(there), agent)
            move = _Move(agent, handle, time.perf_counter(), finished)
            state = self._agent.transfer(handle)
            end = time.perf_counter() + SPIN_S
            while state == "PROC" and time.perf_counter() < end:
                state = self._agent.check_xfer_state(handle)
            self._conclude(move, state)
        except nixlNotFoundError as error:
            self._fail(finished, PeerFault("the other worker's data is not where its message says"), error)
        except (PeerFault, ConnectionLost) as error:
            self._fail(finished, error)
        except Exception as error:
            self._forget(peer.agent)
            self._fail(finished, ConnectionLost(), error)

    def _describe(self, place: Place) -> Any:
        return self._agent.get_xfer_descs([(place.address, place.nbytes, place.device_index)], mem_type=place.memory_type)

    def _conclude(self, move: _Move, state: str) -> None:
        """Finish a move by its state: done, failed, or to be looked at again."""
        if state == "PROC":
            if move not in self._moves:
                self._moves.append(move)
            return
        if move in self._moves:
            self._moves.remove(move)
        self._release(move)
        if state == "DONE":
            self._finish(move.finished, None)
        else:
            self._forget(move.peer)
            self._fail(move.finished, ConnectionLost())

    def _look_at_moves(self) -> None:
        for move in list(self._moves):
            try:
                state = self._agent.check_xfer_state(move.handle)
            except Exception:
                state = "ERR"
            if state == "PROC" and time.perf_counter() - move.posted > self._abandon_after_s:
                self._forget(move.peer)
                state = "ERR"
            self._conclude(move, state)

    def _release(self, move: _Move) -> None:
        with suppress(Exception):
            self._agent.release_xfer_handle(move.handle)

    def _look_at_arrivals(self) -> None:
        # Asking for messages, of which there are none, is what lets NIXL make progress on connections.
        self._agent.get_new_notifs()
        arrived = self._watch()
        self._expecting = arrived is not None
        if arrived:
            self._tell_loop(self._on_arrival, arrived)

    def _stop(self) -> None:
        self._stopping = True
        if self._agent is None:
            return
        for peer in list(self._peers):
            self._forget(peer)
        for move in list(self._moves):
            self._conclude(move, "ERR")
        for registration in self._registrations.values():
            with suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._agent = None

    def _finish(self, future: asyncio.Future[Any], result: Any) -> None:
        self._tell_loop(lambda: None if future.done() else future.set_result(result))

    def _fail(self, future: asyncio.Future[Any], error: Exception, cause: Exception | None = None) -> None:
        if cause is not None:
            error.__cause__ = cause
        self._tell_loop(lambda: None if future.done() else future.set_exception(error))

    def _tell_loop(self, call: Callable[..., object], *args: Any) -> None:
        if threading.current_thread() is not self._thread:
            call(*args)
            return
        # The loop may be closed while the thread ends; nobody waits for the answer then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)
