"""What the recorded releases have in common. A release's own file adds, replaces and removes."""

from __future__ import annotations

from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record.release import REQUIRED, UNSAID, fields, names, unset

ARGUMENTS = names(
    "M121, S-args13, D29t",
    """
    model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision
    tokenizer_revision custom_tokenizer backend pipeline_parallel_size context_parallel_size
    moe_cluster_parallel_size moe_tensor_parallel_size moe_expert_parallel_size gpus_per_node
    enable_attention_dp
    enable_lm_head_tp_in_adp pp_partition cp_config load_format enable_lora lora_config kv_cache_config
    enable_chunked_prefill guided_decoding_backend batched_logits_processor iter_stats_max_iterations
    request_stats_max_iterations peft_cache_config scheduler_config cache_transceiver_config
    sparse_attention_config speculative_config max_batch_size max_input_len max_seq_len max_beam_width
    max_num_tokens gather_generation_logits num_postprocess_workers postprocess_tokenizer_dir reasoning_parser
    otlp_traces_endpoint return_perf_metrics perf_metrics_max_requests orchestrator_type env_overrides
    garbage_collection_gen0_threshold cuda_graph_config attention_dp_config disable_overlap_scheduler
    moe_config
    nvfp4_gemm_config attn_backend sampler_force_async_worker enable_iter_perf_stats enable_iter_req_stats
    print_iter_log batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio
    torch_compile_config
    enable_autotuner enable_layerwise_nvtx_marker enable_min_latency stream_interval
    force_dynamic_quantization
    allreduce_strategy checkpoint_loader checkpoint_format kv_connector_config mm_encoder_only
    ray_worker_extension_cls ray_placement_config disable_flashinfer_sampling max_stats_len
    """,
)

KV_CACHE: dict[str, Any] = {
    "enable_block_reuse": True,
    "max_tokens": None,
    "max_attention_window": None,
    "sink_token_length": None,
    "free_gpu_memory_fraction": 0.9,
    "host_cache_size": None,
    "cross_kv_cache_fraction": None,
    "secondary_offload_min_priority": None,
    "event_buffer_max_size": 0,
    "attention_dp_events_gather_period_ms": 5,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "use_uvm": False,
    "max_gpu_total_bytes": 0,
    "dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "tokens_per_block": 32,
}

TRANSCEIVER: dict[str, Any] = {
    "backend": None,
    "max_tokens_in_buffer": None,
    "kv_transfer_timeout_ms": None,
    "kv_transfer_sender_future_timeout_ms": 1000,
}

TORCH_COMPILE: dict[str, Any] = {
    "enable_fullgraph": True,
    "enable_inductor": False,
    "enable_piecewise_cuda_graph": False,
    "capture_num_tokens": None,
    "enable_userbuffers": True,
    "max_num_streams": 1,
}

NESTED: dict[str, dict[str, Any]] = {
    "scheduler_config": fields("capacity_scheduler_policy context_chunking_policy dynamic_batch_config"),
    "moe_config": fields(
        "backend max_num_tokens load_balancer disable_finalize_fusion use_low_precision_moe_combine"
    ),
    "attention_dp_config": fields("enable_balance timeout_iters batching_wait_iters"),
    "torch_compile_config": TORCH_COMPILE,
    "kv_connector_config": fields(
        "connector_module connector_scheduler_class connector_worker_class", connector=UNSAID
    ),
    "cuda_graph_config": fields("batch_sizes max_batch_size enable_padding"),
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "cache_transceiver_config.backend": ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI", None),
    "scheduler_config.capacity_scheduler_policy": ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
    "scheduler_config.context_chunking_policy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", None),
    "guided_decoding_backend": ("xgrammar", "llguidance", None),
    "tokenizer_mode": ("auto", "slow"),
    "orchestrator_type": ("rpc", "ray", None),
    "allreduce_strategy": (
        "AUTO",
        "NCCL",
        "UB",
        "MINLATENCY",
        "ONESHOT",
        "TWOSHOT",
        "LOWPRECISION",
        "MNNVL",
        "NCCL_SYMMETRIC",
        None,
    ),
    "kv_cache_config.mamba_ssm_cache_dtype": ("auto", "float16", "bfloat16", "float32"),
}

GENERATE_ASYNC: dict[str, Any] = {
    "inputs": REQUIRED,
    "sampling_params": None,
    "lora_request": None,
    "prompt_adapter_request": None,
    "streaming": False,
    "kv_cache_retention_config": None,
    "disaggregated_params": None,
    "trace_headers": None,
    "_postproc_params": None,
    "scheduling_params": None,
    "cache_salt": None,
}
ENCODER_ARGUMENTS: dict[str, Any] = {
    "model": REQUIRED,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "dtype": "auto",
}
ENCODER_GENERATE_ASYNC: dict[str, Any] = {"inputs": REQUIRED, "sampling_params": None}

SAMPLING: dict[str, Any] = {
    **unset("""
        end_id pad_id bad bad_token_ids stop stop_token_ids embedding_bias logits_processor best_of top_k
        top_p
        top_p_min top_p_reset_ids top_p_decay seed temperature min_tokens beam_search_diversity_rate
        repetition_penalty presence_penalty frequency_penalty length_penalty early_stopping
        no_repeat_ngram_size
        min_p beam_width_array logprobs prompt_logprobs additional_model_outputs lookahead_config
        guided_decoding
        truncate_prompt_tokens
        """),
    "max_tokens": 32,
    "include_stop_str_in_output": False,
    "apply_batched_logits_processor": False,
    "n": 1,
    "use_beam_search": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "exclude_input_from_output": True,
    "return_encoder_output": False,
    "return_perf_metrics": False,
    "ignore_eos": False,
    "detokenize": True,
    "add_special_tokens": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
GUIDED: dict[str, Any] = {
    "json": None,
    "regex": None,
    "grammar": None,
    "json_object": False,
    "structural_tag": None,
}

DISAGGREGATED = (
    "request_type",
    "first_gen_tokens",
    "ctx_request_id",
    "opaque_state",
    "draft_tokens",
    "multimodal_embedding_handles",
    "multimodal_hashes",
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
)
METHODS = (
    "generate",
    "generate_async",
    "get_stats",
    "get_stats_async",
    "get_kv_cache_events",
    "get_kv_cache_events_async",
    "shutdown",
    "llm_id",
    "tokenizer",
)

BEHAVIOURS: dict[str, tuple[Any, str]] = {
    "generate_async is a plain function": (True, "D29"),
    "result needs a running loop": (True, "S-res12"),
    "sampling params are mutated": (("end_id", "_stream_interval", "max_tokens=1 for context_only"), "D121"),
    "one output object, mutated in place": (True, "S-res12"),
    "token ids are cumulative": (True, "S-res12"),
    "stop token ids are stripped": ("the cumulative ids may shrink on the last step", "S-res12"),
    "finish reasons": (("stop", "length", "timeout", "cancelled", "not_finished"), "S-res12"),
    "context_only finishes with": ("not_finished", "S-res12"),
    "context output": ("the given parameters replaced, embedding handles left out", "M121, M29"),
    "decode output holds the first token": (True, "T-mm"),
    "decode needs the expanded prompt": (True, "T-mm"),
    "handles in generation_only": ("ValueError", "D121"),
    "events before the first prompt": ("AssertionError", "S-exe12"),
    "stats before the first prompt": ("empty", "S-exe12"),
    "iterators end at their timeout": (True, "S-res12"),
    "one iterator per engine": (True, "S-res12"),
    "after shutdown": ("RuntimeError: LLM is shutting down", "D121"),
    "fatal error": ("shutdown, then any exception that is not RequestError; others may hang", "S-exe12"),
    "RequestError": ("RuntimeError", "S-exe12"),
    "input processors raise": (
        "also NotImplementedError, KeyError, RuntimeError, OSError",
        "S-llava, S-qwen",
    ),
    "abort": ("returns at once; after the end it does nothing", "M29"),
    "logprobs": (
        "dict of token id -> Logprob(logprob, rank); 0: the chosen token only; k: top k and the chosen one",
        "T-lp",
    ),
    "transceiver": ("no backend: a disaggregated request fails", "D29"),
    "events need": (
        ("kv_cache_config.event_buffer_max_size > 0", "kv_cache_config.enable_block_reuse"),
        "D29",
    ),
    "unknown constructor key": ("ValueError", "S-llm"),
    "too few GPUs": ("RuntimeError", "S-llm"),
    "mm token ids without tokenizer": ("ValueError", "S-llm"),
    "handle opened once": ("a handle that nobody opens keeps its memory", "S-ker"),
    "end id in token_ids": ("may be the last of them", "inferred"),
    "max_tokens beyond the context": ("lowered to what fits", "S-bw"),
    "mrope handles": (
        "positions int64 [3, 1, tokens], deltas int32 [1, 1], for the expanded prompt",
        "S-qwen",
    ),
    "handles made by the caller": ("accepted: from_tensor(t).dump_to_dict(), t kept alive", "S-ker"),
    "embedding handles beside a prompt": ("the text is read, never the ids", "S-qwen, S-llava"),
    "embeddings of Llama 4": (
        ("mm_embeddings", "image_special_tokens", "image_special_token_offsets"),
        "S-l4",
    ),
}
