"""Facts about the model from its directory, read as JSON: no engine and no tokenizer library is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record import VIDEO_PLACEHOLDER, ModelFacts, find_model_facts
from dynamo.trtllm.model_files import architectures_of, read_model_json


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What the adapter needs to know of a model before and after loading it."""

    facts: ModelFacts
    architecture: str | None
    placeholder_id: int | None
    hidden_size: int | None
    max_positions: int | None
    video_placeholder_id: int | None = None
    """The id that the chat template writes once per video."""
    frames_together: int = 2
    """Frames of a video that the model takes at once."""
    row_pixels: int = 28 * 28
    """Pixels of an image that become one row of features, for models that cut images into patches."""


def describe_model(path: str) -> ModelDescription:
    """Reads `config.json` and `tokenizer.json` of a directory or of a model
    that the Hugging Face cache holds."""
    config = read_model_json(path)
    architectures = architectures_of(config)
    facts = find_model_facts(architectures)
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    return ModelDescription(
        facts=facts,
        architecture=architectures[0] if architectures else None,
        placeholder_id=_placeholder_id(path, config, facts),
        hidden_size=_integer(text, "hidden_size") or _integer(config, "hidden_size"),
        max_positions=_integer(text, "max_position_embeddings")
        or _integer(config, "max_position_embeddings"),
        video_placeholder_id=_video_placeholder_id(path, config, facts),
        frames_together=_integer(config.get("vision_config"), "temporal_patch_size") or 2,
        row_pixels=_row_pixels(config.get("vision_config")),
    )


def _row_pixels(vision: Any) -> int:
    patch, merge = _integer(vision, "patch_size") or 14, _integer(vision, "spatial_merge_size") or 2
    return (patch * merge) ** 2


def _placeholder_id(path: str, config: Mapping[str, Any], facts: ModelFacts) -> int | None:
    """The id that the chat template writes once per image; what an image expands to may have another one."""
    if "I" not in facts.modalities:
        return None
    return _token_id(path, config, facts.placeholder, ("image_token_id", "image_token_index"))


def _video_placeholder_id(path: str, config: Mapping[str, Any], facts: ModelFacts) -> int | None:
    if "V" not in facts.modalities:
        return None
    return _token_id(path, config, VIDEO_PLACEHOLDER, ("video_token_id",))


def _token_id(
    path: str, config: Mapping[str, Any], content: str | None, names: tuple[str, ...]
) -> int | None:
    """The id of the added token `content`, else what the configuration says under one of `names`."""
    added = read_model_json(path, "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping) and token.get("content") == content:
            return _integer(token, "id")
    return next((value for name in names if (value := _integer(config, name)) is not None), None)


def _integer(config: Any, name: str) -> int | None:
    value = config.get(name) if isinstance(config, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
