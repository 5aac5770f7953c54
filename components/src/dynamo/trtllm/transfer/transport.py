"""What carries bytes between two processes:
the part of a transfer that differs between NIXL and a copy in this process.

A transport knows addresses and peers, and neither tensors nor offers. `registry.py` names all of them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor

if TYPE_CHECKING:
    import torch

    from dynamo.trtllm.transfer.board import Board
    from dynamo.trtllm.transfer.pool import Segment

INLINE_COPY_BYTES = 8 << 20
"""Larger copies leave the event loop; at memory speed this many bytes take one or two milliseconds."""


class ConnectionLost(Exception):
    """A read failed because the connection broke; a new one may work."""


class MemoryLost(ConnectionLost):
    """A read was given up and could not be stopped:
    bytes may still arrive in its target, which must not be used again."""


class Place(NamedTuple):
    """Bytes on a device of some process. `device` is `cpu` or `cuda`."""

    device: str
    device_index: int
    address: int
    nbytes: int


class Acknowledgements(NamedTuple):
    """Where a transport brings the word of readers that they are done with an offer."""

    board: Board
    """Registered words: one for each open offer, which its reader writes,
    and those that this process writes to others."""
    expected: Callable[[], bool]
    """True while a word could free memory. May be asked from another thread."""
    arrived: Callable[[list[int]], None]
    """Called on the event loop with the generations that readers are done with."""


class Transport(ABC):
    """One process's connection to all others. `connect` once,
    then everything else, then `disconnect` once."""

    name: ClassVar[str]
    """What descriptors call it; both ends must use the same one."""

    @abstractmethod
    async def connect(self, agent: str, abandon_after_s: float) -> None:
        """Make the transport usable under the process's unique name `agent`.

        A read that has not ended after `abandon_after_s` is given up; if it cannot be stopped within
        as long again, it fails with `MemoryLost`. Raises `StartupError` where this machine cannot use it.
        """

    @abstractmethod
    def listen(self, acknowledgements: Acknowledgements) -> None:
        """Bring readers' acknowledgements from now on. Called once, when the board is registered."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Undo `connect`; no read is in flight any more. Calling again does nothing."""

    @abstractmethod
    async def register(self, memory: torch.Tensor) -> Any:
        """Make `memory`, uint8 `[bytes]`, readable by peers and usable for reads;
        returns what `unregister` takes."""

    @abstractmethod
    async def unregister(self, registration: Any) -> None:
        """Undo `register`, before the memory is freed."""

    @property
    @abstractmethod
    def metadata(self) -> str:
        """What peers must know to read from this process, with all memory registered so far; base64."""

    @abstractmethod
    def read(self, sender: PeerIdentity, source: Place, target: Segment) -> asyncio.Future[None]:
        """Start reading `source`, which is `sender`'s, into `target`.

        The future is never cancelled. It completes when the transport will not touch `target` any more, or
        fails: with a `PeerFault`, `ConnectionLost`, or `MemoryLost`. It stays open only while a call into the
        transport's library does not return, which `check_health` says.
        """

    @abstractmethod
    def acknowledge(self, descriptor: TransferDescriptor) -> None:
        """Tell the sender that its segment is not needed any more; does not wait, ignores failure."""

    def offered(self) -> None:
        """An offer was made: a transport that has to look for acknowledgements starts looking,
        while they are expected."""
        return

    def check_health(self) -> None:
        """Return at once while reads can end;
        raise `TransferDead` when the transport's library does not return any more.

        To be called about once a second.
        """
        return
