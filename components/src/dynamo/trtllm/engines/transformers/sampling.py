"""From logits to tokens: what each request asked for, over all rows of a step at once.

Order: repetition, presence and frequency penalties over prompt and output tokens alike; tokens banned by
min_tokens or by the request's grammar; temperature; top-k; top-p over what top-k left; min-p; one draw. Log
probabilities are those of the model itself, before any of these. The draw of output token i is one number
that depends on (seed, i) only, so batching and hand-overs change nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dynamo.trtllm.core import SAMPLING_RANGES, Sampling, StepLogprobs, TokenLogprob
from dynamo.trtllm.engines.transformers.grammars import Grammar, Masks
from dynamo.trtllm.errors import ClientFault

logger = logging.getLogger(__name__)

_MASK64 = (1 << 64) - 1


class Sampled(NamedTuple):
    """A token per row [rows], each row's log probabilities where any row asked for them,
    and why a row has no token."""

    tokens: torch.Tensor
    logprobs: list[StepLogprobs | None] | None
    failed: Mapping[int, Exception]


@dataclass
class Choice:
    """How one request chooses its tokens. `counts` [vocabulary] is kept up to date by `note`;
    None without penalties."""

    seed: int
    temperature: float
    """0 means greedy."""
    top_k: int
    """0 means all."""
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    logprobs: int | None
    banned: tuple[int, ...]
    """Tokens that may not come before `min_tokens` tokens were given out."""
    min_tokens: int
    counts: torch.Tensor | None = field(default=None, repr=False)
    grammar: Grammar | None = field(default=None, repr=False)
    """What the answer must follow, at the place that it has reached."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    @property
    def is_argmax(self) -> bool:
        """The most likely token and nothing else."""
        chance = self.temperature != 0.0 or self.has_penalties
        return not chance and self.logprobs is None and not self.banned and self.grammar is None

    def begin(self, token_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        """Count the tokens that the penalties have to know; image tokens may lie beyond the `vocabulary`."""
        if self.has_penalties:
            ids = torch.tensor(token_ids, device=device)
            self.counts = torch.bincount(ids[ids < vocabulary], minlength=vocabulary).float()

    def note(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts[token_id] += 1
        if self.grammar is not None:
            self.grammar.take(token_id)

    def banned_at(self, index: int) -> tuple[int, ...]:
        """Tokens that `min_tokens` bans as output token `index`."""
        return self.banned if index < self.min_tokens else ()


def make_choice(sampling: Sampling, seed: int, eos_token_ids: frozenset[int], vocabulary: int) -> Choice:
    """The checked form of `sampling`. Raises `ClientFault` for values out
    of range and for what this engine does not do."""
    _check(sampling)
    greedy = sampling.temperature is None and sampling.top_p is None and sampling.top_k is None
    temperature = (
        0.0
        if greedy or sampling.top_k == 1
        else 1.0
        if sampling.temperature is None
        else sampling.temperature
    )
    ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
    return Choice(
        seed=seed,
        temperature=temperature,
        top_k=min(max(sampling.top_k or 0, 0), vocabulary),
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p or 0.0,
        repetition=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        presence=sampling.presence_penalty or 0.0,
        frequency=sampling.frequency_penalty or 0.0,
        logprobs=None if sampling.logprobs is None else min(sampling.logprobs, vocabulary),
        banned=tuple(sorted(i for i in ends if 0 <= i < vocabulary)) if sampling.min_tokens else (),
        min_tokens=sampling.min_tokens,
    )


def _check(sampling: Sampling) -> None:
    if sampling.prompt_logprobs is not None:
        raise ClientFault("log probabilities of prompt tokens are not supported by the portable engine")
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            raise ClientFault(f"{name} must be between {low:g} and {high:g}, not {value:g}")
    if sampling.repetition_penalty == 0.0:
        raise ClientFault("repetition_penalty must be greater than 0")


def uniform(seed: int, index: int) -> float:
    """The draw of output token `index`, in [0, 1):
    two rounds of the splitmix64 finalizer (Steele, Lea, Flood 2014)."""
    return (_mix(_mix(seed & _MASK64) ^ (index & _MASK64)) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def sample(
    logits: torch.Tensor, choices: Sequence[Choice], indices: Sequence[int]
) -> tuple[torch.Tensor, list[StepLogprobs | None] | None]:
    """Choose a token per row of `logits` [rows, vocabulary].

    `indices` say which output token of its request each row is, from 0. Returns the tokens [rows] and,
    when any row asked for them, a list with each row's log probabilities. Changes nothing in `choices`.
    """
    adjusted = logits
    if any(
        c.has_penalties or (c.min_tokens > i and c.grammar is None)
        for c, i in zip(choices, indices, strict=True)
    ):
        adjusted = _adjust(logits.float().clone(), choices, indices)
    if any(c.grammar is not None for c in choices):
        adjusted = adjusted.masked_fill(_forbidden(choices, indices, logits), -math.inf)
    tokens = adjusted.argmax(-1)
    drawn = [row for row, c in enumerate(choices) if c.temperature > 0.0]
    if drawn:
        tokens[drawn] = _draw(
            adjusted[drawn].float(), [choices[r] for r in drawn], [indices[r] for r in drawn]
        )
    asked = [row for row, c in enumerate(choices) if c.logprobs is not None]
    return tokens, _logprobs(logits, tokens, choices, asked) if asked else None


def sample_apart(logits: torch.Tensor, choices: Sequence[Choice], indices: Sequence[int]) -> Sampled:
    """As `sample`; where that fails, a row at a time, so that a row for
    which no token can be chosen takes no other with it."""
    try:
        return Sampled(*sample(logits, choices, indices), {})
    except Exception as error:
        logger.info(
            "choosing tokens for %d requests failed (%s); each is tried alone",
            len(choices),
            type(error).__name__,
        )
    tokens = torch.zeros(len(choices), dtype=torch.long, device=logits.device)
    logprobs: list[StepLogprobs | None] = [None] * len(choices)
    failed: dict[int, Exception] = {}
    for row in range(len(choices)):
        only = slice(row, row + 1)
        try:
            token, own = sample(logits[only], choices[only], indices[only])
        except Exception as error:
            failed[row] = error
        else:
            tokens[row], logprobs[row] = token[0], own[0] if own else None
    return Sampled(tokens, logprobs, failed)


def _adjust(logits: torch.Tensor, choices: Sequence[Choice], indices: Sequence[int]) -> torch.Tensor:
    """Penalties and bans, in place."""
    for row, (choice, index) in enumerate(zip(choices, indices, strict=True)):
        scores = logits[row]
        if choice.counts is not None:
            seen = choice.counts > 0
            if choice.repetition != 1.0:
                penalized = torch.where(scores > 0, scores / choice.repetition, scores * choice.repetition)
                scores.copy_(torch.where(seen, penalized, scores))
            scores -= choice.presence * seen + choice.frequency * choice.counts
        if choice.grammar is None and choice.banned_at(index):
            scores[list(choice.banned)] = -math.inf
    return logits


def _forbidden(choices: Sequence[Choice], indices: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """What the grammars do not allow: [rows, vocabulary] bool, on the device of `logits`."""
    masks = Masks(len(choices), logits.shape[1])
    for row, (choice, index) in enumerate(zip(choices, indices, strict=True)):
        if choice.grammar is not None:
            masks.allow(row, choice.grammar, choice.banned_at(index))
    return masks.forbidden().to(logits.device)


def _draw(logits: torch.Tensor, choices: Sequence[Choice], indices: Sequence[int]) -> torch.Tensor:
    """One token per row, by what `choices` ask for."""
    device = logits.device
    temperatures = torch.tensor([c.temperature for c in choices], device=device, dtype=torch.float32)[:, None]
    logits = logits / temperatures.clamp_min(1e-5)
    if any(c.top_k or c.top_p < 1.0 for c in choices):
        top_k = torch.tensor([c.top_k or logits.shape[1] for c in choices], device=device)[:, None]
        top_p = torch.tensor([c.top_p for c in choices], device=device, dtype=torch.float32)[:, None]
        logits = keep_likeliest(logits, top_k, top_p)
    shares = None
    if any(c.min_p > 0.0 for c in choices):
        shares = torch.tensor([c.min_p for c in choices], device=device, dtype=torch.float64)[:, None]
    draws = [uniform(c.seed, i) for c, i in zip(choices, indices, strict=True)]
    return draw(logits, shares, torch.tensor(draws, device=device, dtype=torch.float64)[:, None])


def draw(logits: torch.Tensor, min_p: torch.Tensor | None, draws: torch.Tensor) -> torch.Tensor:
    """One token per row by inversion: the first token, in order of ids,
    at which the summed probability passes the row's draw.

    `logits` [rows, vocabulary]; `min_p` and `draws` [rows, 1] float64. Returns [rows] int64.
    """
    probabilities = torch.softmax(logits, -1, dtype=torch.float64)
    if min_p is not None:
        floor = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    summed = probabilities.cumsum(-1)
    tokens = torch.searchsorted(summed, draws * summed[:, -1:], right=True)[:, 0]
    likeliest = probabilities.argmax(-1)
    return torch.where(tokens < logits.shape[1], tokens, likeliest)


def keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask what top-k and top-p leave out. The likeliest token always stays;
    equal logits count by order of ids.

    `logits` [rows, vocabulary] float32; `top_k` [rows, 1] int64, the vocabulary for no limit;
    `top_p` [rows, 1] float32.
    """
    vocabulary = logits.shape[1]
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k, -math.inf)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = (before >= top_p) & (top_p < 1.0) & (ranks > 0)
    ordered = ordered.masked_fill(dropped, -math.inf)
    return torch.full_like(logits, -math.inf).scatter_(1, order, ordered)


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, choices: Sequence[Choice], asked: Sequence[int]
) -> list[StepLogprobs | None]:
    """Natural log probabilities of the model's own distribution for the rows in `asked`."""
    scores = torch.log_softmax(logits[list(asked)].float(), -1)
    chosen = scores.gather(1, tokens[list(asked), None])
    ranks = ((scores > chosen).sum(-1) + 1).tolist()
    width = max(choices[row].logprobs or 0 for row in asked)
    best, ids = scores.topk(width, -1)
    table: list[StepLogprobs | None] = [None] * len(choices)
    rows = zip(
        asked,
        tokens[list(asked)].tolist(),
        chosen[:, 0].tolist(),
        ranks,
        best.tolist(),
        ids.tolist(),
        strict=True,
    )
    for row, token, logprob, rank, values, top_ids in rows:
        count = choices[row].logprobs or 0
        top = tuple(
            TokenLogprob(i, v, r + 1)
            for r, (i, v) in enumerate(zip(top_ids[:count], values[:count], strict=True))
        )
        table[row] = StepLogprobs(TokenLogprob(token, logprob, rank), top)
    return table
