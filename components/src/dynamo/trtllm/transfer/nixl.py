"""The NIXL transport: reads over UCX, between processes and machines.

The peer's connection data travels in the descriptor (about 0.6 kB of base64) and is loaded once per peer;
acknowledgements are one-sided writes into the sender's board.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, ClassVar

from dynamo.trtllm.transfer.descriptor import WORD_BYTES, PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.nixl_thread import AgentThread
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.transport import Acknowledgements, Place, Transport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class NixlTransport(Transport):
    """One NIXL agent on a thread of its own. Needs `nixl` from `connect` on."""

    name: ClassVar[str] = "nixl"

    def __init__(self) -> None:
        self._thread: AgentThread | None = None
        self._acknowledgements: Acknowledgements | None = None

    async def connect(self, agent: str, abandon_after_s: float) -> None:
        thread = AgentThread(agent, abandon_after_s=abandon_after_s)
        await thread.start()
        self._thread = thread

    def listen(self, acknowledgements: Acknowledgements) -> None:
        self._acknowledgements = acknowledgements
        board, expected = acknowledgements.board, acknowledgements.expected
        self._require_thread().watch(
            lambda: board.arrived() if expected() else None, acknowledgements.arrived
        )

    async def disconnect(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()

    async def register(self, memory: torch.Tensor) -> Any:
        return await self._require_thread().register(memory)

    async def unregister(self, registration: Any) -> None:
        await self._require_thread().unregister(registration)

    @property
    def metadata(self) -> str:
        return self._require_thread().metadata

    def read(self, sender: PeerIdentity, source: Place, target: Segment) -> asyncio.Future[None]:
        own = target.pool.memory.device
        here = Place(own.type, own.index or 0, target.address, target.nbytes)
        return self._require_thread().move("READ", sender, source, here)

    def acknowledge(self, descriptor: TransferDescriptor) -> None:
        if self._thread is None or self._acknowledgements is None or not descriptor.acknowledge_at:
            return
        board = self._acknowledgements.board
        word = board.post(descriptor.generation)
        if word is None:
            return
        here = Place("cpu", 0, board.outgoing_address(word), WORD_BYTES)
        there = Place("cpu", 0, descriptor.acknowledge_at, WORD_BYTES)
        written = self._thread.move("WRITE", descriptor.sender, there, here)

        def ended(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and (error := written.exception()) is not None:
                logger.debug("an acknowledgement could not be sent", exc_info=error)
            board.sent(word)

        written.add_done_callback(ended)

    def offered(self) -> None:
        self._require_thread().expect_arrival()

    def check_health(self) -> None:
        if self._thread is not None:
            self._thread.check_health()

    def _require_thread(self) -> AgentThread:
        if self._thread is None:
            raise RuntimeError("the transfer is not started")
        return self._thread
