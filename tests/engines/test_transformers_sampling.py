"""The portable engine's sampler against references that are simple enough to read."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from dynamo.trtllm.core import Sampling
from dynamo.trtllm.engines.transformers.sampling import Choice, make_choice, sample, uniform
from dynamo.trtllm.errors import ClientFault

VOCABULARY = 12
CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -9.0])


def _choice(seen: tuple[int, ...] = (), eos: frozenset[int] = frozenset(), **sampling: Any) -> Choice:
    choice = make_choice(Sampling(**sampling), sampling.get("seed", 0) or 0, eos, VOCABULARY)
    choice.begin(seen, VOCABULARY, CPU)
    return choice


def _token(choice: Choice, logits: torch.Tensor = LOGITS, index: int = 0) -> int:
    return int(sample(logits[None], [choice], [index])[0][0])


def _draws(count: int = 3000, **sampling: Any) -> Counter[int]:
    """Tokens that `count` seeds draw from the same logits."""
    choices = [_choice(**{**sampling, "seed": seed}) for seed in range(count)]
    tokens, _ = sample(LOGITS.expand(count, -1), choices, [0] * count)
    return Counter(tokens.tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.5},
        {"temperature": 5.0, "top_k": 1},
        {"seed": 3},
    ],
)
def test_the_likeliest_token_is_taken_when_nothing_asks_for_chance(sampling: dict[str, Any]) -> None:
    assert [_token(_choice(**sampling), index=i) for i in range(20)] == [0] * 20


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    drawn = _draws(temperature=temperature)
    for token, probability in enumerate(expected.tolist()):
        assert drawn[token] / 3000 == pytest.approx(probability, abs=4 * math.sqrt(probability / 3000) + 2e-3)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.6}, 2),
        ({"temperature": 1.0, "top_p": 0.0}, 1),
        ({"temperature": 1.0, "min_p": 0.2}, 4),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.99}, 4),
        ({"temperature": 1.0, "top_k": -1, "min_p": 0.5}, 2),
    ],
)
def test_only_the_tokens_that_the_limits_leave_are_drawn(sampling: dict[str, Any], kept: int) -> None:
    assert set(_draws(**sampling)) == set(range(kept))


def test_top_p_counts_the_probability_that_top_k_left() -> None:
    left = torch.softmax(LOGITS[:2], -1)
    assert set(_draws(temperature=1.0, top_k=2, top_p=float(left[0]) + 0.01)) == {0, 1}
    assert set(_draws(temperature=1.0, top_k=2, top_p=float(left[0]) - 0.01)) == {0}


def test_a_draw_depends_on_seed_and_index_only() -> None:
    assert uniform(5, 7) == uniform(5, 7)
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2500
    assert uniform(-1, 0) == uniform((1 << 64) - 1, 0)
    draws = [uniform(seed, 3) for seed in range(4000)]
    assert min(draws) >= 0.0
    assert max(draws) < 1.0
    assert sum(draws) / 4000 == pytest.approx(0.5, abs=0.02)


def test_a_row_gets_the_same_token_whatever_stands_beside_it() -> None:
    mixed: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 4},
        {},
        {"temperature": 1.3, "top_p": 0.8, "seed": 9},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.01, "seed": 2, "presence_penalty": 0.7},
        {"repetition_penalty": 1.8, "logprobs": 2},
    ]
    logits = torch.randn(len(mixed), VOCABULARY, generator=torch.Generator().manual_seed(0))
    choices = [_choice(seen=(1, 2, 2), **each) for each in mixed]
    indices = [3, 0, 5, 2, 9]
    together = sample(logits, choices, indices)[0].tolist()
    assert together == [_token(c, logits[row], indices[row]) for row, c in enumerate(choices)]


def test_penalties_follow_their_formulas_over_prompt_and_output_tokens() -> None:
    prompt, output = (0, 0, 3), (5,)
    counts = Counter(prompt + output)
    expected = []
    for token, logit in enumerate(LOGITS.tolist()):
        if counts[token]:
            logit = logit / 1.5 if logit > 0 else logit * 1.5
        expected.append(logit - 0.3 * (counts[token] > 0) - 0.2 * counts[token])
    choice = _choice(prompt, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    for token in output:
        choice.note(token)
    ranked = sorted(range(VOCABULARY), key=lambda token: -expected[token])
    taken, logits = [], LOGITS.clone()
    for _ in range(VOCABULARY - 1):
        taken.append(_token(choice, logits))
        logits[taken[-1]] = -math.inf
    assert taken == ranked[:-1]


def test_ends_are_banned_until_min_tokens_are_out() -> None:
    choice = _choice(eos=frozenset({0}), min_tokens=2, stop_token_ids=frozenset({1, 99}))
    assert [_token(choice, index=i) for i in range(4)] == [2, 2, 0, 0]
    ignoring = _choice(eos=frozenset({0}), min_tokens=2, ignore_eos=True)
    assert _token(ignoring) == 0


def test_logprobs_are_the_models_own_with_ranks_from_one() -> None:
    plain, pushed = _choice(logprobs=3), _choice((0, 0, 0), logprobs=0, frequency_penalty=1.0)
    tokens, table = sample(LOGITS.expand(3, -1), [plain, pushed, _choice()], [0, 0, 0])
    expected = torch.log_softmax(LOGITS, -1).tolist()
    assert table is not None
    first, second, third = table
    assert third is None
    assert first is not None
    assert second is not None
    assert [(t.token_id, t.rank) for t in first.top] == [(0, 1), (1, 2), (2, 3)]
    assert [t.logprob for t in first.top] == pytest.approx(expected[:3])
    assert tokens.tolist() == [0, 1, 0]
    assert (second.chosen.token_id, second.chosen.rank, second.top) == (1, 2, ())
    assert second.chosen.logprob == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt tokens"),
    ],
)
def test_values_out_of_range_and_what_is_not_done_here_are_the_clients_fault(
    sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClientFault, match=words):
        make_choice(Sampling(**sampling), 0, frozenset(), VOCABULARY)
