"""The frontend's request, parsed once into a frozen object; nothing further in looks into the request's dict.

Field names and shapes are those that ai-dynamo 1.6's frontend sends to a `ModelInput.Tokens` worker. Media parts stay references
here: this module fetches nothing and knows no engine.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynamo.trtllm.engines.port import GuidedDecoding, Sampling
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.parts import MediaPart

_PART_KINDS: tuple[tuple[str, Literal["image", "video", "audio"]], ...] = (
    ("image_url", "image"),
    ("video_url", "video"),
    ("audio_url", "audio"),
)
_MAX_LOGPROBS = 100


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """What the frontend brings to decode from prefill's reply."""

    disaggregated_params: Mapping[str, Any]
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation request as the frontend sent it. `token_ids` hold one placeholder for each image."""

    model: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    media: tuple[MediaPart, ...] = ()
    text: str | None = None
    """The rendered prompt; present only beside media."""
    prefill_result: PrefillResult | None = None
    priority: float | None = None
    cache_salt: str | None = None
    dp_rank: int | None = None
    is_health_check: bool = False
    media_hashes: tuple[str, ...] = ()
    """The frontend's hexadecimal hash of each media item, in order; empty when it sent none."""


def parse_request(raw: Mapping[str, Any]) -> Request:
    """Parse the frontend's dict. Raises `ClientFault` naming the field that this worker cannot serve."""
    extra = _mapping(raw, "extra_args")
    routing = _mapping(raw, "routing")
    if routing.get("lora_name"):
        raise ClientFault("LoRA adapters are not supported; ask for the base model")
    if any(_flatten(_mapping(raw, "multi_modal_uuids").values())):
        raise ClientFault("a content part's uuid is not supported; leave it out")
    if _mapping(raw, "mm_processor_kwargs"):
        raise ClientFault("mm_processor_kwargs is not supported; leave it out")
    return Request(
        model=str(raw.get("model", "")),
        token_ids=_token_ids(raw.get("token_ids")),
        sampling=_sampling(raw),
        media=_media(_mapping(raw, "multi_modal_data")),
        text=extra.get("formatted_prompt"),
        prefill_result=_prefill_result(raw.get("prefill_result")),
        priority=_number(routing, "priority"),
        cache_salt=routing.get("cache_salt"),
        dp_rank=_integer(routing, "dp_rank"),
        is_health_check=bool(raw.get("_HEALTH_CHECK")),
        media_hashes=tuple(extra.get("mm_hashes") or ()),
    )


def _sampling(raw: Mapping[str, Any]) -> Sampling:
    options, stop, output = (_mapping(raw, key) for key in ("sampling_options", "stop_conditions", "output_options"))
    _refuse_unsupported(options)
    max_tokens = _integer(stop, "max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise ClientFault(f"max_tokens must be at least 1, not {max_tokens}")
    hidden = frozenset(_ids(stop, "stop_token_ids_hidden"))
    eos = frozenset(_ids(raw, "eos_token_ids")) or hidden
    return Sampling(
        temperature=_number(options, "temperature", low=0.0),
        top_p=_number(options, "top_p", low=0.0, high=1.0),
        top_k=_top_k(options),
        min_p=_number(options, "min_p", low=0.0, high=1.0),
        seed=_integer(options, "seed"),
        repetition_penalty=_repetition_penalty(options),
        presence_penalty=_number(options, "presence_penalty", low=-2.0, high=2.0),
        frequency_penalty=_number(options, "frequency_penalty", low=-2.0, high=2.0),
        max_tokens=max_tokens,
        min_tokens=max(0, _integer(stop, "min_tokens") or 0),
        stop_token_ids=frozenset((*_ids(stop, "stop_token_ids"), *_ids(stop, "stop_token_ids_visible"))) - eos,
        eos_token_ids=eos,
        ignore_eos=bool(stop.get("ignore_eos")),
        logprobs=_count(output, "logprobs"),
        prompt_logprobs=_count(output, "prompt_logprobs"),
        guided=_guided(options.get("guided_decoding")),
    )


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    for name in ("n", "best_of"):
        count = _integer(options, name)
        if count is not None and count != 1:
            raise ClientFault(f"{name} must be 1: this worker gives one choice per request, not {count}")
    if options.get("use_beam_search"):
        raise ClientFault("beam search is not supported")


def _top_k(options: Mapping[str, Any]) -> int | None:
    top_k = _integer(options, "top_k")
    return top_k if top_k is not None and top_k > 0 else None  # 0 and -1 mean all tokens, as in the OpenAI extensions


def _repetition_penalty(options: Mapping[str, Any]) -> float | None:
    penalty = _number(options, "repetition_penalty", low=0.0)
    if penalty == 0.0:
        raise ClientFault("repetition_penalty must be greater than 0")
    return penalty


def _guided(raw: Any) -> GuidedDecoding | None:
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise ClientFault("guided_decoding must be an object")
    given = {name: value for name, value in raw.items() if value not in (None, False, [], "")}
    known = {name: given[name] for name in ("json", "regex", "grammar", "json_object", "structural_tag") if name in given}
    if given.get("choice"):
        known["choice"] = tuple(given["choice"])
    if len(known) > 1:
        raise ClientFault(f"only one kind of guided decoding is possible at once, not {' and '.join(sorted(known))}")
    return GuidedDecoding(**known) if known else None


def _media(raw: Mapping[str, Any]) -> tuple[MediaPart, ...]:
    parts: list[MediaPart] = []
    for key, kind in _PART_KINDS:
        for item in raw.get(key) or ():
            url = item.get("Url") if isinstance(item, Mapping) else item
            if url is None:
                raise ClientFault(f"{kind} {len(parts) + 1}: media decoded by the frontend is not supported; send its URL")
            parts.append(MediaPart(position=len(parts) + 1, kind=kind, url=url))
    unknown = sorted(set(raw) - {key for key, _ in _PART_KINDS})
    if unknown:
        raise ClientFault(f"content parts of type {', '.join(unknown)} are not supported; this worker takes text and image_url")
    return tuple(parts)


def _prefill_result(raw: Any) -> PrefillResult | None:
    if raw is None:
        return None
    details = raw.get("prompt_tokens_details") or {}
    return PrefillResult(
        disaggregated_params=raw.get("disaggregated_params") or {},
        cached_tokens=int(details.get("cached_tokens") or 0),
    )


def _token_ids(raw: Any) -> tuple[int, ...]:
    """Token ids as a list of ints, or packed as little-endian int32 (`DYN_TOKEN_IDS_AS_BYTES`)."""
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise ClientFault("the prompt is empty")
    if isinstance(raw, (bytes, bytearray)):
        if len(raw) % 4:
            raise ClientFault("the prompt's packed token ids are not whole 32-bit numbers")
        return struct.unpack(f"<{len(raw) // 4}i", raw)
    return tuple(raw)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ClientFault(f"{key} must be an object")
    return value


def _number(raw: Mapping[str, Any], key: str, *, low: float | None = None, high: float | None = None) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ClientFault(f"{key} must be a number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ClientFault(f"{key} must be {bounds}, not {value:g}")
    return float(value)


def _integer(raw: Mapping[str, Any], key: str) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1:
        raise ClientFault(f"{key} must be a whole number")
    return int(value)


def _count(raw: Mapping[str, Any], key: str) -> int | None:
    value = _integer(raw, key)
    if value is not None and not 0 <= value <= _MAX_LOGPROBS:
        raise ClientFault(f"{key} must be between 0 and {_MAX_LOGPROBS}, not {value}")
    return value


def _ids(raw: Mapping[str, Any], key: str) -> Sequence[int]:
    return raw.get(key) or ()


def _flatten(values: Any) -> list[Any]:
    return [item for value in values for item in (value or ())]
