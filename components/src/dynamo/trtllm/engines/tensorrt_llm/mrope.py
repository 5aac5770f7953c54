"""Three-dimensional positions (time, height, width) of Qwen's vision models,
for a prompt whose images were encoded elsewhere.

Formula: text advances all three by one; an image of merged grid (t, h, w) that starts at position p occupies
p + its own coordinates, and the text after it goes on at one more than the largest position so far. Source:
the models' published `get_rope_index`, against which a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Grid = tuple[int, int, int]


def positions(length: int, images: Sequence[tuple[int, Grid]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of an expanded prompt of `length` tokens with `images` as (start, merged grid), in order.

    Returns int64 `[3, 1, length]`, and int32 `[1, 1]`: what to add to a later token's index to get its
    position. The library copies the latter into an int32 cache and takes no other kind.
    """
    import torch

    parts: list[torch.Tensor] = []
    at, following = 0, 0
    for start, (frames, height, width) in images:
        parts.append(_text(following, start - at))
        following += start - at
        axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
        parts.append(torch.stack([a.reshape(-1) for a in axes]) + following)
        following += max(frames, height, width)
        at = start + frames * height * width
    parts.append(_text(following, length - at))
    result = torch.cat(parts, dim=1).to(torch.int64)
    delta = int(result.max()) + 1 - length if length else 0
    return result.unsqueeze(1).contiguous(), torch.tensor([[delta]], dtype=torch.int32)


def grid_of(position_ids: torch.Tensor, tokens: int) -> Grid | None:
    """The merged grid of the one image in a prompt, from its positions `[3,
    1, length]`; None when they show no such image.

    The encoder tells positions, not grids:
    an image's coordinates are the only ones that repeat along an axis.
    """
    flat = position_ids.reshape(3, -1)
    for start in range(flat.shape[1] - tokens + 1):
        window = flat[:, start : start + tokens]
        extent = (window.max(dim=1).values - window[:, 0] + 1).tolist()
        grid = (int(extent[0]), int(extent[1]), int(extent[2]))
        if grid[0] * grid[1] * grid[2] != tokens:
            continue
        if bool((positions(tokens, [(0, grid)])[0][:, 0] + window[:, :1] == window).all()):
            return grid
    return None


def grid_of_image(width: int, height: int, tokens: int) -> Grid:
    """The merged grid of an image that became `tokens` rows.

    Qwen's processors keep the ratio of its sides as far as whole cells allow, so of all grids of
    so many cells it is the one whose ratio is nearest. Source: `smart_resize` of the models'
    published image processors.
    """
    pairs = [(rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0]
    wanted = math.log(height / width)
    rows, columns = min(pairs, key=lambda pair: abs(math.log(pair[0] / pair[1]) - wanted))
    return 1, rows, columns


def _text(start: int, count: int) -> torch.Tensor:
    import torch

    return torch.arange(start, start + count).expand(3, count)
