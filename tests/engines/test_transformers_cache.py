"""The batch cache against a list of lists: whatever joins, leaves and grows,
each row sees its own tokens, in order."""

from __future__ import annotations

import random

import pytest
import torch

from dynamo.trtllm.engines.transformers.attention import grouped_attention
from dynamo.trtllm.engines.transformers.cache import BatchCache, CacheShape, PromptCache

WINDOW = 6


def _shape(sliding: tuple[bool, ...] = (False, True)) -> CacheShape:
    return CacheShape(
        layers=len(sliding),
        kv_heads=2,
        key_dim=3,
        value_dim=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        sliding=sliding,
        window=WINDOW if any(sliding) else None,
    )


def _prompt(shape: CacheShape, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that hold each token's number in every place, the layer added."""
    column = torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]
    layer = torch.arange(shape.layers)[:, None, None, None] * 0.25
    keys = (column + layer).expand(shape.layers, shape.kv_heads, len(numbers), shape.key_dim)
    values = (column + layer).expand(shape.layers, shape.kv_heads, len(numbers), shape.value_dim)
    return keys, values


def _step(cache: BatchCache, rows: list[list[int]], numbers: list[int]) -> None:
    """One decode step that gives each row one number; asserts what each layer of each row sees."""
    shape = cache.shape
    full, sliding = cache.begin_step()
    for history, number in zip(rows, numbers, strict=True):
        history.append(number)
    for layer in range(shape.layers):
        new = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None] + 0.25 * layer
        keys, values = cache.update(new.expand(-1, 2, 1, 3), new.expand(-1, 2, 1, 5), layer)
        mask = sliding if shape.sliding[layer] else full
        for row, history in enumerate(rows):
            seen = slice(None) if mask is None else mask[row, 0, 0] == 0
            expected = [n + 0.25 * layer for n in (history[-WINDOW:] if shape.sliding[layer] else history)]
            assert keys[row, 1, :, 2][seen].tolist() == expected
            assert values[row, 0, :, 4][seen].tolist() == expected
    cache.end_step()


@pytest.mark.parametrize("seed", range(6))
def test_rows_keep_their_own_tokens_through_any_order_of_joining_and_leaving(seed: int) -> None:
    chance, shape = random.Random(seed), _shape()
    cache, rows, number = BatchCache(shape, 8), [], 0  # type: ignore[var-annotated]
    for _ in range(150):
        action = chance.random()
        if action < 0.15 and len(rows) < 8:
            history = list(range(number, number + chance.choice([1, 5, 40, 300])))
            number += len(history)
            assert cache.join(*_prompt(shape, history)) == len(rows)
            rows.append(history)
        elif action < 0.25 and rows:
            row = chance.randrange(len(rows))
            cache.leave(row)
            rows[row] = rows[-1]
            rows.pop()
        elif rows:
            _step(cache, rows, list(range(number, number + len(rows))))
            number += len(rows)
        assert cache.rows == len(rows)
        assert [cache.length(row) for row in range(len(rows))] == [len(history) for history in rows]


def test_a_step_that_was_not_ended_is_written_over() -> None:
    shape = _shape()
    cache, rows = BatchCache(shape, 1), [[1, 2, 3]]
    cache.join(*_prompt(shape, rows[0]))
    cache.begin_step()
    cache.update(torch.full((1, 2, 1, 3), 99.0), torch.full((1, 2, 1, 5), 99.0), 0)
    _step(cache, rows, [4])
    assert (cache.length(0), rows) == (4, [[1, 2, 3, 4]])


def test_storage_stays_bounded_while_requests_come_and_go_without_a_pause() -> None:
    shape = _shape((False,))
    cache = BatchCache(shape, 2)
    cache.join(*_prompt(shape, [0] * 30))
    for _ in range(40):
        cache.join(*_prompt(shape, [0] * 30))
        for _ in range(60):
            cache.begin_step()
            cache.end_step()
        cache.leave(0)
    assert cache.keys.shape[3] <= 512
    assert cache.length(0) == 90


def test_prompt_masks_are_left_out_only_where_plain_causal_is_right() -> None:
    assert PromptCache(_shape((False,)), 1, 9).masks(9, None) == (None, None)
    full, sliding = PromptCache(_shape(), 1, 9).masks(9, None)
    assert full is None
    assert sliding is not None
    assert (sliding[0, 0] == 0).sum(-1).tolist() == [1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_prompt_masks_let_the_tokens_of_an_image_see_one_another() -> None:
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1]])
    full, _ = PromptCache(_shape((False,)), 1, 7).masks(7, blocks)
    assert full is not None
    assert (full[0, 0] == 0).sum(-1).tolist() == [1, 4, 4, 4, 5, 7, 7]


@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (5, None), (5, 2.0), (1, 2.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_is_plain_attention_with_repeated_heads(
    queries: int, softcap: float | None, masked: bool
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, queries, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 4)
    mask = (
        torch.where(torch.rand(2, 1, queries, 5) < 0.3, torch.finfo(torch.float32).min, 0.0)
        if masked
        else None
    )
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    elif queries > 1:
        scores = scores.masked_fill(torch.ones(queries, 5).triu(1).bool(), -torch.inf)
    expected = (torch.softmax(scores, -1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    output, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3, softcap=softcap)
    torch.testing.assert_close(output, expected)
