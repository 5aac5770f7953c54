"""The in-process adapter: the same contract without a transport, for both ends in one process.

Descriptors of one process mean nothing in another; the reader finds the sender in a registry of this module.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.pooled import INLINE_COPY_BYTES, ConnectionLost, PooledTransfer

if TYPE_CHECKING:
    import torch

_STARTED: dict[str, LocalTransfer] = {}


class LocalTransfer(PooledTransfer):
    """Reads by copying between the pools of two transfers in this process. `_regions` maps base addresses to registered
    memory.
    """

    transport: ClassVar[Literal["nixl", "local"]] = "local"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._agent = f"{self._name}#{self._incarnation}"
        self._regions: dict[int, torch.Tensor] = {}

    async def _connect(self) -> None:
        _STARTED[self._agent] = self

    async def _disconnect(self) -> None:
        _STARTED.pop(self._agent, None)
        self._regions.clear()

    async def _register(self, memory: torch.Tensor) -> int:
        self._regions[memory.data_ptr()] = memory
        return memory.data_ptr()

    async def _unregister(self, registration: int) -> None:
        self._regions.pop(registration, None)

    def _metadata(self) -> str:
        return ""

    def _read(self, sender: PeerIdentity, source: tuple[str, int, int], target: Segment) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        peer = _STARTED.get(sender.agent)
        if peer is None:
            future.set_exception(ConnectionLost())
            return future
        memory = peer.find_memory(source[2], target.nbytes)
        if memory is None:
            future.set_exception(PeerFault("the other worker's data is not where its message says"))
            return future
        if target.nbytes > INLINE_COPY_BYTES:
            return asyncio.get_running_loop().run_in_executor(None, _copy, target.memory, memory)
        _copy(target.memory, memory)
        future.set_result(None)
        return future

    def find_memory(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Registered bytes of this transfer, uint8 `[nbytes]`; None where they do not lie in one registered region."""
        for base, memory in self._regions.items():
            if base <= address and address + nbytes <= base + memory.numel():
                return memory[address - base : address - base + nbytes]
        return None

    def _acknowledge(self, descriptor: TransferDescriptor) -> None:
        peer = _STARTED.get(descriptor.sender.agent)
        if peer is not None:
            peer._acknowledged(descriptor.generation)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
