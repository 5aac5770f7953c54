"""What each release has: constructor keys, nested configurations, signatures and fields, each with the text
it was read in.

The double's own tables: nothing of `dynamo` is imported here. See `tests/trtllm_double/README.md` for the
sources.
"""

from __future__ import annotations

from typing import Any

REQUIRED: Any = object()
"""Default of a parameter that has none."""
OF_ITS_OWN: Any = object()
"""Default of a nested configuration that is made even if none is given (`kv_cache_config`,
`scheduler_config`)."""


def names(text: str, **defaults: Any) -> dict[str, Any]:
    """Names with None as their default, and those with another."""
    return {**dict.fromkeys(text.split()), **defaults}


# Constructor. 1.2.1: llm_args.py of its documentation (read by a colleague). rc29: LLM.html and
# developer-guide/telemetry of its documentation (exact). 1.4: TorchLlmArgs.html of 1.4.0rc4, and what its
# migration notes removed.
_COMMON = names(
    """
    tokenizer revision tokenizer_revision moe_tensor_parallel_size moe_expert_parallel_size gpus_per_node
    attention_dp_config cache_transceiver_config peft_cache_config max_seq_len guided_decoding_backend
    speculative_config lora_config cuda_graph_config torch_compile_config postprocess_tokenizer_dir
    reasoning_parser iter_stats_max_iterations request_stats_max_iterations kv_connector_config
    orchestrator_type checkpoint_loader checkpoint_format moe_cluster_parallel_size cp_config
    sparse_attention_config batched_logits_processor nvfp4_gemm_config
    ray_worker_extension_cls env_overrides otlp_traces_endpoint ray_placement_config
    """,
    model=REQUIRED, tokenizer_mode="auto", skip_tokenizer_init=False, trust_remote_code=False,
    tensor_parallel_size=1, dtype="auto",
    backend="pytorch", pipeline_parallel_size=1, context_parallel_size=1, enable_attention_dp=False,
    kv_cache_config=OF_ITS_OWN,
    scheduler_config=OF_ITS_OWN, moe_config=OF_ITS_OWN, disable_overlap_scheduler=False,
    enable_chunked_prefill=False,
    max_batch_size=2048, max_num_tokens=8192, max_input_len=1024, max_beam_width=1, enable_lora=False,
    load_format="auto",
    stream_interval=1, attn_backend="TRTLLM", allreduce_strategy="AUTO", num_postprocess_workers=0,
    enable_iter_perf_stats=False,
    enable_iter_req_stats=False, return_perf_metrics=False, perf_metrics_max_requests=0, print_iter_log=False,
    garbage_collection_gen0_threshold=20000, mm_encoder_only=False, gather_generation_logits=False,
    batch_wait_timeout_ms=0,
    batch_wait_timeout_iters=0, batch_wait_max_tokens_ratio=0, enable_autotuner=True,
    enable_layerwise_nvtx_marker=False,
    enable_min_latency=False, force_dynamic_quantization=False,
)  # fmt: skip
ARGUMENTS_121 = {
    **_COMMON,
    **names(
        "decoding_config custom_tokenizer pp_partition max_batch_size max_input_len max_beam_width",
        sampler_type="auto", fail_fast_on_attention_window_too_large=False, enable_lm_head_tp_in_adp=False,
        enable_sleep=False, disable_flashinfer_sampling=False, max_stats_len=1000,
        sampler_force_async_worker=False,
    ),
}  # fmt: skip
ARGUMENTS_RC29 = {
    **_COMMON,
    **names(
        """
        custom_tokenizer model_kwargs post_processor_hook sleep_config gms_config mx_config
        perf_metrics_output_dir
        encode_only encoder_max_batch_size encoder_max_num_tokens encoder_cuda_graph_config
        prometheus_metrics_config prefill_cuda_graph_backend prefill_capture_num_tokens reorder_policy_config
        kv_cache_compression_config checkpoint_io_policy dwdp_config mla_skip_correction_threshold
        layer_wise_benchmarks_config pp_partition
        """,
        multimodal_config=OF_ITS_OWN, telemetry_config=OF_ITS_OWN, disable_mm_encoder=False,
        generation_config="trtllm",
        num_serve_frontends=1, enable_tokenization_cache=False, enable_early_first_token_response=False,
        enable_energy_metrics=False, max_stats_len=1000, enable_resource_governor=False,
        enable_return_routed_experts=False,
        enable_in_graph_sampling=False, enable_lm_head_tp_in_adp=False,
        enable_low_latency_host_dispatch=False,
        enable_mla_skip_correction=False, enable_speculative_beam_history_d2h=False,
        enable_encoder_decoder_mixed_cuda_graph=False,
        sampler_force_async_worker=False, use_fine_grained_sync=False, use_cute_dsl_bf16_bmm=False,
        use_cute_dsl_bf16_gemm=False,
        use_cute_dsl_blockscaling_bmm=False, use_cute_dsl_blockscaling_mm=False,
    ),
}  # fmt: skip
REMOVED_IN_14 = ("enable_min_latency", "max_input_len")
"""Inferred: deprecated in 1.3 and not in the argument list of 1.4.0rc4's TorchLlmArgs.html as far as it was
read."""
ARGUMENTS_140 = {name: default for name, default in ARGUMENTS_RC29.items() if name not in REMOVED_IN_14}

# Nested configurations. KvCacheConfig and CacheTransceiverConfig: documentation of 1.2.1, 1.3.0rc27, rc29,
# 1.4.0rc1 and rc4.
_KV_CACHE = names(
    "max_tokens max_attention_window sink_token_length host_cache_size cross_kv_cache_fraction "
    "secondary_offload_min_priority",
    enable_block_reuse=True, free_gpu_memory_fraction=0.9, event_buffer_max_size=0,
    attention_dp_events_gather_period_ms=5,
    enable_partial_reuse=True, copy_on_partial_reuse=True, use_uvm=False, max_gpu_total_bytes=0, dtype="auto",
    mamba_ssm_cache_dtype="auto", tokens_per_block=32,
)  # fmt: skip
_KV_CACHE_RC29 = {
    **_KV_CACHE,
    **names(
        "kv_events_config disk_cache_size avg_seq_len pool_ratio mamba_state_config "
        "fp8_context_mla_kv_len_cap",
        use_kv_cache_manager_v2="auto", kv_cache_event_hash_algo="auto", block_reuse_config=OF_ITS_OWN,
        disk_prefetch_num_reqs=4,
        iteration_stats_interval=1, enable_kv_pool_rebalance=False, enable_swa_scratch_reuse=False,
        mamba_ssm_philox_rounds=0,
        mamba_ssm_stochastic_rounding=False, max_util_for_resume=0.95,
    ),
}  # fmt: skip
_TRANSCEIVER = names(
    "backend max_tokens_in_buffer", kv_transfer_timeout_ms=None, kv_transfer_sender_future_timeout_ms=1000
)
_TRANSCEIVER_RC29 = {
    **_TRANSCEIVER, "kv_transfer_timeout_ms": 60000, "transceiver_runtime": "auto",
    "kv_transfer_poll_interval_ms": 5000,
    "kv_cache_bounce_size_mb": 0, "enable_pipelined_transfer": False, "agent_bounce_buffer_enable": False,
}  # fmt: skip
_NESTED = {
    "SchedulerConfig": names(
        "context_chunking_policy dynamic_batch_config", capacity_scheduler_policy="GUARANTEED_NO_EVICT"
    ),
    "DynamicBatchConfig": names(
        "", enable_batch_size_tuning=REQUIRED, enable_max_num_tokens_tuning=REQUIRED,
        dynamic_batch_moving_average_window=REQUIRED
    ),
    "MoeConfig": names(
        "max_num_tokens load_balancer", backend="AUTO", disable_finalize_fusion=False,
        use_low_precision_moe_combine=False
    ),
    "AttentionDpConfig": names("", enable_balance=False, timeout_iters=50, batching_wait_iters=10),
    "TorchCompileConfig": names(
        "capture_num_tokens", enable_fullgraph=True, enable_inductor=False, enable_piecewise_cuda_graph=False,
        enable_userbuffers=True, max_num_streams=1,
    ),
    "KvCacheConnectorConfig": names(
        "connector connector_module connector_scheduler_class connector_worker_class"
    ),
    "CudaGraphConfig": names("batch_sizes max_batch_size", enable_padding=False),
}  # fmt: skip
NESTED_121: dict[str, dict[str, Any]] = {
    **_NESTED,
    "KvCacheConfig": {**_KV_CACHE, "onboard_blocks": True, "use_kv_cache_manager_v2": False},
    "CacheTransceiverConfig": _TRANSCEIVER,
}
NESTED_RC29: dict[str, dict[str, Any]] = {
    **_NESTED,
    "KvCacheConfig": _KV_CACHE_RC29,
    "BlockReuseConfig": {"policy": "all_reusable", "max_num_turns": 1},
    "CacheTransceiverConfig": _TRANSCEIVER_RC29,
    "CudaGraphConfig": names(
        "batch_sizes max_batch_size max_num_token num_tokens max_seq_len seq_lens", mode="decode",
        enable_padding=False
    ),
    "SchedulerConfig": {
        **_NESTED["SchedulerConfig"], "enable_prefix_aware_scheduling": False, "use_python_scheduler": False,
        "waiting_queue_policy": "fcfs",
    },
    "AttentionDpConfig": {
        **_NESTED["AttentionDpConfig"], "enable_kv_cache_aware_routing": False,
        "kv_cache_routing_conversation_affinity": False,
        "kv_cache_routing_load_balance_weight": 1.0, "kv_cache_routing_max_sessions": None,
    },
    "MultimodalConfig": names(
        "encoder_cache_max_bytes encoder_side_stream_max_ahead video_pruning_rate encoder_cuda_graph",
        encoder_scheduling_policy="DEFAULT",
    ),
    "TelemetryConfig": {"disabled": False, "usage_context": "unknown"},
    "SleepConfig": names("restore_modes"),
}  # fmt: skip
NESTED_140: dict[str, dict[str, Any]] = {
    **NESTED_RC29,
    "KvCacheConfig": {
        **_KV_CACHE_RC29, "host_cache_bind_to_gpu_numa_node": False, "disk_cache_path": None,
        "disk_io_threads": 0,
        "cold_tier_offload_min_priority": None,
    },
    "BlockReuseConfig": {**NESTED_RC29["BlockReuseConfig"], "swa_endpoint_rewind_tokens": 0},
    "CacheTransceiverConfig": {**_TRANSCEIVER_RC29, "transceiver_runtime": "PYTHON",
    "agent_bounce_params": None},
}  # fmt: skip
SECTIONS = {
    "kv_cache_config": "KvCacheConfig", "cache_transceiver_config": "CacheTransceiverConfig",
    "scheduler_config": "SchedulerConfig",
    "moe_config": "MoeConfig", "attention_dp_config": "AttentionDpConfig",
    "torch_compile_config": "TorchCompileConfig",
    "kv_connector_config": "KvCacheConnectorConfig", "cuda_graph_config": "CudaGraphConfig",
    "multimodal_config": "MultimodalConfig",
    "telemetry_config": "TelemetryConfig", "sleep_config": "SleepConfig",
    "dynamic_batch_config": "DynamicBatchConfig",
    "block_reuse_config": "BlockReuseConfig",
}  # fmt: skip
"""Field -> class of its value. A class that the release lacks is not there, and neither is its field."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "CacheTransceiverConfig.backend": ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI", None),
    "SchedulerConfig.context_chunking_policy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", None),
    "guided_decoding_backend": ("xgrammar", "llguidance", None),
    "tokenizer_mode": ("auto", "slow"),
    "orchestrator_type": (None, "rpc", "ray"),
}
CHOICES_121 = {
    **_CHOICES,
    "backend": ("pytorch", "_autodeploy"),
    "load_format": ("auto", "dummy", "vision_only"),
}
CHOICES_RC29: dict[str, tuple[Any, ...]] = {
    **_CHOICES,
    "backend": ("pytorch",),
    "load_format": ("auto", "dummy", "vision_only", "gms"),
    "attn_backend": ("VANILLA", "TRTLLM", "FLASHINFER"),
    "allreduce_strategy": (
        "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC",
        None,
    ),
    "generation_config": ("trtllm", "auto"),
    "CacheTransceiverConfig.transceiver_runtime": ("CPP", "PYTHON", "auto", None),
    "SchedulerConfig.context_chunking_policy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK",
    None),
    "SchedulerConfig.waiting_queue_policy": ("fcfs", "priority"),
    "MultimodalConfig.encoder_scheduling_policy": ("DISABLED", "DEFAULT", "EAGER"),
    "KvCacheConfig.dtype": ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_ds_mla", "nvfp4"),
    "KvCacheConfig.kv_cache_event_hash_algo": ("auto", "v1_block_key", "v2_sha256", "v2_sha256_64"),
    "BlockReuseConfig.policy": ("all_reusable", "per_request", "per_conversation"),
}  # fmt: skip

# Calls. 1.2.1 and rc29: `generate_async` in llmapi/llm.py of the release's documentation (exact).
GENERATE_121: dict[str, Any] = {
    "inputs": REQUIRED, "sampling_params": None, "lora_request": None, "prompt_adapter_request": None,
    "streaming": False,
    "kv_cache_retention_config": None, "disaggregated_params": None, "trace_headers": None,
    "_postproc_params": None,
    "scheduling_params": None, "cache_salt": None,
}  # fmt: skip
GENERATE_RC29: dict[str, Any] = {
    **{name: default for name, default in GENERATE_121.items() if name != "cache_salt"},
    "conversation_params": None, "cache_salt": None, "priority": 0.5,
}  # fmt: skip

# SamplingParams: sampling_params.py of 1.2.1's documentation; rc29: a 1.3.0rc copy of the documentation and
# base_worker.py.
SAMPLING_121: dict[str, Any] = names(
    """
    end_id pad_id bad bad_token_ids stop stop_token_ids embedding_bias logits_processor best_of top_k top_p
    top_p_min top_p_reset_ids top_p_decay seed temperature min_tokens beam_search_diversity_rate
    repetition_penalty presence_penalty frequency_penalty length_penalty early_stopping no_repeat_ngram_size
    min_p beam_width_array logprobs prompt_logprobs additional_model_outputs lookahead_config guided_decoding
    truncate_prompt_tokens
    """,
    max_tokens=32, include_stop_str_in_output=False, apply_batched_logits_processor=False, n=1,
    use_beam_search=False,
    return_context_logits=False, return_generation_logits=False, exclude_input_from_output=True,
    return_encoder_output=False,
    return_perf_metrics=False, ignore_eos=False, detokenize=True, add_special_tokens=True,
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
)  # fmt: skip
SAMPLING_RC29: dict[str, Any] = {
    **SAMPLING_121, "prompt_ignore_length": None, "logprobs_mode": "raw", "logprobs_simple_format": False,
    "prompt_logprobs_simple_format": False, "return_routed_experts": False, "thinking_token_budget": None,
}  # fmt: skip
GUIDED: dict[str, Any] = {
    "json": None,
    "regex": None,
    "grammar": None,
    "json_object": False,
    "structural_tag": None,
}

# DisaggregatedParams: disaggregated_params.py of 1.2.1 and rc29 (exact), DisaggregatedParams.html of
# 1.4.0rc4.
DISAGGREGATED_121 = (
    "request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens",
    "multimodal_embedding_handles",
    "multimodal_hashes", "mrope_position_ids_handle", "mrope_position_deltas_handle",
)  # fmt: skip
DISAGGREGATED_RC29 = (
    *DISAGGREGATED_121, "first_gen_log_probs", "first_gen_logits", "disagg_request_id", "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style", "ctx_usage",
)  # fmt: skip
DISAGGREGATED_140 = (
    *DISAGGREGATED_RC29, "remote_tail_start", "multimodal_positions", "multimodal_lengths", "orig_elapsed_s",
    "multimodal_input_layout",
)  # fmt: skip
