"""Whether a prefill and a decode worker can hand KV caches to each other,
from their two engine configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo.trtllm.config import EngineKind, WorkerConfig
from dynamo.trtllm.engine_flags import DEFAULT_ENGINE_ARGS
from dynamo.trtllm.preflight.faults import longest_prompt, release_to_check
from dynamo.trtllm.preflight.shape import ModelShape
from dynamo.trtllm.utils.engine_args import drop_empty
from dynamo.trtllm.utils.layers import Layer, find_value, merge_layers
from dynamo.trtllm.utils.yaml_files import read_yaml

_MUST_AGREE = {
    "cache_transceiver_config.backend": (None, "both sides must speak the same transport"),
    "dtype": ("auto", "KV caches are handed over as they are"),
    "kv_cache_config.dtype": ("auto", "KV caches are handed over as they are"),
    "kv_cache_config.tokens_per_block": (32, "KV caches are handed over block by block"),
    "cache_transceiver_config.transceiver_runtime": (None, "both sides must run the same transceiver"),
}
"""Engine argument -> its default, and why prefill and decode must agree on it."""


def read_other(config: WorkerConfig, path: Path) -> WorkerConfig:
    """The other side of `config`: the same worker with the other role and the engine arguments of `path`."""
    role = config.role.other_half
    assert role is not None, "only prefill and decode workers have another side"
    filled, _ = drop_empty(read_yaml(path))
    args, origins = merge_layers([Layer("default", DEFAULT_ENGINE_ARGS), Layer(f"file {path.name}", filled)])
    args.pop("double", None)
    return replace(config, role=role, engine=replace(config.engine, role=role, args=args, origins=origins))


def compare(
    config: WorkerConfig, other: WorkerConfig, shape: ModelShape | None
) -> tuple[list[str], list[str]]:
    """Faults and notes about the pair."""
    prefill, decode = (config, other) if config.role.prefills else (other, config)
    faults: list[str] = []
    notes: list[str] = []
    for dotted, (default, reason) in _MUST_AGREE.items():
        ours, theirs = _value(prefill, dotted, default), _value(decode, dotted, default)
        if ours != theirs:
            faults.append(
                f"{dotted} is {ours} on prefill and {theirs} on decode: make them equal, since {reason}"
            )
    faults += _lengths(prefill, decode, shape)
    if config.engine.kind is EngineKind.TENSORRT_LLM:
        _compare_layouts(prefill, decode, faults, notes)
    return faults, notes


def _value(config: WorkerConfig, dotted: str, default: Any) -> Any:
    value = find_value(config.engine.args, dotted)
    value = default if value is None else value
    return (
        value.upper() if isinstance(value, str) and dotted.startswith("cache_transceiver_config") else value
    )


def _lengths(prefill: WorkerConfig, decode: WorkerConfig, shape: ModelShape | None) -> list[str]:
    faults = []
    longest = longest_prompt(prefill, shape)
    buffer = find_value(decode.engine.args, "cache_transceiver_config.max_tokens_in_buffer")
    if longest is not None and isinstance(buffer, int) and buffer < longest[0]:
        faults.append(
            f"cache_transceiver_config.max_tokens_in_buffer is {buffer} on decode, below prefill's "
            f"longest expanded prompt of {longest[0]} tokens by {longest[1]}: raise it to at least that"
        )
    ours, theirs = prefill.engine.args.get("max_seq_len"), decode.engine.args.get("max_seq_len")
    if isinstance(ours, int) and isinstance(theirs, int) and theirs < ours:
        faults.append(
            f"max_seq_len is {ours} on prefill and {theirs} on decode: "
            "decode must take at least what prefill hands over"
        )
    return faults


def _compare_layouts(
    prefill: WorkerConfig, decode: WorkerConfig, faults: list[str], notes: list[str]
) -> None:
    """How the two sides split layers and heads, and which of those pairs are known to fail."""
    sizes = {
        name: (_value(prefill, name, 1), _value(decode, name, 1))
        for name in ("tensor_parallel_size", "pipeline_parallel_size")
    }
    tensor, pipeline = sizes["tensor_parallel_size"], sizes["pipeline_parallel_size"]
    backends = {str(_value(side, "attn_backend", "TRTLLM")).upper() for side in (prefill, decode)}
    if tensor[0] != tensor[1]:
        if "FLASHINFER" in backends:
            faults.append(
                f"tensor_parallel_size is {tensor[0]} on prefill and {tensor[1]} on decode, "
                "and attn_backend FLASHINFER lays KV caches out by it: make them equal"
            )
        else:
            notes.append(
                f"tensor_parallel_size {tensor[0]} on prefill and {tensor[1]} on decode: "
                "KV heads are split anew on the way"
            )
    if len(backends) > 1:
        faults.append(
            "attn_backend differs between prefill and decode: make them equal, "
            "since it decides how KV caches are laid out"
        )
    if pipeline[0] > 1 and tensor[1] > 1 and pipeline[1] == 1:
        sentence = (
            "pipeline parallelism on prefill with tensor parallelism on decode hangs in TensorRT-LLM 1.2.1"
        )
        release = release_to_check()
        if release is not None and release.version == "1.2.1":
            faults.append(f"{sentence}: use the same split on both sides")
        else:
            notes.append(sentence)
    attention = [bool(_value(side, "enable_attention_dp", False)) for side in (prefill, decode)]
    if attention[0] != attention[1]:
        notes.append(
            "enable_attention_dp differs between prefill and decode: KV heads are split anew on the way"
        )
    if _value(prefill, "speculative_config", None) != _value(decode, "speculative_config", None):
        notes.append(
            "speculative_config differs between prefill and decode: draft tokens of prefill may go unused"
        )
