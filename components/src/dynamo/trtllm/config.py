"""The worker's configuration: frozen layers, one for each part, and the flags that fill them.

Every default, and every flag with its variable, kind and help, is written once (`flag.py` says how): here, in
`engine_flags.py` where it fills an engine argument, and in `invocation.py` where it fills no part of the
worker. `utils/` reads command line, environment and files by these declarations. Each part of the worker is
handed its own layer, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.trtllm.flag import flag
from dynamo.trtllm.roles import (
    WITH_ENCODER,
    WITH_KV_CACHE,
    WITH_MEDIA,
    EngineKind,
    Modality,
    Role,
    default_endpoint,
)
from dynamo.trtllm.values import (
    COUNT,
    COUNTS,
    DEVICE,
    DIRECTORY,
    ENDPOINT,
    HOSTS,
    MEBIBYTE,
    MEBIBYTES,
    MEBIBYTES_OR_NONE,
    MODEL_PATH,
    NAMES,
    SECONDS,
    SWITCH,
    TRUTH,
    member,
)

__all__ = ["MEBIBYTE", "EngineKind", "Modality", "Role", "default_endpoint"]  # with what is defined here

_PORTABLE = frozenset({EngineKind.TRANSFORMERS})


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
        "--enable-local-indexer", TRUTH, True, "Keep KV events in the worker.", group="Older flags"
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
        "--max-video-duration", SECONDS, 1800.0, "Longest video.", roles=WITH_MEDIA
    )
    max_frames: int = flag(
        "--max-video-frames",
        COUNT,
        128,
        "Most frames of one video that the model is shown: no more are chosen, and a request that asks for "
        "more is refused.",
        roles=WITH_MEDIA,
    )
    max_frame_pixels: int = flag(
        "--max-video-frame-pixels", COUNT, 9_000_000, "Most pixels of one frame.", roles=WITH_MEDIA
    )
    max_pixels: int = flag(
        "--max-video-pixels",
        COUNT,
        300_000_000,
        "Most pixels of all frames of one video that the model is shown; each takes three bytes.",
        roles=WITH_MEDIA,
    )
    decode_timeout_s: float = flag(
        "--video-decode-timeout",
        SECONDS,
        60.0,
        "Longest processor time for opening and decoding one video; then its request is answered with a 400.",
        roles=WITH_MEDIA,
    )


@dataclass(frozen=True, kw_only=True)
class AudioLimits:
    """What one sound may cost. Its samples take four bytes each at the model's rate."""

    max_duration_s: float = flag(
        "--max-audio-duration", SECONDS, 1800.0, "Longest sound.", roles=WITH_MEDIA
    )
    max_channels: int = 8
    decode_timeout_s: float = flag(
        "--audio-decode-timeout",
        SECONDS,
        30.0,
        "Longest processor time for decoding one sound; then its request is answered with a 400.",
        roles=WITH_MEDIA,
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
        roles=WITH_MEDIA,
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
        roles=WITH_MEDIA,
    )
    allowed_hosts: tuple[str, ...] = flag(
        "--allowed-media-domains",
        HOSTS,
        (),
        "The only hosts that media are fetched from, checked at every redirect. "
        "example.com is that host alone, *.example.com any host below it.",
        roles=WITH_MEDIA,
        default_text="every public host",
    )
    limits: Mapping[str, int] = flag(
        "--limit-mm-per-prompt",
        COUNTS,
        {},
        "Most items of each kind of media in one request; a JSON object says the same. 0 takes none.",
        roles=WITH_MEDIA,
        default_text="image as --max-images, the others 1",
    )
    max_images: int = flag(
        "--max-images",
        COUNT,
        16,
        "Most images of one request, where --limit-mm-per-prompt says nothing of them.",
        roles=WITH_MEDIA,
    )
    max_image_pixels: int = flag(
        "--max-image-pixels",
        COUNT,
        64_000_000,
        "Most pixels of one image, read from its header.",
        roles=WITH_MEDIA,
    )
    decode_timeout_s: float = flag(
        "--image-decode-timeout",
        SECONDS,
        10.0,
        "Longest processor time for decoding one image; then its request is answered with a 400.",
        roles=WITH_MEDIA,
    )
    max_request_bytes: int = flag(
        "--max-request-media-mb",
        MEBIBYTES,
        200 * MEBIBYTE,
        "Most media bytes of one request; at least --max-file-size-mb.",
        roles=WITH_MEDIA,
    )
    fetch_timeout_s: float = flag(
        "--media-fetch-timeout", SECONDS, 30.0, "Longest time for one download.", roles=WITH_MEDIA
    )
    max_fetches: int = flag(
        "--max-media-fetches", COUNT, 64, "Downloads at once over all requests.", roles=WITH_MEDIA
    )
    max_fetches_per_host: int | None = flag(
        "--max-media-fetches-per-host",
        COUNT,
        None,
        "Downloads at once from one host, a quarter of --max-media-fetches by default. A request that has "
        "waited for its turn for --media-fetch-timeout is answered with a 504.",
        roles=WITH_MEDIA,
    )
    """None: a quarter, so that one slow host leaves room for others."""
    cache_bytes: int = flag(
        "--media-cache-mb",
        MEBIBYTES_OR_NONE,
        256 * MEBIBYTE,
        "Cache of encoded or decoded media, by content; 0 turns it off.",
        roles=WITH_MEDIA,
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
        roles=WITH_KV_CACHE,
    )
    publish_metrics: bool = flag(
        "--publish-metrics", SWITCH, False, "Publish the engine's metrics.", roles=WITH_KV_CACHE
    )
    stall_timeout_s: float = 300.0
    """With requests in flight and no step of any of them for this long, TensorRT-LLM is taken for dead."""
    double_script: Mapping[str, Any] = field(default_factory=dict)
    """Delays and failures that the double plays, from `--override-engine-args '{"double": {...}}'`."""


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
        roles=WITH_ENCODER,
    )
    encode_fallback: bool = flag(
        "--encode-fallback",
        SWITCH,
        False,
        "Encode in this worker while no encode worker is running, instead of answering 503.",
        roles=WITH_ENCODER,
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
        roles=WITH_KV_CACHE,
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
