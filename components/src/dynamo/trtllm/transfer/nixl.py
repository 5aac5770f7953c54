"""The NIXL adapter: offers and reads over UCX, between processes and machines.

The peer's connection data travels in the descriptor (about 0.6 kB of base64) and is loaded once per peer; acknowledgements
are NIXL notifications.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.nixl_agent import AgentThread, Place
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.pooled import PooledTransfer

if TYPE_CHECKING:
    import torch


class NixlTransfer(PooledTransfer):
    """One NIXL agent with registered pools. Needs `nixl` from `start` on, which raises `StartupError` where it cannot run."""

    transport: ClassVar[Literal["nixl", "local"]] = "nixl"

    def __init__(self, **options: Any) -> None:
        """Options as `PooledTransfer`."""
        super().__init__(**options)
        self._thread: AgentThread | None = None

    async def _connect(self) -> None:
        thread = AgentThread(
            f"{self._name}#{self._incarnation}",
            abandon_after_s=self._time_to_live_s,
            on_acknowledged=self._all_acknowledged,
            expects_acknowledgements=self._awaits_acknowledgement,
        )
        await thread.start()
        self._thread = thread

    async def _disconnect(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()

    def _require_thread(self) -> AgentThread:
        if self._thread is None:
            raise RuntimeError("the transfer is not started")
        return self._thread

    async def _register(self, memory: torch.Tensor) -> Any:
        return await self._require_thread().register(memory)

    async def _unregister(self, registration: Any) -> None:
        await self._require_thread().unregister(registration)

    def _metadata(self) -> str:
        return self._require_thread().metadata

    def _read(self, sender: PeerIdentity, source: tuple[str, int, int], target: Segment) -> asyncio.Future[None]:
        device, index, address = source
        own = target.memory.device
        there = Place(device, index, address, target.nbytes)
        here = Place(own.type, own.index or 0, target.address, target.nbytes)
        return self._require_thread().read(sender, there, here)

    def _acknowledge(self, descriptor: TransferDescriptor) -> None:
        self._require_thread().acknowledge(descriptor.sender, descriptor.generation)

    def _offered(self) -> None:
        self._require_thread().expect_acknowledgement()

    def _all_acknowledged(self, generations: list[int]) -> None:
        for generation in generations:
            self._acknowledged(generation)
