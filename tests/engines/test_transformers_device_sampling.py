"""Sampling on the device gives, row for row, what the host's sampler gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dynamo.trtllm.core import Sampling, StepLogprobs
from dynamo.trtllm.engines.transformers.device_sampling import Kind, choose, read, uniforms
from dynamo.trtllm.engines.transformers.rows import RowTable
from dynamo.trtllm.engines.transformers.sampling import Choice, make_choice, sample, uniform
from dynamo.trtllm.engines.transformers.sequence import Sequence, Stage

VOCABULARY = 50
CPU = torch.device("cpu")


def _sequence(index: int, seen: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    """A request that has given out `index` tokens."""
    choice = make_choice(Sampling(**sampling), sampling.get("seed", 0), frozenset({2}), VOCABULARY)
    choice.begin(seen, VOCABULARY, CPU)
    sequence = Sequence(Stage.GENERATE, seen or (1,), (), choice, 100, frozenset(), frozenset(), 0, None)
    sequence.output = index
    return sequence


def _table(sequences: list[Sequence]) -> RowTable:
    table = RowTable(len(sequences), VOCABULARY, CPU)
    for row, sequence in enumerate(sequences):
        table.join(row, sequence, 4)
    return table


def _random_sampling(chance: random.Random) -> dict[str, Any]:
    sampling: dict[str, Any] = {"seed": chance.choice([0, 7, -3, (1 << 64) - 1, 1 << 90])}
    options: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.3, 1.0, 2.5]),
        "top_p": chance.choice([0.0, 0.5, 0.95, 1.0]),
        "top_k": chance.choice([-1, 1, 4, 1000]),
        "min_p": chance.choice([0.0, 0.1]),
        "repetition_penalty": 1.7,
        "presence_penalty": -0.6,
        "frequency_penalty": 0.4,
        "min_tokens": chance.choice([3, (1 << 31) - 1]),
        "logprobs": chance.choice([0, 1, 5, 50]),
    }
    return sampling | {name: value for name, value in options.items() if chance.random() < 0.35}


@pytest.mark.parametrize("seed", range(25))
def test_any_mix_of_requests_gets_the_tokens_and_log_probabilities_of_the_host(seed: int) -> None:
    chance = random.Random(seed)
    asked = [(chance.randrange(6), _random_sampling(chance)) for _ in range(7)]
    seen = [tuple(chance.choices(range(VOCABULARY), k=9)) for _ in asked]
    logits = torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    on_host = [_sequence(index, ids, **each) for (index, each), ids in zip(asked, seen, strict=True)]
    tokens, logprobs = sample(logits, [s.choice for s in on_host], [index for index, _ in asked])
    on_device = [_sequence(index, ids, **each) for (index, each), ids in zip(asked, seen, strict=True)]
    choices = [s.choice for s in on_device]
    kind = Kind.of(choices, VOCABULARY)
    chosen, result = choose(logits.clone(), _table(on_device), kind)
    assert chosen.tolist() == tokens.tolist()
    rows = read(result.tolist(), choices, kind)
    assert [token for token, _ in rows] == tokens.tolist()
    for (_, ours), theirs in zip(rows, logprobs or [None] * 7, strict=True):
        _same(ours, theirs)


def _same(ours: StepLogprobs | None, theirs: StepLogprobs | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert [(t.token_id, t.rank) for t in (ours.chosen, *ours.top)] == [
            (t.token_id, t.rank) for t in (theirs.chosen, *theirs.top)
        ]
        expected = [t.logprob for t in (theirs.chosen, *theirs.top)]
        assert [t.logprob for t in (ours.chosen, *ours.top)] == pytest.approx(expected)


def test_draws_are_those_of_the_host_for_every_seed_and_index() -> None:
    seeds = [0, 1, -1, 12345, (1 << 63) - 1, -(1 << 63), 0x9E3779B97F4A7C15 - (1 << 64)]
    pairs = [(seed, index) for seed in seeds for index in (0, 1, 2, 1000, 1 << 40)]
    draws = uniforms(torch.tensor([s for s, _ in pairs]), torch.tensor([i for _, i in pairs]))
    assert draws.tolist() == [uniform(seed, index) for seed, index in pairs]


def test_penalties_follow_the_tokens_that_the_device_chose() -> None:
    sampling: dict[str, Any] = {
        "temperature": 1.3,
        "seed": 5,
        "frequency_penalty": 1.1,
        "repetition_penalty": 1.2,
    }
    host, device = _sequence(0, (3, 3, 4), **sampling), _sequence(0, (3, 3, 4), **sampling)
    table, kind = _table([device]), Kind.of([device.choice], VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    for index in range(20):
        logits = torch.randn(1, VOCABULARY, generator=generator)
        expected = int(sample(logits, [host.choice], [index])[0])
        host.choice.note(expected)
        tokens, _ = choose(logits, table, kind)
        table.count(tokens)
        table.advance(tokens)
        assert int(tokens) == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2, "presence_penalty": 1.0}]
)
def test_a_row_that_is_not_finite_is_told_apart_and_its_token_is_still_an_id(
    bad: float, sampling: dict[str, Any]
) -> None:
    sequences = [_sequence(0, (3,), **sampling) for _ in range(3)]
    choices = [s.choice for s in sequences]
    table, kind = _table(sequences), Kind.of(choices, VOCABULARY)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2))
    clean = choose(logits.clone(), table, kind)[0].tolist()
    logits[1, 9] = bad
    tokens, result = choose(logits, table, kind)
    assert [token for token, _ in read(result.tolist(), choices, kind)] == [clean[0], -1, clean[2]]
    assert all(0 <= token < VOCABULARY for token in tokens.tolist())


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        ({}, Kind()),
        ({"temperature": 0.0, "top_p": 0.5}, Kind()),
        ({"temperature": 1.0}, Kind(drawn=True)),
        ({"temperature": 1.0, "top_k": 5}, Kind(drawn=True, limited=True)),
        ({"min_tokens": 2}, Kind(adjusted=True)),
        ({"logprobs": 5}, Kind(width=8)),
        ({"logprobs": 0}, Kind(width=0)),
        ({"logprobs": 49}, Kind(width=VOCABULARY)),
    ],
)
def test_a_step_computes_no_more_than_its_requests_need(sampling: dict[str, Any], kind: Kind) -> None:
    choices: list[Choice] = [_sequence(0, **each).choice for each in ({}, sampling)]
    assert Kind.of(choices, VOCABULARY) == kind
