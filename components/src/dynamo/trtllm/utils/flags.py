"""The worker's own flags, as one table: spelling, environment names, kind of value, where it lands, and who has a use for it.

Only data and value conversion: it reads neither command line nor environment, and knows no rule between two flags. Dynamo's
runtime flags are not here; they come from Dynamo itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dynamo.trtllm.config import MEBIBYTE, EngineKind, Modality, Role
from dynamo.trtllm.utils import kinds
from dynamo.trtllm.utils.json_text import parse_json

ENVIRONMENT_PREFIX = "DYN_TRTLLM_"
_LONGEST_S = 1e9
"""Thirty years: beyond any wait, and within what clocks and timers take."""
TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True)
class Kind:
    """How a flag's text becomes a value. `convert` raises ValueError; `wanted` completes 'must be ...'."""

    wanted: str
    convert: Callable[[str], Any]
    metavar: str = "VALUE"
    show: Callable[[Any], str] = str


def _count(text: str) -> int:
    value = int(text)
    if not kinds.COUNT.accepts(value):
        raise ValueError
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = _above_zero(text)
    if value > _LONGEST_S:
        raise ValueError
    return value


def _mebibytes(text: str) -> int:
    return int(_size(text, MEBIBYTE) * MEBIBYTE)


def _gigabytes(text: str) -> float:
    return _size(text, 1024 * MEBIBYTE)


def _size(text: str, unit: int) -> float:
    value = _above_zero(text)
    if value * unit > kinds.LARGEST_BYTES:
        raise ValueError
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not kinds.FRACTION.accepts(value):
        raise ValueError
    return value


def _mebibytes_or_none(text: str) -> int:
    return 0 if float(text) == 0 else _mebibytes(text)


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError
    return word in TRUE_WORDS


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"(dyn://)?[^\s./]+\.[^\s./]+\.[^\s./]+", text):
        raise ValueError
    return text if text.startswith("dyn://") else f"dyn://{text}"


def _directory(text: str) -> Path:
    path = _path(text)
    if not _is_directory(path):
        raise ValueError
    return path.resolve()


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # `~someone` that nobody is
        raise ValueError from None


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or behind a directory that may not be searched
        raise ValueError from None


def _model_path(text: str) -> str:
    _is_directory(Path(text))
    return text


def _json_object(text: str) -> dict[str, Any]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _served_names(text: str) -> tuple[str, ...]:
    from dynamo.common.configuration.utils import split_served_model_names

    text.encode()  # raises ValueError for bytes of a command line that are no text
    return tuple(split_served_model_names(text))


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError
    return text


def _choice(*words: str) -> Kind:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return Kind(_one_of(words), convert, metavar="{" + ",".join(words) + "}")


def _member(members: type[Enum], aliases: Mapping[str, str] | None = None) -> Kind:
    spelled = aliases or {}
    words = [str(member.value) for member in members] + list(spelled)

    def convert(text: str) -> Enum:
        return members(spelled.get(text, text))

    return Kind(_one_of(words), convert, metavar="{" + ",".join(words) + "}", show=lambda member: str(member.value))


def _one_of(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


TEXT = Kind("a text", str)
COUNT = Kind(kinds.COUNT.wanted, _count, metavar="N")
SECONDS = Kind("a number of seconds above 0", _seconds, metavar="SECONDS")
FRACTION = Kind(kinds.FRACTION.wanted, _fraction, metavar="FRACTION")
MEBIBYTES = Kind(
    "a size in MB above 0", _mebibytes, metavar="MB", show=lambda size: f"{size / MEBIBYTE:g}"
)
MEBIBYTES_OR_NONE = Kind("a size in MB, or 0 to turn it off", _mebibytes_or_none, metavar="MB", show=MEBIBYTES.show)
GIGABYTES = Kind("a size in GB above 0", _gigabytes, metavar="GB")
TRUTH = Kind("true or false", _truth, metavar="{true,false}", show=lambda on: str(on).lower())
SWITCH = Kind("true or false", _truth, show=lambda on: str(on).lower())
"""Takes no value on the command line and has a `--no-` form; in the environment it is a truth value."""
ENDPOINT = Kind("an endpoint of the form dyn://namespace.component.endpoint", _endpoint, metavar="ENDPOINT")
DIRECTORY = Kind("a directory that exists", _directory, metavar="DIRECTORY")
FILE = Kind("a file", _path, metavar="FILE")
JSON_OBJECT = Kind("a JSON object", _json_object, metavar="JSON")

ROLES = _member(Role, {"prefill_and_decode": "agg", "pd": "agg"})
MODALITIES = _member(Modality)
ENGINES = _member(EngineKind)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag. `name` is the spelling that sentences use; `also` are other spellings of the same.

    `lands` is `layer.field` of the worker's configuration, `engine_arg` a dotted TensorRT-LLM argument; neither: a rule in
    `trtllm_utils` reads it. `roles` that have no use for it ignore it, `engines` refuse it (None: all have a use).
    """

    name: str
    kind: Kind
    help: str
    also: tuple[str, ...] = ()
    plain: str | None = None
    """Variable of the guide's launch scripts that is read when nothing else says a value."""
    lands: str | None = None
    engine_arg: str | None = None
    roles: frozenset[Role] | None = None
    engines: frozenset[EngineKind] | None = None
    in_environment: bool = True

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment names, the first that is set wins; the plain one is not among them."""
        if not self.in_environment:
            return ()
        return tuple(ENVIRONMENT_PREFIX + spelling[2:].upper().replace("-", "_") for spelling in self.spellings)


_WITH_ENCODER = frozenset({Role.AGGREGATED, Role.PREFILL})
_WITH_MEDIA = frozenset({Role.AGGREGATED, Role.PREFILL, Role.ENCODE})
_WITH_KV_CACHE = frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE})
_PORTABLE = frozenset({EngineKind.TRANSFORMERS})

_MODEL = (
    Flag(
        name="--model-path",
        also=("--model",),
        plain="MODEL_PATH",
        kind=Kind("a directory that can be looked into, a Hugging Face name, or the word demo", _model_path),
        lands="model.path",
        help="Model: a directory, a Hugging Face name, or the word demo.",
    ),
    Flag(
        name="--served-model-name",
        plain="SERVED_MODEL_NAME",
        kind=Kind("one or more names", _served_names, metavar="NAME", show=lambda names: ", ".join(names) or "the model path"),
        lands="model.served_names",
        help="Name in requests; more names, split by spaces or commas, are aliases.",
    ),
    Flag(name="--modality", plain="MODALITY", kind=MODALITIES, lands="model.modality", help="What a request may hold."),
    Flag(name="--enable-multimodal", kind=SWITCH, help="The same as --modality multimodal."),
)

_TOPOLOGY = (
    Flag(
        name="--disaggregation-mode",
        kind=ROLES,
        lands="worker.role",
        help="What this worker does; agg, pd and prefill_and_decode are one.",
    ),
    Flag(
        name="--encode-endpoint",
        plain="ENCODE_ENDPOINT",
        kind=ENDPOINT,
        lands="peers.encode_endpoint",
        roles=_WITH_ENCODER,
        help="Encode worker to call for images and embedding files, for instance dyn://dynamo.tensorrt_llm_encode.generate.",
    ),
    Flag(
        name="--encode-fallback",
        kind=SWITCH,
        lands="peers.encode_fallback",
        roles=_WITH_ENCODER,
        help="Encode here while no encode worker lives, instead of answering 503.",
    ),
    Flag(
        name="--prefill-endpoint",
        kind=ENDPOINT,
        lands="peers.prefill_endpoint",
        roles=frozenset({Role.DECODE}),
        help="Prefill workers that decode asks again when that of a request was lost; in this worker's own namespace by default.",
    ),
    Flag(
        name="--peer-timeout",
        kind=SECONDS,
        lands="peers.timeout_s",
        roles=_WITH_KV_CACHE,
        help="Longest wait for the answer of an encode or prefill worker.",
    ),
)

_ENGINE = (
    Flag(name="--engine", kind=ENGINES, lands="engine.kind", help="Adapter that serves the model."),
    Flag(
        name="--device",
        kind=Kind("auto, cpu, cuda or cuda:N", _device, metavar="{auto,cpu,cuda,cuda:N}"),
        lands="engine.device",
        engines=_PORTABLE,
        help="Device of the portable engine.",
    ),
    Flag(
        name="--torch-threads",
        kind=Kind(COUNT.wanted, _count, metavar="N", show=lambda _: "1 on CPU below 200 million parameters, else the cores"),
        lands="engine.torch_threads",
        engines=_PORTABLE,
        help="CPU threads of the portable engine.",
    ),
    Flag(
        name="--dtype",
        kind=_choice(*kinds.DTYPES),
        engine_arg="dtype",
        help="Type of weights and activations.",
    ),
    Flag(name="--tensor-parallel-size", kind=COUNT, engine_arg="tensor_parallel_size", help="GPUs that share each layer."),
    Flag(
        name="--pipeline-parallel-size",
        kind=COUNT,
        engine_arg="pipeline_parallel_size",
        help="GPUs that share the stack of layers.",
    ),
    Flag(name="--expert-parallel-size", kind=COUNT, engine_arg="moe_expert_parallel_size", help="GPUs that share the experts."),
    Flag(
        name="--enable-attention-dp",
        kind=SWITCH,
        engine_arg="enable_attention_dp",
        roles=_WITH_KV_CACHE,
        help="Attention by data parallelism instead of tensor parallelism.",
    ),
    Flag(
        name="--gpus-per-node", kind=COUNT, engine_arg="gpus_per_node", help="GPUs of one node, when more nodes make one worker."
    ),
    Flag(
        name="--kv-block-size",
        kind=COUNT,
        engine_arg="kv_cache_config.tokens_per_block",
        roles=_WITH_KV_CACHE,
        help="Tokens in a KV cache block.",
    ),
    Flag(
        name="--free-gpu-memory-fraction",
        kind=FRACTION,
        engine_arg="kv_cache_config.free_gpu_memory_fraction",
        roles=_WITH_KV_CACHE,
        help="Share of the memory left after loading that the KV cache takes.",
    ),
    Flag(name="--max-batch-size", kind=COUNT, engine_arg="max_batch_size", help="Most requests in one step."),
    Flag(name="--max-num-tokens", kind=COUNT, engine_arg="max_num_tokens", help="Most tokens in one step."),
    Flag(
        name="--max-seq-len",
        kind=COUNT,
        engine_arg="max_seq_len",
        roles=_WITH_KV_CACHE,
        help="Most tokens of prompt and output together.",
    ),
    Flag(
        name="--max-beam-width", kind=COUNT, engine_arg="max_beam_width", roles=_WITH_KV_CACHE, help="Most beams of one request."
    ),
    Flag(
        name="--guided-decoding-backend",
        kind=_choice("xgrammar", "llguidance"),
        engine_arg="guided_decoding_backend",
        roles=_WITH_KV_CACHE,
        help="Library that holds the output to a grammar.",
    ),
    Flag(
        name="--load-format",
        kind=_choice("auto", "dummy", "vision_only"),
        engine_arg="load_format",
        help="How weights are loaded.",
    ),
    Flag(
        name="--trust-remote-code",
        kind=SWITCH,
        engine_arg="trust_remote_code",
        help="Run Python code that the model's directory brings along.",
    ),
    Flag(name="--extra-engine-args", kind=FILE, help="YAML file of engine arguments under TensorRT-LLM's names."),
    Flag(
        name="--override-engine-args",
        kind=JSON_OBJECT,
        help="JSON object of engine arguments that beat every other source; changes only the keys it names. "
        "--trtllm.GROUP.KEY VALUE says one of them at a time.",
    ),
    Flag(
        name="--publish-events-and-metrics",
        kind=SWITCH,
        roles=_WITH_KV_CACHE,
        help="The same as --publish-kv-events with --publish-metrics.",
    ),
    Flag(
        name="--publish-kv-events",
        kind=SWITCH,
        lands="engine.publish_kv_events",
        roles=_WITH_KV_CACHE,
        help="Publish KV cache events for KV-aware routing.",
    ),
    Flag(
        name="--publish-metrics",
        kind=SWITCH,
        lands="engine.publish_metrics",
        roles=_WITH_KV_CACHE,
        help="Publish the engine's metrics.",
    ),
)

_MEDIA = (
    Flag(
        name="--allowed-local-media-path",
        plain="ALLOWED_LOCAL_MEDIA_PATH",
        kind=DIRECTORY,
        lands="media.allowed_local_path",
        roles=_WITH_MEDIA,
        help="Directory of embedding files; set explicitly, image files in it are served too.",
    ),
    Flag(
        name="--max-file-size-mb",
        plain="MAX_FILE_SIZE_MB",
        kind=MEBIBYTES,
        lands="media.max_file_bytes",
        roles=_WITH_MEDIA,
        help="Largest single image or embedding file.",
    ),
    Flag(name="--max-images", kind=COUNT, lands="media.max_images", roles=_WITH_MEDIA, help="Most media parts of one request."),
    Flag(
        name="--max-image-pixels",
        kind=COUNT,
        lands="media.max_image_pixels",
        roles=_WITH_MEDIA,
        help="Most pixels of one image, read from its header.",
    ),
    Flag(
        name="--image-decode-timeout",
        kind=SECONDS,
        lands="media.decode_timeout_s",
        roles=_WITH_MEDIA,
        help="Longest processor time for decoding one image; then its request is answered with a 400.",
    ),
    Flag(
        name="--max-request-media-mb",
        kind=MEBIBYTES,
        lands="media.max_request_bytes",
        roles=_WITH_MEDIA,
        help="Most media bytes of one request; at least --max-file-size-mb.",
    ),
    Flag(
        name="--media-fetch-timeout",
        kind=SECONDS,
        lands="media.fetch_timeout_s",
        roles=_WITH_MEDIA,
        help="Longest time for one download.",
    ),
    Flag(
        name="--max-media-fetches",
        kind=COUNT,
        lands="media.max_fetches",
        roles=_WITH_MEDIA,
        help="Downloads at once over all requests.",
    ),
    Flag(
        name="--max-media-fetches-per-host",
        kind=COUNT,
        lands="media.max_fetches_per_host",
        roles=_WITH_MEDIA,
        help="Downloads at once from one host, a quarter of --max-media-fetches by default. A request that has waited for its "
        "turn for --media-fetch-timeout is answered with a 504.",
    ),
    Flag(
        name="--media-cache-mb",
        kind=MEBIBYTES_OR_NONE,
        lands="media.cache_bytes",
        roles=_WITH_MEDIA,
        help="Cache of encoded or decoded media, by content; 0 turns it off.",
    ),
)

_TRANSFER = (
    Flag(
        name="--transfer-pool-mb",
        kind=MEBIBYTES,
        lands="transfer.pool_bytes",
        help="Memory registered for embeddings and KV caches on their way.",
    ),
    Flag(
        name="--transfer-ttl",
        kind=SECONDS,
        lands="transfer.time_to_live_s",
        help="How long the sender keeps what nobody fetched.",
    ),
    Flag(
        name="--transfer-through-host",
        kind=SWITCH,
        lands="transfer.through_host",
        help="Hand GPU tensors over through pinned host memory: faster where UCX has no direct path between the GPUs.",
    ),
)

_CHECK = (
    Flag(
        name="--check",
        kind=SWITCH,
        in_environment=False,
        help="Check the configuration without loading weights, print the plan and every fault, and end.",
    ),
    Flag(
        name="--against",
        kind=FILE,
        in_environment=False,
        help="With --check: engine configuration of the other side to compare with.",
    ),
    Flag(
        name="--engine-report",
        kind=SWITCH,
        in_environment=False,
        help="With --check: print the installed TensorRT-LLM's signatures beside the record.",
    ),
    Flag(name="--live", kind=SWITCH, in_environment=False, help="With --check: ask the running peers."),
    Flag(
        name="--gpu-memory-gb",
        kind=GIGABYTES,
        in_environment=False,
        help="With --check: memory of one GPU; left out, the driver is asked.",
    ),
)

_OLD = (
    Flag(name="--enable-local-indexer", kind=TRUTH, lands="runtime.enable_local_indexer", help="Keep KV events in the worker."),
    Flag(name="--store-kv", kind=_choice("etcd", "file", "mem"), in_environment=False, help="The same as --discovery-backend."),
    Flag(name="--use-nixl-connect", kind=SWITCH, in_environment=False, help="Does nothing any more."),
    Flag(
        name="--migration-limit", kind=TEXT, in_environment=False, help="Does nothing any more: it is a flag of the frontend now."
    ),
)

GROUPS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    ("Model", _MODEL),
    ("Role and peers", _TOPOLOGY),
    ("Engine", _ENGINE),
    ("Media", _MEDIA),
    ("Transfer", _TRANSFER),
    ("Check", _CHECK),
    ("Older flags", _OLD),
)
FLAGS: dict[str, Flag] = {flag.name: flag for _, flags in GROUPS for flag in flags}

OTHER_VARIABLES = frozenset({"DYN_TRTLLM_PULL_EGRESS"})
"""Variables with our prefix that are no flag's."""

NO_OPS = {
    "--use-nixl-connect": "it does nothing: transfers always go through NIXL",
    "--migration-limit": "it does nothing here: give it to the frontend",
}

_GENERATION = "it is for generating pictures and videos"
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            "--quant-algo",
            "--quant-dynamic",
            "--enable-teacache",
            "--teacache-use-ret-steps",
            "--teacache-thresh",
            "--disable-torch-compile",
            "--enable-fullgraph",
            "--enable-cuda-graph",
            "--attn-backend",
            "--dit-ulysses-size",
            "--dit-ring-size",
            "--dit-cfg-size",
            "--enable-layerwise-nvtx-marker",
            "--skip-warmup",
            "--default-height",
            "--default-width",
            "--default-num-inference-steps",
            "--default-guidance-scale",
            "--default-num-frames",
            "--default-num-images-per-prompt",
        ),
        _GENERATION,
    ),
    "--torch-dtype": "use --dtype",
    "--revision": "download the revision and give its directory as --model-path",
    "--conversation-affinity": "this worker leaves routing to the frontend",
    "--conversation-affinity-dp-rank-source": "this worker leaves routing to the frontend",
    "--frontend-decoding": "this worker fetches and decodes media itself",
    "--model-loader-extra-config": "this worker has no GPU memory service",
    "--router-mode": "set routing on the frontend",
}
"""Flags of Dynamo 1.6's own TensorRT-LLM component that mean nothing here, with what to do instead."""
