"""Keys and values: of prompts while they are computed, and of the running requests in one batch.

Both caches speak the part of Transformers' cache interface that a decoder calls (`update`, `get_seq_length`).
They know tokens, columns and layers, nothing about requests. Masks are additive: 0 where a key may be seen,
the dtype's minimum where not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dynamo.trtllm.engines.transformers.causal import continues_unmasked

_COLUMN_STEP = 256
_ROW_STEP = 4


@dataclass(frozen=True)
class CacheShape:
    """What one token's keys and values look like in every layer of a model."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding: tuple[bool, ...]
    """Per layer: True when it sees only the last `window` tokens."""
    window: int | None

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def lowest(self) -> float:
        return torch.finfo(self.dtype).min

    def empty(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed keys and values, [layers, rows, kv_heads, columns, dim]:
        a masked NaN would still spoil a sum."""
        shape = (self.layers, rows, self.kv_heads, columns)
        options: Any = {"dtype": self.dtype, "device": self.device}
        return torch.zeros(*shape, self.key_dim, **options), torch.zeros(*shape, self.value_dim, **options)


class PromptCache:
    """Keys and values of prompts under computation, one row each, filled from the left:
    [layers, rows, kv_heads, tokens, dim]."""

    def __init__(self, shape: CacheShape, rows: int, tokens: int) -> None:
        self.shape = shape
        self.keys, self.values = shape.empty(rows, tokens)
        self._layer_keys, self._layer_values = list(self.keys), list(self.values)
        self.filled = 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.filled + keys.shape[2]
        all_keys, all_values = self._layer_keys[layer][:, :, :end], self._layer_values[layer][:, :, :end]
        all_keys[:, :, self.filled :] = keys
        all_values[:, :, self.filled :] = values
        return all_keys, all_values

    def get_seq_length(self, layer: int = 0) -> int:
        return self.filled

    def masks(
        self, queries: int, blocks: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Masks for the next `queries` tokens of every row, for full and for sliding layers; None where the
        queries are causal and see all before them.

        `blocks` [rows, tokens] numbers the tokens that see one another in both directions (images of some
        models), -1 for none.
        """
        total, window = self.filled + queries, self.shape.window
        shape = self.shape
        causal = blocks is None and (
            self.filled == 0 or continues_unmasked(shape.device, shape.dtype, shape.key_dim, shape.value_dim)
        )
        if causal and (window is None or total <= window):
            return None, None
        at = torch.arange(self.filled, total, device=self.shape.device)[:, None]
        of = torch.arange(total, device=self.shape.device)[None, :]
        mutual = None
        if blocks is not None:
            mine = blocks[:, self.filled : total, None]
            mutual = (mine == blocks[:, None, :total]) & (mine >= 0)
        full = None if causal else self._additive(of <= at, mutual)
        sliding = None if window is None else self._additive((of <= at) & (of > at - window), mutual)
        return full, sliding

    def _additive(self, allowed: torch.Tensor, mutual: torch.Tensor | None) -> torch.Tensor:
        seen = allowed[None] if mutual is None else allowed | mutual
        mask = torch.zeros(seen.shape, dtype=self.shape.dtype, device=self.shape.device)
        return mask.masked_fill_(~seen, self.shape.lowest)[:, None]

    def row(self, row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `tokens` of one row: [layers, kv_heads, tokens, dim], views."""
        return self.keys[:, row, :, :tokens], self.values[:, row, :, :tokens]


class BatchCache:
    """Keys and values of the running requests, a row each,
    right-aligned at one column that all rows write next.

    A shared column makes the write of a step one slice per layer, and a sliding layer's window one slice of
    columns. Requests of different length differ in their first column only, which the mask hides. Storage
    grows and is compacted, never shrunk.
    """

    def __init__(self, shape: CacheShape, max_rows: int) -> None:
        self.shape = shape
        self.rows = 0
        self._max_rows = max_rows
        self._column = 0
        self._first: list[int] = []
        self._low = self._low_sliding = self._end = 0
        self._allocate(1, _COLUMN_STEP)

    def _allocate(self, rows: int, columns: int) -> None:
        self.keys, self.values = self.shape.empty(rows, columns)
        self.mask = torch.full(
            (rows, columns), self.shape.lowest, dtype=self.shape.dtype, device=self.shape.device
        )
        self._layer_keys, self._layer_values = list(self.keys), list(self.values)

    @property
    def row_capacity(self) -> int:
        return self.keys.shape[1]

    def length(self, row: int) -> int:
        """Tokens that `row` holds."""
        return self._column - self._first[row]

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Copy a request's [layers, kv_heads, tokens, dim] into a new row;
        returns its index, always the last one."""
        tokens = keys.shape[2]
        self._reserve(self.rows + 1, tokens)
        row, first = self.rows, self._column - tokens
        self.keys[:, row, :, first : self._column] = keys
        self.values[:, row, :, first : self._column] = values
        self.mask[row] = self.shape.lowest
        self.mask[row, first : self._column] = 0
        self._first.append(first)
        self.rows += 1
        return row

    def leave(self, row: int) -> None:
        """Free `row`; the last row moves into its place."""
        last = self.rows - 1
        if row != last:
            used = slice(self._first[last], self._column)
            self.keys[:, row, :, used] = self.keys[:, last, :, used]
            self.values[:, row, :, used] = self.values[:, last, :, used]
            self.mask[row] = self.mask[last]
            self._first[row] = self._first[last]
        self._first.pop()
        self.rows = last
        if not last:
            self._column = 0

    def begin_step(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Open the next column for all rows; returns the masks [rows, 1, 1,
        tokens] for full and for sliding layers."""
        self._reserve(self.rows, 0)
        self.mask[:, self._column] = 0
        self._end = self._column + 1
        self._low = min(self._first)
        window = self.shape.window
        self._low_sliding = self._low if window is None else max(self._low, self._end - window)
        highest = max(self._first)
        full = None if highest == self._low else self.mask[: self.rows, None, None, self._low : self._end]
        if window is None or highest <= self._low_sliding:
            return full, None
        return full, self.mask[: self.rows, None, None, self._low_sliding : self._end]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low = self._low_sliding if self.shape.sliding[layer] else self._low
        all_keys = self._layer_keys[layer][: self.rows, :, low : self._end]
        all_values = self._layer_values[layer][: self.rows, :, low : self._end]
        all_keys[:, :, -1:] = keys
        all_values[:, :, -1:] = values
        return all_keys, all_values

    def get_seq_length(self, layer: int = 0) -> int:
        return self._column

    def end_step(self) -> None:
        """Keep what the step wrote. A step that failed is not ended: the next one writes the same column."""
        self._column += 1

    def _reserve(self, rows: int, tokens: int) -> None:
        """Room for `rows` rows, with at least `tokens` columns before
        the write column and one free column at it."""
        columns, column = self.keys.shape[3], self._column
        if rows <= self.row_capacity and tokens <= column < columns:
            return
        low, count = min(self._first, default=column), self.rows
        target = -(-max(column - low, tokens, 1) // _COLUMN_STEP) * _COLUMN_STEP
        used = (
            self.keys[:, :count, :, low:column],
            self.values[:, :count, :, low:column],
            self.mask[:count, low:column],
        )
        if rows > self.row_capacity or target >= columns:
            more = columns if target < columns else max(target + _COLUMN_STEP, columns + columns // 4)
            self._allocate(
                max(self.row_capacity, min(-(-rows // _ROW_STEP) * _ROW_STEP, self._max_rows), rows), more
            )
        else:
            used = (used[0].clone(), used[1].clone(), used[2].clone())
            self.mask.fill_(self.shape.lowest)
        place = slice(target - (column - low), target)
        self.keys[:, :count, :, place], self.values[:, :count, :, place], self.mask[:count, place] = used
        self._first = [first + target - column for first in self._first]
        self._column = target
