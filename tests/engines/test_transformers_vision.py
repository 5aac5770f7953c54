"""Vision towers of the families with grids, as they run on a GPU: sizes given on the host, forwards of
fewer kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamo.trtllm.engines.transformers.positions import positions_with_images
from dynamo.trtllm.engines.transformers.vision import derived, quicken
from engines.families import qwen2_5_vl, qwen2_vl, qwen3_vl

WITH_GRIDS = pytest.mark.parametrize("make", [qwen2_vl, qwen2_5_vl, qwen3_vl])
Make = Callable[[], tuple[Any, Any]]


def _features(tower: Any, grid: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
    patches = int(grid.prod(1).sum())
    pixels = torch.randn(patches, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = tower(pixels, grid_thw=grid, **given).pooler_output
    return found


@WITH_GRIDS
@pytest.mark.parametrize("grids", [[[1, 8, 6]], [[1, 4, 8], [1, 6, 6], [2, 4, 4]], [[1, 6, 4]] * 3])
def test_a_tower_given_its_sizes_on_the_host_gives_the_same_features_as_by_itself(
    make: Make, grids: list[list[int]]
) -> None:
    tower = make()[0].eval().base_model.visual
    grid = torch.tensor(grids)
    given = derived(tower, grid, torch.device("cpu"))
    expected = _features(tower, grid)
    assert torch.equal(_features(tower, grid, **given), expected)
    assert quicken(tower) == 3  # two layers' attention, and the embedding of patches
    torch.testing.assert_close(_features(tower, grid, **given), expected, atol=1e-6, rtol=1e-5)


@WITH_GRIDS
def test_positions_of_prompts_with_images_are_those_of_the_model(make: Make) -> None:
    model, chance = make()[0].base_model, random.Random(2)
    for _ in range(20):
        images: list[tuple[int, list[int]]] = []
        kinds: list[int] = [0] * chance.randrange(4)
        for _ in range(chance.randrange(1, 5)):
            grid = [1, 2 * chance.randrange(1, 7), 2 * chance.randrange(1, 7)]
            images.append((len(kinds), grid))
            kinds += [1] * (grid[1] * grid[2] // 4) + [0] * chance.randrange(1, 6)
        ids, grids = torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([grid for _, grid in images])
        expected, _ = model.get_rope_index(ids, torch.tensor([kinds]), image_grid_thw=grids)
        assert torch.equal(positions_with_images(len(kinds), images, 2), expected[:, 0])
