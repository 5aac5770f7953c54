"""The multimodal models that the portable engine serves: one row for each family.

A row says what the chat template writes for an image, a video or a sound, what that becomes in the prompt,
and what the text model needs beside the features. A family is added with a row here and a tiny model in the
tests that proves it against `generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from dynamo.trtllm.engines.port import ProcessorOption
from dynamo.trtllm.engines.transformers.tokens import AudioTokens, ImageTokens, MediaTokens, VideoTokens
from dynamo.trtllm.errors import ClientFault

Extras = Mapping[str, Any]
Options = Mapping[str, Any]
"""A request's `mm_processor_kwargs` for one kind, checked by the `ProcessorOption`s of its family."""


class ProcessorCall(NamedTuple):
    """What options become in calls of Transformers' processor: `preparing` of the image processor itself,
    `counting` of `_get_num_multimodal_tokens`, which reads the same under names of its own."""

    preparing: Mapping[str, Any]
    counting: Mapping[str, Any]


def _no_options(tokens: ImageTokens, context_length: int) -> dict[str, ProcessorOption]:
    return {}


def _plain_call(processor: Any, options: Options) -> ProcessorCall:
    return ProcessorCall({}, {})


@dataclass(frozen=True)
class ImageRules:
    """How a family takes images. `tokens(config, processor)` reads the ids;
    `expand(tokens, rows, extras)` is what stands for an image in the prompt.
    """

    tokens: Callable[[Any, Any], ImageTokens]
    expand: Callable[[ImageTokens, int, Extras], tuple[int, ...]]
    adopt: Callable[[ImageTokens, int, Extras], dict[str, Any]]
    """The extras of an image of which only features are known.
    Raises `ClientFault` naming the key that is missing."""
    size_key: str | None = None
    """The processor output that says how an image was cut."""
    options: Callable[[ImageTokens, int], Mapping[str, ProcessorOption]] = _no_options
    """Keys of `mm_processor_kwargs`; the second argument is the context length."""
    call: Callable[[Any, Options], ProcessorCall] = _plain_call
    """How those keys are said to the image processor, the first argument;
    and to the video processor, which takes the same."""


@dataclass(frozen=True)
class Family:
    """One family, and the kinds of media that it takes."""

    name: str
    image: ImageRules | None = None
    others: Mapping[str, Callable[[Any, Any], MediaTokens]] = field(default_factory=dict)
    """The kinds beside images by their names, each with what reads its ids of configuration and processor."""
    grid: bool = False
    """Positions follow `image_grid_thw` (M-RoPE)."""
    mutual: bool = False
    """The tokens of an image see one another in both directions."""
    levels: Callable[[Any], int] = lambda config: 0
    """Feature levels beside the first (deepstack)."""

    def tokens(self, config: Any, processor: Any) -> dict[str, MediaTokens]:
        """What stands for an item in a prompt, by the kinds of media."""
        readers = {} if self.image is None else {"image": self.image.tokens}
        return {kind: read(config, processor) for kind, read in {**readers, **self.others}.items()}


def _repeat(tokens: ImageTokens, rows: int, extras: Extras) -> tuple[int, ...]:
    return tokens.begin + (tokens.feature,) * rows + tokens.end


def _by_rows(tokens: ImageTokens, rows: int, extras: Extras) -> tuple[int, ...]:
    """Pixtral's layout: each row of features ends with a break, the last one with an end token."""
    height = int(extras["image_sizes"][0]) // (tokens.patch * tokens.merge)
    line = (tokens.feature,) * (rows // height) + (tokens.row_end or 0,)
    return (line * height)[:-1] + tokens.end


def _no_extras(tokens: ImageTokens, rows: int, extras: Extras) -> dict[str, Any]:
    return {}


def _adopt_grid(tokens: ImageTokens, rows: int, extras: Extras) -> dict[str, Any]:
    given = extras.get("image_grid_thw")
    if given is None:
        side = math.isqrt(rows)
        if side * side != rows:
            raise ClientFault(
                f"{rows} rows are no square grid; give image_grid_thw [1, "
                "height, width] beside the embeddings"
            )
        return {"image_grid_thw": [1, side * tokens.merge, side * tokens.merge]}
    grid = _integers("image_grid_thw", given, 3)
    frames, height, width = grid
    fits = min(grid) > 0 and height % tokens.merge == 0 and width % tokens.merge == 0
    if not fits or frames != 1 or height * width != rows * tokens.merge**2:
        raise ClientFault(f"image_grid_thw {grid} does not fit {rows} rows of embeddings")
    return {"image_grid_thw": grid}


def _adopt_size(tokens: ImageTokens, rows: int, extras: Extras) -> dict[str, Any]:
    given, cell = extras.get("image_sizes"), tokens.patch * tokens.merge
    if given is None:
        side = math.isqrt(rows)
        if side * side != rows:
            raise ClientFault(
                f"{rows} rows are no square; give image_sizes [height, width] in pixels beside the embeddings"
            )
        return {"image_sizes": [side * cell, side * cell]}
    size = _integers("image_sizes", given, 2)
    if min(size) < cell or (size[0] // cell) * (size[1] // cell) != rows:
        raise ClientFault(f"image_sizes {size} does not fit {rows} rows of embeddings")
    return {"image_sizes": size}


def _integers(key: str, value: Any, count: int) -> list[int]:
    """`value`, a nested list or a tensor of one image, as `count` integers."""
    value = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (list, tuple)) or len(value) != count or not all(type(v) is int for v in value):
        raise ClientFault(f"{key} must be {count} integers for one image")
    return list(value)


def _pixel_options(tokens: ImageTokens, context_length: int) -> dict[str, ProcessorOption]:
    """Bounds of an image's pixels after resizing:
    from one row of features to as many as the context holds."""
    cell = (tokens.patch * tokens.merge) ** 2
    pixels = ProcessorOption(least=cell, most=cell * context_length)
    edges = ProcessorOption(fields={"shortest_edge": pixels, "longest_edge": pixels})
    return {"min_pixels": pixels, "max_pixels": pixels, "size": edges}


def _pixel_call(processor: Any, options: Options) -> ProcessorCall:
    """`shortest_edge` and `longest_edge` are the least and the most pixels, whatever their names say
    (`Qwen2VLImageProcessor`, Transformers 5.24); `min_pixels` and `max_pixels` are older names of them."""
    if not options:
        return ProcessorCall({}, {})
    given = {**options.get("size", {})}
    for name, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if older in options:
            given[name] = options[older]
    if given.get("shortest_edge", 0) > given.get("longest_edge", math.inf):
        raise ClientFault("mm_processor_kwargs ask for more pixels at least than at most")
    size = {name: given.get(name, processor.size[name]) for name in ("shortest_edge", "longest_edge")}
    return ProcessorCall(
        {"size": size}, {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    )


def _edge_options(tokens: ImageTokens, context_length: int) -> dict[str, ProcessorOption]:
    """Pixtral's: the longest side in pixels, up to a square image that fills the context."""
    cell = tokens.patch * tokens.merge
    edge = ProcessorOption(least=cell, most=cell * max(1, math.isqrt(context_length)))
    return {"size": ProcessorOption(fields={"longest_edge": edge})}


def _edge_call(processor: Any, options: Options) -> ProcessorCall:
    size = dict(options.get("size", {}))
    return ProcessorCall({"size": size}, {"size": size}) if size else ProcessorCall({}, {})


def _qwen_tokens(config: Any, processor: Any) -> ImageTokens:
    vision = config.vision_config
    image = config.image_token_id
    return ImageTokens(image, image, merge=vision.spatial_merge_size, patch=vision.patch_size)


def _qwen_video(config: Any, processor: Any, *, paced: bool = False, timed: bool = False) -> VideoTokens:
    def write(text: str) -> Sequence[int]:
        ids: list[int] = processor.tokenizer.encode(text, add_special_tokens=False)
        return ids

    vision = config.vision_config
    return VideoTokens(
        config.video_token_id,
        merge=vision.spatial_merge_size,
        together=vision.temporal_patch_size,
        begin=config.vision_start_token_id,
        end=config.vision_end_token_id,
        write=write if timed else None,
        paced=paced,
    )


def _llava_tokens(config: Any, processor: Any) -> ImageTokens:
    return ImageTokens(config.image_token_id, config.image_token_id)


def _mistral3_tokens(config: Any, processor: Any) -> ImageTokens:
    image = config.image_token_id
    ends = {"end": (processor.image_end_token_id,), "row_end": processor.image_break_token_id}
    return ImageTokens(
        image, image, merge=config.spatial_merge_size, patch=config.vision_config.patch_size, **ends
    )


def _gemma3_tokens(config: Any, processor: Any) -> ImageTokens:
    gap = tuple(processor.tokenizer.encode("\n\n", add_special_tokens=False))
    begin, end = config.boi_token_index, config.eoi_token_index
    return ImageTokens(begin, config.image_token_id, begin=(*gap, begin), end=(end, *gap))


def _qwen2_audio(config: Any, processor: Any) -> AudioTokens:
    return AudioTokens(config.audio_token_id)


_QWEN = ImageRules(
    _qwen_tokens, _repeat, _adopt_grid, size_key="image_grid_thw", options=_pixel_options, call=_pixel_call
)
_LLAVA = ImageRules(_llava_tokens, _repeat, _no_extras)
_MISTRAL3 = ImageRules(
    _mistral3_tokens, _by_rows, _adopt_size, size_key="image_sizes", options=_edge_options, call=_edge_call
)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family("Qwen2-VL", _QWEN, {"video": _qwen_video}, grid=True),
    "qwen2_5_vl": Family("Qwen2.5-VL", _QWEN, {"video": partial(_qwen_video, paced=True)}, grid=True),
    "qwen3_vl": Family(
        "Qwen3-VL",
        _QWEN,
        {"video": partial(_qwen_video, timed=True)},
        grid=True,
        levels=lambda config: len(config.vision_config.deepstack_visual_indexes),
    ),
    "llava": Family("LLaVA", _LLAVA),
    "llava_next": Family("LLaVA-NeXT", replace(_LLAVA, size_key="image_sizes")),
    "mistral3": Family("Mistral 3", _MISTRAL3),
    "gemma3": Family("Gemma 3", ImageRules(_gemma3_tokens, _repeat, _no_extras), mutual=True),
    "qwen2_audio": Family("Qwen2-Audio", others={"audio": _qwen2_audio}),
}
"""By the configuration's `model_type`."""


def supported_names() -> str:
    """All families in words, for messages."""
    return ", ".join(f.name for f in FAMILIES.values())
