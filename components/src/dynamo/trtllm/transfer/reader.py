"""The reading half of a transfer: one fetch, from the room for it until its memory is given back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from dynamo.trtllm.errors import PeerFault, PeerTimeout, PeerUnavailable
from dynamo.trtllm.transfer import layout
from dynamo.trtllm.transfer.descriptor import TransferDescriptor
from dynamo.trtllm.transfer.memory import Memory, copy_bytes
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.port import Received
from dynamo.trtllm.transfer.transport import ConnectionLost, Place, Transport

if TYPE_CHECKING:
    import torch

RETRIES = 1
"""A lost connection is made once more, and so is a read whose data was replaced meanwhile."""


class Reader:
    """Fetches of one process. `_reads` are the transport's futures: memory is not free before its read has ended."""

    def __init__(self, memory: Memory, transport: Transport, counts: Counter[str]) -> None:
        self._memory = memory
        self._transport = transport
        self._counts = counts
        self._reads: set[asyncio.Future[None]] = set()

    @property
    def reads_in_flight(self) -> int:
        """Reads that the transport has not ended yet."""
        return len(self._reads)

    async def fetch(self, descriptor: TransferDescriptor, deadline_s: float, *, copy: bool, device: str | None) -> Received:
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
            self._transport.acknowledge(descriptor)
            raise
        except Exception:
            self._counts["failures"] += 1
            raise
        # After the caller has gone on: nobody waits for the acknowledgement.
        loop.call_soon(self._transport.acknowledge, descriptor)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += descriptor.payload_bytes
        tensors = layout.views(segment.memory, descriptor.tensors)
        if not copy and device in (None, home):
            return Received(tensors, lambda: self._memory.free(segment))
        try:
            return Received(await copy_bytes(descriptor.length, lambda: {n: _copied(x, device) for n, x in tensors.items()}))
        finally:
            self._memory.free(segment)

    async def _fetch_into(self, segment: Segment, descriptor: TransferDescriptor, end: float) -> None:
        """Read and check the offer, once more if that fails. The segment is the caller's only when this returns."""
        for attempt in range(1 + RETRIES):
            self._counts["retries"] += attempt
            await self._read_in_time(segment, descriptor, end)
            if layout.is_marked(segment.memory, descriptor.generation):
                return
        self._memory.free(segment)
        raise PeerFault("the data from the other worker expired before it was read")

    async def _read_in_time(self, target: Segment, descriptor: TransferDescriptor, end: float) -> None:
        """One read, over a new connection if the first one is lost.

        Unless it returns, `target` is freed when its read has ended.
        """
        source = Place(descriptor.device, descriptor.device_index, descriptor.address, target.nbytes)
        for attempt in range(1 + RETRIES):
            self._counts["retries"] += attempt
            read = self._transport.read(descriptor.sender, source, target)
            error = await self._ended(read, target, end)
            if error is None:
                return
            if not isinstance(error, ConnectionLost):
                self._memory.free(target)
                raise error
        self._memory.free(target)
        raise PeerUnavailable("the worker that holds this request's data is gone") from error

    async def _ended(self, read: asyncio.Future[None], target: Segment, end: float) -> BaseException | None:
        """The error of a read that ended in time. Raises `PeerTimeout` for one that did not."""
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        try:
            if not read.done():
                await asyncio.wait({read}, timeout=max(end - asyncio.get_running_loop().time(), 0.0))
        except asyncio.CancelledError:
            read.add_done_callback(lambda read: self._free_after(read, target))
            raise
        if not read.done():
            read.add_done_callback(lambda read: self._free_after(read, target))
            raise PeerTimeout("the data from the other worker did not arrive in time")
        return read.exception()

    def _free_after(self, read: asyncio.Future[None], target: Segment) -> None:
        if not read.cancelled():
            read.exception()
        self._memory.free(target)


def _copied(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    """An independent tensor on `device`, None for its own; on return nothing reads the original any more."""
    import torch

    copy = tensor.to(tensor.device if device is None else device, copy=True)
    for end in (tensor, copy):
        if end.is_cuda:
            torch.cuda.current_stream(end.device).synchronize()
    return copy
