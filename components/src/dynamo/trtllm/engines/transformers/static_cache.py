"""Keys and values of the running requests in one allocation whose layout stays the same from step to step.

A recorded step repeats the same kernels at the same addresses. So the batch has a few shapes (`Bucket`),
every row writes at its own position, which the device knows, and a mask hides what a row does not hold.
Requests are unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dynamo.trtllm.engines.transformers.cache import CacheShape

_SMALLEST_COLUMNS = 256
_TIGHT_STEP = 8
"""Attention wants rows of a multiple of eight columns."""
_MOVED_AT_ONCE = 1 << 15
"""Tokens up to which all layers move in one copy, which needs room for them a second time; of more, a layer
at a time.
"""
_FIRST_SHARE = 8
"""The first allocation is this part of what may be used: three doublings reach the whole."""


@dataclass(frozen=True)
class Bucket:
    """The shape of the batch in a step: rows, some of them perhaps empty, and columns of each."""

    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def bucket_for(rows: int, columns: int, max_rows: int, max_tokens: int) -> Bucket:
    """The smallest bucket that holds `rows` of `columns`, rounded up so that there are few of them.

    Where rounding up would need more than `max_tokens`, the bucket is as small as it can be instead.
    """
    rounded = Bucket(min(_rounded(rows, 1), max_rows), _rounded(columns, _SMALLEST_COLUMNS))
    if rounded.tokens <= max_tokens:
        return rounded
    return Bucket(rows, -(-columns // _TIGHT_STEP) * _TIGHT_STEP)


def usual_buckets(max_rows: int, max_columns: int, max_tokens: int) -> list[Bucket]:
    """What `bucket_for` rounds to for up to `max_rows` of up to `max_columns`, the smallest first."""
    rows = {min(_rounded(count, 1), max_rows) for count in range(1, max_rows + 1)}
    columns = {_rounded(count, _SMALLEST_COLUMNS) for count in range(1, max_columns + 1)}
    buckets = (Bucket(r, c) for r in rows for c in columns)
    return sorted((b for b in buckets if b.tokens <= max_tokens), key=lambda b: (b.tokens, b.rows))


def _rounded(count: int, smallest: int) -> int:
    """`count` rounded up to a power of two times `smallest`, from eight on also to the middle of two."""
    size = smallest
    while size < count:
        size *= 2
    middle = size * 3 // 4
    return middle if count <= middle and size >= 8 * smallest else size


class StaticCache:
    """The batch's keys and values. `lengths`, [max_rows] int64, is the device's count of tokens per row.

    The caller keeps `lengths`; `held` is the host's count. `version` changes when the storage moves: what was
    recorded before points into the old one.
    """

    def __init__(self, shape: CacheShape, max_rows: int, max_tokens: int, lengths: torch.Tensor) -> None:
        self.shape = shape
        self.bucket = Bucket(0, 0)
        self.held: list[int] = []
        self.version = 0
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._lengths = lengths
        self._rows = torch.arange(max_rows, device=shape.device)
        self._storage = self._allocate(0)
        self._use(*self._views(self._storage, self.bucket))

    def _allocate(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat room for `tokens` tokens; zeroed, since a masked NaN would still spoil a sum."""
        shape = self.shape
        options: Any = {"dtype": shape.dtype, "device": shape.device}
        heads = shape.layers * shape.kv_heads * tokens
        return torch.zeros(heads * shape.key_dim, **options), torch.zeros(heads * shape.value_dim, **options)

    def _views(self, storage: tuple[torch.Tensor, torch.Tensor], bucket: Bucket) -> list[torch.Tensor]:
        """Keys and values, [layers, rows, kv_heads, columns, dim], over the flat storage."""
        shape, views = self.shape, []
        for flat, dim in zip(storage, (shape.key_dim, shape.value_dim), strict=True):
            size = (shape.layers, bucket.rows, shape.kv_heads, bucket.columns, dim)
            views.append(flat[: shape.layers * shape.kv_heads * bucket.tokens * dim].view(size))
        return views

    def _use(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = keys, values
        self._layer_keys, self._layer_values = list(keys), list(values)

    @property
    def allocated(self) -> int:
        """Tokens that the storage has room for."""
        return self._storage[0].numel() // (self.shape.layers * self.shape.kv_heads * self.shape.key_dim)

    def fit(self, rows: int, columns: int) -> Bucket:
        """Lay the batch out for `rows` of `columns`, if it is too small or if half of it would do."""
        now, wanted = self.bucket, bucket_for(rows, columns, self._max_rows, self._max_tokens)
        too_small = rows > now.rows or columns > now.columns
        if too_small or 2 * wanted.rows <= now.rows or 2 * wanted.columns <= now.columns:
            self._lay_out(wanted)
        return self.bucket

    def lay_out_empty(self, bucket: Bucket) -> None:
        """Lay out `bucket`, while there is no row, in storage that has room for all that may be used."""
        if self.allocated < self._max_tokens:
            self._grow(bucket, self._max_tokens)
        elif bucket != self.bucket:
            self._lay_out(bucket)

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Copy a request's [layers, kv_heads, tokens, dim] into a new row, the last; returns its index."""
        row, tokens = len(self.held), keys.shape[2]
        self.fit(row + 1, max([tokens, *self.held]) + 1)
        self._keys[:, row, :, :tokens] = keys
        self._values[:, row, :, :tokens] = values
        self.held.append(tokens)
        return row

    def leave(self, row: int, spoilt: bool = False) -> None:
        """Free `row`; the last one takes its place. A `spoilt` row may hold NaN, which must not stay."""
        last = len(self.held) - 1
        used = self.held[last]
        for cache in (self._keys, self._values):
            if spoilt:
                cache[:, row] = 0
            if row != last:
                cache[:, row, :, :used] = cache[:, last, :, :used]
        self.held[row] = used
        self.held.pop()

    def masks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Additive masks [rows, 1, 1, columns] for full and for sliding layers, computed on the device."""
        at = self._lengths[: self.bucket.rows, None]
        columns = torch.arange(self.bucket.columns, device=self.shape.device)
        seen = columns <= at
        window = self.shape.window
        return self._additive(seen), None if window is None else self._additive(
            seen & (columns > at - window)
        )

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self.shape.dtype, device=self.shape.device)
        return mask.masked_fill_(~seen, self.shape.lowest)[:, None, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write every row's next token, [rows, kv_heads, 1, dim], at the row's own position."""
        rows, at = self._rows[: self.bucket.rows], self._lengths[: self.bucket.rows]
        all_keys, all_values = self._layer_keys[layer], self._layer_values[layer]
        all_keys[rows, :, at] = keys[:, :, 0]
        all_values[rows, :, at] = values[:, :, 0]
        return all_keys, all_values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def end_step(self) -> None:
        """Every row holds one token more."""
        self.held = [tokens + 1 for tokens in self.held]

    def _lay_out(self, bucket: Bucket) -> None:
        """Move what the rows hold to where `bucket` has it, in larger storage if it needs that."""
        if bucket.tokens > self.allocated:
            self._grow(bucket, max(2 * self.allocated, self._max_tokens // _FIRST_SHARE))
            return
        keys, values = self._views(self._storage, bucket)
        if len(self.held) * max(self.held, default=0) <= _MOVED_AT_ONCE:
            self._move(self._keys, keys, copy=True)
            self._move(self._values, values, copy=True)
            self._use(keys, values)
            self.bucket = bucket
            return
        # A layer's new place overlaps old ones of later layers when the batch grows, else of earlier layers.
        layers = range(self.shape.layers)
        for layer in reversed(layers) if bucket.tokens > self.bucket.tokens else layers:
            for old, new in ((self._layer_keys, keys), (self._layer_values, values)):
                self._move(old[layer], new[layer], copy=True)
        self._use(keys, values)
        self.bucket = bucket

    def _grow(self, bucket: Bucket, tokens: int) -> None:
        """Move into storage for `tokens` tokens, as far as that many may be used, and for `bucket` in any
        case.
        """
        storage = self._allocate(max(bucket.tokens, min(tokens, self._max_tokens)))
        keys, values = self._views(storage, bucket)
        for layer in range(self.shape.layers):
            self._move(self._layer_keys[layer], keys[layer])
            self._move(self._layer_values[layer], values[layer])
        self._storage, self.bucket = storage, bucket
        self._use(keys, values)
        self.version += 1

    def _move(self, old: torch.Tensor, new: torch.Tensor, copy: bool = False) -> None:
        """Of one layer or of all: `old` and `new` are [..., rows, kv_heads, columns, dim]."""
        rows, used = len(self.held), max(self.held, default=0)
        source = old[..., :rows, :, :used, :]
        new[..., :rows, :, :used, :] = source.clone() if copy else source
