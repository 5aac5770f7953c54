"""From logits to tokens on the device: `sampling` with every number in a table; nothing waits for the host.

Order, formulas and draws are those of `sampling`, so that a seed gives the same tokens either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynamo.trtllm.core import StepLogprobs, TokenLogprob
from dynamo.trtllm.engines.transformers.grammars import allowed
from dynamo.trtllm.engines.transformers.rows import RowTable
from dynamo.trtllm.engines.transformers.sampling import Choice, draw, keep_likeliest

_FIXED = 3
"""Columns of a result before the likeliest tokens: the token, its log probability, its rank."""


@dataclass(frozen=True)
class Kind:
    """What a step has to compute for the requests in it: the least that serves all of them."""

    adjusted: bool = False
    """Penalties, or tokens that are banned for a while."""
    drawn: bool = False
    """Some token is drawn; otherwise the likeliest is taken."""
    limited: bool = False
    """Top-k or top-p, for which the vocabulary is sorted."""
    guided: bool = False
    """Some request follows a grammar, whose mask the host writes before the step."""
    width: int | None = None
    """Likeliest tokens that are reported with their log probabilities; None: no log probabilities."""

    @staticmethod
    def of(choices: Sequence[Choice], vocabulary: int) -> Kind:
        """The kind that serves all `choices`."""
        drawn = [c for c in choices if c.temperature > 0.0]
        asked = [c.logprobs for c in choices if c.logprobs is not None]
        return Kind(
            adjusted=any(c.has_penalties or c.banned for c in choices),
            drawn=bool(drawn),
            limited=any(c.top_k or c.top_p < 1.0 for c in drawn),
            guided=any(c.grammar is not None for c in choices),
            width=_rounded(max(asked), vocabulary) if asked else None,
        )

    @property
    def columns(self) -> int:
        """Numbers per row in a result."""
        return 1 if self.width is None else _FIXED + 2 * self.width


def _rounded(width: int, vocabulary: int) -> int:
    """Few widths instead of many: every width is a graph of its own."""
    return min(vocabulary, 1 << (width - 1).bit_length()) if width else 0


def choose(logits: torch.Tensor, table: RowTable, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per row of `logits` [rows, vocabulary], and what the host reads: [rows, kind.columns] float64.

    The host reads -1 for the token of a row whose logits are not finite; the tokens themselves are valid ids.
    """
    rows = logits.shape[0]
    adjusted = _adjust(logits.float(), table) if kind.adjusted else logits
    if kind.guided:
        adjusted = adjusted.masked_fill(~allowed(table.masks[:rows], table.vocabulary), -torch.inf)
    tokens = adjusted.argmax(-1)
    if kind.drawn:
        tokens = torch.where(table.fraction("temperature", rows) > 0.0, _draw(adjusted, table, kind), tokens)
    shown = torch.where(torch.isfinite(logits).all(-1), tokens, -1)[:, None].double()
    if kind.width is None:
        return tokens, shown
    return tokens, torch.cat([shown, _logprobs(logits, tokens, kind.width)], 1)


def read(
    result: Sequence[Sequence[float]], choices: Sequence[Choice], kind: Kind
) -> list[tuple[int, StepLogprobs | None]]:
    """The rows of a result as tokens and log probabilities."""
    read = []
    for row, choice in zip(result, choices, strict=False):
        token, entry = int(row[0]), None
        if kind.width is not None and choice.logprobs is not None and token >= 0:
            values, ids = row[_FIXED : _FIXED + kind.width], row[_FIXED + kind.width :]
            pairs = list(zip(ids, values, strict=True))[: choice.logprobs]
            top = tuple(TokenLogprob(int(i), value, rank + 1) for rank, (i, value) in enumerate(pairs))
            entry = StepLogprobs(TokenLogprob(token, row[1], int(row[2])), top)
        read.append((token, entry))
    return read


def _adjust(scores: torch.Tensor, table: RowTable) -> torch.Tensor:
    """Penalties and bans. A row without them keeps its scores to the bit."""
    rows = scores.shape[0]
    counts = table.counts[:rows]
    seen = counts > 0
    repetition, presence, frequency = (
        table.fraction(name, rows).float()[:, None] for name in ("repetition", "presence", "frequency")
    )
    penalized = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, penalized, scores) - (presence * seen + frequency * counts)
    early = table.integer("index", rows) < table.integer("min_tokens", rows)
    return scores.masked_fill(table.banned[:rows] & early[:, None], -torch.inf)


def _draw(scores: torch.Tensor, table: RowTable, kind: Kind) -> torch.Tensor:
    rows = scores.shape[0]
    temperatures = table.fraction("temperature", rows).float()[:, None]
    scores = scores.float() / temperatures.clamp_min(1e-5)
    if kind.limited:
        top_k, top_p = table.integer("top_k", rows)[:, None], table.fraction("top_p", rows).float()[:, None]
        scores = keep_likeliest(scores, top_k, top_p)
    draws = uniforms(table.integer("seed", rows), table.integer("index", rows))
    return draw(scores, table.fraction("min_p", rows)[:, None], draws[:, None])


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, 2 + 2 * width] float64: the token's log probability and rank, the best values, their ids."""
    scores = torch.log_softmax(logits.float(), -1)
    chosen = scores.gather(1, tokens[:, None])
    ranks = (scores > chosen).sum(-1, keepdim=True) + 1
    best, ids = scores.topk(width, -1)
    return torch.cat([chosen.double(), ranks.double(), best.double(), ids.double()], 1)


def uniforms(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`sampling.uniform` of each pair of `seeds` and `indices`, int64 of one shape, in float64.

    Multiplication and addition of int64 wrap as those of uint64 do; only the shifts need a mask.
    """
    return _shifted(_mix(_mix(seeds) ^ indices), 11).double() * 2.0**-53


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = state + (0x9E3779B97F4A7C15 - (1 << 64))
    state = (state ^ _shifted(state, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    state = (state ^ _shifted(state, 27)) * (0x94D049BB133111EB - (1 << 64))
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, places: int) -> torch.Tensor:
    """A right shift that fills with zeros."""
    return (state >> places) & ((1 << (64 - places)) - 1)
