"""Every metric of this worker: its name, type, unit, help, labels, and the roles that have it.

README's tables are made of them. Whoever owns a number counts it and gives it out under its declaration
(`stats`); `service/metrics_page.py` shows what the owners give. So a new metric is a declaration here and the
line that counts it. Names that Dynamo has are Dynamo's (`prometheus_names`): `dynamo_component_*` in full,
because Dynamo's own workers show the same quantity under that name.

Imports nothing of the worker but the roles, so that every part may declare what it counts.
"""

from __future__ import annotations

import sys
from collections import Counter as Counting
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dynamo.trtllm.roles import Role

ROLE = "role"
"""The label that the page itself fills in; its values are those of `--disaggregation-mode`."""
_AGG, _PREFILL, _DECODE, _ENCODE = Role.AGGREGATED, Role.PREFILL, Role.DECODE, Role.ENCODE
_ALL = (_AGG, _PREFILL, _DECODE, _ENCODE)
_CONTEXT = (_AGG, _PREFILL)
_GENERATION = (_AGG, _PREFILL, _DECODE)
_MEDIA = (_AGG, _PREFILL, _ENCODE)
_SENDERS = (_PREFILL, _ENCODE)
_READERS = (_AGG, _PREFILL, _DECODE)


@dataclass(frozen=True, eq=False)
class Metric:
    """One declaration. `unit` is what a value counts; `roles` show it, where they have what it is about."""

    name: str
    unit: str
    help: str
    roles: tuple[Role, ...]
    labels: tuple[str, ...] = ()

    def of(self, *values: str) -> Series:
        """This metric with `values` for its labels, but for `role`."""
        return Series(self, values)


class Series(NamedTuple):
    """One line of the page: a metric and the values of its labels, but for `role`."""

    metric: Metric
    labels: tuple[str, ...] = ()


Readings: TypeAlias = "Mapping[Metric | Series, float]"
"""What an owner gives out: the present values, a metric without labels by itself."""


class Counter(Metric):
    """Only grows; its name ends in `_total`."""


class Gauge(Metric):
    """A value of this moment."""


class Histogram(Metric):
    """Durations in seconds, by `BUCKETS_S`."""


class Stage(str, Enum):
    """A part of a request's time in one worker: the values of the label `stage`."""

    QUEUE = "queue"
    PREPARE = "prepare"
    FETCH = "fetch"
    MEDIA_DECODE = "media_decode"
    ENCODE = "encode"
    REMOTE_ENCODE = "remote_encode"
    EMBEDDING_HANDOVER = "embedding_handover"
    PREFILL = "prefill"
    KV_HANDOVER = "kv_handover"
    REPLY = "reply"

    # Dictionaries of stages are looked up for every request, and an enumeration's own hash is Python code.
    __hash__ = str.__hash__


BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

"""Upper bounds of all histograms, in seconds."""

STAGES: Mapping[Stage, tuple[str, tuple[Role, ...]]] = {
    Stage.QUEUE: (
        "waiting for the event loop at arrival, and in the portable engine for a place in the batch",
        _ALL,
    ),
    Stage.PREPARE: ("parsing the request, and putting its media into its prompt", _ALL),
    Stage.FETCH: ("reading media from where the request's URLs lead to", _MEDIA),
    Stage.MEDIA_DECODE: ("turning files into pixels, or into the embeddings that they hold", _MEDIA),
    Stage.ENCODE: ("the engine's vision encoder, its queue included", _MEDIA),
    Stage.REMOTE_ENCODE: ("asking an encode worker, until its reply is here", _CONTEXT),
    Stage.EMBEDDING_HANDOVER: (
        "encode: copying embeddings into registered memory; the others: reading them from there",
        _MEDIA,
    ),
    Stage.PREFILL: (
        "the engine's context stage up to the first token; other engines' queue included",
        _CONTEXT,
    ),
    Stage.KV_HANDOVER: (
        "prefill: copying the KV cache into registered memory; decode: reading it, beside the first token",
        (_PREFILL, _DECODE),
    ),
    Stage.REPLY: (
        "making the one reply, or decode's first one, and giving it to Dynamo",
        (_PREFILL, _DECODE, _ENCODE),
    ),
}
"""What the stages are, and the roles that have them."""


REQUESTS = Counter(
    "dynamo_trtllm_requests_total", "requests", "Requests by how they ended.", _ALL, ("outcome",)
)
INFLIGHT_REQUESTS = Gauge(
    "dynamo_trtllm_inflight_requests", "requests", "Requests that have not ended.", _ALL
)
REQUEST_DURATION = Histogram(
    "dynamo_trtllm_request_duration_seconds",
    "seconds",
    "From a request's arrival at this worker to its end.",
    _ALL,
    (ROLE, "outcome"),
)
TIME_TO_FIRST_TOKEN = Histogram(
    "dynamo_trtllm_time_to_first_token_seconds",
    "seconds",
    "From a request's arrival at this worker to its first output.",
    _GENERATION,
    (ROLE, "outcome"),
)
STAGE_DURATION = Histogram(
    "dynamo_trtllm_stage_duration_seconds",
    "seconds",
    "Time that a request spent in a stage; where media of one request overlap in it, they count once.",
    _ALL,
    ("stage", ROLE, "outcome"),
)

ENGINE_ACTIVE = Gauge(
    "dynamo_trtllm_engine_active_requests", "requests", "Requests that the engine computes.", _GENERATION
)
ENGINE_QUEUED = Gauge(
    "dynamo_trtllm_engine_queued_requests", "requests", "Requests that wait for the engine.", _GENERATION
)
ENGINE_PROMPT_TOKENS = Counter(
    "dynamo_trtllm_engine_prompt_tokens_total", "tokens", "Prompt tokens computed.", _CONTEXT
)
ENGINE_OUTPUT_TOKENS = Counter(
    "dynamo_trtllm_engine_output_tokens_total", "tokens", "Output tokens computed.", _GENERATION
)
ENGINE_ENCODED_IMAGES = Counter(
    "dynamo_trtllm_engine_encoded_images_total", "images", "Images, videos and sounds encoded.", _MEDIA
)
ENGINE_USED_BLOCKS = Gauge(
    "dynamo_trtllm_engine_used_kv_blocks", "blocks", "KV cache blocks set aside for requests.", _GENERATION
)
ENGINE_KV_EVENTS = Counter(
    "dynamo_trtllm_engine_kv_events_total", "events", "KV cache events told to the router.", _CONTEXT
)
ENGINE_ITERATION = Gauge(
    "dynamo_trtllm_engine_iteration_seconds", "seconds", "Duration of the engine's last step.", _GENERATION
)
ENGINE_GPU_MEMORY = Gauge(
    "dynamo_trtllm_engine_gpu_memory_bytes", "bytes", "GPU memory that the engine holds.", _GENERATION
)
TOTAL_BLOCKS = Gauge(
    "dynamo_component_total_blocks", "blocks", "KV cache blocks there are.", _GENERATION, ("dp_rank",)
)
CACHE_USAGE = Gauge(
    "dynamo_component_gpu_cache_usage_percent",
    "ratio",
    "KV cache in use, from 0 to 1.",
    _GENERATION,
    ("dp_rank",),
)
CACHE_HIT_RATE = Gauge(
    "dynamo_component_kv_cache_hit_rate",
    "ratio",
    "Prompt tokens found in the KV cache, from 0 to 1.",
    _CONTEXT,
    ("dp_rank",),
)
MODEL_LOAD_TIME = Gauge(
    "dynamo_component_model_load_time_seconds", "seconds", "Time that starting the engine took.", _ALL
)

MEDIA_CACHE_HITS = Counter(
    "dynamo_trtllm_media_cache_hits_total",
    "items",
    "Media found in the cache, or being computed for another request.",
    _MEDIA,
)
MEDIA_CACHE_MISSES = Counter(
    "dynamo_trtllm_media_cache_misses_total", "items", "Media not found in the cache.", _MEDIA
)
MEDIA_CACHE_EVICTIONS = Counter(
    "dynamo_trtllm_media_cache_evictions_total", "items", "Media that left the cache for others.", _MEDIA
)
MEDIA_CACHE_BYTES = Gauge(
    "dynamo_trtllm_media_cache_current_bytes", "bytes", "Size of the media in the cache.", _MEDIA
)
MEDIA_CACHE_ENTRIES = Gauge("dynamo_trtllm_media_cache_entries", "items", "Media in the cache.", _MEDIA)
MEDIA_OPENED = Counter(
    "dynamo_trtllm_media_opened_total", "files", "Videos and sounds that were opened.", _MEDIA, ("kind",)
)
MEDIA_DECODING = Gauge(
    "dynamo_trtllm_media_decoding_images",
    "files",
    "Images being decoded, `small` or `large`, and `clips`: videos and sounds. Waiting ones do not count.",
    _MEDIA,
    ("size",),
)
ENCODE_RETRIES = Counter(
    "dynamo_trtllm_encode_retries_total",
    "calls",
    "Items asked of a second encode worker after the first one failed.",
    _CONTEXT,
)
INFLIGHT_ENCODE_CALLS = Gauge(
    "dynamo_trtllm_inflight_encode_calls", "calls", "Calls to encode workers without an answer.", _CONTEXT
)
PREFILL_RETRIES = Counter(
    "dynamo_trtllm_prefill_retries_total",
    "requests",
    "Requests prefilled again because their KV cache was lost.",
    (_DECODE,),
)

TRANSFER_OFFERS = Counter(
    "dynamo_trtllm_transfer_offers_total", "hand-overs", "Hand-overs offered to other workers.", _SENDERS
)
TRANSFER_OFFERED_BYTES = Counter(
    "dynamo_trtllm_transfer_offered_bytes_total", "bytes", "Size of what was offered.", _SENDERS
)
TRANSFER_ACKNOWLEDGED = Counter(
    "dynamo_trtllm_transfer_acknowledged_total",
    "hand-overs",
    "Offers that a reader has read or given back.",
    _SENDERS,
)
TRANSFER_EXPIRED = Counter(
    "dynamo_trtllm_transfer_expired_total", "hand-overs", "Offers that nobody read in time.", _SENDERS
)
TRANSFER_OPEN_OFFERS = Gauge(
    "dynamo_trtllm_transfer_open_offers", "hand-overs", "Offers that nobody has read yet.", _SENDERS
)
TRANSFER_QUARANTINED = Gauge(
    "dynamo_trtllm_transfer_quarantined_segments",
    "hand-overs",
    "Expired offers whose memory a reader may still read.",
    _SENDERS,
)
TRANSFER_FETCHES = Counter(
    "dynamo_trtllm_transfer_fetches_total", "hand-overs", "Hand-overs read from other workers.", _READERS
)
TRANSFER_FETCHED_BYTES = Counter(
    "dynamo_trtllm_transfer_fetched_bytes_total", "bytes", "Size of what was read.", _READERS
)
TRANSFER_FAILURES = Counter(
    "dynamo_trtllm_transfer_failures_total", "hand-overs", "Reads that failed.", _READERS
)
TRANSFER_RETRIES = Counter(
    "dynamo_trtllm_transfer_retries_total", "reads", "Reads that were tried again.", _READERS
)
TRANSFER_READS = Gauge(
    "dynamo_trtllm_transfer_reads_in_flight", "reads", "Reads that have not ended.", _READERS
)
TRANSFER_LOST_READS = Gauge(
    "dynamo_trtllm_transfer_lost_reads",
    "reads",
    "Reads that could not be stopped; their memory stays out of use.",
    _READERS,
)
TRANSFER_WAITING = Gauge(
    "dynamo_trtllm_transfer_waiting", "hand-overs", "Offers and reads that wait for memory.", _ALL
)
TRANSFER_OWN_REGISTRATIONS = Gauge(
    "dynamo_trtllm_transfer_own_registrations",
    "hand-overs",
    "Hand-overs with memory of their own, larger than the pool.",
    _ALL,
)
TRANSFER_POOL_BYTES = Gauge("dynamo_trtllm_transfer_pool_bytes", "bytes", "Registered memory.", _ALL)
TRANSFER_POOL_USED_BYTES = Gauge(
    "dynamo_trtllm_transfer_pool_used_bytes", "bytes", "Registered memory in use.", _ALL
)
TRANSFER_POOL_PEAK_BYTES = Gauge(
    "dynamo_trtllm_transfer_pool_peak_bytes", "bytes", "Most registered memory ever in use.", _ALL
)

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
"""All declarations, in the order of the page."""


def merged(*readings: Readings) -> Readings:
    """The readings of several owners as one; values of the same series are added."""
    total: Counting[Metric | Series] = Counting()
    for each in readings:
        total.update(each)
    return total


def table() -> Iterator[str]:
    """The lines of README's table of metrics; `python -m dynamo.trtllm.metrics README.md` writes them."""
    yield "| metric | type | unit | labels | roles | meaning |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for metric in METRICS:
        kind = type(metric).__name__.lower()
        roles = "all" if metric.roles == _ALL else ", ".join(role.value for role in metric.roles)
        labels = ", ".join(metric.labels)
        yield f"| `{metric.name}` | {kind} | {metric.unit} | {labels} | {roles} | {metric.help} |"


def stage_table() -> Iterator[str]:
    """The lines of README's table of stages, in the order in which a request passes them."""
    yield "| `stage` | roles | what |"
    yield "| --- | --- | --- |"
    for stage, (help, roles) in STAGES.items():
        names = "all" if roles == _ALL else ", ".join(role.value for role in roles)
        yield f"| `{stage.value}` | {names} | {help} |"


def with_tables(document: str) -> str:
    """`document` with its two tables, up to an empty line, made anew. Raises `ValueError` without them."""
    lines = document.splitlines()
    for made in (list(table()), list(stage_table())):
        start = lines.index(made[0])
        lines[start : lines.index("", start)] = made
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Write the tables into each file named."""
    for path in map(Path, arguments):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
