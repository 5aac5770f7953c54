"""The worker's configuration: frozen layers, one for each part, and the flags that fill them.

Every default, and every flag with its variable, kind and help, is written here once (`flag.py` says how).
`utils/` reads command line, environment and files by these declarations. Each part of the worker is handed
its own layer, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.trtllm.flag import Flag, flag
from dynamo.trtllm.roles import EngineKind, Modality, Role, default_endpoint
from dynamo.trtllm.values import (
    COUNT,
    COUNTS,
    DEVICE,
    DIRECTORY,
    DTYPES,
    ENDPOINT,
    FILE,
    FRACTION,
    GIGABYTES,
    GPUS,
    HOSTS,
    JSON_OBJECT,
    MEBIBYTE,
    MEBIBYTES,
    MEBIBYTES_OR_NONE,
    MODEL_PATH,
    NAMES,
    SECONDS,
    SWITCH,
    TEXT,
    TRUTH,
    choice,
    member,
)

__all__ = ["MEBIBYTE", "EngineKind", "Modality", "Role", "default_endpoint"]  # with what is defined here

_WITH_ENCODER = frozenset(role for role in Role if role.prefills)
_WITH_MEDIA = frozenset(role for role in Role if role.reads_media)
_WITH_KV_CACHE = frozenset(role for role in Role if role.runs_language_model)
_PORTABLE = frozenset({EngineKind.TRANSFORMERS})
_CHECK, _OLDER = "Check", "Older flags"


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the worker meets Dynamo: names, discovery, planes. Flags, variables, defaults are Dynamo's own."""

    namespace: str = "dynamo"
    endpoint: str = "dyn://dynamo.tensorrt_llm.generate"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    response_plane: str = "tcp"
    event_plane: str | None = None
    endpoint_types: tuple[str, ...] = ("chat", "completions")
    pushes_chunks: bool = True
    """False serves by Dynamo's pull path (`DYN_TRTLLM_PULL_EGRESS=1`), for comparing and for emergencies."""
    enable_local_indexer: bool = flag(
        "--enable-local-indexer", TRUTH, True, "Keep KV events in the worker.", group=_OLDER
    )
    exclude_tools_when_tool_choice_none: bool = True
    default_thinking_mode: str | None = None
    structural_tag: Mapping[str, Any] | None = None
    kv_state_endpoint: str | None = None
    """Endpoint that owns this worker's KV events; None: the serving endpoint."""
    health_check_payload: Mapping[str, Any] | None = None
    """Replaces the role's own payload for the health canary."""
    dump_config_to: str | None = None
    hands_files_over: bool = False
    """Frontends get files that this worker writes: from the same machine's disk, or from its status port."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that Dynamo's Rust side reads, to be set before joining it (None: to be unset)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is served, under which names, and how the frontend treats its text."""

    path: str = flag(
        "--model-path",
        MODEL_PATH,
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "Model: a directory, a Hugging Face name, demo or demo-audio.",
        also=("--model",),
        shared="MODEL_PATH",
    )
    served_names: tuple[str, ...] = flag(
        "--served-model-name",
        NAMES,
        (),
        "Name in requests; more names, split by spaces or commas, are aliases.",
        shared="SERVED_MODEL_NAME",
        default_text="the model path",
    )
    """The first is the model's name in requests, the rest are aliases; empty means `path`."""
    modality: Modality = flag(
        "--modality", member(Modality), Modality.TEXT, "What a request may hold.", shared="MODALITY"
    )
    custom_jinja_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def name(self) -> str:
        return self.served_names[0] if self.served_names else self.path


@dataclass(frozen=True, kw_only=True)
class VideoLimits:
    """What one clip may cost. Of its frames only the chosen ones are kept, three bytes a pixel."""

    max_duration_s: float = flag(
        "--max-video-duration", SECONDS, 1800.0, "Longest video.", roles=_WITH_MEDIA
    )
    max_frames: int = flag(
        "--max-video-frames",
        COUNT,
        128,
        "Most frames of one video that the model is shown: no more are chosen, and a request that asks for "
        "more is refused.",
        roles=_WITH_MEDIA,
    )
    max_frame_pixels: int = flag(
        "--max-video-frame-pixels", COUNT, 9_000_000, "Most pixels of one frame.", roles=_WITH_MEDIA
    )
    max_pixels: int = flag(
        "--max-video-pixels",
        COUNT,
        300_000_000,
        "Most pixels of all frames of one video that the model is shown; each takes three bytes.",
        roles=_WITH_MEDIA,
    )
    decode_timeout_s: float = flag(
        "--video-decode-timeout",
        SECONDS,
        60.0,
        "Longest processor time for opening and decoding one video; then its request is answered with a 400.",
        roles=_WITH_MEDIA,
    )


@dataclass(frozen=True, kw_only=True)
class AudioLimits:
    """What one sound may cost. Its samples take four bytes each at the model's rate."""

    max_duration_s: float = flag(
        "--max-audio-duration", SECONDS, 1800.0, "Longest sound.", roles=_WITH_MEDIA
    )
    max_channels: int = 8
    decode_timeout_s: float = flag(
        "--audio-decode-timeout",
        SECONDS,
        30.0,
        "Longest processor time for decoding one sound; then its request is answered with a 400.",
        roles=_WITH_MEDIA,
    )


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Where media may come from, and how much of it one request may bring."""

    allowed_local_path: Path = flag(
        "--allowed-local-media-path",
        DIRECTORY,
        Path("/tmp"),
        "Directory of embedding files; set explicitly, media files in it are served too.",
        shared="ALLOWED_LOCAL_MEDIA_PATH",
        roles=_WITH_MEDIA,
    )
    local_files: bool = False
    """True when `allowed_local_path` was set explicitly: only then are media files served by `file://`."""
    video: VideoLimits = VideoLimits()
    audio: AudioLimits = AudioLimits()
    allow_internal: bool = False
    """`DYN_MM_ALLOW_INTERNAL=1`: private and loopback addresses may be fetched."""
    max_file_bytes: int = flag(
        "--max-file-size-mb",
        MEBIBYTES,
        50 * MEBIBYTE,
        "Largest single media or embedding file.",
        shared="MAX_FILE_SIZE_MB",
        roles=_WITH_MEDIA,
    )
    allowed_hosts: tuple[str, ...] = flag(
        "--allowed-media-domains",
        HOSTS,
        (),
        "The only hosts that media are fetched from, checked at every redirect. "
        "example.com is that host alone, *.example.com any host below it.",
        roles=_WITH_MEDIA,
        default_text="every public host",
    )
    limits: Mapping[str, int] = flag(
        "--limit-mm-per-prompt",
        COUNTS,
        {},
        "Most items of each kind of media in one request; a JSON object says the same. 0 takes none.",
        roles=_WITH_MEDIA,
        default_text="image as --max-images, the others 1",
    )
    max_images: int = flag(
        "--max-images",
        COUNT,
        16,
        "Most images of one request, where --limit-mm-per-prompt says nothing of them.",
        roles=_WITH_MEDIA,
    )
    max_image_pixels: int = flag(
        "--max-image-pixels",
        COUNT,
        64_000_000,
        "Most pixels of one image, read from its header.",
        roles=_WITH_MEDIA,
    )
    decode_timeout_s: float = flag(
        "--image-decode-timeout",
        SECONDS,
        10.0,
        "Longest processor time for decoding one image; then its request is answered with a 400.",
        roles=_WITH_MEDIA,
    )
    max_request_bytes: int = flag(
        "--max-request-media-mb",
        MEBIBYTES,
        200 * MEBIBYTE,
        "Most media bytes of one request; at least --max-file-size-mb.",
        roles=_WITH_MEDIA,
    )
    fetch_timeout_s: float = flag(
        "--media-fetch-timeout", SECONDS, 30.0, "Longest time for one download.", roles=_WITH_MEDIA
    )
    max_fetches: int = flag(
        "--max-media-fetches", COUNT, 64, "Downloads at once over all requests.", roles=_WITH_MEDIA
    )
    max_fetches_per_host: int | None = flag(
        "--max-media-fetches-per-host",
        COUNT,
        None,
        "Downloads at once from one host, a quarter of --max-media-fetches by default. A request that has "
        "waited for its turn for --media-fetch-timeout is answered with a 504.",
        roles=_WITH_MEDIA,
    )
    """None: a quarter, so that one slow host leaves room for others."""
    cache_bytes: int = flag(
        "--media-cache-mb",
        MEBIBYTES_OR_NONE,
        256 * MEBIBYTE,
        "Cache of encoded or decoded media, by content; 0 turns it off.",
        roles=_WITH_MEDIA,
    )

    def limit_of(self, kind: str) -> int:
        """Most items of `kind` in one request."""
        return self.limits.get(kind, self.max_images if kind == "image" else 1)

    @property
    def fetches_per_host(self) -> int:
        """Downloads at once from one host."""
        return self.max_fetches_per_host or max(1, self.max_fetches // 4)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine is built with.

    `args` holds engine arguments under TensorRT-LLM's names, merged from defaults, file, environment, command
    line and overrides; `origins` says for each dotted name where its value came from.
    """

    kind: EngineKind = flag(
        "--engine", member(EngineKind), EngineKind.TENSORRT_LLM, "Adapter that serves the model."
    )
    model_path: str = ModelConfig.path
    modality: Modality = Modality.TEXT
    role: Role = Role.AGGREGATED
    device: str = flag("--device", DEVICE, "auto", "Device of the portable engine.", engines=_PORTABLE)
    torch_threads: int | None = flag(
        "--torch-threads",
        COUNT,
        None,
        "CPU threads of the portable engine.",
        engines=_PORTABLE,
        default_text="1 on CPU below 200 million parameters, else the cores",
    )
    args: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    publish_kv_events: bool = flag(
        "--publish-kv-events",
        SWITCH,
        False,
        "Publish KV cache events for KV-aware routing.",
        roles=_WITH_KV_CACHE,
    )
    publish_metrics: bool = flag(
        "--publish-metrics", SWITCH, False, "Publish the engine's metrics.", roles=_WITH_KV_CACHE
    )
    stall_timeout_s: float = 300.0
    """With requests in flight and no step of any of them for this long, TensorRT-LLM is taken for dead."""
    double_script: Mapping[str, Any] = field(default_factory=dict)
    """Delays and failures that the double plays, from `--override-engine-args '{"double": {...}}'`."""


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
        roles=_WITH_KV_CACHE,
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
        roles=_WITH_KV_CACHE,
    ),
    Flag(
        "--free-gpu-memory-fraction",
        FRACTION,
        0.9,
        "Share of the memory left after loading that the KV cache takes.",
        argument="kv_cache_config.free_gpu_memory_fraction",
        roles=_WITH_KV_CACHE,
    ),
    Flag("--max-batch-size", COUNT, None, "Most requests in one step.", argument="max_batch_size"),
    Flag("--max-num-tokens", COUNT, None, "Most tokens in one step.", argument="max_num_tokens"),
    Flag(
        "--max-seq-len",
        COUNT,
        None,
        "Most tokens of prompt and output together.",
        argument="max_seq_len",
        roles=_WITH_KV_CACHE,
    ),
    Flag(
        "--max-beam-width",
        COUNT,
        None,
        "Most beams of one request.",
        argument="max_beam_width",
        roles=_WITH_KV_CACHE,
    ),
    Flag(
        "--guided-decoding-backend",
        choice("xgrammar", "llguidance"),
        None,
        "Library that holds the output to a grammar.",
        argument="guided_decoding_backend",
        roles=_WITH_KV_CACHE,
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


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Other workers that this one calls, and how long it waits for them."""

    encode_endpoint: str | None = flag(
        "--encode-endpoint",
        ENDPOINT,
        None,
        "Encode worker to call for images and embedding files, for instance "
        "dyn://dynamo.tensorrt_llm_encode.generate.",
        shared="ENCODE_ENDPOINT",
        roles=_WITH_ENCODER,
    )
    encode_fallback: bool = flag(
        "--encode-fallback",
        SWITCH,
        False,
        "Encode in this worker while no encode worker is running, instead of answering 503.",
        roles=_WITH_ENCODER,
    )
    prefill_endpoint: str = flag(
        "--prefill-endpoint",
        ENDPOINT,
        "dyn://dynamo.prefill.generate",
        "Prefill workers that decode asks when the one that had a request was lost; in this worker's own "
        "namespace by default.",
        roles=frozenset(role for role in Role if role.asks_prefill_workers),
    )
    timeout_s: float = flag(
        "--peer-timeout",
        SECONDS,
        60.0,
        "Longest wait for the answer of an encode or prefill worker.",
        roles=_WITH_KV_CACHE,
    )


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The memory that embeddings and KV caches pass through."""

    backend: str = "nixl"
    pool_bytes: int = flag(
        "--transfer-pool-mb",
        MEBIBYTES,
        256 * MEBIBYTE,
        "Memory registered for embeddings and KV caches on their way.",
    )
    time_to_live_s: float = flag(
        "--transfer-ttl", SECONDS, 60.0, "How long the sender keeps what nobody fetched."
    )
    """A reader's deadline is at most half of it."""
    through_host: bool = flag(
        "--transfer-through-host",
        SWITCH,
        False,
        "Hand GPU tensors over through pinned host memory: faster where UCX has no direct path between the "
        "GPUs.",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """All layers of one worker."""

    role: Role = flag(
        "--disaggregation-mode",
        member(Role, {"prefill_and_decode": "agg", "pd": "agg"}),
        Role.AGGREGATED,
        "What this worker does; agg, pd and prefill_and_decode are one.",
    )
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    peers: PeerConfig = field(default_factory=PeerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `--check` looks at beside the configuration itself."""

    against: Path | None = flag(
        "--against",
        FILE,
        None,
        "With --check: engine configuration of the other side to compare with.",
        in_environment=False,
    )
    """The other side of a prefill and decode pair."""
    engine_report: bool = flag(
        "--engine-report",
        SWITCH,
        False,
        "With --check: print the installed TensorRT-LLM's signatures beside the record.",
        in_environment=False,
    )
    live: bool = flag("--live", SWITCH, False, "With --check: ask the running peers.", in_environment=False)
    gpu_memory_gb: float | None = flag(
        "--gpu-memory-gb",
        GIGABYTES,
        None,
        "With --check: memory of one GPU; left out, the driver is asked.",
        in_environment=False,
    )


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Flags that fill no part of the worker by themselves: `utils/trtllm_utils.py` makes values of them.

    None: not said.
    """

    enable_multimodal: bool | None = flag(
        "--enable-multimodal", SWITCH, None, "The same as --modality multimodal.", group="Model"
    )
    extra_engine_args: Path | None = flag(
        "--extra-engine-args", FILE, None, "YAML file of engine arguments under TensorRT-LLM's names."
    )
    override_engine_args: Mapping[str, Any] | None = flag(
        "--override-engine-args",
        JSON_OBJECT,
        None,
        "JSON object of engine arguments that beat every other source; changes only the keys it names. "
        "--trtllm.GROUP.KEY VALUE says one of them at a time.",
    )
    publish_events_and_metrics: bool | None = flag(
        "--publish-events-and-metrics",
        SWITCH,
        None,
        "The same as --publish-kv-events with --publish-metrics.",
        roles=_WITH_KV_CACHE,
    )
    check: bool | None = flag(
        "--check",
        SWITCH,
        None,
        "Check the configuration without loading weights, print the plan and every fault, and end.",
        in_environment=False,
        group=_CHECK,
    )
    store_kv: str | None = flag(
        "--store-kv",
        choice("etcd", "file", "mem"),
        None,
        "The same as --discovery-backend.",
        in_environment=False,
        group=_OLDER,
    )
    use_nixl_connect: bool | None = flag(
        "--use-nixl-connect",
        SWITCH,
        None,
        "Does nothing any more.",
        in_environment=False,
        group=_OLDER,
        no_op="it does nothing: transfers always go through NIXL",
    )
    migration_limit: str | None = flag(
        "--migration-limit",
        TEXT,
        None,
        "Does nothing any more: it is a flag of the frontend now.",
        in_environment=False,
        group=_OLDER,
        no_op="it does nothing here: give it to the frontend",
    )


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One command line: the worker to run, or to check without running it. `notes` are lines for the log."""

    config: WorkerConfig
    check: CheckOptions | None = None
    notes: tuple[str, ...] = ()
