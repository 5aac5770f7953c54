"""Training batches: dialogues as token ids, positions and image patches, made with numpy on worker processes.

The results equal those of `AutoProcessor` and of `Qwen2VLModel.get_rope_index` (tests prove it), at a
fraction of their cost: pixels stay uint8, those of pictures single-frame, until they are on the device, and
whatever depends on sizes is an index tensor computed here. A patch covers two frames: of a picture the same
one twice, of a clip two that follow each other. The vision tower sees every pair of frames by itself, so a
clip of six frames is to it what three pictures are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from tokenizers import Tokenizer
from torchvision.transforms.v2 import functional as tv  # type: ignore[import-untyped]

from .artifacts import (
    END_OF_TEXT,
    IMAGE_PAD,
    MAX_FRAME_PIXELS,
    MAX_PIXELS,
    MERGE,
    MIN_FRAME_PIXELS,
    MIN_PIXELS,
    PATCH,
    TURN_END,
    TURN_START,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    token_id,
)
from .clips import Clip, Frames, degrade_clip, draw_clip
from .dialogues import Dialogue, Medium, Mix, draw_dialogue
from .pictures import FIRST_TRAINING_SEED, MAX_SIDE, MIN_SIDE, Picture, degrade, draw, resize

Ids = npt.NDArray[np.int64]
Levels = npt.NDArray[np.uint8]
Grid = tuple[int, int, int]
"""Of one picture or clip: pairs of frames, patch rows and patch columns; the last two are multiples of
`MERGE`."""

IGNORED = -100
_MAX_GROUPS = 4
_RESIZED = 0.4
"""The share of pictures that are scaled after they were drawn."""


class Batch(NamedTuple):
    """One training step's input. P patches, N merged patches (P / 4), B dialogues of S tokens, T trained
    tokens."""

    patches: torch.Tensor
    """uint8 [P, 3 * 14 * 14]: the first frame of every patch, in `pixel_values` order."""
    second_frames: torch.Tensor
    """uint8 [V, 3 * 14 * 14]: the second frame of every patch of a clip."""
    seconds_at: torch.Tensor
    """int64 [V]: the patches that `second_frames` belong to."""
    patch_places: torch.Tensor
    """int64 [P, 2]: row and column of every patch in its picture."""
    groups: list[torch.Tensor]
    """bool [pictures, patches] each, G elements in all: pictures (or pairs of frames) of similar size side by
    side, true where there is a patch."""
    grouped: torch.Tensor
    """int64 [G]: the patch at every element of the flattened groups; P where there is none."""
    ungrouped: torch.Tensor
    """int64 [P]: where each patch is in the flattened groups."""
    ids: torch.Tensor
    """int64 [B, S], padded on the right."""
    positions: torch.Tensor
    """int64 [3, B, S]: temporal, row and column position of every token."""
    media_at: torch.Tensor
    """int64 [N]: indices, in the flattened ids, of the tokens of pictures and clips."""
    targets_at: torch.Tensor
    """int64 [T]: indices, in the flattened ids, of the tokens that predict an answer token."""
    targets: torch.Tensor
    """int64 [T]: the answer tokens."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        moved: dict[str, Any] = {name: _moved(value, device) for name, value in self._asdict().items()}
        return Batch(**moved)


def _moved(
    value: torch.Tensor | list[torch.Tensor], device: torch.device
) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(value, list):
        return [item.to(device, non_blocking=True) for item in value]
    return value.to(device, non_blocking=True)


@dataclass(frozen=True)
class Example:
    """One encoded dialogue: S token ids, their labels (`IGNORED` where nothing is trained), its pictures and
    clips in order.

    `patches` are the first frames of each one's patches, `second_frames` the second ones, None of a picture.
    """

    ids: Ids
    labels: Ids
    positions: Ids
    patches: list[Levels]
    second_frames: list[Levels | None]
    grids: list[Grid]


def smart_resize(height: int, width: int, least: int = MIN_PIXELS, most: int = MAX_PIXELS) -> tuple[int, int]:
    """Qwen2-VL's rule: sides in multiples of 28, the area within the limits, the aspect ratio kept as closely
    as possible."""
    factor = PATCH * MERGE
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        scale = math.sqrt(height * width / most)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns


def patchify(image: Image.Image) -> tuple[Levels, Grid]:
    """Cuts an RGB picture into uint8 patches [rows * columns, 3 * 14 * 14], ordered 2 x 2 block by block, and
    its grid."""
    size = smart_resize(image.height, image.width)
    patches = _cut(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], size)
    return patches[0], (1, size[0] // PATCH, size[1] // PATCH)


def patchify_clip(frames: Frames) -> tuple[Levels, Levels, Grid]:
    """The patches of the first and of the second frame of every pair, [pairs * rows * columns, 3 * 14 * 14],
    and the grid.

    Of an odd number of frames the last one counts twice.
    """
    height, width = frames.shape[1:3]
    size = smart_resize(height, width, MIN_FRAME_PIXELS, MAX_FRAME_PIXELS)
    patches = _cut(torch.from_numpy(frames).permute(0, 3, 1, 2), size)
    if len(patches) % 2:
        patches = np.concatenate([patches, patches[-1:]])
    first, second = (patches[at::2].reshape(-1, patches.shape[-1]) for at in range(2))
    return first, second, (len(patches) // 2, size[0] // PATCH, size[1] // PATCH)


def _cut(pixels: torch.Tensor, size: tuple[int, int]) -> Levels:
    """uint8 [frames, 3, height, width] scaled to `size` and cut into [frames, rows * columns, 3 * 14 *
    14]."""
    if tuple(pixels.shape[2:]) != size:
        pixels = tv.resize(pixels, list(size), interpolation=tv.InterpolationMode.BICUBIC, antialias=True)
    rows, columns = size[0] // PATCH, size[1] // PATCH
    blocks = pixels.numpy().reshape(-1, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    return blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(blocks), rows * columns, 3 * PATCH * PATCH)


def patch_places(grid: Grid) -> Ids:
    """int64 [pairs * rows * columns, 2]: row and column of every patch, in the order of `patchify`."""
    pairs, *sides = grid
    rows, columns = np.indices(sides)
    places = np.stack([rows, columns], axis=-1).reshape(sides[0] // MERGE, MERGE, sides[1] // MERGE, MERGE, 2)
    return np.tile(places.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int64), (pairs, 1))


def rope_positions(ids: Ids, grids: Sequence[Grid], media_tokens: Sequence[int]) -> Ids:
    """int64 [3, S]: Qwen2-VL's positions. A pair of frames has one temporal position; text goes on after its
    larger side."""
    positions = np.empty((3, len(ids)), np.int64)
    starts = np.flatnonzero(np.isin(ids, media_tokens))
    at, next_position, seen = 0, 0, 0
    for pairs, rows, columns in ((pairs, rows // MERGE, columns // MERGE) for pairs, rows, columns in grids):
        start = int(starts[seen])
        positions[:, at:start] = np.arange(start - at) + next_position
        next_position += start - at
        count = pairs * rows * columns
        at, seen = start + count, seen + count
        positions[:, start:at] = np.indices((pairs, rows, columns)).reshape(3, -1) + next_position
        next_position += max(rows, columns)
    positions[:, at:] = np.arange(len(ids) - at) + next_position
    return positions


def render(dialogue: Dialogue) -> str:
    """The dialogue as the chat template renders it, one placeholder per picture or clip."""
    turns = ((turn.role, "".join(_rendered(item) for item in turn.content)) for turn in dialogue)
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns)


def _rendered(item: str | Medium) -> str:
    if isinstance(item, str):
        return item
    return VISION_START + (VIDEO_PAD if isinstance(item, Clip) else IMAGE_PAD) + VISION_END


class Encoder:
    """Turns dialogues into examples for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._media = [token_id(tokenizer, token) for token in (IMAGE_PAD, VIDEO_PAD)]
        self._end = token_id(tokenizer, TURN_END)
        self._answer_start = tokenizer.encode(f"{TURN_START}assistant\n").ids

    def encode(self, dialogue: Dialogue) -> Example:
        """Token ids with placeholders expanded, labels on every answer and the end of its turn, positions and
        patches."""
        cut = [_patches(item) for turn in dialogue for item in turn.content if not isinstance(item, str)]
        grids = [grid for _, _, grid in cut]
        ids = np.array(self._tokenizer.encode(render(dialogue)).ids, np.int64)
        counts = np.ones(len(ids), np.int64)
        counts[np.isin(ids, self._media)] = [math.prod(grid) // MERGE**2 for grid in grids]
        labels = np.repeat(answer_labels(ids, self._answer_start, self._end), counts)
        ids = np.repeat(ids, counts)
        positions = rope_positions(ids, grids, self._media)
        return Example(
            ids, labels, positions, [first for first, _, _ in cut], [second for _, second, _ in cut], grids
        )


def answer_labels(ids: Ids, answer_start: Sequence[int], end: int) -> Ids:
    """int64 [S]: the ids of every answer and of the end of its turn, `IGNORED` elsewhere; `answer_start`
    stands before each answer."""
    labels = np.full(len(ids), IGNORED, np.int64)
    ends = np.flatnonzero(ids == end)
    head = len(answer_start)
    for start in np.flatnonzero(ids == answer_start[0]):
        if ids[start : start + head].tolist() == answer_start:
            last = ends[np.searchsorted(ends, start)] + 1
            labels[start + head : last] = ids[start + head : last]
    return labels


def _patches(medium: Medium) -> tuple[Levels, Levels | None, Grid]:
    if isinstance(medium, Clip):
        return patchify_clip(medium.frames)
    patches, grid = patchify(medium.image)
    return patches, None, grid


def collate(examples: Sequence[Example], tokenizer: Tokenizer) -> Batch:
    """Pads the texts on the right and packs pictures and clips; at least one example must hold one."""
    media_tokens = [token_id(tokenizer, token) for token in (IMAGE_PAD, VIDEO_PAD)]
    pad_token = token_id(tokenizer, END_OF_TEXT)
    length = max(len(example.ids) for example in examples)
    ids = np.full((len(examples), length), pad_token, np.int64)
    labels = np.full((len(examples), length), IGNORED, np.int64)
    positions = np.zeros((3, len(examples), length), np.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        labels[row, : len(example.ids)] = example.labels
        positions[:, row, : len(example.ids)] = example.positions
    grids = [grid for example in examples for grid in example.grids]
    groups, grouped, ungrouped = _group(
        [rows * columns for pairs, rows, columns in grids for _ in range(pairs)]
    )
    second_frames, seconds_at = _second_frames(examples)
    targets = labels.reshape(-1)[1:]
    trained = np.flatnonzero(targets != IGNORED)
    return Batch(
        patches=torch.from_numpy(
            np.concatenate([patches for example in examples for patches in example.patches])
        ),
        second_frames=torch.from_numpy(second_frames),
        seconds_at=torch.from_numpy(seconds_at),
        patch_places=torch.from_numpy(np.concatenate([patch_places(grid) for grid in grids])),
        groups=[torch.from_numpy(group) for group in groups],
        grouped=torch.from_numpy(grouped),
        ungrouped=torch.from_numpy(ungrouped),
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        media_at=torch.from_numpy(np.flatnonzero(np.isin(ids.reshape(-1), media_tokens))),
        targets_at=torch.from_numpy(trained),
        targets=torch.from_numpy(targets[trained]),
    )


def _second_frames(examples: Sequence[Example]) -> tuple[Levels, Ids]:
    """`Batch.second_frames` and `seconds_at`."""
    frames, places = [np.empty((0, 3 * PATCH * PATCH), np.uint8)], [np.empty(0, np.int64)]
    offset = 0
    for example in examples:
        for first, second in zip(example.patches, example.second_frames, strict=True):
            if second is not None:
                frames.append(second)
                places.append(np.arange(offset, offset + len(second)))
            offset += len(first)
    return np.concatenate(frames), np.concatenate(places)


def _group(counts: Sequence[int]) -> tuple[list[npt.NDArray[np.bool_]], Ids, Ids]:
    """`Batch.groups`, `grouped` and `ungrouped` for pictures of `counts` patches, in at most `_MAX_GROUPS`
    groups."""
    total = sum(counts)
    starts = np.cumsum([0, *counts])
    groups: list[Ids] = []
    ungrouped = np.empty(total, np.int64)
    offset = 0
    for members in np.array_split(np.argsort(counts, kind="stable"), min(_MAX_GROUPS, len(counts))):
        width = counts[members[-1]]
        group = np.full((len(members), width), total, np.int64)
        for row, member in enumerate(members):
            group[row, : counts[member]] = np.arange(starts[member], starts[member + 1])
            ungrouped[starts[member] : starts[member + 1]] = np.arange(counts[member]) + offset + row * width
        groups.append(group)
        offset += group.size
    return (
        [group < total for group in groups],
        np.concatenate([group.reshape(-1) for group in groups]),
        ungrouped,
    )


def mix_at(progress: float) -> Mix:
    """The curriculum of dialogues: single pictures first, several pictures and several turns from a tenth of
    the training on."""
    ramp = min(1.0, max(0.0, (progress - 0.08) / 0.15))
    return Mix(
        clips=0.35,
        text_only=0.08,
        several_pictures=0.42 * ramp,
        several_turns=0.15 * ramp,
        system=0.2,
        wild_text=0.08 * ramp,
    )


def size_at(progress: float, rng: Random) -> tuple[int, int]:
    """The curriculum of sizes (width, height): small pictures first, the whole range from four tenths of the
    training on.

    Small shapes are the hardest to tell apart, so half of the pictures stays small. Later, a few are longer
    than `MAX_SIDE` on one side, within `MAX_PIXELS`, for the sake of what people send.
    """
    ramp = min(1.0, max(0.0, (progress - 0.05) / 0.35))
    if ramp == 1.0 and rng.random() < 0.05:
        long = rng.randint(MAX_SIDE, 896)
        short = rng.randint(MIN_SIDE, MAX_PIXELS // long)
        return (long, short) if rng.random() < 0.5 else (short, long)
    largest = 112 + round((56 if rng.random() < 0.5 else MAX_SIDE - 112) * ramp)
    return rng.randint(MIN_SIDE, largest), rng.randint(MIN_SIDE, largest)


class DialogueBatches(torch.utils.data.Dataset[Batch]):
    """Batch `i` of a training of `steps` batches of `rows` dialogues; `progress` (0..1) is set by the
    training loop."""

    def __init__(
        self, tokenizer: Tokenizer, rows: int, steps: int, seed: int, progress: Synchronized[float]
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._rows, self._steps, self._seed, self._progress = rows, steps, seed, progress

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        rng = Random(f"{self._seed}/{step}")
        progress = self._progress.value
        mix = mix_at(progress)

        def next_picture() -> Picture:
            picture = draw(rng.randrange(FIRST_TRAINING_SEED, 1 << 62), size_at(progress, rng))
            picture = resize(picture, rng) if rng.random() < _RESIZED else picture
            return degrade(picture, rng) if rng.random() < 0.3 else picture

        def next_clip() -> Clip:
            frames = rng.choice((4, 4, 4, 6, 6, 8, 8, rng.randint(2, 16)))
            clip = draw_clip(rng.randrange(FIRST_TRAINING_SEED, 1 << 62), frames=frames)
            return degrade_clip(clip, rng) if rng.random() < 0.3 else clip

        examples = [
            self._encoder.encode(draw_dialogue(rng, next_picture, mix, next_clip)) for _ in range(self._rows)
        ]
        return collate(examples, self._tokenizer)
