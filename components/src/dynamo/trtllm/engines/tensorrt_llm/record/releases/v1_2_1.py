"""TensorRT-LLM 1.2.1. Arguments, KV cache, transceiver and calls: its rendered source."""

from __future__ import annotations

from dynamo.trtllm.engines.tensorrt_llm.record.release import Release, names
from dynamo.trtllm.engines.tensorrt_llm.record.releases import shared

RELEASE = Release(
    version="1.2.1",
    llm_arguments={
        **shared.ARGUMENTS,
        **names("M121", "sampler_type decoding_config fail_fast_on_attention_window_too_large enable_sleep"),
    },
    nested={
        **shared.NESTED,
        "kv_cache_config": {**shared.KV_CACHE, "onboard_blocks": True},
        "cache_transceiver_config": shared.TRANSCEIVER,
    },
    nested_sources={
        "kv_cache_config": "M121", "cache_transceiver_config": "M121", "torch_compile_config": "M121",
        "*": "S-args13, inferred",
    },
    choices={**shared.CHOICES, "load_format": ("auto", "dummy", "vision_only")},
    generate_async=shared.GENERATE_ASYNC,
    preprocess={},
    encoder_arguments=shared.ENCODER_ARGUMENTS,
    encoder_generate_async=shared.ENCODER_GENERATE_ASYNC,
    sampling=shared.SAMPLING,
    guided=shared.GUIDED,
    disaggregated=shared.DISAGGREGATED,
    methods=shared.METHODS,
    behaviours={
        **shared.BEHAVIOURS,
        "images with token ids": ("decoded to text and tokenized again; embeddings and uuids are "
        "lost", "M121"),
        "embeddings with text": (True, "M121"),
        "error sets finished": (False, "S-res12"),
        "mrope handles in prefill": ("written into the parameters that were passed", "M121"),
        "kv transfer failure": ("may hang without kv_transfer_timeout_ms", "D121"),
        "reuse with images in P/D": ("crashes; enable_block_reuse: false", "inferred"),
        "mm_keys in events": (False, "inferred"),
        "context_only with the overlap scheduler": ("ValueError", "S-bw"),
        "ignore_eos": ("end id -1, stop words stay", "S-bw"),
        "opaque_state": ("bytes", "D121"),
        "input processing": ("inside generate_async", "M121"),
        "images of one encoder request": ("one concatenated handle", "M121"),
        "health": ("_check_health: the executor exists and is not shut down", "M121"),
    },
    sources={
        "generate_async": "M121", "preprocess": "M121", "sampling": "M121", "disaggregated": "M121",
        "encoder": "M121", "guided": "YC", "methods": "YC", "choices": "M121",
    },
)  # fmt: skip
