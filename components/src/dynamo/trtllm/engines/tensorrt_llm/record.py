"""What is known of TensorRT-LLM's LLM API, release by release, as data with its sources.

The preflight check, the test double and the GPU suite read this record; the adapter itself asks the installed library and uses
the record only for what a library cannot be asked (models, behaviours). Nothing here imports TensorRT-LLM. Facts were read in its
public documentation and sources, not run; `SOURCES` says where, and how near that text is to the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SOURCES: Mapping[str, str] = {
    "D29": "docs of 1.3.0rc29, built from commit c76f4a8 (exact)",
    "D29t": "docs of 1.3.0rc29, developer-guide/telemetry: every captured field of TorchLlmArgs (exact)",
    "D121": "docs of 1.2.1, built from commit 376f7e1 (exact)",
    "D27": "docs of 1.3.0rc27 (one release before)",
    "S-llm": "tensorrt_llm/llmapi/llm.py, late 1.3.0rc2x (near)",
    "S-llm12": "tensorrt_llm/llmapi/llm.py, about 1.2.0rc2 (near)",
    "S-res12": "tensorrt_llm/executor/result.py, about 1.2.0rc (near)",
    "S-exe12": "tensorrt_llm/executor/executor.py, about 1.2.0rc (near)",
    "S-ker": "tensorrt_llm/_torch/shared_tensor and tensorrt_llm/_utils, about 1.2 and 1.3.0rc (near)",
    "S-args13": "tensorrt_llm/llmapi/llm_args.py, early 1.3.0rc (near)",
    "T-mm": "the library's own test of the standalone multimodal encoder, 1.3.0rc (near)",
    "T-lp": "the library's own tests of logprobs, 1.3.0rc (near)",
    "S-bw": "tensorrt_llm/executor/base_worker.py, about 1.2 and late 1.3.0rc (near)",
    "S-l4": "tensorrt_llm/_torch/models/modeling_llama.py, 1.1 to 1.3.0rc (near): its input processor attaches embeddings",
    "YC": "the library's api_stability references (stable set)",
    "?": "not confirmed; asked of the installed library at start",
}

REQUIRED: Any = object()
"""Default of a parameter that has none."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release: names and defaults are those a caller may rely on, each group with its source."""

    version: str
    llm_arguments: Mapping[str, str]
    """Constructor keys of `LLM` -> source. A key that is not here is refused by that release."""
    nested: Mapping[str, Mapping[str, Any]]
    """Configuration object -> its fields -> default."""
    nested_sources: Mapping[str, str]
    choices: Mapping[str, tuple[Any, ...]]
    """Dotted name -> the values it accepts, spelled as the library wants them."""
    generate_async: Mapping[str, Any]
    """Parameters of `LLM.generate_async` -> default; all after `streaming` are passed by keyword."""
    encoder_arguments: Mapping[str, Any]
    encoder_generate_async: Mapping[str, Any]
    sampling: Mapping[str, Any]
    guided: Mapping[str, Any]
    disaggregated: tuple[str, ...]
    """Fields of `DisaggregatedParams`; all default to None."""
    methods: tuple[str, ...]
    """Public methods and properties of `LLM` that the adapter may use."""
    behaviours: Mapping[str, tuple[Any, str]]
    """Name of a behaviour -> its value and its source."""
    sources: Mapping[str, str] = field(default_factory=dict)


def _names(source: str, text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), source)


_SHARED_ARGUMENTS = {
    **_names("YC, S-args13, D29t", """
        model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision
        tokenizer_revision backend pipeline_parallel_size context_parallel_size moe_tensor_parallel_size
        moe_expert_parallel_size gpus_per_node enable_attention_dp attention_dp_config kv_cache_config
        cache_transceiver_config scheduler_config peft_cache_config disable_overlap_scheduler enable_chunked_prefill
        max_batch_size max_num_tokens max_seq_len max_input_len max_beam_width guided_decoding_backend speculative_config
        enable_lora lora_config load_format stream_interval cuda_graph_config moe_config attn_backend allreduce_strategy
        torch_compile_config num_postprocess_workers postprocess_tokenizer_dir reasoning_parser enable_iter_perf_stats
        enable_iter_req_stats return_perf_metrics perf_metrics_max_requests iter_stats_max_iterations
        request_stats_max_iterations print_iter_log garbage_collection_gen0_threshold kv_connector_config orchestrator_type
        mm_encoder_only checkpoint_loader checkpoint_format moe_cluster_parallel_size cp_config sparse_attention_config
        batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio enable_autotuner
        enable_layerwise_nvtx_marker enable_min_latency force_dynamic_quantization model_kwargs quant_config nvfp4_gemm_config
        ray_worker_extension_cls
        """),
}

_ARGUMENTS_121 = {
    **_SHARED_ARGUMENTS,
    **_names("S-llm12", "build_config decoding_config sampler_type fail_fast_on_attention_window_too_large"),
    **_names("?", "env_overrides otlp_traces_endpoint ray_placement_config"),
}

_ARGUMENTS_RC29 = {
    **_SHARED_ARGUMENTS,
    **_names("D29", """
        multimodal_config custom_tokenizer post_processor_hook sleep_config gms_config mx_config env_overrides
        otlp_traces_endpoint perf_metrics_output_dir
        """),
    **_names("D29t", """
        disable_mm_encoder encode_only encoder_max_batch_size encoder_max_num_tokens encoder_cuda_graph_config
        generation_config num_serve_frontends prometheus_metrics_config telemetry_config enable_tokenization_cache
        enable_early_first_token_response enable_energy_metrics max_stats_len prefill_cuda_graph_backend
        prefill_capture_num_tokens reorder_policy_config enable_resource_governor enable_return_routed_experts
        kv_cache_compression_config checkpoint_io_policy dwdp_config enable_in_graph_sampling enable_lm_head_tp_in_adp
        enable_low_latency_host_dispatch enable_mla_skip_correction mla_skip_correction_threshold
        enable_speculative_beam_history_d2h enable_encoder_decoder_mixed_cuda_graph gather_generation_logits
        layer_wise_benchmarks_config pp_partition sampler_force_async_worker use_fine_grained_sync use_cute_dsl_bf16_bmm
        use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm ray_placement_config
        """),
}

_KV_CACHE_SHARED: dict[str, Any] = {
    "enable_block_reuse": True, "max_tokens": None, "max_attention_window": None, "sink_token_length": None,
    "free_gpu_memory_fraction": 0.9, "host_cache_size": None, "cross_kv_cache_fraction": None,
    "secondary_offload_min_priority": None, "event_buffer_max_size": 0, "attention_dp_events_gather_period_ms": 5,
    "enable_partial_reuse": True, "copy_on_partial_reuse": True, "use_uvm": False, "max_gpu_total_bytes": 0, "dtype": "auto",
    "mamba_ssm_cache_dtype": "auto", "tokens_per_block": 32,
}  # fmt: skip

_KV_CACHE_RC29: dict[str, Any] = {
    **_KV_CACHE_SHARED,
    "use_kv_cache_manager_v2": "auto", "kv_cache_event_hash_algo": "auto", "kv_events_config": None, "block_reuse_config": None,
    "disk_cache_size": None, "disk_prefetch_num_reqs": REQUIRED, "avg_seq_len": None, "pool_ratio": None,
    "iteration_stats_interval": REQUIRED, "mamba_state_config": None, "enable_kv_pool_rebalance": False,
    "enable_swa_scratch_reuse": False, "fp8_context_mla_kv_len_cap": None, "mamba_ssm_philox_rounds": REQUIRED,
    "mamba_ssm_stochastic_rounding": False, "max_util_for_resume": REQUIRED,
}  # fmt: skip
_KV_CACHE_RC29 = {name: (None if value is REQUIRED else value) for name, value in _KV_CACHE_RC29.items()}

_TRANSCEIVER_121: dict[str, Any] = {
    "backend": None, "max_tokens_in_buffer": None, "kv_transfer_timeout_ms": None, "kv_transfer_sender_future_timeout_ms": 1000,
}  # fmt: skip
_TRANSCEIVER_RC29: dict[str, Any] = {
    "backend": None, "max_tokens_in_buffer": None, "kv_transfer_timeout_ms": 60000, "kv_transfer_sender_future_timeout_ms": 1000,
    "transceiver_runtime": "auto", "kv_transfer_poll_interval_ms": 5000, "kv_cache_bounce_size_mb": 0,
    "enable_pipelined_transfer": False, "agent_bounce_buffer_enable": False,
}  # fmt: skip

_NESTED_SHARED: dict[str, dict[str, Any]] = {
    "scheduler_config": dict.fromkeys(("capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config")),
    "moe_config": dict.fromkeys(
        ("backend", "max_num_tokens", "load_balancer", "disable_finalize_fusion", "use_low_precision_moe_combine")
    ),
    "attention_dp_config": dict.fromkeys(("enable_balance", "timeout_iters", "batching_wait_iters")),
    "torch_compile_config": dict.fromkeys(
        ("enable_fullgraph", "enable_inductor", "enable_piecewise_cuda_graph", "capture_num_tokens", "enable_userbuffers",
         "max_num_streams")
    ),
    "kv_connector_config": dict.fromkeys(
        ("connector", "connector_module", "connector_scheduler_class", "connector_worker_class")
    ),
}  # fmt: skip

_NESTED_121: dict[str, dict[str, Any]] = {
    **_NESTED_SHARED,
    "kv_cache_config": {**_KV_CACHE_SHARED, "onboard_blocks": True, "use_kv_cache_manager_v2": False},
    "cache_transceiver_config": _TRANSCEIVER_121,
    "cuda_graph_config": dict.fromkeys(("batch_sizes", "max_batch_size", "enable_padding")),
}
_NESTED_RC29: dict[str, dict[str, Any]] = {
    **_NESTED_SHARED,
    "kv_cache_config": _KV_CACHE_RC29,
    "cache_transceiver_config": _TRANSCEIVER_RC29,
    "cuda_graph_config": dict.fromkeys(
        ("mode", "batch_sizes", "max_batch_size", "enable_padding", "max_num_token", "num_tokens", "max_seq_len", "seq_lens")
    ),
    "scheduler_config": dict.fromkeys(
        ("capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config", "enable_prefix_aware_scheduling",
         "use_python_scheduler", "waiting_queue_policy")
    ),
    "attention_dp_config": dict.fromkeys(
        ("enable_balance", "timeout_iters", "batching_wait_iters", "enable_kv_cache_aware_routing",
         "kv_cache_routing_conversation_affinity", "kv_cache_routing_load_balance_weight")
    ),
    "multimodal_config": {
        "encoder_cache_max_bytes": None, "encoder_scheduling_policy": "DEFAULT", "encoder_side_stream_max_ahead": None,
        "video_pruning_rate": None, "encoder_cuda_graph": None,
    },
    "telemetry_config": {"disabled": False, "usage_context": "unknown"},
}  # fmt: skip

_TRANSCEIVER_BACKENDS = ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI", None)
_CHOICES_SHARED: dict[str, tuple[Any, ...]] = {
    "cache_transceiver_config.backend": _TRANSCEIVER_BACKENDS,
    "scheduler_config.capacity_scheduler_policy": ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
    "scheduler_config.context_chunking_policy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", None),
    "guided_decoding_backend": ("xgrammar", "llguidance", None),
    "tokenizer_mode": ("auto", "slow"),
    "orchestrator_type": (None, "rpc", "ray"),
}
_CHOICES_121 = {**_CHOICES_SHARED, "backend": ("pytorch", "_autodeploy"), "load_format": ("auto", "dummy", "vision_only")}
_CHOICES_RC29: dict[str, tuple[Any, ...]] = {
    **_CHOICES_SHARED,
    "backend": ("pytorch",),
    "cache_transceiver_config.transceiver_runtime": ("CPP", "PYTHON", "auto", None),
    "scheduler_config.context_chunking_policy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK", None),
    "scheduler_config.waiting_queue_policy": ("fcfs", "priority"),
    "load_format": ("auto", "dummy", "vision_only", "gms"),
    "attn_backend": ("VANILLA", "TRTLLM", "FLASHINFER"),
    "allreduce_strategy": (
        "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC", None,
    ),
    "multimodal_config.encoder_scheduling_policy": ("DISABLED", "DEFAULT", "EAGER"),
    "kv_cache_config.dtype": ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_ds_mla", "nvfp4"),
    "kv_cache_config.kv_cache_event_hash_algo": ("auto", "v1_block_key", "v2_sha256", "v2_sha256_64"),
}  # fmt: skip

_GENERATE_121: dict[str, Any] = {
    "inputs": REQUIRED, "sampling_params": None, "lora_request": None, "prompt_adapter_request": None, "streaming": False,
    "kv_cache_retention_config": None, "disaggregated_params": None, "trace_headers": None, "_postproc_params": None,
    "scheduling_params": None, "cache_salt": None,
}  # fmt: skip
_GENERATE_RC29 = {**_GENERATE_121, "conversation_params": None, "priority": 0.5}

_ENCODER: dict[str, Any] = {"model": REQUIRED, "trust_remote_code": False, "tensor_parallel_size": 1, "dtype": "auto"}

_SAMPLING_121: dict[str, Any] = {
    "end_id": None, "pad_id": None, "max_tokens": 32, "bad": None, "bad_token_ids": None, "stop": None, "stop_token_ids": None,
    "include_stop_str_in_output": False, "embedding_bias": None, "logits_processor": None, "apply_batched_logits_processor":
    False, "n": 1, "best_of": None, "use_beam_search": False, "top_k": None, "top_p": None, "top_p_min": None,
    "top_p_reset_ids": None, "top_p_decay": None, "seed": None, "temperature": None, "min_tokens": None,
    "beam_search_diversity_rate": None, "repetition_penalty": None, "presence_penalty": None, "frequency_penalty": None,
    "length_penalty": None, "early_stopping": None, "no_repeat_ngram_size": None, "min_p": None, "beam_width_array": None,
    "logprobs": None, "prompt_logprobs": None, "return_context_logits": False, "return_generation_logits": False,
    "exclude_input_from_output": True, "return_encoder_output": False, "return_perf_metrics": False, "additional_model_outputs":
    None, "lookahead_config": None, "guided_decoding": None, "ignore_eos": False, "detokenize": True, "add_special_tokens":
    True, "truncate_prompt_tokens": None, "skip_special_tokens": True, "spaces_between_special_tokens": True,
}  # fmt: skip
_SAMPLING_RC29 = {
    **_SAMPLING_121, "prompt_ignore_length": None, "logprobs_mode": "raw", "logprobs_simple_format": False,
    "prompt_logprobs_simple_format": False, "return_routed_experts": False, "thinking_token_budget": None,
}  # fmt: skip

_GUIDED: dict[str, Any] = {"json": None, "regex": None, "grammar": None, "json_object": False, "structural_tag": None}

_DISAGGREGATED_121 = (
    "request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens", "multimodal_embedding_handles",
    "multimodal_hashes", "mrope_position_ids_handle", "mrope_position_deltas_handle",
)  # fmt: skip
_DISAGGREGATED_RC29 = (
    *_DISAGGREGATED_121, "first_gen_log_probs", "first_gen_logits", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint",
    "schedule_style", "ctx_usage",
)  # fmt: skip

_METHODS_121 = (
    "generate", "generate_async", "get_stats", "get_stats_async", "get_kv_cache_events", "get_kv_cache_events_async", "shutdown",
    "llm_id", "tokenizer", "args",
)  # fmt: skip
_METHODS_RC29 = (
    *_METHODS_121, "preprocess", "encode", "get_kv_cache_capacity", "get_data_transceiver_state", "startup_metrics",
    "disaggregated_params",
)  # fmt: skip

_BEHAVIOURS_SHARED: dict[str, tuple[Any, str]] = {
    "generate_async is a plain function": (True, "D29"),
    "result needs a running loop": (True, "S-res12"),
    "sampling params are mutated": (("end_id", "_stream_interval", "max_tokens=1 for context_only"), "D121"),
    "one output object, mutated in place": (True, "S-res12"),
    "token ids are cumulative": (True, "S-res12"),
    "stop token ids are stripped": ("the cumulative ids may shrink on the last step", "S-res12"),
    "finish reasons": (("stop", "length", "timeout", "cancelled", "not_finished"), "S-res12"),
    "context_only finishes with": ("not_finished", "S-res12"),
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
    "abort": ("returns at once; a last step 'cancelled' is likely, not promised", "S-res12"),
    "logprobs": ("dict of token id -> Logprob(logprob, rank); 0: the chosen token only; k: top k and the chosen one", "T-lp"),
    "transceiver": ("no backend: a disaggregated request fails", "D29"),
    "events need": (("kv_cache_config.event_buffer_max_size > 0", "kv_cache_config.enable_block_reuse"), "D29"),
    "unknown constructor key": ("ValueError", "S-llm"),
    "too few GPUs": ("RuntimeError", "S-llm"),
    "mm token ids without tokenizer": ("ValueError", "S-llm"),
    "handle opened once": ("a handle that nobody opens keeps its memory", "S-ker"),
    "opaque_state": ("bytes", "D29"),
    "end id in token_ids": ("may be the last of them", "?"),
    "max_tokens beyond the context": ("lowered to what fits", "S-bw"),
    "mrope handles": ("int64 [3, 1, tokens] and [1, 1], for the expanded prompt", "S-ker"),
    "handles made by the caller": ("accepted: from_tensor(t).dump_to_dict(), t kept alive", "S-ker"),
}

RECORD: Mapping[str, Release] = {
    "1.2.1": Release(
        version="1.2.1",
        llm_arguments=_ARGUMENTS_121,
        nested=_NESTED_121,
        nested_sources={"cache_transceiver_config": "D121", "kv_cache_config": "S-args13", "*": "?"},
        choices=_CHOICES_121,
        generate_async=_GENERATE_121,
        encoder_arguments=_ENCODER,
        encoder_generate_async={"inputs": REQUIRED, "sampling_params": None},
        sampling=_SAMPLING_121,
        guided=_GUIDED,
        disaggregated=_DISAGGREGATED_121,
        methods=_METHODS_121,
        behaviours={
            **_BEHAVIOURS_SHARED,
            "images with token ids": ("decoded to text; embeddings and uuids are lost", "D121"),
            "embeddings with text": (True, "D121"),
            "error sets finished": (False, "S-res12"),
            "mrope handles in prefill": ("written into the parameters that were passed", "D121"),
            "kv transfer failure": ("may hang without kv_transfer_timeout_ms", "D121"),
            "reuse with images in P/D": ("crashes; enable_block_reuse: false", "?"),
            "mm_keys in events": (False, "?"),
            "context_only with the overlap scheduler": ("ValueError", "S-bw"),
        },
        sources={"generate_async": "D121", "sampling": "D121", "disaggregated": "D121", "encoder": "S-llm12", "guided": "YC",
                 "methods": "YC"},
    ),
    "1.3.0rc29": Release(
        version="1.3.0rc29",
        llm_arguments=_ARGUMENTS_RC29,
        nested=_NESTED_RC29,
        nested_sources={"*": "D29t"},
        choices=_CHOICES_RC29,
        generate_async=_GENERATE_RC29,
        encoder_arguments=_ENCODER,
        encoder_generate_async={"inputs": REQUIRED, "sampling_params": None},
        sampling=_SAMPLING_RC29,
        guided=_GUIDED,
        disaggregated=_DISAGGREGATED_RC29,
        methods=_METHODS_RC29,
        behaviours={
            **_BEHAVIOURS_SHARED,
            "images with token ids": ("used as they are, placeholders expanded", "S-llm"),
            "embeddings with text": (True, "S-llm"),
            "error sets finished": (True, "D29"),
            "mrope handles in prefill": ("written into the parameters that were passed", "S-llm"),
            "kv transfer failure": ("RequestError after kv_transfer_timeout_ms", "D27"),
            "reuse with images in P/D": ("works", "D29"),
            "mm_keys in events": (True, "T-mm"),
            "context_only with the overlap scheduler": ("allowed", "S-bw"),
        },
        sources={"generate_async": "D29", "sampling": "T-lp", "disaggregated": "D29", "encoder": "D29", "guided": "YC",
                 "methods": "D29"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ModelFacts:
    """What TensorRT-LLM does with one architecture (the first of `architectures` in the model's config.json).

    `encodes_apart`: the library can encode its images in another process (EPD). `attaches_embeddings`: it takes precomputed
    embeddings beside a text prompt. `placeholder`: what the chat template writes once per image. `around`: text that the model
    expects around a lone image. `mrope`: three-dimensional positions travel with the hand-off.
    """

    modalities: str
    encodes_apart: bool
    attaches_embeddings: bool
    source: str
    placeholder: str | None = None
    around: tuple[str, str] = ("", "")
    mrope: bool = False
    disaggregates: bool = True


_QWEN: dict[str, Any] = {
    "placeholder": "<|image_pad|>", "around": ("<|vision_start|>", "<|vision_end|>"), "mrope": True,
}  # fmt: skip

MODELS: Mapping[str, ModelFacts] = {
    "LlavaNextForConditionalGeneration": ModelFacts("LI", True, True, "D29, T-mm", "<image>"),
    "LlavaForConditionalGeneration": ModelFacts("LI", False, False, "?", "<image>"),
    "Qwen2VLForConditionalGeneration": ModelFacts("LIV", False, False, "D29", **_QWEN),
    "Qwen2_5_VLForConditionalGeneration": ModelFacts("LIV", True, False, "D29, T-mm", **_QWEN),
    "Qwen3VLForConditionalGeneration": ModelFacts("LIV", True, False, "D29, T-mm", **_QWEN),
    "Qwen3VLMoeForConditionalGeneration": ModelFacts("LIV", True, False, "D29, T-mm", **_QWEN),
    "Qwen3_5ForConditionalGeneration": ModelFacts("LIV", True, False, "D29", **_QWEN),
    "Qwen3_5MoeForConditionalGeneration": ModelFacts("LIV", True, False, "D29", **_QWEN),
    "NemotronH_Nano_VL_V2": ModelFacts("LIVA", True, False, "D29", "<image>"),
    "Llama4ForConditionalGeneration": ModelFacts("LI", False, True, "D29, S-l4", "<|image|>"),
    "Mistral3ForConditionalGeneration": ModelFacts("LI", False, False, "D29", "[IMG]"),
    "Gemma3ForConditionalGeneration": ModelFacts("LI", False, False, "D29", "<start_of_image>"),
    "Gemma4ForConditionalGeneration": ModelFacts("LIVA", False, False, "D29", disaggregates=False),
    "LlavaLlamaModel": ModelFacts("LIV", False, False, "D29", "<image>"),
    "Phi4MMForCausalLM": ModelFacts("LIA", False, False, "D29"),
}

TEXT_ONLY = ModelFacts("L", False, False, "an architecture that the table does not list takes no images")


def release_record(version: str) -> Release:
    """The record nearest to `version`: the same release, else the one of its minor line, else the newest."""
    if version in RECORD:
        return RECORD[version]
    minor = ".".join(version.split(".")[:2])
    return next((r for v, r in RECORD.items() if v.startswith(minor + ".")), RECORD["1.3.0rc29"])


def find_model_facts(architectures: list[str] | tuple[str, ...] | None) -> ModelFacts:
    """Facts of the first architecture that the table knows; `TEXT_ONLY` when it knows none."""
    return next((MODELS[name] for name in architectures or () if name in MODELS), TEXT_ONLY)
