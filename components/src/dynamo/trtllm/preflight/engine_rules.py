"""What TensorRT-LLM refuses of engine arguments that do not fit each other: its own validators across fields,
asked beforehand.

Sources: the validators in `llmapi/llm_args.py` (record keys M121, S-args13), the documentation of
`CacheTransceiverConfig` (D27, D141), and what the transceiver raises when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamo.trtllm.config import EngineKind, WorkerConfig
from dynamo.trtllm.preflight.shape import ModelShape
from dynamo.trtllm.utils.layers import find_value, origin_of

_PYTHON_BACKENDS = ("NIXL", "DEFAULT")
_TRANSCEIVER = "cache_transceiver_config"
_PIPELINED = {
    "enable_chunked_prefill": (True, False),
    "pipeline_parallel_size": (1, 1),
    "context_parallel_size": (1, 1),
    f"{_TRANSCEIVER}.kv_cache_bounce_size_mb": (0, 0),
}
"""Engine argument -> what pipelined transfer needs, and its default."""


def find_engine_faults(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    """One sentence for each pair of engine arguments that the library would refuse, or that leaves nothing
    to serve."""
    if config.engine.kind is EngineKind.TENSORRT_LLM:
        for rule in _RULES:
            yield from rule(config.engine.args, config.engine.origins)


def _runtime(args: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    backend, runtime = (
        find_value(args, f"{_TRANSCEIVER}.{name}") for name in ("backend", "transceiver_runtime")
    )
    if backend and str(runtime).upper() == "PYTHON" and str(backend).upper() not in _PYTHON_BACKENDS:
        said = _said(args, origins, f"{_TRANSCEIVER}.transceiver_runtime")
        yield (
            f"{said} moves KV caches by NIXL only, and {_said(args, origins, f'{_TRANSCEIVER}.backend')}: "
            f"set the backend to "
            "NIXL, or transceiver_runtime to CPP, on prefill and decode"
        )


def _pipelined(args: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    name = f"{_TRANSCEIVER}.enable_pipelined_transfer"
    if find_value(args, name) is not True:
        return
    for dotted, (needed, default) in _PIPELINED.items():
        value = find_value(args, dotted)
        if (default if value is None else value) != needed:
            yield f"{_said(args, origins, name)} needs {dotted} {str(needed).lower()}"
    runtime = find_value(args, f"{_TRANSCEIVER}.transceiver_runtime")
    if str(runtime).upper() == "CPP":
        yield f"{_said(args, origins, name)} needs {_TRANSCEIVER}.transceiver_runtime PYTHON"


def _disk_cache(args: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    size, path = (find_value(args, f"kv_cache_config.disk_cache_{name}") for name in ("size", "path"))
    if not size:
        return
    said = _said(args, origins, "kv_cache_config.disk_cache_size")
    if not path:
        yield f"{said} needs kv_cache_config.disk_cache_path: name a directory on a local disk"
    elif not Path(str(path)).is_dir():
        said = _said(args, origins, "kv_cache_config.disk_cache_path")
        yield f"{said} is no directory on this machine: make it first"


def _nothing_to_serve(args: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    for name in ("encode_only", "mm_encoder_only"):
        if args.get(name) is True:
            yield (
                f"{_said(args, origins, name)} leaves an engine that generates no text: remove it, and use "
                "--disaggregation-mode encode for a worker that encodes images"
            )


def _shared_weights(args: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    if str(args.get("load_format")).lower() == "gms" and find_value(args, "moe_config.load_balancer"):
        yield (
            f"{_said(args, origins, 'load_format')} cannot be used with moe_config.load_balancer, whose "
            f"weights are not "
            "shared: remove one of them"
        )


def _said(args: Mapping[str, Any], origins: Mapping[str, str], dotted: str) -> str:
    """`name value (origin)` of an engine argument."""
    return f"{dotted} {find_value(args, dotted)} ({origin_of(origins, dotted)})"


_RULES: tuple[Callable[[Mapping[str, Any], Mapping[str, str]], Iterator[str]], ...] = (
    _runtime,
    _pipelined,
    _disk_cache,
    _nothing_to_serve,
    _shared_weights,
)
