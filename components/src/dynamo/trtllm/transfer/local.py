"""The in-process transport: the same contract without a network, for both ends in one process.

Descriptors of one process mean nothing in another; the reader finds the sender in a registry of this module.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.transport import (
    INLINE_COPY_BYTES,
    Acknowledgements,
    ConnectionLost,
    Place,
    Transport,
)

if TYPE_CHECKING:
    import torch

_CONNECTED: dict[str, LocalTransport] = {}


class LocalTransport(Transport):
    """Reads by copying between registered memory of this process.
    `_regions` maps base addresses to that memory."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._agent = ""
        self._regions: dict[int, torch.Tensor] = {}
        self._acknowledgements: Acknowledgements | None = None

    async def connect(self, agent: str, abandon_after_s: float) -> None:
        self._agent = agent
        _CONNECTED[agent] = self

    def listen(self, acknowledgements: Acknowledgements) -> None:
        self._acknowledgements = acknowledgements

    async def disconnect(self) -> None:
        _CONNECTED.pop(self._agent, None)
        self._regions.clear()

    async def register(self, memory: torch.Tensor) -> int:
        self._regions[memory.data_ptr()] = memory
        return memory.data_ptr()

    async def unregister(self, registration: int) -> None:
        self._regions.pop(registration, None)

    @property
    def metadata(self) -> str:
        return ""

    def read(self, sender: PeerIdentity, source: Place, target: Segment) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        peer = _CONNECTED.get(sender.agent)
        if peer is None:
            future.set_exception(ConnectionLost())
            return future
        memory = peer.find_memory(source.address, source.nbytes)
        if memory is None:
            future.set_exception(PeerFault("the other worker's data is not where its message says"))
            return future
        if target.nbytes > INLINE_COPY_BYTES:
            return asyncio.get_running_loop().run_in_executor(None, _copy, target.memory, memory)
        _copy(target.memory, memory)
        future.set_result(None)
        return future

    def find_memory(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Registered bytes of this transport, uint8 `[nbytes]`;
        None where they do not lie in one registered region."""
        for base, memory in self._regions.items():
            if base <= address and address + nbytes <= base + memory.numel():
                return memory[address - base : address - base + nbytes]
        return None

    def acknowledge(self, descriptor: TransferDescriptor) -> None:
        peer = _CONNECTED.get(descriptor.sender.agent)
        if peer is not None and peer._acknowledgements is not None:
            peer._acknowledgements.arrived([descriptor.generation])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
