"""The reading half of a transfer: one fetch, from the room for it until its memory is given back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.trtllm.errors import PeerFault, PeerTimeout, PeerUnavailable
from dynamo.trtllm.transfer import layout
from dynamo.trtllm.transfer.descriptor import TransferDescriptor
from dynamo.trtllm.transfer.memory import Memory, copy_bytes
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.port import Received
from dynamo.trtllm.transfer.transport import ConnectionLost, MemoryLost, Place, Transport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RETRIES = 1
"""A lost connection is made once more, and so is a read whose data was replaced meanwhile."""


@dataclass(eq=False)
class _Target:
    """A segment that is read into, and the last read of it that was started."""

    segment: Segment
    read: asyncio.Future[None] | None = None


class Reader:
    """Fetches of one process. `_reads` are the transport's futures:
    memory is not free before its read has ended."""

    def __init__(self, memory: Memory, transport: Transport, counts: Counter[str]) -> None:
        self._memory = memory
        self._transport = transport
        self._counts = counts
        self._reads: set[asyncio.Future[None]] = set()
        self._lost: list[Segment] = []

    @property
    def reads_in_flight(self) -> int:
        """Reads that the transport has not ended yet."""
        return len(self._reads)

    @property
    def lost_reads(self) -> int:
        """Reads that could not be stopped; their memory is kept out of use."""
        return len(self._lost)

    @property
    def lost_bytes(self) -> int:
        """Bytes of the targets of lost reads."""
        return sum(segment.nbytes for segment in self._lost)

    async def fetch(
        self, descriptor: TransferDescriptor, deadline_s: float, *, copy: bool, device: str | None
    ) -> Received:
        """Read an offer and acknowledge it; see `Transfer.fetch`."""
        if descriptor.transport != self._transport.name:
            raise PeerFault("the other worker hands over by another transport; use one for all workers")
        loop = asyncio.get_running_loop()
        end = loop.time() + min(deadline_s, descriptor.time_to_live_s / 2)
        try:
            home = self._memory.device_for(descriptor)
            segment = await self._memory.allocate(home, descriptor.length, end)
            await self._fetch_into(segment, descriptor, end)
        except asyncio.CancelledError:
            self._acknowledge(descriptor)
            raise
        except Exception:
            self._counts["failures"] += 1
            raise
        # After the caller has gone on: nobody waits for the acknowledgement.
        loop.call_soon(self._acknowledge, descriptor)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += descriptor.payload_bytes
        return await self._handed_out(
            segment, descriptor, copy=copy or device not in (None, home), device=device
        )

    async def _handed_out(
        self, segment: Segment, descriptor: TransferDescriptor, *, copy: bool, device: str | None
    ) -> Received:
        """The tensors of a segment that was read: views that hold it, or copies after which it is free."""
        held = False
        try:
            tensors = layout.views(segment.memory, descriptor.tensors)
            if copy:
                return Received(
                    await copy_bytes(
                        descriptor.length, lambda: {n: _copied(x, device) for n, x in tensors.items()}
                    )
                )
            held = True
            return Received(tensors, lambda: self._memory.free(segment))
        finally:
            if not held:
                self._memory.free(segment)

    def _acknowledge(self, descriptor: TransferDescriptor) -> None:
        try:
            self._transport.acknowledge(descriptor)
        except Exception:
            logger.warning(
                "an acknowledgement could not be sent; the sender's time to live frees its memory",
                exc_info=True,
            )

    async def _fetch_into(self, segment: Segment, descriptor: TransferDescriptor, end: float) -> None:
        """Read and check the offer, once more if that fails.

        The segment is the caller's only when this returns.
        Otherwise it is freed here, once its last read has ended.
        """
        target = _Target(segment)
        try:
            for attempt in range(1 + RETRIES):
                self._counts["retries"] += attempt
                await self._read_in_time(target, descriptor, end)
                if layout.is_marked(segment.memory, descriptor.generation):
                    return
            raise PeerFault("the data from the other worker expired before it was read")
        except BaseException:
            self._give_back(target)
            raise

    async def _read_in_time(self, target: _Target, descriptor: TransferDescriptor, end: float) -> None:
        """One read, over a new connection if the first one is lost."""
        source = Place(descriptor.device, descriptor.device_index, descriptor.address, target.segment.nbytes)
        for attempt in range(1 + RETRIES):
            self._counts["retries"] += attempt
            read = self._transport.read(descriptor.sender, source, target.segment)
            error = await self._ended(read, target, end)
            if error is None:
                return
            if not isinstance(error, ConnectionLost):
                raise error
            if isinstance(error, MemoryLost):
                break
        raise PeerUnavailable("the worker that holds this request's data is gone") from error

    async def _ended(self, read: asyncio.Future[None], target: _Target, end: float) -> BaseException | None:
        """The error of a read that ended in time. Raises `PeerTimeout` for one that did not."""
        target.read = read
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        if not read.done():
            await asyncio.wait({read}, timeout=max(end - asyncio.get_running_loop().time(), 0.0))
        if not read.done():
            raise PeerTimeout("the data from the other worker did not arrive in time")
        return read.exception()

    def _give_back(self, target: _Target) -> None:
        """Free a segment when its last read has ended; keep it for good if that read could not be stopped."""

        def ended(read: asyncio.Future[None]) -> None:
            if not read.cancelled() and isinstance(read.exception(), MemoryLost):
                self._lost.append(target.segment)
            else:
                self._memory.free(target.segment)

        if target.read is None:
            self._memory.free(target.segment)
        elif target.read.done():
            ended(target.read)
        else:
            target.read.add_done_callback(ended)


def _copied(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    """An independent tensor on `device`, None for its own; on return nothing reads the original any more."""
    import torch

    copy = tensor.to(tensor.device if device is None else device, copy=True)
    for end in (tensor, copy):
        if end.is_cuda:
            torch.cuda.current_stream(end.device).synchronize()
    return copy
