"""A model's dimensions, read from the JSON files in its directory:
what head counts, memory and modality checks need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.model_files import architectures_of, read_model_json

_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "use_sliding_window": False,
    },
    "llama4": {"intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "head_dim": 128},
}
"""What Transformers' configuration classes fill in where a published
config.json leaves a key out, by family."""

_VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "spatial_merge_size": 2},
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
    "clip": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096},
}

_MOST_PARAMETERS = 10**15
_GATED_VISION = ("qwen2_5_vl", "pixtral")
"""Vision families whose MLP has three matrices; the others have two."""

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "nvfp4": 0.5625,
    "int8": 1.0,
    "int4": 0.5625,
}
"""Bytes of one weight or cache value; four-bit forms count their scales, one byte for 16 values."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of the text model and the size of the whole one.
    `parameters` is an estimate, norms and biases left out."""

    architecture: str
    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    windowed_layers: int
    """Layers that keep no more than `window` tokens of a request."""
    window: int | None
    hidden: int
    vocab: int
    max_positions: int | None
    has_vision: bool
    has_audio: bool
    dtype: str
    """Type of the weights as stored: `bfloat16`, or `fp8` and the like for a quantized model."""
    parameters: int
    media_parameters: int
    """Those of them that turn images or sounds into embeddings."""

    @property
    def takes_media(self) -> bool:
        return self.has_vision or self.has_audio

    @property
    def weight_bytes(self) -> int:
        return round(self.parameters * DTYPE_BYTES.get(self.dtype, 2.0))


def find_shape(path: str) -> ModelShape | None:
    """Dimensions of the model at `path`;
    None when its config.json is not on this machine or does not say them."""
    return parse_shape(read_model_json(path))


def parse_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Dimensions in the content of a config.json;
    None when the layout is not that of a decoder, or a number is none."""
    try:
        shape = _parse(config)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        return None
    if shape is None:
        return None
    counts = (shape.kv_heads, shape.head_dim, shape.vocab, shape.parameters, shape.media_parameters)
    usable = all(type(count) is int and 0 <= count <= _MOST_PARAMETERS for count in counts)
    return shape if usable and shape.kv_heads and shape.head_dim else None


def _parse(config: Mapping[str, Any]) -> ModelShape | None:
    model_type, named = str(config.get("model_type", "")), architectures_of(config)
    nested = config.get("text_config")
    text = {**(nested if isinstance(nested, Mapping) else config)}
    family = str(text.get("model_type", model_type)).removesuffix("_text")
    text = {**_TEXT_DEFAULTS.get(family, {}), **text}
    required = [text.get(name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")]
    heads, layers, hidden = (value if isinstance(value, int) and value > 0 else 0 for value in required)
    if not (heads and layers and hidden):
        return None
    vision, audio = config.get("vision_config"), config.get("audio_config")
    media_parameters = _count_vision(model_type, vision, hidden) if isinstance(vision, Mapping) else 0
    media_parameters += _count_audio(audio, hidden) if isinstance(audio, Mapping) else 0
    window, windowed = _windows(text, layers)
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    positions = text.get("max_position_embeddings")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    return ModelShape(
        architecture=named[0] if named else model_type or "this model",
        model_type=model_type,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        windowed_layers=windowed,
        window=window,
        hidden=hidden,
        vocab=int(text.get("vocab_size") or 0),
        max_positions=positions if type(positions) is int and positions > 0 else None,
        has_vision=isinstance(vision, Mapping),
        has_audio=isinstance(audio, Mapping),
        dtype=_dtype(config, text),
        parameters=_count_text(text, heads, kv_heads, head_dim, layers, hidden, tied) + media_parameters,
        media_parameters=media_parameters,
    )


def _count_text(
    text: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int, layers: int, hidden: int, tied: bool
) -> int:
    """Weights of embeddings, attention and MLPs: gated, three matrices each, dense or mixtures of experts."""
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    embeddings = int(text.get("vocab_size") or 0) * hidden * (1 if tied else 2)
    inner = int(text.get("intermediate_size") or 4 * hidden)
    experts = int(text.get("num_local_experts") or text.get("num_experts") or 0)
    if not experts:
        return embeddings + layers * (attention + 3 * hidden * inner)
    # Llama 4: an expert is as wide as intermediate_size, and one more is shared
    if "intermediate_size_mlp" in text:
        sparse = layers // int(text.get("interleave_moe_layer_step") or 1)
        per_expert, shared, dense = inner, inner, int(text["intermediate_size_mlp"])
    else:
        sparse = layers - len(text.get("mlp_only_layers") or ())
        per_expert = int(text.get("moe_intermediate_size") or inner)
        shared, dense = int(text.get("shared_expert_intermediate_size") or 0), inner
    routed = experts * (3 * hidden * per_expert + hidden) + 3 * hidden * shared
    return embeddings + layers * attention + sparse * routed + (layers - sparse) * 3 * hidden * dense


def _count_vision(model_type: str, given: Mapping[str, Any], out: int) -> int:
    """Weights of a vision transformer and of the layers that bring its output to the text model's width."""
    kind = str(given.get("model_type", model_type)).removesuffix("_vision_model").removesuffix("_vision")
    family = kind if kind in _VISION_DEFAULTS else model_type
    vision = {**_VISION_DEFAULTS.get(family, {}), **given}
    width = int(vision.get("embed_dim") or vision.get("hidden_size") or 0)
    depth = int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
    inner = int(
        vision.get("mlp_ratio", 0) * width
        if "embed_dim" in vision
        else vision.get("intermediate_size") or 4 * width
    )
    matrices = 3 if kind in _GATED_VISION or model_type in _GATED_VISION else 2
    merged = width * int(vision.get("spatial_merge_size") or 1) ** 2
    projections = 1 + len(vision.get("deepstack_visual_indexes") or ())
    return depth * (4 * width * width + matrices * width * inner) + projections * (
        merged * merged + merged * out
    )


def _count_audio(given: Mapping[str, Any], out: int) -> int:
    """Weights of an encoder built as Whisper's, two convolutions and a transformer,
    and of the layer behind it."""
    width, depth, inner, bands = (
        int(given.get(name) or 0) for name in ("d_model", "encoder_layers", "encoder_ffn_dim", "num_mel_bins")
    )
    positions = int(given.get("max_source_positions") or 0)
    convolutions = 3 * width * (bands + width)
    return convolutions + positions * width + depth * (4 * width * width + 2 * width * inner) + width * out


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """The sliding window and how many layers have one."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or text.get("use_sliding_window") is False:
        return None, 0
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    pattern = text.get("sliding_window_pattern")
    return window, layers - layers // pattern if isinstance(pattern, int) and pattern > 0 else layers


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        method = " ".join(
            str(quantized.get(key, "")) for key in ("quant_method", "quant_algo", "fmt", "format")
        ).lower()
        for mark, dtype in (
            ("fp8", "fp8"),
            ("fbgemm", "fp8"),
            ("e4m3", "fp8"),
            ("fp4", "nvfp4"),
            ("awq", "int4"),
            ("gptq", "int4"),
        ):
            if mark in method:
                return dtype
    named = (
        config.get("dtype")
        or config.get("torch_dtype")
        or text.get("dtype")
        or text.get("torch_dtype")
        or "bfloat16"
    )
    return str(named)
