"""Positions of the tokens of a prompt with images, in the families whose positions follow grids (M-RoPE).

The same as the models' own `get_rope_index`, which goes through the prompt token by token and takes
milliseconds for a long one, while nothing else is launched. Videos are left to it: their times differ from
family to family.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def positions_with_images(
    length: int, images: Sequence[tuple[int, Sequence[int]]], merge: int
) -> torch.Tensor:
    """[3, length]: time, height and width of every token of a prompt of `length` tokens.

    `images` are the first index of each image's features and its grid (1, height and width in patches), in
    order; `merge` patches a side become one row of features. Text counts on from one more than the largest
    position before it.
    """
    parts: list[torch.Tensor] = []
    position = at = 0
    for start, (_, patches_high, patches_wide) in images:
        parts.append(_counted(position, start - at))
        position += start - at
        high, wide = patches_high // merge, patches_wide // merge
        rows = torch.arange(high)[:, None].expand(high, wide)
        columns = torch.arange(wide)[None, :].expand(high, wide)
        parts.append(torch.stack([torch.zeros_like(rows), rows, columns]).reshape(3, -1) + position)
        position += max(high, wide)
        at = start + high * wide
    parts.append(_counted(position, length - at))
    return torch.cat(parts, 1)


def _counted(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count).expand(3, -1)
