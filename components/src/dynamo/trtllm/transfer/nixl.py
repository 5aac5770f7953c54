"""The NIXL adapter: offers and reads over UCX, between processes and machines.

The peer's connection data travels in the descriptor (about 0.6 kB of base64) and is loaded once per peer; acknowledgements are
one-sided writes into the sender's board.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dynamo.trtllm.transfer.descriptor import WORD_BYTES, PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.nixl_agent import AgentThread, Place
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.pooled import PooledTransfer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


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
            watch=self._arrived,
            on_arrival=self._all_acknowledged,
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
        own = target.pool.memory.device
        there = Place(device, index, address, target.nbytes)
        here = Place(own.type, own.index or 0, target.address, target.nbytes)
        return self._require_thread().move("READ", sender, there, here)

    def _acknowledge(self, descriptor: TransferDescriptor) -> None:
        if self._thread is None or not descriptor.acknowledge_at:
            return
        board = self._require_board()
        word = board.post(descriptor.generation)
        if word is None:
            return
        here = Place("cpu", 0, board.outgoing_address(word), WORD_BYTES)
        there = Place("cpu", 0, descriptor.acknowledge_at, WORD_BYTES)
        written = self._thread.move("WRITE", descriptor.sender, there, here)
        written.add_done_callback(lambda written: self._acknowledgement_ended(word, written))

    def _acknowledgement_ended(self, word: int, written: asyncio.Future[None]) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            logger.debug("an acknowledgement could not be sent", exc_info=error)
        self._require_board().sent(word)

    def _arrived(self) -> list[int] | None:
        """On the agent's thread: the acknowledgements since the last call, None while none is expected."""
        return self._require_board().arrived() if self._awaits_acknowledgement() else None

    def _offered(self) -> None:
        self._require_thread().expect_arrival()

    def _all_acknowledged(self, generations: list[int]) -> None:
        for generation in generations:
            self._acknowledged(generation)
