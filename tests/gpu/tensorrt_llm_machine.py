"""What the tests on a machine with TensorRT-LLM share: when to skip, and engines with a share of the GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.trtllm.config import EngineConfig, Modality, Role
from dynamo.trtllm.engines.port import EngineInfo
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine

MODEL = os.environ.get("TRTLLM_TEST_MODEL", "Qwen/Qwen3-0.6B")
VLM = os.environ.get("TRTLLM_TEST_VLM", "")
NEEDS_LIBRARY = [
    pytest.mark.tensorrt_llm,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_llm") is None,
        reason="TensorRT-LLM is not installed on this machine",
    ),
]
NEEDS_IMAGES = [
    *NEEDS_LIBRARY,
    pytest.mark.skipif(not VLM, reason="TRTLLM_TEST_VLM names no model with images"),
]
TRANSCEIVER = {
    "cache_transceiver_config": {
        "backend": "NIXL",
        "max_tokens_in_buffer": 8192,
        "kv_transfer_timeout_ms": 60000,
    }
}


def config(
    role: Role = Role.AGGREGATED, *, images: bool = False, share: float = 0.2, **args: Any
) -> EngineConfig:
    """An engine that takes `share` of the free GPU memory for its KV cache,
    without block reuse: parity must not depend on it."""
    shared = {
        "max_seq_len": 4096,
        "max_num_tokens": 4096,
        "max_batch_size": 8,
        "kv_cache_config": {"free_gpu_memory_fraction": share, "enable_block_reuse": False},
        **(TRANSCEIVER if role in (Role.PREFILL, Role.DECODE) else {}),
        **args,
    }
    modality = Modality.MULTIMODAL if images else Modality.TEXT
    return EngineConfig(model_path=VLM if images else MODEL, role=role, modality=modality, args=shared)


@asynccontextmanager
async def started(engine_config: EngineConfig) -> AsyncIterator[tuple[TensorRTLLMEngine, EngineInfo]]:
    engine = TensorRTLLMEngine(engine_config)
    try:
        yield engine, await engine.start()
    finally:
        await engine.close()
