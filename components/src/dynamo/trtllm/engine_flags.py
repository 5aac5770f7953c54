"""Flags that fill engine arguments, under TensorRT-LLM's names, and the defaults of these arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.trtllm.flag import Flag
from dynamo.trtllm.roles import WITH_KV_CACHE
from dynamo.trtllm.values import COUNT, DTYPES, FRACTION, GPUS, SWITCH, choice

ENGINE_FLAGS: tuple[Flag[Any], ...] = (
    Flag("--dtype", DTYPES, None, "Type of weights and activations.", argument="dtype"),
    Flag("--tensor-parallel-size", GPUS, 1, "GPUs that share each layer.", argument="tensor_parallel_size"),
    Flag(
        "--pipeline-parallel-size",
        GPUS,
        1,
        "GPUs that share the stack of layers.",
        argument="pipeline_parallel_size",
    ),
    Flag(
        "--expert-parallel-size",
        COUNT,
        None,
        "GPUs that share the experts.",
        argument="moe_expert_parallel_size",
    ),
    Flag(
        "--enable-attention-dp",
        SWITCH,
        None,
        "Attention by data parallelism instead of tensor parallelism.",
        argument="enable_attention_dp",
        roles=WITH_KV_CACHE,
    ),
    Flag(
        "--gpus-per-node",
        COUNT,
        None,
        "GPUs of one node, when more nodes make one worker.",
        argument="gpus_per_node",
    ),
    Flag(
        "--kv-block-size",
        COUNT,
        32,
        "Tokens in a KV cache block.",
        argument="kv_cache_config.tokens_per_block",
        roles=WITH_KV_CACHE,
    ),
    Flag(
        "--free-gpu-memory-fraction",
        FRACTION,
        0.9,
        "Share of the memory left after loading that the KV cache takes.",
        argument="kv_cache_config.free_gpu_memory_fraction",
        roles=WITH_KV_CACHE,
    ),
    Flag("--max-batch-size", COUNT, None, "Most requests in one step.", argument="max_batch_size"),
    Flag("--max-num-tokens", COUNT, None, "Most tokens in one step.", argument="max_num_tokens"),
    Flag(
        "--max-seq-len",
        COUNT,
        None,
        "Most tokens of prompt and output together.",
        argument="max_seq_len",
        roles=WITH_KV_CACHE,
    ),
    Flag(
        "--max-beam-width",
        COUNT,
        None,
        "Most beams of one request.",
        argument="max_beam_width",
        roles=WITH_KV_CACHE,
    ),
    Flag(
        "--guided-decoding-backend",
        choice("xgrammar", "llguidance"),
        None,
        "Library that holds the output to a grammar.",
        argument="guided_decoding_backend",
        roles=WITH_KV_CACHE,
    ),
    Flag(
        "--load-format",
        choice("auto", "dummy", "vision_only"),
        None,
        "How weights are loaded.",
        argument="load_format",
    ),
    Flag(
        "--trust-remote-code",
        SWITCH,
        None,
        "Run Python code that the model's directory brings along.",
        argument="trust_remote_code",
    ),
)
"""Flags that fill `EngineConfig.args`, under TensorRT-LLM's names."""


def _default_engine_args() -> dict[str, Any]:
    args: dict[str, Any] = {}
    for each in ENGINE_FLAGS:
        if each.argument is not None and each.default is not None:
            section, _, name = each.argument.rpartition(".")
            (args.setdefault(section, {}) if section else args)[name] = each.default
    return args


DEFAULT_ENGINE_ARGS: Mapping[str, Any] = _default_engine_args()
"""Engine arguments that hold when nothing else is said. The others have the engine's own default."""
