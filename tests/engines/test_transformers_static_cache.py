"""The static cache against a list of lists: whatever joins, leaves and moves, each row sees its tokens."""

from __future__ import annotations

import random

import pytest
import torch

from dynamo.trtllm.engines.transformers.cache import CacheShape
from dynamo.trtllm.engines.transformers.static_cache import Bucket, StaticCache, bucket_for, usual_buckets

WINDOW = 6
MAX_ROWS = 8


def _shape() -> CacheShape:
    return CacheShape(
        layers=2,
        kv_heads=2,
        key_dim=3,
        value_dim=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        sliding=(False, True),
        window=WINDOW,
    )


class Rows:
    """A cache, the tokens that each of its rows should hold, and the count that the device would keep."""

    def __init__(self, max_tokens: int) -> None:
        self.lengths = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self.cache = StaticCache(_shape(), MAX_ROWS, max_tokens, self.lengths)
        self.histories: list[list[float]] = []
        self._next = 0.0

    def _numbers(self, count: int) -> list[float]:
        self._next += count
        return [self._next - count + i for i in range(count)]

    def join(self, tokens: int) -> None:
        """A prompt that holds each token's number in every place, the layer added."""
        numbers = self._numbers(tokens)
        column = torch.tensor(numbers)[None, None, :, None] + torch.arange(2)[:, None, None, None] * 0.25
        row = self.cache.join(column.expand(2, 2, tokens, 3), column.expand(2, 2, tokens, 5))
        assert row == len(self.histories)
        self.lengths[row] = tokens
        self.histories.append(numbers)

    def leave(self, row: int) -> None:
        last = len(self.histories) - 1
        self.cache.leave(row)
        self.lengths[row] = self.lengths[last]
        self.lengths[last] = 0
        self.histories[row] = self.histories[last]
        self.histories.pop()

    def step(self) -> None:
        """Give each row one number, and check what each layer of each row sees."""
        rows = len(self.histories)
        bucket = self.cache.fit(rows, max(self.cache.held) + 1)
        numbers = [*self._numbers(rows), *([7.0] * (bucket.rows - rows))]
        masks = self.cache.masks()
        for history, number in zip(self.histories, numbers, strict=False):
            history.append(number)
        for layer, mask in enumerate(masks):
            new = torch.tensor(numbers)[:, None, None, None] + 0.25 * layer
            keys, values = self.cache.update(new.expand(-1, 2, 1, 3), new.expand(-1, 2, 1, 5), layer)
            assert mask is not None
            for row, history in enumerate(self.histories):
                seen = mask[row, 0, 0] == 0
                expected = [n + 0.25 * layer for n in (history[-WINDOW:] if layer else history)]
                assert keys[row, 1, :, 2][seen].tolist() == expected
                assert values[row, 0, :, 4][seen].tolist() == expected
        self.cache.end_step()
        self.lengths[:rows] += 1


@pytest.mark.parametrize("seed", range(6))
def test_rows_keep_their_own_tokens_through_any_order_of_joining_and_leaving(seed: int) -> None:
    chance, rows = random.Random(seed), Rows(MAX_ROWS * 1024)
    for _ in range(150):
        action, count = chance.random(), len(rows.histories)
        if action < 0.15 and count < MAX_ROWS:
            rows.join(chance.choice([1, 5, 40, 255, 300]))
        elif action < 0.25 and count:
            rows.leave(chance.randrange(count))
        elif count:
            rows.step()
        assert rows.cache.held == [len(history) for history in rows.histories]


def test_a_batch_that_may_not_be_rounded_up_is_laid_out_tightly() -> None:
    rows = Rows(max_tokens=3 * 300)
    for _ in range(3):
        rows.join(290)
    for _ in range(9):
        rows.step()
    assert rows.cache.bucket == Bucket(3, 304)
    assert rows.cache.allocated <= 3 * 304


def test_storage_moves_while_it_grows_and_never_again() -> None:
    rows = Rows(max_tokens=MAX_ROWS * 1024)
    versions = set()
    for tokens in (3, 300, 700, 5, 5, 5, 5, 5):
        rows.join(tokens)
        rows.step()
        versions.add(rows.cache.version)
    assert versions == {1, 2, 3}
    assert rows.cache.allocated == MAX_ROWS * 1024
    while rows.histories:
        rows.leave(0)
    for _ in range(MAX_ROWS):
        rows.join(900)
        rows.step()
    assert rows.cache.version == 3


def test_a_batch_shrinks_when_half_of_it_would_do() -> None:
    rows = Rows(MAX_ROWS * 1024)
    for tokens in (900, 10, 10, 10, 10):
        rows.join(tokens)
    rows.step()
    assert rows.cache.bucket == Bucket(6, 1024)
    rows.leave(0)
    rows.step()
    assert rows.cache.bucket == Bucket(4, 256)
    rows.leave(0)
    rows.step()
    assert rows.cache.bucket == Bucket(4, 256)
    rows.leave(0)
    rows.step()
    assert rows.cache.bucket == Bucket(2, 256)


def test_what_a_spoilt_row_held_reaches_no_later_request() -> None:
    rows = Rows(MAX_ROWS * 1024)
    for _ in range(2):
        rows.join(4)
    rows.step()
    broken = torch.full((2, 2, 1, 5), torch.nan)
    for layer in range(2):
        rows.cache.update(broken[..., :3], broken, layer)
    rows.cache.leave(1, spoilt=True)
    rows.lengths[1] = 0
    rows.histories.pop()
    rows.cache.leave(0, spoilt=True)
    rows.histories.clear()
    rows.join(2)
    rows.join(2)
    for layer in range(2):
        keys, values = rows.cache.update(broken[..., :3].nan_to_num(), broken.nan_to_num(), layer)
        assert torch.isfinite(keys).all()
        assert torch.isfinite(values).all()


def test_there_are_few_buckets_and_each_holds_what_it_is_for() -> None:
    buckets = set()
    for rows in range(1, 65):
        for columns in range(1, 4097, 17):
            bucket = bucket_for(rows, columns, 64, 1 << 30)
            assert bucket.rows >= rows
            assert bucket.columns >= columns
            buckets.add(bucket)
    assert {b.rows for b in buckets} == {1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert {b.columns for b in buckets} == {256, 512, 1024, 1536, 2048, 3072, 4096}
    assert bucket_for(33, 10, 40, 1 << 30).rows == 40


@pytest.mark.parametrize(
    ("max_rows", "max_columns", "max_tokens"), [(64, 8192, 1 << 20), (6, 2048, 6000), (1, 100, 256)]
)
def test_usual_buckets_are_all_that_batches_are_rounded_up_to(
    max_rows: int, max_columns: int, max_tokens: int
) -> None:
    usual = usual_buckets(max_rows, max_columns, max_tokens)
    columns = [*range(1, max_columns, 17), max_columns]
    met = {bucket_for(rows, each, max_rows, 1 << 40) for rows in range(1, max_rows + 1) for each in columns}
    assert set(usual) == {bucket for bucket in met if bucket.tokens <= max_tokens}
    assert len(usual) == len(set(usual)) <= 120


def test_an_empty_cache_that_is_laid_out_has_its_whole_storage_and_serves_as_before() -> None:
    rows = Rows(max_tokens=4096)
    rows.cache.lay_out_empty(Bucket(2, 256))
    assert rows.cache.allocated == 4096
    rows.cache.lay_out_empty(Bucket(4, 1024))
    version = rows.cache.version
    for tokens in (5, 300, 40):
        rows.join(tokens)
        rows.step()
    rows.leave(0)
    rows.step()
    assert rows.cache.version == version
