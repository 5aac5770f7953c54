"""The sending half of a transfer:
offers, from the copy into registered memory until that memory is free again."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.trtllm.transfer import layout
from dynamo.trtllm.transfer.board import Board
from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.memory import Memory, copy_bytes
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.port import Offer, OfferState, wait_for_event

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 1.0


@dataclass(eq=False)
class _Held:
    """A segment of an offer. `due` is when it expires while the offer is open,
    and when it is free again once set aside."""

    offer: Offer
    segment: Segment
    word: int
    due: float


class Sender:
    """Offers of one process. State shared by requests, all touched on the event loop only: `_open` (offers
    by generation) and `_quarantine` (segments by generation that a reader may still be reading). `clock`
    is monotonic, in seconds.
    """

    def __init__(
        self,
        memory: Memory,
        board: Board,
        counts: Counter[str],
        *,
        time_to_live_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._board = board
        self._counts = counts
        self._time_to_live_s = time_to_live_s
        self._clock = clock
        self._generation = secrets.randbelow(1 << 20) << 32
        self._open: dict[int, _Held] = {}
        self._quarantine: dict[int, _Held] = {}
        self._changed = asyncio.Event()

    @property
    def open_offers(self) -> int:
        """Offers that a reader may ask for."""
        return len(self._open)

    @property
    def quarantined_segments(self) -> int:
        """Segments of offers that ended unread, kept aside because a reader may be reading them right now."""
        return len(self._quarantine)

    @property
    def waiting(self) -> int:
        """Offers that wait for a word on the board."""
        return self._board.waiting

    def awaits_acknowledgement(self) -> bool:
        """True while a reader's word could free memory. May be asked from another thread."""
        return bool(self._open or self._quarantine)

    async def offer(
        self,
        tensors: Mapping[str, torch.Tensor],
        deadline_s: float,
        transport: str,
        identity: Callable[[], PeerIdentity],
    ) -> Offer:
        """Copy `tensors` into a segment and offer it as `Transfer.offer` says, by `transport`.

        `identity` is asked once the memory is there: memory registered for this offer changes it.
        """
        specs, length = layout.plan(tensors)
        device = self._memory.device_of(tensors.values())
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        segment = await self._memory.allocate(device, length, end)
        self._generation += 1
        generation = self._generation
        word: int | None = None
        try:
            word = await self._board.take(end - loop.time())
            layout.mark(segment.memory, generation)
            await copy_bytes(length, lambda: layout.write(segment.memory, specs, tensors))
            kind, _, index = device.partition(":")
            descriptor = TransferDescriptor(
                transport=transport,
                sender=identity(),
                device="cuda" if kind == "cuda" else "cpu",
                device_index=int(index or 0),
                address=segment.address,
                length=length,
                acknowledge_at=self._board.address_of(word),
                generation=generation,
                time_to_live_s=self._time_to_live_s,
                tensors=specs,
            )
        except BaseException:
            self._memory.free(segment)
            if word is not None:
                self._board.give_back(word)
            raise
        return self._hold(descriptor, segment, word)

    def _hold(self, descriptor: TransferDescriptor, segment: Segment, word: int) -> Offer:
        generation = descriptor.generation
        offer = Offer(descriptor, lambda: self._withdraw(generation, OfferState.RELEASED))
        first = not self.awaits_acknowledgement()
        self._open[generation] = _Held(offer, segment, word, self._clock() + self._time_to_live_s)
        self._counts["offers"] += 1
        self._counts["offered_bytes"] += descriptor.payload_bytes
        if first:
            self._changed.set()
        return offer

    def acknowledged(self, generations: list[int]) -> None:
        """Readers are done with these segments: free them at once, wherever they are.
        Unknown generations are ignored."""
        for generation in generations:
            held = self._open.pop(generation, None)
            if held is not None:
                held.offer.settle(OfferState.ACKNOWLEDGED)
                self._counts["acknowledged"] += 1
            else:
                held = self._quarantine.pop(generation, None)
            if held is not None:
                self._invalidate(held)
                self._free(held)

    def sweep(self) -> float | None:
        """Expire offers and end quarantines that are due.
        Returns the seconds until the next is due, None without one."""
        now = self._clock()
        for generation in [key for key, held in self._quarantine.items() if held.due <= now]:
            self._free(self._quarantine.pop(generation))
        for generation in [key for key, held in self._open.items() if held.due <= now]:
            self._counts["expired"] += 1
            self._withdraw(generation, OfferState.EXPIRED)
        due = [held.due for held in (*self._open.values(), *self._quarantine.values())]
        return max(min(due) - now, 0.0) if due else None

    async def keep_house(self) -> None:
        """Sweep whenever something is due, until cancelled."""
        while True:
            self._changed.clear()
            try:
                pause_s = self.sweep()
            except Exception:
                logger.exception("expired offers could not be freed; trying again")
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
                continue
            await wait_for_event(self._changed, pause_s)

    async def drain(self, deadline_s: float) -> bool:
        """Wait until no offer is open, at most `deadline_s`; true when none is left."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while self._open and loop.time() < end:
            waits = {asyncio.ensure_future(held.offer.settled(deadline_s)) for held in self._open.values()}
            try:
                await asyncio.wait(waits, timeout=max(end - loop.time(), 0.0))
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
        return not self._open

    def close(self) -> None:
        """End all offers; their readers find the segments invalid."""
        for held in self._open.values():
            self._invalidate(held)
            held.offer.settle(OfferState.RELEASED)
        self._open.clear()
        self._quarantine.clear()

    def _withdraw(self, generation: int, state: OfferState) -> None:
        """End an open offer that a reader may be reading right now:
        mark it invalid and keep its memory aside."""
        held = self._open.pop(generation)
        held.due = self._clock() + self._time_to_live_s / 2
        self._quarantine[generation] = held
        self._invalidate(held)
        held.offer.settle(state)
        self._changed.set()

    def _free(self, held: _Held) -> None:
        self._board.give_back(held.word)
        self._memory.free(held.segment)

    @staticmethod
    def _invalidate(held: _Held) -> None:
        """Readers that come late find nothing. Where that fails (a GPU in trouble),
        the wait before reuse has to do."""
        try:
            layout.mark(held.segment.memory, layout.INVALID_GENERATION)
        except Exception:
            logger.exception("a segment could not be marked as free")
