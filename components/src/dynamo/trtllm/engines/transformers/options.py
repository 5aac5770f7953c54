"""The engine arguments that the portable engine honours, under TensorRT-LLM's names, checked once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.engine_args import find_wrong, show

logger = logging.getLogger(__name__)

_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "moe_expert_parallel_size",
    "context_parallel_size",
)
_SAME_NAME = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "dtype", "tokens_per_block")
_OF_THE_CACHE = {
    "max_tokens": "max_kv_tokens",
    "tokens_per_block": "tokens_per_block",
    "free_gpu_memory_fraction": "memory_fraction",
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits and layout. None lets the model and the machine decide."""

    max_batch_size: int = 64
    max_num_tokens: int = 2048
    """Prompt tokens computed in one step; the running requests wait
    for no more than that between two tokens."""
    max_seq_len: int | None = None
    max_input_len: int | None = None
    tokens_per_block: int = 32
    max_kv_tokens: int | None = None
    memory_fraction: float | None = None
    dtype: str = "auto"
    chunked_prefill: bool = True
    cuda_graphs: bool = True
    """Decode as CUDA graphs where device and model allow it."""


def parse_options(args: Mapping[str, Any]) -> EngineOptions:
    """The options in `args`. Raises `StartupError` for bad values;
    keys of other engines are named in the log and ignored."""
    for dotted, value, wanted in find_wrong(args):
        raise StartupError(f"{dotted} must be {wanted}, not {show(value)}")
    graphs = args.get("cuda_graph_config", {})
    args = {key: value for key, value in args.items() if value is not None and key != "cuda_graph_config"}
    for key in _PARALLEL:
        if args.pop(key, 1) != 1:
            raise StartupError(
                f"{key} must be 1 for the portable engine: it runs on one device; use --engine tensorrt_llm"
            )
    kv_cache = {k: v for k, v in dict(args.pop("kv_cache_config", None) or {}).items() if v is not None}
    options: dict[str, Any] = {key: args.pop(key) for key in _SAME_NAME if key in args}
    options |= {ours: kv_cache.pop(theirs) for theirs, ours in _OF_THE_CACHE.items() if theirs in kv_cache}
    options["chunked_prefill"] = args.pop("enable_chunked_prefill", True)
    options["cuda_graphs"] = graphs is not None
    ignored = sorted(set(args) - {"backend", "model"}) + [
        f"kv_cache_config.{key}" for key in sorted(kv_cache)
    ]
    ignored += [f"cuda_graph_config.{key}" for key in sorted(graphs or {})]
    if ignored:
        logger.info("engine arguments that the portable engine ignores: %s", ", ".join(ignored))
    return EngineOptions(**options)
