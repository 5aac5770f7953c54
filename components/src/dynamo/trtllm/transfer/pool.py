"""Memory for transfers: an allocator of aligned ranges, and a pool that lets callers wait for room.

A pool is one block of memory, registered once with the transport. Segments are cut from it and
given back. This module does not know what is in a segment, nor when it may be reused: the sender
and the reader decide that.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.errors import Overloaded
from dynamo.trtllm.transfer.descriptor import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch


def round_up(nbytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


class Allocator:
    """Best-fit allocation of aligned ranges out of `[0, capacity)`;
    neighbouring free ranges are merged at once.

    Ties go to the lowest offset, so that a lightly used pool stays within
    pages that are already in memory and in cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.used = 0
        self.peak = 0
        self._free_offsets: list[int] = [0] if self.capacity else []
        self._free_lengths: dict[int, int] = {0: self.capacity} if self.capacity else {}
        self._taken: dict[int, int] = {}

    @property
    def segments(self) -> int:
        """Ranges that are handed out."""
        return len(self._taken)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free range of at least `nbytes` (at least one alignment unit);
        None while no hole is large enough."""
        length = round_up(max(nbytes, 1))
        fitting = [
            (self._free_lengths[offset], offset)
            for offset in self._free_offsets
            if self._free_lengths[offset] >= length
        ]
        if not fitting:
            return None
        hole, offset = min(fitting)
        self._remove_hole(offset)
        if hole > length:
            self._add_hole(offset + length, hole - length)
        self._taken[offset] = length
        self.used += length
        self.peak = max(self.peak, self.used)
        return offset

    def free(self, offset: int) -> None:
        """Give a range back. Raises `KeyError` for an offset that is not handed out."""
        length = self._taken.pop(offset)
        self.used -= length
        following = offset + length
        if following in self._free_lengths:
            length += self._remove_hole(following)
        index = bisect_left(self._free_offsets, offset)
        if index:
            before = self._free_offsets[index - 1]
            if before + self._free_lengths[before] == offset:
                self._free_lengths[before] += length
                return
        self._add_hole(offset, length)

    def _add_hole(self, offset: int, length: int) -> None:
        self._free_offsets.insert(bisect_left(self._free_offsets, offset), offset)
        self._free_lengths[offset] = length

    def _remove_hole(self, offset: int) -> int:
        del self._free_offsets[bisect_left(self._free_offsets, offset)]
        return self._free_lengths.pop(offset)


@dataclass(eq=False)
class _Waiter:
    amount: int
    granted: asyncio.Future[int]


class _FirstComeFirstServed(ABC):
    """Something that is handed out in places and can be waited for.
    Shared by all transfers; used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiter] = deque()

    @abstractmethod
    def _grant(self, amount: int) -> int | None:
        """A place for `amount`; None while there is no room."""

    @abstractmethod
    def _take_back(self, place: int) -> None:
        """Undo `_grant`."""

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return len(self._waiting)

    def give_back(self, place: int) -> None:
        """Free a place and serve those who wait."""
        self._take_back(place)
        self._serve_waiting()

    async def _take(self, amount: int, timeout_s: float) -> int:
        if not self._waiting:
            place = self._grant(amount)
            if place is not None:
                return place
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await asyncio.wait({waiter.granted}, timeout=max(timeout_s, 0.0))
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        if not waiter.granted.done():
            self._withdraw(waiter)
            raise Overloaded("the transfer memory stayed full; try again later")
        return waiter.granted.result()

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter.granted.done():
            self._take_back(waiter.granted.result())
        else:
            self._waiting.remove(waiter)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            place = self._grant(self._waiting[0].amount)
            if place is None:
                return
            self._waiting.popleft().granted.set_result(place)


class Slots(_FirstComeFirstServed):
    """A semaphore of `count` numbered slots whose waits end at a deadline."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._free = list(range(count - 1, -1, -1))

    async def take(self, timeout_s: float) -> int:
        """Number of a free slot. Raises `Overloaded` when there is none within `timeout_s` seconds."""
        return await self._take(1, timeout_s)

    def take_now(self) -> int | None:
        """Number of a free slot, None when there is none."""
        return self._grant(1)

    def _grant(self, amount: int) -> int | None:
        return self._free.pop() if self._free else None

    def _take_back(self, place: int) -> None:
        self._free.append(place)


class Room(_FirstComeFirstServed):
    """An allocator that one can wait for."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator = allocator

    async def take(self, nbytes: int, timeout_s: float) -> int:
        """Offset of a range of `nbytes`.
        Raises `Overloaded` when there is none within `timeout_s` seconds."""
        return await self._take(nbytes, timeout_s)

    def _grant(self, amount: int) -> int | None:
        return self.allocator.allocate(amount)

    def _take_back(self, place: int) -> None:
        self.allocator.free(place)


class Pool:
    """One block of registered memory, uint8 `[bytes]`, from which segments are cut.

    `registration` is what the transport gave for registering it.
    """

    def __init__(self, memory: torch.Tensor, registration: Any) -> None:
        self.memory = memory
        self.registration = registration
        self.base = memory.data_ptr()
        self.room = Room(Allocator(memory.numel()))

    async def allocate(self, nbytes: int, timeout_s: float) -> Segment:
        """A segment of `nbytes`. Raises `Overloaded` when there is no room within `timeout_s` seconds."""
        return Segment(self, await self.room.take(nbytes, timeout_s), nbytes)

    def free(self, segment: Segment) -> None:
        """Take a segment back and serve those who wait."""
        self.room.give_back(segment.offset)


@dataclass(frozen=True, eq=False)
class Segment:
    """A range of a pool that belongs to one transfer: `nbytes` bytes from `offset`."""

    pool: Pool
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.pool.base + self.offset

    @property
    def memory(self) -> torch.Tensor:
        """The bytes, as a uint8 view `[nbytes]`."""
        return self.pool.memory[self.offset : self.offset + self.nbytes]
