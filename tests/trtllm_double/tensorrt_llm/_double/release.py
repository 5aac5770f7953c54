"""The releases that the double can play, and the one that it plays: `TRTLLM_DOUBLE_RELEASE`, 1.3.0rc29 by
default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._double import tables


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release. A flag says how it behaves; where that was read stands in
    `tests/trtllm_double/README.md`."""

    version: str
    arguments: Mapping[str, Any]
    nested: Mapping[str, Mapping[str, Any]]
    choices: Mapping[str, tuple[Any, ...]]
    generate: Mapping[str, Any]
    sampling: Mapping[str, Any]
    disaggregated: tuple[str, ...]
    build_config: bool = False
    """`tensorrt_llm.llmapi.BuildConfig` and the TensorRT backend's arguments exist."""
    request_ids: str | None = None
    """Parameters of `get_global_disagg_request_id`: "node" (rc22 and later), "machine" before, None where
    there is none."""
    preprocess: bool = False
    capacity: bool = False
    """`get_kv_cache_capacity` exists."""
    conversations: bool = False
    fast_path: bool = False
    """Some processors take token ids beside images as they are; before, all ids are decoded and tokenized
    again by the LLM."""
    uuids: bool = False
    one_encoder_handle: bool = False
    """An encode request yields one concatenated tensor in a list of one."""
    fresh_mrope: bool = False
    """The rank sends new mRoPE handles with a context's output; before, what was given stays, opened."""
    int32_deltas: bool = False
    """The forward pass copies mRoPE deltas into an int32 cache."""
    out_of_vocabulary: bool = False
    """An image's tokens become `vocab_size + 1` in the expanded prompt; later they stay in the vocabulary."""
    ignore_eos_drops_stops: bool = False
    trims_logprobs: bool = False
    error_finishes: bool = False
    """A failed request is `finished` and has `error`."""
    overlap_refused: bool = False
    """A context-only request beside the overlap scheduler kills the worker."""
    health_sees_death: bool = False
    """`_check_health` asks the ranks; before, it says only whether `shutdown` was called."""
    salted_events: bool = False
    media_keys: bool = False
    """Stored blocks of KV events name their media."""
    ends_with_end_id: bool = False
    dp_statistics: bool = False
    default_runtime: str = "CPP"
    """What `transceiver_runtime: auto` means, as far as it is known."""


_LATER: dict[str, Any] = {
    "generate": tables.GENERATE_RC29, "sampling": tables.SAMPLING_RC29, "choices": tables.CHOICES_RC29,
    "request_ids": "node",
    "preprocess": True, "capacity": True, "conversations": True, "fast_path": True, "uuids": True,
    "fresh_mrope": True,
    "int32_deltas": True, "ignore_eos_drops_stops": True, "trims_logprobs": True, "error_finishes": True,
    "health_sees_death": True,
    "salted_events": True, "media_keys": True, "dp_statistics": True,
}  # fmt: skip
RELEASES: Mapping[str, Release] = {
    "1.2.1": Release(
        version="1.2.1", arguments=tables.ARGUMENTS_121, nested=tables.NESTED_121, choices=tables.CHOICES_121,
        generate=tables.GENERATE_121, sampling=tables.SAMPLING_121, disaggregated=tables.DISAGGREGATED_121,
        build_config=True,
        one_encoder_handle=True, out_of_vocabulary=True, overlap_refused=True, ends_with_end_id=True,
    ),
    "1.3.0rc29": Release(
        version="1.3.0rc29", arguments=tables.ARGUMENTS_RC29, nested=tables.NESTED_RC29,
        disaggregated=tables.DISAGGREGATED_RC29, **_LATER,
    ),
    "1.4.0rc2": Release(
        version="1.4.0rc2", arguments=tables.ARGUMENTS_140, nested=tables.NESTED_140,
        disaggregated=tables.DISAGGREGATED_140,
        default_runtime="PYTHON", **_LATER,
    ),
}  # fmt: skip

release: Release = RELEASES[os.environ.get("TRTLLM_DOUBLE_RELEASE", "1.3.0rc29")]
