"""Words of registered memory through which processes acknowledge:
a reader writes an offer's generation into the sender's board.

One-sided writes, because a message would make the reader's next read wait until the sender's process has
looked at it. Every offer has a word of its own for as long as its segment is not free, apart from all
payload: a late write can do no more than put a generation there that nobody waits for.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamo.trtllm.transfer.descriptor import WORD_BYTES
from dynamo.trtllm.transfer.pool import Slots

INBOX_WORDS = 4096
"""Offers that may be open or set aside at once; more wait."""
OUTBOX_WORDS = 1024
"""Acknowledgements that may be on their way at once; more are not sent,
and the time to live frees their segments."""


class Board:
    """The inbox, then the outbox. `arrived` may be called from any thread.

    `registration` is set by whoever registers `memory` with a transport.
    """

    def __init__(self) -> None:
        self.memory = torch.zeros((INBOX_WORDS + OUTBOX_WORDS) * WORD_BYTES, dtype=torch.uint8)
        self.registration: Any = None
        self._base = self.memory.data_ptr()
        words = self.memory.view(torch.int64).numpy()
        self._inbox, self._outbox = words[:INBOX_WORDS], words[INBOX_WORDS:]
        self._inbox_slots = Slots(INBOX_WORDS)
        self._outbox_slots = Slots(OUTBOX_WORDS)

    @property
    def waiting(self) -> int:
        """Offers that wait for a word."""
        return self._inbox_slots.waiting

    async def take(self, timeout_s: float) -> int:
        """Index of a free word of the inbox. Raises `Overloaded` when there is none within `timeout_s`."""
        return await self._inbox_slots.take(timeout_s)

    def give_back(self, index: int) -> None:
        """The word's offer is gone."""
        self._inbox_slots.give_back(index)

    def address_of(self, index: int) -> int:
        """Where the reader of this word's offer writes."""
        return self._base + index * WORD_BYTES

    def arrived(self) -> list[int]:
        """Generations that readers have written since the last call."""
        # A copy, because peers write while this looks.
        seen = self._inbox.copy()
        indices = seen.nonzero()[0]
        if not indices.size:
            return []
        self._inbox[indices] = 0
        return [int(generation) for generation in seen[indices]]

    def post(self, generation: int) -> int | None:
        """Put `generation` into the outbox; returns its word's index, None when the outbox is full."""
        index = self._outbox_slots.take_now()
        if index is not None:
            self._outbox[index] = generation
        return index

    def outgoing_address(self, index: int) -> int:
        """Where a posted word lies."""
        return self.address_of(INBOX_WORDS + index)

    def sent(self, index: int) -> None:
        """The transport does not need a posted word any more."""
        self._outbox_slots.give_back(index)
