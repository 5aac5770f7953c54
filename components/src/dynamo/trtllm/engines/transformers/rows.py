"""What the device knows about each running request, so that a step needs nothing from the host.

Two small tables, a row per request: whole numbers (the last token, how many tokens the cache holds, the seed)
and fractions (temperature and its kin). A step reads and advances them in place; joining writes one of each.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamo.trtllm.engines.transformers.grammars import words
from dynamo.trtllm.engines.transformers.sampling import Choice
from dynamo.trtllm.engines.transformers.sequence import Sequence

_INTEGERS = ("token", "length", "delta", "active", "index", "seed", "top_k", "min_tokens")
_LARGE = 1 << 62
_FRACTIONS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


class RowTable:
    """Per-row state on the device: `integers` [rows, 8] int64 and `fractions` [rows, 6] float64.

    A row without a request is zero: it takes token 0 at position 0, stays there, and nobody reads its choice.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self._device = device
        self._integers = torch.zeros(rows, len(_INTEGERS), dtype=torch.int64, device=device)
        self._fractions = torch.zeros(rows, len(_FRACTIONS), dtype=torch.float64, device=device)
        self._counts: torch.Tensor | None = None
        self._banned: torch.Tensor | None = None
        self._masks: torch.Tensor | None = None

    def integer(self, name: str, rows: int) -> torch.Tensor:
        """The column `name` of the first `rows` rows: [rows] int64, a view."""
        return self._integers[:rows, _INTEGERS.index(name)]

    def fraction(self, name: str, rows: int) -> torch.Tensor:
        """The column `name` of the first `rows` rows: [rows] float64, a view."""
        return self._fractions[:rows, _FRACTIONS.index(name)]

    @property
    def counts(self) -> torch.Tensor:
        """How often each token occurred, [rows, vocabulary] float32, for penalties. Made at first use."""
        if self._counts is None:
            shape = (self._integers.shape[0], self.vocabulary)
            self._counts = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return self._counts

    @property
    def banned(self) -> torch.Tensor:
        """Tokens that may not come before `min_tokens`, [rows, vocabulary] bool. Made at first use."""
        if self._banned is None:
            shape = (self._integers.shape[0], self.vocabulary)
            self._banned = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._banned

    @property
    def masks(self) -> torch.Tensor:
        """What the requests' grammars allow in the coming step, [rows,
        words] int32 as in `grammars`. Made at first use."""
        if self._masks is None:
            shape = (self._integers.shape[0], words(self.vocabulary))
            self._masks = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        return self._masks

    def join(self, row: int, sequence: Sequence, length: int) -> None:
        """Take `sequence`, of which the cache holds `length` tokens, into `row`."""
        choice = sequence.choice
        integers = {
            "token": sequence.last_token,
            "length": length,
            "delta": sequence.rope_delta,
            "active": 1,
            "index": sequence.output,
            "seed": _signed(choice.seed),
            "top_k": choice.top_k or self.vocabulary,
            "min_tokens": min(choice.min_tokens, _LARGE),
        }
        fractions = {name: getattr(choice, name) for name in _FRACTIONS}
        self._integers[row] = torch.tensor([integers[name] for name in _INTEGERS], dtype=torch.int64)
        self._fractions[row] = torch.tensor([fractions[name] for name in _FRACTIONS], dtype=torch.float64)
        self._take_counts(row, choice)

    def _take_counts(self, row: int, choice: Choice) -> None:
        """From here on the device counts."""
        if choice.counts is not None:
            self.counts[row] = choice.counts
            choice.counts = None
        elif self._counts is not None:
            self._counts[row] = 0
        if choice.banned and choice.grammar is None:
            self.banned[row] = False
            self.banned[row, list(choice.banned)] = True
        elif self._banned is not None:
            self._banned[row] = False

    def move(self, source: int, target: int) -> None:
        """Row `source` takes the place of `target`."""
        if source != target:
            for table in self._tables():
                table[target] = table[source]

    def clear(self, row: int) -> None:
        """Nobody is in `row` any more."""
        self._integers[row] = 0
        self._fractions[row] = 0

    def advance(self, tokens: torch.Tensor) -> None:
        """Every request has chosen its token in `tokens` [rows], and the cache holds one more."""
        rows = tokens.shape[0]
        active = self.integer("active", rows)
        self.integer("token", rows).copy_(tokens)
        self.integer("length", rows).add_(active)
        self.integer("index", rows).add_(active)

    def count(self, tokens: torch.Tensor) -> None:
        """Note `tokens` [rows] for the penalties of later steps."""
        rows = tokens.shape[0]
        ones = self.integer("active", rows)[:, None].float()
        self.counts[:rows].scatter_add_(1, tokens[:, None], ones)

    def _tables(self) -> list[Any]:
        return [t for t in (self._integers, self._fractions, self._counts, self._banned) if t is not None]


def _signed(seed: int) -> int:
    """The low 64 bits of `seed` as a signed integer, which has the same bits."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
