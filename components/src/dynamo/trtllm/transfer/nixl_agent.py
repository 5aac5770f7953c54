"""One NIXL agent: its registered memory, its peers, and the moves that are on their way.

Only one thread at a time may call it; `nixl_thread.py` sees to that. It waits for nothing.
Knows addresses and peers, not tensors or offers.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from dynamo.trtllm.errors import PeerFault, StartupError
from dynamo.trtllm.transfer.descriptor import PeerIdentity
from dynamo.trtllm.transfer.transport import ConnectionLost, MemoryLost, Place

Operation = Literal["READ", "WRITE"]
Tell = Callable[..., None]
"""`tell(call, *args)` makes a call on the event loop, from whichever thread."""

SPIN_S = 50e-6
"""A move that ends within this is waited for at once; the kernel's timers are no finer."""
MAX_PEERS = 1024
"""Connections that are kept; the one unused for longest goes first."""
RELEASE_PAUSE_S = 0.02
"""Shortest pause between two attempts to take back what the library would not let go of."""


@dataclass(eq=False)
class _Move:
    peer: str
    handle: Any
    posted: float
    finished: asyncio.Future[None]
    given_up: float | None = None
    """When it was given up; from then on only the library's handle is waited for."""
    next_try: float = 0.0


class Agent:
    """The library's agent by the name `name`. Futures are completed through `tell`.

    A move that has not ended after `abandon_after_s` is given up together with the connection to its peer.
    Until the library has let go of it, its bytes may still arrive; if that takes as long again, it fails with
    `MemoryLost`. Whatever a call of the library raises for one move says nothing about the others.
    """

    def __init__(self, name: str, abandon_after_s: float, tell: Tell) -> None:
        """Raises `StartupError` when NIXL or its UCX backend is not usable."""
        self._abandon_after_s = abandon_after_s
        self._tell = tell
        self._agent = _make_agent(name)
        self._registrations: dict[int, tuple[Any, Any]] = {}
        self._peers: dict[str, PeerIdentity] = {}
        self._moves: list[_Move] = []
        self._given_up: list[_Move] = []
        self.metadata = self._current_metadata()
        """Base64 of what peers need to read all memory registered so far. Read from any thread."""

    @property
    def last_posted(self) -> float | None:
        """When the youngest move that is under way was posted, on `time.perf_counter`; None without one."""
        return self._moves[-1].posted if self._moves else None

    def register(self, memory: Any) -> Any:
        """Register a tensor; returns what `unregister` takes."""
        if memory.is_cuda:
            import torch

            torch.cuda.set_device(memory.device)
        registration = self._agent.register_memory(memory)
        # With the memory itself: it must not be freed before the library has let go of it.
        self._registrations[id(registration)] = (registration, memory)
        try:
            self.metadata = self._current_metadata()
        except Exception:
            self.unregister(registration)
            raise
        return registration

    def unregister(self, registration: Any) -> None:
        """Undo `register`."""
        self._agent.deregister_memory(registration)
        del self._registrations[id(registration)]
        self.metadata = self._current_metadata()

    def knows(self, peer: PeerIdentity) -> bool:
        """True when a move with `peer` needs no new connection."""
        known = self._peers.get(peer.agent)
        return known is not None and known.metadata == peer.metadata

    def post(
        self,
        operation: Operation,
        peer: PeerIdentity,
        there: Place,
        here: Place,
        finished: asyncio.Future[None],
    ) -> None:
        """Start a move. `finished` completes when the transport will not touch `here` any more;
        see `Transport.read`."""
        from nixl._bindings import nixlNotFoundError

        move: _Move | None = None
        try:
            agent = self._require_peer(peer)
            handle = self._agent.initialize_xfer(
                operation, self._describe(here), self._describe(there), agent
            )
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
            if move is not None:
                self._give_up(move, error)
            else:
                self._forget(peer.agent)
                self._fail(finished, ConnectionLost(), error)

    def look_at_moves(self) -> None:
        """Complete the moves that have ended, and give up those that took too long. Raises nothing."""
        for move in list(self._moves):
            error: Exception | None = None
            try:
                state = self._agent.check_xfer_state(move.handle)
            except Exception as raised:
                state, error = "ERR", raised
            if state == "PROC" and time.perf_counter() - move.posted > self._abandon_after_s:
                state = "ERR"
            self._conclude(move, state, error)
        if self._given_up:
            self._look_at_given_up()

    def progress(self) -> None:
        """Let the library work on connections. Asking for messages, of which there are none, does that."""
        self._agent.get_new_notifs()

    def stop(self) -> None:
        """End all moves and drop the library's agent; the object is of no use afterwards."""
        for peer in list(self._peers):
            self._forget(peer)
        for move in list(self._moves):
            self._conclude(move, "ERR")
        for move in self._given_up:
            self._fail(move.finished, MemoryLost())
        for registration, _ in self._registrations.values():
            with suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._agent = None

    def _current_metadata(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

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

    def _describe(self, place: Place) -> Any:
        kind = "VRAM" if place.device == "cuda" else "DRAM"
        return self._agent.get_xfer_descs([(place.address, place.nbytes, place.device_index)], mem_type=kind)

    def _conclude(self, move: _Move, state: str, error: Exception | None = None) -> None:
        """Finish a move by its state: done, failed, or to be looked at again."""
        if state == "PROC":
            if move not in self._moves:
                self._moves.append(move)
            return
        if move in self._moves:
            self._moves.remove(move)
        if state == "DONE":
            with suppress(Exception):
                self._agent.release_xfer_handle(move.handle)
            self._tell(_finish, move.finished, None)
        else:
            self._give_up(move, error)

    def _give_up(self, move: _Move, error: Exception | None) -> None:
        """End a failed or late move: at once if the library lets go of it, else when it does."""
        move.given_up = time.perf_counter()
        self._forget(move.peer)
        if not self._is_released(move, error):
            self._given_up.append(move)

    def _look_at_given_up(self) -> None:
        now = time.perf_counter()
        for move in [move for move in self._given_up if move.next_try <= now]:
            if self._is_released(move):
                self._given_up.remove(move)
            elif move.given_up is not None and now - move.given_up > self._abandon_after_s:
                self._given_up.remove(move)
                self._fail(move.finished, MemoryLost())

    def _is_released(self, move: _Move, cause: Exception | None = None) -> bool:
        """Take a given-up move back from the library; true, and its future failed,
        when nothing of it is left there."""
        try:
            self._agent.release_xfer_handle(move.handle)
        except Exception:
            move.next_try = time.perf_counter() + RELEASE_PAUSE_S
            return False
        self._fail(move.finished, ConnectionLost(), cause)
        return True

    def _fail(self, future: asyncio.Future[Any], error: Exception, cause: Exception | None = None) -> None:
        if cause is not None:
            error.__cause__ = cause
        self._tell(_finish, future, error)


def _finish(future: asyncio.Future[Any], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _make_agent(name: str) -> Any:
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
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise StartupError("NIXL has no UCX backend on this machine; install nixl with UCX")
    return agent
