"""The engine arguments that the portable engine honours, under TensorRT-LLM's names, checked once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.errors import StartupError

logger = logging.getLogger(__name__)

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size", "context_parallel_size")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits and layout. None lets the model and the machine decide."""

    max_batch_size: int = 64
    max_num_tokens: int = 2048
    """Prompt tokens computed in one step; the running requests wait for no more than that between two tokens."""
    max_seq_len: int | None = None
    max_input_len: int | None = None
    tokens_per_block: int = 32
    max_kv_tokens: int | None = None
    memory_fraction: float | None = None
    dtype: str = "auto"
    chunked_prefill: bool = True


def parse_options(args: Mapping[str, Any]) -> EngineOptions:
    """The options in `args`. Raises `StartupError` for bad values; keys of other engines are named in the log and ignored."""
    args = {key: value for key, value in args.items() if value is not None}
    for key in _PARALLEL:
        if args.pop(key, 1) != 1:
            raise StartupError(f"{key} must be 1 for the portable engine: it runs on one device; use --engine tensorrt_llm")
    kv_cache = {k: v for k, v in dict(args.pop("kv_cache_config", None) or {}).items() if v is not None}
    limits = [key for key in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len") if key in args]
    options: dict[str, Any] = {key: _count(key, args.pop(key)) for key in limits}
    for key, ours in (("max_tokens", "max_kv_tokens"), ("tokens_per_block", "tokens_per_block")):
        if key in kv_cache:
            options[ours] = _count(f"kv_cache_config.{key}", kv_cache.pop(key))
    if "tokens_per_block" in args:
        options["tokens_per_block"] = _count("tokens_per_block", args.pop("tokens_per_block"))
    fraction = "free_gpu_memory_fraction"
    if fraction in kv_cache:
        options["memory_fraction"] = _fraction(f"kv_cache_config.{fraction}", kv_cache.pop(fraction))
    options["dtype"] = str(args.pop("dtype", "auto"))
    if options["dtype"] not in _DTYPES:
        raise StartupError(f"dtype must be one of {', '.join(_DTYPES)}, not {options['dtype']}")
    options["chunked_prefill"] = bool(args.pop("enable_chunked_prefill", True))
    ignored = sorted(set(args) - {"backend", "model"}) + [f"kv_cache_config.{key}" for key in sorted(kv_cache)]
    if ignored:
        logger.info("engine arguments that the portable engine ignores: %s", ", ".join(ignored))
    return EngineOptions(**options)


def _count(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise StartupError(f"{key} must be a whole number of at least 1, not {value!r}")
    return value


def _fraction(key: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise StartupError(f"{key} must be above 0 and at most 1, not {value!r}")
    return float(value)
