"""Which values engine arguments take: kinds and ranges, said once.

`--check`, every start, the flags that stand for an engine argument and the portable engine all ask here.
Names and types are those of TensorRT-LLM's `LlmArgs`; what an engine makes of a value is its own affair. Other
names take any plain value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo.trtllm.config import DEFAULT_ENGINE_ARGS
from dynamo.trtllm.utils.layers import find_value

LARGEST = 2**31 - 1
"""Counts become signed 32-bit numbers in the engines."""
LARGEST_BYTES = 2**63 - 1
_SHOWN = 80


@dataclass(frozen=True)
class ValueKind:
    """One kind of value. `wanted` completes 'must be ...'; `nullable`: nothing at all is a value too, and
    means something."""

    wanted: str
    accepts: Callable[[Any], bool]
    nullable: bool = True


def _whole(least: int, most: int = LARGEST, *, nullable: bool = True) -> ValueKind:
    def accepts(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return ValueKind(f"a whole number of at least {least}", accepts, nullable)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= LARGEST_BYTES
    return type(value) is float and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable() and "${" not in value


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(COUNT.accepts(item) for item in value)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value consists of texts, finite numbers, truth values, lists and mappings by text: what JSON
    can say."""
    if depth > 50:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item, depth + 1) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, (str, bool)) or _is_number(value)


COUNT = _whole(1)
WHOLE = _whole(0)
SIZE = _whole(0, LARGEST_BYTES)
GPUS = _whole(1, nullable=False)
NUMBER = ValueKind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
FRACTION = ValueKind("a fraction above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1)
TRUTH = ValueKind("true or false", lambda value: isinstance(value, bool), nullable=False)
TEXT = ValueKind("a text", _is_text)
WORD = ValueKind("a text", _is_text, nullable=False)
COUNTS = ValueKind("a list of whole numbers of at least 1", _is_list_of_counts)
MAPPING = ValueKind("a mapping", lambda value: isinstance(value, Mapping))
SECTION = ValueKind("a mapping", MAPPING.accepts, nullable=False)
DTYPES = ("auto", "float16", "bfloat16", "float32")
DTYPE = ValueKind("one of auto, float16, bfloat16 or float32", lambda value: value in DTYPES, nullable=False)
PLAIN = ValueKind("made of texts, finite numbers, truth values, lists and mappings", is_plain)


def _table(kind: ValueKind, names: str, section: str = "") -> dict[str, ValueKind]:
    return {section + name: kind for name in names.split()}


_KV, _TRANSCEIVER, _GRAPHS = "kv_cache_config.", "cache_transceiver_config.", "cuda_graph_config."

KINDS: Mapping[str, ValueKind] = {
    **_table(GPUS, "tensor_parallel_size pipeline_parallel_size context_parallel_size"),
    **_table(COUNT, """
        moe_expert_parallel_size moe_tensor_parallel_size moe_cluster_parallel_size gpus_per_node
        max_batch_size max_num_tokens max_seq_len max_input_len max_beam_width stream_interval encoder_max_batch_size
        tokens_per_block encoder_max_num_tokens num_serve_frontends moe_config.max_num_tokens
        torch_compile_config.max_num_streams
        """),
    **_table(COUNT, "max_tokens tokens_per_block", _KV),
    **_table(COUNT, "max_num_token max_seq_len", _GRAPHS),
    **_table(COUNT, "max_tokens_in_buffer kv_transfer_timeout_ms", _TRANSCEIVER),
    **_table(WHOLE, """
        num_postprocess_workers iter_stats_max_iterations request_stats_max_iterations
        perf_metrics_max_requests
        garbage_collection_gen0_threshold batch_wait_timeout_iters cuda_graph_config.max_batch_size
        """),
    **_table(WHOLE, "sink_token_length event_buffer_max_size attention_dp_events_gather_period_ms", _KV),
    **_table(WHOLE, "kv_transfer_sender_future_timeout_ms kv_transfer_poll_interval_ms", _TRANSCEIVER),
    **_table(SIZE, "host_cache_size max_gpu_total_bytes disk_cache_size", _KV),
    **_table(NUMBER, "batch_wait_timeout_ms batch_wait_max_tokens_ratio kv_cache_config.cross_kv_cache_fraction"),
    **_table(FRACTION, "free_gpu_memory_fraction", _KV),
    **_table(COUNTS, "max_attention_window", _KV),
    **_table(COUNTS, "batch_sizes", _GRAPHS),
    **_table(TRUTH, """
        trust_remote_code skip_tokenizer_init mm_encoder_only encode_only print_iter_log return_perf_metrics
        force_dynamic_quantization gather_generation_logits fail_fast_on_attention_window_too_large
        telemetry_config.disabled
        """),
    **_table(TRUTH, "copy_on_partial_reuse use_uvm onboard_blocks", _KV),
    **_table(WORD, "tokenizer_mode backend load_format attn_backend moe_config.backend kv_cache_config.dtype"),
    **_table(TEXT, """
        tokenizer tokenizer_revision revision guided_decoding_backend checkpoint_format reasoning_parser
        orchestrator_type
        allreduce_strategy custom_tokenizer
        """),
    **_table(TEXT, "backend transceiver_runtime", _TRANSCEIVER),
    **_table(TEXT, "capacity_scheduler_policy context_chunking_policy waiting_queue_policy", "scheduler_config."),
    **_table(SECTION, "kv_cache_config scheduler_config"),
    "model_kwargs": MAPPING,
    "dtype": DTYPE,
}  # fmt: skip
"""Dotted name -> kind. `kind_of` knows more by the form of a name."""

_TRUTH_PREFIXES = ("enable_", "disable_")


def kind_of(dotted: str) -> ValueKind:
    """The kind of an engine argument: as listed, else `..._config` is a mapping and `enable_...` true or
    false."""
    listed = KINDS.get(dotted)
    if listed is not None:
        return listed
    *section, name = dotted.split(".")
    if name.endswith("_config"):
        return MAPPING
    if len(section) <= 1 and name.startswith(_TRUTH_PREFIXES):
        return TRUTH
    return PLAIN


class Wrong(NamedTuple):
    """One argument whose value is of another kind; `wanted` completes 'must be ...'."""

    dotted: str
    value: Any
    wanted: str


def find_wrong(args: Mapping[str, Any]) -> Iterator[Wrong]:
    """Each argument whose value is of another kind.

    Only the two levels that engines have names for are looked at by name; what lies deeper only has to be
    plain.
    """
    for key, value in args.items():
        if kind_of(key) in (MAPPING, SECTION) and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _wrong(f"{key}.{name}", inner)
        else:
            yield from _wrong(key, value)


def _wrong(dotted: str, value: Any) -> Iterator[Wrong]:
    kind = kind_of(dotted)
    if value is None and kind.nullable:
        return
    if not kind.accepts(value):
        yield Wrong(dotted, value, f"{kind.wanted}{_advice(kind, value)}")
    elif not is_plain(value):
        yield Wrong(dotted, value, PLAIN.wanted)


def drop_empty(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`args` without what was named and given no value, where that means nothing; and the dotted names of
    what was dropped.

    `kv_cache_config:` with nothing below it would otherwise replace the whole mapping of defaults.
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in args.items():
        if value is None and _keeps_default(str(key)):
            dropped.append(str(key))
        elif isinstance(value, Mapping):
            empty = [
                name for name, inner in value.items() if inner is None and _keeps_default(f"{key}.{name}")
            ]
            dropped += [f"{key}.{name}" for name in empty]
            kept[key] = {name: inner for name, inner in value.items() if name not in empty}
        else:
            kept[key] = value
    return kept, dropped


def _keeps_default(dotted: str) -> bool:
    return not kind_of(dotted).nullable or find_value(DEFAULT_ENGINE_ARGS, dotted) is not None


def show(value: Any, most: int = _SHOWN) -> str:
    """A value as it is written in YAML or JSON, cut to `most` characters."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of the type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def _advice(kind: ValueKind, value: Any) -> str:
    """What most likely went wrong, for values that people write for a number."""
    if isinstance(value, bool):
        return " (YAML reads yes, no, on and off as true and false)"
    if isinstance(value, str) and "${" in value:
        return " (variables are not filled in here: write the value itself)"
    if type(value) in (int, float) and _is_number(value) and value > LARGEST:
        return " (too large)"
    if isinstance(value, str) and kind is not DTYPE and _reads_as_number(value):
        return " (write plain digits without quotes, for instance 8000 and not 8e3)"
    return ""


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
