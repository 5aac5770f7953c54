"""The transfer over registered memory: a sender, a reader, the memory of both,
and the transport that carries the bytes."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from dynamo.trtllm.errors import TransferDead
from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.memory import Memory
from dynamo.trtllm.transfer.port import Offer, Received, Transfer, TransferStats
from dynamo.trtllm.transfer.transport import Acknowledgements, Transport

if TYPE_CHECKING:
    import torch

    from dynamo.trtllm.transfer.reader import Reader
    from dynamo.trtllm.transfer.sender import Sender

Part = TypeVar("Part")

MOST_LOST = 0.5
"""Share of the memory that may be lost to reads which could not be stopped;
beyond it a new process serves better."""
_COUNTED = (
    "offers",
    "offered_bytes",
    "fetches",
    "fetched_bytes",
    "acknowledged",
    "expired",
    "failures",
    "retries",
)


class PooledTransfer(Transfer):
    """Offers and fetches over pools of registered memory. All state is touched on the event loop only.

    `clock` is monotonic, in seconds; tests inject their own and call `sweep`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str | None = None,
        pool_bytes: int = 256 << 20,
        time_to_live_s: float = 60.0,
        max_object_bytes: int = 16 << 30,
        stage_cuda_on_host: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is stable over restarts and unique among live processes;
        without one, a random name is used."""
        self._incarnation = secrets.token_hex(8)
        self._name = name or self._incarnation
        self.transport = transport
        self._time_to_live_s = time_to_live_s
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._memory = Memory(
            transport,
            pool_bytes=pool_bytes,
            max_object_bytes=max_object_bytes,
            stage_cuda_on_host=stage_cuda_on_host,
        )
        self._sender: Sender | None = None
        self._reader: Reader | None = None
        self._identity: PeerIdentity | None = None
        self._housekeeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        from dynamo.trtllm.transfer.board import Board
        from dynamo.trtllm.transfer.reader import Reader
        from dynamo.trtllm.transfer.sender import Sender

        await self.transport.connect(f"{self._name}#{self._incarnation}", self._time_to_live_s)
        board = Board()
        try:
            await self._memory.open()
            board.registration = await self.transport.register(board.memory)
        except BaseException:
            await self.transport.disconnect()
            raise
        sender = Sender(
            self._memory, board, self._counts, time_to_live_s=self._time_to_live_s, clock=self._clock
        )
        self.transport.listen(Acknowledgements(board, sender.awaits_acknowledgement, sender.acknowledged))
        self._sender, self._reader = sender, Reader(self._memory, self.transport, self._counts)
        self._housekeeper = asyncio.create_task(sender.keep_house(), name="transfer-housekeeping")

    async def close(self) -> None:
        housekeeper, self._housekeeper = self._housekeeper, None
        if housekeeper is not None:
            housekeeper.cancel()
            await asyncio.gather(housekeeper, return_exceptions=True)
        if self._sender is not None:
            self._sender.close()
        self._sender = self._reader = None
        await self._memory.settle()
        await self.transport.disconnect()
        self._memory.forget()

    @property
    def identity(self) -> PeerIdentity:
        metadata = self.transport.metadata
        if self._identity is None or self._identity.metadata != metadata:
            self._identity = PeerIdentity(name=self._name, incarnation=self._incarnation, metadata=metadata)
        return self._identity

    async def offer(self, tensors: Mapping[str, torch.Tensor], deadline_s: float | None = None) -> Offer:
        sender = self._require(self._sender)
        wait_s = self._time_to_live_s / 2 if deadline_s is None else deadline_s
        offer = await sender.offer(tensors, wait_s, self.transport.name, lambda: self.identity)
        self.transport.offered()
        return offer

    async def fetch(
        self,
        descriptor: TransferDescriptor,
        deadline_s: float | None = None,
        *,
        copy: bool = False,
        device: str | None = None,
    ) -> Received:
        wait_s = math.inf if deadline_s is None else deadline_s
        return await self._require(self._reader).fetch(descriptor, wait_s, copy=copy, device=device)

    async def discard(self, descriptor: TransferDescriptor) -> None:
        if descriptor.transport == self.transport.name:
            self.transport.acknowledge(descriptor)

    async def drain(self, deadline_s: float | None = None) -> bool:
        wait_s = self._time_to_live_s if deadline_s is None else deadline_s
        return self._sender is None or await self._sender.drain(wait_s)

    def check_health(self) -> None:
        self.transport.check_health()
        if self._reader is not None and self._reader.lost_bytes > self._memory.sizes()[0] * MOST_LOST:
            raise TransferDead("reads that could not be stopped hold most of the transfer memory")

    def sweep(self) -> float | None:
        """What the housekeeping does by itself, at once.
        Returns the seconds until something is due, None without it."""
        return self._require(self._sender).sweep()

    def stats(self) -> TransferStats:
        sender, reader = self._sender, self._reader
        size, used, peak = self._memory.sizes()
        return TransferStats(
            **{f"{name}_total": self._counts[name] for name in _COUNTED},
            open_offers=sender.open_offers if sender else 0,
            waiting_offers=self._memory.waiting + (sender.waiting if sender else 0),
            quarantined_segments=sender.quarantined_segments if sender else 0,
            reads_in_flight=reader.reads_in_flight if reader else 0,
            lost_reads=reader.lost_reads if reader else 0,
            own_registrations=self._memory.own_registrations,
            pool_bytes=size,
            pool_used_bytes=used,
            pool_peak_bytes=peak,
        )

    @staticmethod
    def _require(part: Part | None) -> Part:
        if part is None:
            raise RuntimeError("the transfer is not started")
        return part
