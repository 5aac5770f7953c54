"""How much memory a worker will need and how many tokens its KV cache will hold,
from the model's dimensions. Estimates."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.preflight.shape import DTYPE_BYTES, ModelShape
from dynamo.trtllm.utils.layers import find_value

GIGABYTE = 10**9
ASSUMED_GPU_GB = 80.0


def size(count: float) -> str:
    """Bytes in words: `54.3 GB`."""
    return f"{count / GIGABYTE:.1f} GB" if count >= GIGABYTE else f"{count / 10**6:.1f} MB"


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU, and where the number comes from."""

    gigabytes: float
    source: str


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """All sizes in bytes. `kv_tokens` is an upper bound:
    what activations and graphs take is not known before loading."""

    gpus: int
    weights: int
    weights_per_gpu: int
    kv_per_token: int
    """Of one token in all layers, on all GPUs together."""
    kv_per_token_and_gpu: int
    kv_tokens: int
    fits: bool


def find_gpu_memory(given_gb: float | None) -> GpuMemory:
    """`--gpu-memory-gb`, else what the driver says of the smallest GPU, else a stated assumption."""
    if given_gb is not None:
        return GpuMemory(given_gb, "--gpu-memory-gb")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
            return GpuMemory(min(int(line) for line in answer.split()) * (1 << 20) / GIGABYTE, "the driver")
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
    return GpuMemory(ASSUMED_GPU_GB, "assumed, since no GPU is here; --gpu-memory-gb says another size")


def estimate(shape: ModelShape, engine: EngineConfig, gpu: GpuMemory) -> MemoryEstimate:
    """Weights and KV cache of one worker over its GPUs.

    Where GPUs outnumber KV heads, each keeps a whole head;
    attention data parallelism keeps all heads on each GPU.
    """
    tensor, pipeline = (
        int(engine.args.get(name) or 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")
    )
    if engine.kind is not EngineKind.TENSORRT_LLM:
        tensor = pipeline = 1
    weights = _weight_bytes(shape, engine)
    weights_per_gpu = weights // (tensor * pipeline)
    split = 1 if engine.args.get("enable_attention_dp") else tensor
    value_bytes = _kv_value_bytes(shape, engine)
    per_head = 2 * shape.head_dim * value_bytes
    heads_per_gpu = max(1, shape.kv_heads // split)
    per_gpu = (
        0
        if not engine.role.runs_language_model
        else round(heads_per_gpu * per_head * shape.layers / pipeline)
    )
    free = gpu.gigabytes * GIGABYTE - weights_per_gpu
    fraction = float(find_value(engine.args, "kv_cache_config.free_gpu_memory_fraction") or 0.9)
    tokens = int(max(0.0, free) * fraction / per_gpu) if per_gpu else 0
    limit = find_value(engine.args, "kv_cache_config.max_tokens")
    return MemoryEstimate(
        gpus=tensor * pipeline,
        weights=weights,
        weights_per_gpu=weights_per_gpu,
        kv_per_token=0
        if not engine.role.runs_language_model
        else round(shape.kv_heads * per_head * shape.layers),
        kv_per_token_and_gpu=per_gpu,
        kv_tokens=min(tokens, limit) if isinstance(limit, int) else tokens,
        fits=free > 0,
    )


def _weight_bytes(shape: ModelShape, engine: EngineConfig) -> int:
    """Size of what the role loads; a `dtype` argument changes only weights that are not quantized."""
    parameters = shape.parameters if engine.role.runs_language_model else shape.media_parameters
    dtype = str(engine.args.get("dtype") or "auto")
    stored = DTYPE_BYTES.get(shape.dtype, 2.0)
    return round(parameters * (DTYPE_BYTES.get(dtype, stored) if stored >= 2 else stored))


def _kv_value_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    named = str(find_value(engine.args, "kv_cache_config.dtype") or "auto")
    if named != "auto":
        return DTYPE_BYTES.get(named, 2.0)
    dtype = str(engine.args.get("dtype") or "auto")
    return (
        DTYPE_BYTES.get(dtype if dtype != "auto" else shape.dtype, 2.0)
        if shape.dtype in ("float32", "bfloat16", "float16")
        else 2.0
    )
