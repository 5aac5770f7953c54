"""The part of NIXL's Python interface that the transfer uses, inside one process,
with faults in any call at any time."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CALLS = (
    "add_remote_agent",
    "get_xfer_descs",
    "initialize_xfer",
    "transfer",
    "check_xfer_state",
    "release_xfer_handle",
    "remove_remote_agent",
    "get_new_notifs",
)
"""Calls that a read makes, in its order; the last two are made beside it."""


class LibraryError(Exception):
    """What the library raises."""


class Library:
    """All agents of the process. `fault(call, act)` makes every agent
    do `act` in place of that call from then on.

    Moves end at once, or when `hold` is cleared; what they copy is copied at their end.
    """

    def __init__(self) -> None:
        self.agents: dict[str, dict[int, Any]] = {}
        self.hold = False
        self.calls: Counter[str] = Counter()
        self.open_handles = 0
        self._faults: dict[str, Callable[[str], Any]] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nixl import _api

        monkeypatch.setattr(_api, "nixl_agent", lambda name, _config: _Agent(self, name))

    def fault(self, call: str, act: Callable[[str], Any]) -> None:
        self._faults[call] = act

    def mend(self) -> None:
        self._faults.clear()

    def enter(self, call: str) -> Any:
        """What a fault returns in place of the call's result; None without one."""
        self.calls[call] += 1
        act = self._faults.get(call)
        return None if act is None else act(call)


def raising(call: str) -> Any:
    raise LibraryError(f"{call} does not work")


def erring(_call: str) -> Any:
    """The state of a move that failed."""
    return "ERR"


class Once:
    """A fault that happens at the first call only."""

    def __init__(self, act: Callable[[str], Any]) -> None:
        self._act: Callable[[str], Any] | None = act

    def __call__(self, call: str) -> Any:
        act, self._act = self._act, None
        return None if act is None else act(call)


@contextmanager
def hanging(library: Library, call: str) -> Iterator[threading.Event]:
    """`call` does not return before the block ends. Yields what is set once somebody is inside."""
    inside, leave = threading.Event(), threading.Event()

    def hang(_call: str) -> None:
        inside.set()
        leave.wait()

    library.fault(call, hang)
    try:
        yield inside
    finally:
        library.mend()
        leave.set()


class _Move:
    def __init__(self, target: tuple[int, int], source: tuple[int, int]) -> None:
        self.target, self.source = target, source
        self.state: str | None = None


class _Agent:
    """One agent, with the method names of the library."""

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        self._name = name
        self.backends = {"UCX": 1}
        library.agents[name] = {}

    def register_memory(self, memory: Any) -> Any:
        self._library.enter("register_memory")
        registration = [memory.data_ptr()]
        self._library.agents[self._name][registration[0]] = memory
        return registration

    def deregister_memory(self, registration: Any) -> None:
        self._library.enter("deregister_memory")
        self._library.agents[self._name].pop(registration[0])

    def get_agent_metadata(self) -> bytes:
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self._library.enter("add_remote_agent")
        return metadata.decode()

    def remove_remote_agent(self, agent: str) -> None:
        self._library.enter("remove_remote_agent")

    def get_xfer_descs(self, places: list[tuple[int, int, int]], mem_type: str) -> tuple[int, int]:
        self._library.enter("get_xfer_descs")
        ((address, nbytes, _),) = places
        return address, nbytes

    def initialize_xfer(
        self, operation: str, here: tuple[int, int], there: tuple[int, int], agent: str
    ) -> _Move:
        self._library.enter("initialize_xfer")
        self._library.open_handles += 1
        return _Move(here, there) if operation == "READ" else _Move(there, here)

    def transfer(self, move: _Move) -> Any:
        return self._library.enter("transfer") or self._state_of(move)

    def check_xfer_state(self, move: _Move) -> Any:
        return self._library.enter("check_xfer_state") or self._state_of(move)

    def release_xfer_handle(self, move: _Move) -> None:
        self._library.enter("release_xfer_handle")
        self._library.open_handles -= 1
        move.state = move.state or "ERR"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._library.enter("get_new_notifs")
        return {}

    def _state_of(self, move: _Move) -> str:
        if self._library.hold:
            return "PROC"
        if move.state is None:
            ctypes.memmove(move.target[0], move.source[0], move.target[1])
            move.state = "DONE"
        return move.state
