"""From a directory to a model that may serve: device, dtype, threads, weights,
processor, and the check that it computes right.

Everything here runs in the thread that owns the model.
Messages name the architecture and what is supported, never a path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dynamo.trtllm.config import EngineConfig, Modality
from dynamo.trtllm.engines.transformers.attention import ATTENTION_NAME, register
from dynamo.trtllm.engines.transformers.cache import CacheShape
from dynamo.trtllm.engines.transformers.families import FAMILIES, Family, supported_names
from dynamo.trtllm.engines.transformers.fusion import fuse
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.engines.transformers.tokens import MediaTokens
from dynamo.trtllm.engines.transformers.vision import quicken
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.model_files import architectures_of, read_model_json

SMALL_MODEL_PARAMETERS = 200_000_000
_DEFAULT_CONTEXT = 32_768
_CPU_MEMORY_FRACTION = 0.25
_CUDA_MEMORY_FRACTION = 0.8
_GROWTH = 2
"""The batch cache is copied when it grows: old and new stand side by side."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_TOWERS = ("vision_config", "audio_config")
"""Parts of a configuration that text-only models have none of."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LAYER_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and what the other modules ask about it.
    `decoder` is None where the whole model's forward has to be called."""

    model: Any
    decoder: Any
    embed: Any
    architecture: str
    family: Family | None
    """None: text only, either by model or by modality."""
    processor: Any
    tokens: Mapping[str, MediaTokens]
    """What stands for an item in a prompt, by the kinds of media that the model takes."""
    levels: int
    cache_shape: CacheShape
    layer_types: tuple[str, ...]
    """The kinds of layers that the model wants one mask each for; one kind takes its mask bare."""
    vocabulary: int
    """Rows of the embedding table."""
    logits: int
    """Tokens that can be chosen."""
    hidden_size: int
    context_length: int
    kv_tokens: int
    eos_token_ids: frozenset[int]
    stock_attention: str
    """The attention that Transformers would use, which the check at start compares with."""

    @property
    def features(self) -> dict[str, int]:
        """The id that stands for one row of features, by the kinds of media that the model takes."""
        return {kind: each.feature for kind, each in self.tokens.items()}

    @property
    def device(self) -> torch.device:
        return self.cache_shape.device

    @property
    def dtype(self) -> torch.dtype:
        return self.cache_shape.dtype


def load_model(directory: str, config: EngineConfig, options: EngineOptions) -> LoadedModel:
    """Load what `directory` holds for `config.modality`. Raises `StartupError`."""
    device = _device(config.device)
    settings = _read_config(directory)
    kind, architecture = str(settings.model_type), _architecture(settings)
    family = FAMILIES.get(kind)
    takes_media = any(hasattr(settings, name) for name in _TOWERS)
    if family is None and (config.modality is Modality.MULTIMODAL or takes_media):
        raise unsupported(architecture, "it is not in the table of multimodal families")
    register()
    _set_threads(config.torch_threads, 0, device)
    model = _load_weights(directory, family, device, _dtype(options.dtype, device), architecture)
    _set_threads(config.torch_threads, sum(p.numel() for p in model.parameters()), device)
    text_config = model.config.get_text_config()
    decoder = model.base_model.language_model if family else None
    shape, layer_types = _cache_shape(model, text_config, architecture)
    text_model = model if decoder is None else decoder
    if device.type == "cuda":
        fuse(text_model)
        if family is not None and family.grid:
            quicken(model.base_model.visual)
    stock_attention = str(text_model.config._attn_implementation)
    text_model.set_attn_implementation(ATTENTION_NAME)
    served = family if config.modality is Modality.MULTIMODAL else None
    processor = _load_processor(directory, architecture, model.config, served) if served else None
    context_length = _context_length(text_config, options, architecture)
    return LoadedModel(
        model=model,
        decoder=decoder,
        embed=model.get_input_embeddings(),
        architecture=architecture,
        family=served,
        processor=processor,
        tokens=served.tokens(model.config, processor) if served else {},
        levels=served.levels(model.config) if served else 0,
        cache_shape=shape,
        layer_types=layer_types,
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        logits=int(model.get_output_embeddings().weight.shape[0]),
        hidden_size=int(text_config.hidden_size),
        context_length=context_length,
        kv_tokens=_kv_tokens(options, shape, context_length),
        eos_token_ids=_eos_token_ids(model),
        stock_attention=stock_attention,
    )


def unsupported(architecture: str, reason: str) -> StartupError:
    """The refusal of a model, in one sentence."""
    return StartupError(
        f"{architecture} is not supported by the portable engine: {reason}; "
        f"it serves {supported_names()}, and text-only causal models with full or sliding attention"
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device must be auto, cpu, cuda or cuda:N, not {name}") from error
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device must be auto, cpu, cuda or cuda:N, not {name}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(
            f"device {name} was asked for, but this machine shows {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _dtype(name: str, device: torch.device) -> Any:
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else "auto"


def _read_config(directory: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # values of a wrong kind end in whatever their reader runs into
        name = _architecture_on_disk(directory)
        raise unsupported(name, "its configuration cannot be read") from error


def _architecture_on_disk(directory: str) -> str:
    config = read_model_json(directory)
    named = architectures_of(config)
    return named[0] if named else str(config.get("model_type") or "this model")


def _architecture(settings: Any) -> str:
    return str((getattr(settings, "architectures", None) or [settings.model_type])[0])


def _set_threads(threads: int | None, parameters: int, device: torch.device) -> None:
    """More threads than a small model can use make every step slower, most of all beside other workers."""
    if threads is None:
        threads = 1 if parameters < SMALL_MODEL_PARAMETERS or device.type != "cpu" else (os.cpu_count() or 1)
    torch.set_num_threads(threads)


def _load_weights(
    directory: str, family: Family | None, device: torch.device, dtype: Any, architecture: str
) -> Any:
    loader = transformers.AutoModelForMultimodalLM if family else transformers.AutoModelForCausalLM
    try:
        model = loader.from_pretrained(directory, dtype=dtype, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each format of weights has exceptions of its own
        raise unsupported(architecture, "its weights cannot be loaded") from error
    model = model.to(device)  # type: ignore[arg-type]
    return model.eval()


def load_tokenizer(directory: str) -> Any:
    """The model's tokenizer, for the text that its tokens stand for."""
    return transformers.AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


def _load_processor(directory: str, architecture: str, config: Any, family: Family) -> Any:
    part, noun = (
        ("image_processor", "image processor") if family.image else ("feature_extractor", "feature extractor")
    )
    try:
        auto: Any = transformers.AutoProcessor
        processor = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        reason = f"its {noun} cannot be loaded; the model directory needs its processor files"
        raise StartupError(f"{architecture}: {reason}") from error
    if not hasattr(processor, part):
        raise StartupError(
            f"{architecture}: the model directory has no {noun}; add its preprocessor_config.json"
        )
    if getattr(processor, "patch_size", 0) is None:
        processor.patch_size = config.vision_config.patch_size
    if getattr(processor, "vision_feature_select_strategy", "") is None:
        processor.vision_feature_select_strategy = config.vision_feature_select_strategy
    return processor


def _cache_shape(model: Any, text_config: Any, architecture: str) -> tuple[CacheShape, tuple[str, ...]]:
    """Found out by running three tokens with Transformers' own cache:
    whatever cannot be read from it is not served."""
    reason = "its layers keep more than keys and values of full or sliding attention"
    kinds = tuple(sorted(set(getattr(text_config, "layer_types", None) or ())))
    if not set(kinds) <= _LAYER_TYPES:
        raise unsupported(architecture, reason)
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    try:
        cache = DynamicCache(config=text_config)
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_initialized", False)]
        if (
            not layers
            or len(layers) != text_config.num_hidden_layers
            or any(type(layer) not in _LAYER_KINDS for layer in layers)
        ):
            raise unsupported(architecture, reason)
        key_shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
    except (
        TypeError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        AttributeError,
        KeyError,
        IndexError,
    ) as error:
        raise unsupported(architecture, reason) from error
    windows = {layer.sliding_window for layer in layers if layer.is_sliding}
    if len(key_shapes) != 1 or len(windows) > 1:
        raise unsupported(architecture, "its layers differ in more than full and sliding attention")
    kv_heads, key_dim, value_dim = key_shapes.pop()
    shape = CacheShape(
        layers=len(layers),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=layers[0].keys.dtype,
        device=layers[0].keys.device,
        sliding=tuple(bool(layer.is_sliding) for layer in layers),
        window=windows.pop() if windows else None,
    )
    return shape, kinds


def _context_length(text_config: Any, options: EngineOptions, architecture: str) -> int:
    most = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        # These scale positions by the longest row of a batch; up to the original length they are constant.
        original = "original_max_position_embeddings"
        most = rope.get(original) or getattr(text_config, original, None) or most
    if options.max_seq_len is None:
        return min(most or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    if most is not None and options.max_seq_len > most:
        raise StartupError(
            f"max_seq_len is {options.max_seq_len}, but {architecture} has {most} positions; "
            "lower max_seq_len"
        )
    return options.max_seq_len


def _kv_tokens(options: EngineOptions, shape: CacheShape, context_length: int) -> int:
    """How many tokens the KV cache may hold: as configured, else what memory allows,
    at most every request at full length."""
    if options.max_kv_tokens is not None:
        return max(options.max_kv_tokens, options.tokens_per_block)
    if shape.device.type == "cuda":
        free = torch.cuda.mem_get_info(shape.device)[0] * (options.memory_fraction or _CUDA_MEMORY_FRACTION)
    else:
        free = (
            os.sysconf("SC_PAGE_SIZE")
            * os.sysconf("SC_AVPHYS_PAGES")
            * (options.memory_fraction or _CPU_MEMORY_FRACTION)
        )
    tokens = min(int(free) // (shape.bytes_per_token * _GROWTH), context_length * options.max_batch_size)
    if tokens < options.tokens_per_block:
        raise StartupError(
            "no memory is left for the KV cache; use a smaller model or set kv_cache_config.max_tokens"
        )
    return tokens


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
