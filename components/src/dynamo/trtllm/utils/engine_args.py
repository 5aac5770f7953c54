"""Which values engine arguments take: kinds and ranges, said once.

`--check`, every start and the portable engine ask here; an argument that has a flag has the flag's kind.
Names and types are those of TensorRT-LLM's `LlmArgs`; what an engine makes of a value is its own affair.
Other names take any plain value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from dynamo.trtllm.engine_flags import DEFAULT_ENGINE_ARGS, ENGINE_FLAGS
from dynamo.trtllm.utils.layers import find_value
from dynamo.trtllm.values import (
    COUNT,
    DTYPES,
    GPUS,
    LARGEST,
    LARGEST_BYTES,
    NUMBER,
    TRUTH,
    Kind,
    is_number,
    is_plain,
    whole,
)

_SHOWN = 80


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable() and "${" not in value


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(COUNT.accepts(item) for item in value)


WHOLE = whole(0)
SIZE = whole(0, LARGEST_BYTES)
TEXT = Kind("a text", str, _is_text)
WORD = replace(TEXT, nullable=False)
COUNTS = Kind("a list of whole numbers of at least 1", str, _is_list_of_counts)
MAPPING = Kind("a mapping", str, lambda value: isinstance(value, Mapping))
SECTION = replace(MAPPING, nullable=False)
DTYPE = replace(DTYPES, wanted=f"one of {DTYPES.wanted}", nullable=False)
PLAIN = Kind("made of texts, finite numbers, truth values, lists and mappings", str, is_plain)


def _table(kind: Kind[Any], names: str, section: str = "") -> dict[str, Kind[Any]]:
    return {section + name: kind for name in names.split()}


_KV, _TRANSCEIVER = "kv_cache_config.", "cache_transceiver_config."
_GRAPHS, _SCHEDULER = "cuda_graph_config.", "scheduler_config."

KINDS: Mapping[str, Kind[Any]] = {
    **{each.argument: each.kind for each in ENGINE_FLAGS if each.argument is not None},
    **_table(GPUS, "context_parallel_size"),
    **_table(COUNT, """
        moe_tensor_parallel_size moe_cluster_parallel_size max_input_len stream_interval
        encoder_max_batch_size tokens_per_block encoder_max_num_tokens num_serve_frontends
        moe_config.max_num_tokens
        torch_compile_config.max_num_streams
        """),
    **_table(COUNT, "max_tokens", _KV),
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
    **_table(NUMBER, "batch_wait_timeout_ms batch_wait_max_tokens_ratio"),
    **_table(NUMBER, "cross_kv_cache_fraction", _KV),
    **_table(COUNTS, "max_attention_window", _KV),
    **_table(COUNTS, "batch_sizes", _GRAPHS),
    **_table(TRUTH, """
        skip_tokenizer_init mm_encoder_only encode_only print_iter_log return_perf_metrics
        force_dynamic_quantization gather_generation_logits fail_fast_on_attention_window_too_large
        telemetry_config.disabled
        """),
    **_table(TRUTH, "copy_on_partial_reuse use_uvm onboard_blocks", _KV),
    **_table(WORD, "tokenizer_mode backend load_format attn_backend moe_config.backend"),
    **_table(WORD, "dtype", _KV),
    **_table(TEXT, """
        tokenizer tokenizer_revision revision guided_decoding_backend checkpoint_format reasoning_parser
        orchestrator_type
        allreduce_strategy custom_tokenizer
        """),
    **_table(TEXT, "backend transceiver_runtime", _TRANSCEIVER),
    **_table(TEXT, "capacity_scheduler_policy context_chunking_policy waiting_queue_policy", _SCHEDULER),
    **_table(SECTION, "kv_cache_config scheduler_config"),
    "model_kwargs": MAPPING,
    "dtype": DTYPE,
}  # fmt: skip
"""Dotted name -> kind; later ones win: YAML may name more words than a flag. `kind_of` knows other names by
their form."""

_TRUTH_PREFIXES = ("enable_", "disable_")


def kind_of(dotted: str) -> Kind[Any]:
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


def _advice(kind: Kind[Any], value: Any) -> str:
    """What most likely went wrong, for values that people write for a number."""
    if isinstance(value, bool):
        return " (YAML reads yes, no, on and off as true and false)"
    if isinstance(value, str) and "${" in value:
        return " (variables are not filled in here: write the value itself)"
    if type(value) in (int, float) and is_number(value) and value > LARGEST:
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
