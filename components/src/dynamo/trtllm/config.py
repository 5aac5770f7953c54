"""The worker's configuration: frozen layers, one for each part, and the rules that hold between them.

Every default is written here once. `utils/trtllm_utils.py` fills the layers from command line, environment and files; nothing
else reads the environment. Each part of the worker is handed its own layer, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20


class Role(str, Enum):
    """What this process does in its topology (`--disaggregation-mode`)."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class Modality(str, Enum):
    """What a request may hold besides text (`--modality`)."""

    TEXT = "text"
    MULTIMODAL = "multimodal"


class EngineKind(str, Enum):
    """Which adapter serves the model (`--engine`)."""

    TENSORRT_LLM = "tensorrt_llm"
    TRANSFORMERS = "transformers"
    DOUBLE = "double"


DEFAULT_ENGINE_ARGS: Mapping[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "kv_cache_config": {"tokens_per_block": 32, "free_gpu_memory_fraction": 0.9},
}
"""Engine arguments that hold when nothing else is said. What is not named here is the engine's own default."""

_COMPONENTS = {
    Role.AGGREGATED: "tensorrt_llm",
    Role.DECODE: "tensorrt_llm",
    Role.PREFILL: "prefill",
    Role.ENCODE: "tensorrt_llm_encode",
}


def default_endpoint(role: Role, namespace: str) -> str:
    """Where a worker of `role` serves when `--endpoint` does not say otherwise."""
    return f"dyn://{namespace}.{_COMPONENTS[role]}.generate"


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the worker meets Dynamo: names, discovery and planes. Dynamo's own flags, environment names and defaults."""

    namespace: str = "dynamo"
    endpoint: str = "dyn://dynamo.tensorrt_llm.generate"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    response_plane: str = "tcp"
    event_plane: str | None = None
    endpoint_types: tuple[str, ...] = ("chat", "completions")
    push_egress: bool = True
    """False serves by Dynamo's pull path (`DYN_TRTLLM_PULL_EGRESS=1`), for comparing and for emergencies."""
    enable_local_indexer: bool = True
    exclude_tools_when_tool_choice_none: bool = True
    default_thinking_mode: str | None = None
    structural_tag: Mapping[str, Any] | None = None
    kv_state_endpoint: str | None = None
    """Endpoint that owns this worker's KV events; None: the serving endpoint."""
    health_check_payload: Mapping[str, Any] | None = None
    """Replaces the role's own payload for the health canary."""
    dump_config_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is served, under which names, and how the frontend treats its text."""

    path: str = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    """A directory, a Hugging Face name, or the word `demo`."""
    served_names: tuple[str, ...] = ()
    """The first is the model's name in requests, the rest are aliases; empty means `path`."""
    modality: Modality = Modality.TEXT
    custom_jinja_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def name(self) -> str:
        return self.served_names[0] if self.served_names else self.path


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Where media may come from, and how much of it one request may bring."""

    allowed_local_path: Path = Path("/tmp")
    """Embedding files by `file://` must lie in this directory."""
    local_images: bool = False
    """True when `allowed_local_path` was set explicitly: only then are image files served by `file://`."""
    allow_internal: bool = False
    """`DYN_MM_ALLOW_INTERNAL=1`: private and loopback addresses may be fetched."""
    max_file_bytes: int = 50 * MEBIBYTE
    max_images: int = 16
    max_image_pixels: int = 64_000_000
    max_request_bytes: int = 200 * MEBIBYTE
    decode_timeout_s: float = 10.0
    """Processor time that decoding one image may take."""
    fetch_timeout_s: float = 30.0
    max_fetches: int = 64
    """Downloads at once over all requests of this process."""
    max_fetches_per_host: int | None = None
    """Those of them that come from one host; None: a quarter, so that one slow host leaves room for others."""
    cache_bytes: int = 256 * MEBIBYTE
    """Content-addressed cache of encoded or decoded media; 0 turns it off."""

    @property
    def fetches_per_host(self) -> int:
        """Downloads at once from one host."""
        return self.max_fetches_per_host or max(1, self.max_fetches // 4)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine is built with.

    `args` holds engine arguments under TensorRT-LLM's names, merged from defaults, file, environment, command line and overrides;
    `origins` says for each dotted name where its value came from.
    """

    kind: EngineKind = EngineKind.TENSORRT_LLM
    model_path: str = ModelConfig.path
    modality: Modality = Modality.TEXT
    role: Role = Role.AGGREGATED
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`; portable engine only."""
    torch_threads: int | None = None
    """None chooses: 1 on CPU for models under 200 million parameters, else the cores of the machine."""
    args: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    publish_kv_events: bool = False
    publish_metrics: bool = False
    stall_timeout_s: float = 300.0
    """Requests in flight and no step of any of them for this long: the engine is taken for dead. TensorRT-LLM only."""
    double_script: Mapping[str, Any] = field(default_factory=dict)
    """Delays and failures that the double plays, from `--override-engine-args '{"double": {...}}'`."""

    @property
    def publish_events_and_metrics(self) -> bool:
        """Whether anything at all is published (`--publish-events-and-metrics` is both)."""
        return self.publish_kv_events or self.publish_metrics


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Other workers that this one calls, and how long it waits for them."""

    encode_endpoint: str | None = None
    prefill_endpoint: str = "dyn://dynamo.prefill.generate"
    """Where decode asks again when the prefill worker of a request was lost."""
    encode_fallback: bool = False
    """Encode here while no encode worker lives, instead of answering 503."""
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The memory that embeddings and KV caches pass through."""

    backend: str = "nixl"
    pool_bytes: int = 256 * MEBIBYTE
    time_to_live_s: float = 60.0
    """How long the sender keeps what nobody has acknowledged; a reader's deadline is at most half of it."""
    through_host: bool = False
    """True: GPU tensors travel through pinned host memory on both sides."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """All layers of one worker."""

    role: Role = Role.AGGREGATED
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    peers: PeerConfig = field(default_factory=PeerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `--check` looks at beside the configuration itself."""

    against: Path | None = None
    """Engine configuration of the other side of a prefill and decode pair."""
    engine_report: bool = False
    live: bool = False
    gpu_memory_gb: float | None = None
    """Memory of one GPU for the estimate; None: ask the driver, else state an assumption."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One command line: the worker to run, or to check without running it. `notes` are for the log, one line each."""

    config: WorkerConfig
    check: CheckOptions | None = None
    notes: tuple[str, ...] = ()
