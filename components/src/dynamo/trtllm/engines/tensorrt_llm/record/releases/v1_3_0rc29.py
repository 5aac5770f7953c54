"""TensorRT-LLM 1.3.0rc29, which Dynamo 1.6.1 pairs with."""

from __future__ import annotations

from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record.release import (
    MADE,
    REQUIRED,
    UNSAID,
    Release,
    fields,
    names,
    unset,
)
from dynamo.trtllm.engines.tensorrt_llm.record.releases import shared
from dynamo.trtllm.engines.tensorrt_llm.record.videos import VIDEOS_SINCE_13

ARGUMENTS = {
    **shared.ARGUMENTS,
    **names(
        "D29",
        """
        multimodal_config post_processor_hook sleep_config gms_config mx_config perf_metrics_output_dir
        """,
    ),
    **names("S-args13", "model_kwargs ray_worker_nsight_options"),
    **names(
        "D29t",
        """
        disable_mm_encoder encode_only encoder_max_batch_size encoder_max_num_tokens encoder_cuda_graph_config
        generation_config num_serve_frontends prometheus_metrics_config telemetry_config
        enable_tokenization_cache
        enable_early_first_token_response enable_energy_metrics prefill_cuda_graph_backend
        prefill_capture_num_tokens reorder_policy_config enable_resource_governor enable_return_routed_experts
        kv_cache_compression_config checkpoint_io_policy dwdp_config enable_in_graph_sampling
        enable_low_latency_host_dispatch enable_mla_skip_correction mla_skip_correction_threshold
        enable_speculative_beam_history_d2h enable_encoder_decoder_mixed_cuda_graph
        layer_wise_benchmarks_config
        use_fine_grained_sync use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm
        use_cute_dsl_blockscaling_mm
        """,
    ),
}

KV_CACHE: dict[str, Any] = {
    **shared.KV_CACHE,
    **unset("disk_cache_size disk_cache_path avg_seq_len pool_ratio kv_events_config"),
    "mamba_state_cache_interval": None,
    "use_kv_cache_manager_v2": "auto",
    "kv_cache_event_hash_algo": "auto",
    "block_reuse_config": MADE,
    "disk_prefetch_num_reqs": UNSAID,
    "iteration_stats_interval": 1,
    "mamba_state_config": MADE,
    "enable_kv_pool_rebalance": False,
    "enable_swa_scratch_reuse": False,
    "fp8_context_mla_kv_len_cap": UNSAID,
    "mamba_ssm_philox_rounds": 10,
    "mamba_ssm_stochastic_rounding": False,
    "max_util_for_resume": UNSAID,
}
TRANSCEIVER: dict[str, Any] = {
    **shared.TRANSCEIVER,
    "kv_transfer_timeout_ms": 60000,
    "transceiver_runtime": "auto",
    "kv_transfer_poll_interval_ms": 5000,
    "kv_cache_bounce_size_mb": 0,
    "enable_pipelined_transfer": False,
    "agent_bounce_buffer_enable": False,
}
NESTED: dict[str, dict[str, Any]] = {
    **shared.NESTED,
    "kv_cache_config": KV_CACHE,
    "cache_transceiver_config": TRANSCEIVER,
    "cuda_graph_config": fields(
        "mode batch_sizes max_batch_size enable_padding max_num_token num_tokens max_seq_len seq_lens"
    ),
    "scheduler_config": {
        **shared.NESTED["scheduler_config"],
        **fields("enable_prefix_aware_scheduling use_python_scheduler waiting_queue_policy"),
    },
    "attention_dp_config": {
        **shared.NESTED["attention_dp_config"],
        **fields("""
            enable_kv_cache_aware_routing kv_cache_routing_conversation_affinity
            kv_cache_routing_load_balance_weight
            """),
        "kv_cache_routing_max_sessions": 65536,
    },
    "multimodal_config": fields(
        "encoder_cache_max_bytes encoder_side_stream_max_ahead video_pruning_rate encoder_cuda_graph",
        encoder_scheduling_policy="DEFAULT",
    ),
    "telemetry_config": fields("usage_context", disabled=False),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    **shared.CHOICES,
    "backend": ("pytorch",),
    "cache_transceiver_config.transceiver_runtime": ("CPP", "PYTHON", "auto", None),
    "scheduler_config.context_chunking_policy": (
        "FIRST_COME_FIRST_SERVED",
        "EQUAL_PROGRESS",
        "FORCE_CHUNK",
        None,
    ),
    "scheduler_config.waiting_queue_policy": ("fcfs", "priority"),
    "load_format": ("auto", "dummy", "vision_only", "gms"),
    "attn_backend": ("VANILLA", "TRTLLM", "FLASHINFER", "FLASHINFER_STAR_ATTENTION"),
    "multimodal_config.encoder_scheduling_policy": ("DISABLED", "DEFAULT", "EAGER"),
    "kv_cache_config.dtype": ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_ds_mla", "nvfp4"),
    "kv_cache_config.kv_cache_event_hash_algo": ("auto", "v1_block_key", "v2_sha256", "v2_sha256_64"),
}
SAMPLING: dict[str, Any] = {
    **shared.SAMPLING,
    "prompt_ignore_length": None,
    "logprobs_mode": "raw",
    "logprobs_simple_format": False,
    "prompt_logprobs_simple_format": False,
    "return_routed_experts": False,
    "thinking_token_budget": None,
}
BEHAVIOURS: dict[str, tuple[Any, str]] = {
    **shared.BEHAVIOURS,
    "images with token ids": (
        "used as they are where the processor sets supports_token_id_mm_expansion, else decoded and "
        "tokenized again",
        "S-reg",
    ),
    "embeddings with text": (True, "S-llm"),
    "error sets finished": (True, "M29"),
    "mrope handles in prefill": ("fresh ones in the context's output", "M29"),
    "kv transfer failure": ("RequestError after kv_transfer_timeout_ms", "D27"),
    "reuse with images in P/D": ("works", "D29"),
    "mm_keys in events": (True, "T-mm"),
    "context_only with the overlap scheduler": ("allowed", "S-bw"),
    "ignore_eos": ("all stop words are dropped; an end id of -1 keeps them", "S-bw"),
    "opaque_state": ("bytes; None or empty under the Python transceiver", "dyn"),
    "input processing": ("LLM.preprocess, apart from generate_async", "S-llm"),
    "images of one encoder request": ("a handle each", "M29"),
    "request ids": ("node below 256, process below 64", "S-ids"),
    "Python transceiver": ("backend NIXL or DEFAULT only, else ValueError", "S-args13"),
    "mm_processor_kwargs": ("a dictionary, never None", "S-reg, dyn"),
    "health": ("_check_health, _executor.check_health, _executor._fatal_error", "S-llm, dyn"),
}
RELEASE = Release(
    version="1.3.0rc29",
    llm_arguments=ARGUMENTS,
    nested=NESTED,
    nested_sources={
        "kv_cache_config": "D29t, D27, S-args13",
        "cache_transceiver_config": "D29t, D27",
        "*": "D29t",
    },
    choices=CHOICES,
    generate_async={**shared.GENERATE_ASYNC, "conversation_params": None, "priority": 0.5},
    preprocess={"inputs": REQUIRED, "sampling_params": None, "disaggregated_params": None},
    encoder_arguments=shared.ENCODER_ARGUMENTS,
    encoder_generate_async=shared.ENCODER_GENERATE_ASYNC,
    sampling=SAMPLING,
    guided=shared.GUIDED,
    disaggregated=(
        *shared.DISAGGREGATED,
        "first_gen_log_probs",
        "first_gen_logits",
        "disagg_request_id",
        "ctx_dp_rank",
        "ctx_info_endpoint",
        "schedule_style",
        "ctx_usage",
    ),
    methods=(
        *shared.METHODS,
        "preprocess",
        "encode",
        "get_kv_cache_capacity",
        "get_data_transceiver_state",
        "startup_metrics",
        "disaggregated_params",
    ),
    behaviours=BEHAVIOURS,
    videos=VIDEOS_SINCE_13,
    sources={
        "generate_async": "D29",
        "preprocess": "S-llm",
        "sampling": "T-lp, D29",
        "disaggregated": "M29",
        "encoder": "M29",
        "guided": "YC",
        "methods": "D29",
        "choices": "D29t",
    },
)
