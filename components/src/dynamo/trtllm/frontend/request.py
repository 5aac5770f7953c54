"""The frontend's request, parsed once into a frozen object; nothing further in looks into the request's dict.

Field names and shapes are those that ai-dynamo 1.6's frontend sends to a `ModelInput.Tokens`
worker. Media parts stay references here: this module fetches nothing, and of engines it knows what
one is asked (`EngineRequest`).
"""

from __future__ import annotations

import itertools
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from dynamo.trtllm.core import (
    LARGEST_INT32,
    MOST_OF_A_SCALE,
    SAMPLING_RANGES,
    Context,
    GuidedDecoding,
    Prompt,
    Sampling,
)
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.kinds.kind import MediaKind
from dynamo.trtllm.multimodal.kinds.registry import KINDS
from dynamo.trtllm.multimodal.parts import TAKEN, MediaPart, at_part, require_known_content

_MAX_CHOICES = 128
"""As in OpenAI's API."""
_MAX_UUID_CHARACTERS = 256
_EMPTY: Mapping[str, Any] = MappingProxyType({})
_NO_IDS: frozenset[int] = frozenset()

Value = TypeVar("Value")
Checks = Mapping[str, Callable[[str, Any], Any]]
"""By name, what gives the value to use. Called with name and value;
raises `ClientFault` for one that cannot be served."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation request as the frontend sent it: what the engine will be asked,
    and what is to be done before and after."""

    model: str
    engine_request: EngineRequest
    """Its prompt holds one placeholder for each item of media, and no media yet."""
    media: tuple[MediaPart, ...] = ()
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    """`mm_processor_kwargs` as they came: which of them the model knows is for its engine to say."""
    handoff: Mapping[str, Any] | None = None
    """What the frontend brings to decode from prefill's reply: its `disaggregated_params`."""
    best_choices: int | None = None
    """How many of the engine request's choices are given back,
    the best ones (`best_of`); None: all of them."""
    stop_strings: tuple[str, ...] = ()
    """The answer ends where the first of them is complete in its text; none is empty."""
    skips_special_tokens: bool = True
    """False: the text of special tokens counts when stop strings are looked for."""
    shows_logprobs: bool = True
    """False: log probabilities are only there to choose the best answers by."""
    is_health_check: bool = False
    original: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The frontend's mapping as it came, for one use:
    asking another prefill worker the same (`peers.prefill`)."""


def parse_request(raw: Mapping[str, Any], context: Context) -> Request:
    """Parse the frontend's dict. Raises `ClientFault` naming the field that this worker cannot serve."""
    if raw.get("media_io_kwargs"):
        raise ClientFault(
            "media_io_kwargs is not supported; say what to read of media in mm_processor_kwargs"
        )
    routing, extra = _checked(raw, "routing", _ROUTING), _checked(raw, "extra_args", _EXTRA)
    stop, output = _checked(raw, "stop_conditions", _STOP), _checked(raw, "output_options", _OUTPUT)
    options = _checked(raw, "sampling_options", _OPTIONS)
    returned, best_of = _choices(options)
    data, cache_salt = _mapping(raw, "multi_modal_data"), routing.get("cache_salt")
    messages = extra.get("messages")  # present beside media only
    media = (
        _media(raw, data, messages, cache_salt) if data or messages or raw.get("multi_modal_uuids") else ()
    )
    is_ranked = best_of > returned
    shows_logprobs = "logprobs" in output or not is_ranked
    if not shows_logprobs:
        output["logprobs"] = 0
    return Request(
        model=str(raw.get("model", "")),
        engine_request=EngineRequest(
            request_id=context.id(),
            prompt=Prompt(prompt_ids(raw.get("token_ids")), (), extra.get("formatted_prompt")),
            sampling=_sampling(raw, options, stop, output.get("logprobs")),
            priority=routing.get("priority"),
            cache_salt=cache_salt,
            dp_rank=routing.get("dp_rank"),
            trace_headers=context.trace_headers(),
            choices=max(returned, best_of),
            media_hashes=extra.get("mm_hashes", ()) if media else (),
        ),
        media=media,
        processor_options=_mapping(raw, "mm_processor_kwargs"),
        best_choices=returned if is_ranked else None,
        shows_logprobs=shows_logprobs,
        handoff=_checked(raw, "prefill_result", _PREFILL_RESULT).get("disaggregated_params"),
        stop_strings=tuple(filter(None, stop.get("stop", ()))),
        skips_special_tokens=output.get("skip_special_tokens", True),
        is_health_check=is_health_check(raw),
        original=raw,
    )


def is_health_check(raw: Mapping[str, Any]) -> bool:
    """Whether Dynamo's health canary asks, in any role:
    its request is the worker's own (`service.runtime`)."""
    return bool(raw.get("_HEALTH_CHECK"))


def _sampling(
    raw: Mapping[str, Any], options: Mapping[str, Any], stop: Mapping[str, Any], logprobs: int | None
) -> Sampling:
    """`options` and `stop` are checked, `raw` is not."""
    eos_ids = frozenset(_optional(_token_ids, raw, "eos_token_ids") or stop.get("stop_token_ids_hidden", ()))
    stops = (*stop.get("stop_token_ids", ()), *stop.get("stop_token_ids_visible", ()))
    return Sampling(
        **{name: value for name, value in options.items() if name in _SAMPLING_FIELDS},
        max_tokens=stop.get("max_tokens"),
        min_tokens=stop.get("min_tokens", 0),
        stop_token_ids=frozenset(stops) - eos_ids if stops else _NO_IDS,
        eos_token_ids=eos_ids,
        ignore_eos=stop.get("ignore_eos", False),
        logprobs=logprobs,
        guided=options.get("guided_decoding"),
    )


def _choices(options: Mapping[str, Any]) -> tuple[int, int]:
    """`n`, and `best_of` or 1."""
    count, best_of = options.get("n", 1), options.get("best_of")
    if best_of is not None and best_of < count:
        raise ClientFault(f"best_of must be at least n, which is {count}")
    return count, best_of or 1


def _choice_count(name: str, value: Any) -> int:
    return _integer(name, value, 1, _MAX_CHOICES)


def _no_lora(name: str, value: Any) -> None:
    if value:
        raise ClientFault("LoRA adapters are not supported; ask for the base model")


def _no_beam_search(name: str, value: Any) -> None:
    if _truth(name, value):
        raise ClientFault("beam search is not supported")


def _no_echo(name: str, value: Any) -> None:
    """`prompt_logprobs` is what the frontend makes of `echo`."""
    _count(name, value)
    raise ClientFault(
        "echo is not supported: neither the prompt nor log probabilities of its tokens are given back; "
        "leave out echo and prompt_logprobs"
    )


def _messages(name: str, value: Any) -> Any:
    require_known_content(value)
    return value


def _guided(name: str, raw: Any) -> GuidedDecoding | None:
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise ClientFault(f"{name} must be an object")
    given = {name: value for name, value in raw.items() if value not in (None, False, [], "")}
    if "whitespace_pattern" in given:
        raise ClientFault("guided_whitespace_pattern is not supported; leave it out")
    known = {
        name: given[name]
        for name in ("json", "regex", "grammar", "json_object", "structural_tag")
        if name in given
    }
    for text in ("regex", "grammar"):
        _optional(_string, known, text)
    if given.get("choice"):
        known["choice"] = _strings("choice", given["choice"])
    if len(known) > 1:
        raise ClientFault(
            f"only one kind of guided decoding is possible at once, not {' and '.join(sorted(known))}"
        )
    return GuidedDecoding(**known) if known else None


def _media(
    raw: Mapping[str, Any], data: Mapping[str, Any], messages: Any, tenant: str | None
) -> tuple[MediaPart, ...]:
    """The media parts of `data`, kind by kind.

    The frontend's dict keeps the order within a kind, the prompt's placeholders that between kinds.
    Parts that it leaves among the `messages` (`MediaKind.message_parts`) stand between those of its dict.
    """
    unknown = sorted({str(key)[:40] for key in data} - {kind.part_type for kind in KINDS.values()})
    if unknown:
        raise ClientFault(f"content parts of type {', '.join(unknown)} are not supported; {TAKEN}")
    uuids = _mapping(raw, "multi_modal_uuids")
    parts: list[MediaPart] = []
    for kind in KINDS.values():
        names = itertools.chain(_optional(_list, uuids, kind.part_type) or (), itertools.repeat(None))
        items = enumerate(_optional(_list, data, kind.part_type) or (), 1)
        sent = [
            _part(MediaPart(at, kind.name, "", None, tenant), item, uuid)
            for (at, item), uuid in zip(items, names, strict=False)
        ]
        parts += _with_message_parts(kind, sent, messages, tenant) if kind.message_parts else sent
    return tuple(parts)


def _part(place: MediaPart, item: Any, uuid: Any) -> MediaPart:
    """The part in `place`, from the frontend's dict: `{"Url": ...}`, or `{"UuidOnly": ...}` where the client
    sent no URL."""
    with at_part(place):
        if not isinstance(item, Mapping):
            return replace(place, url=item, uuid=_uuid(uuid))
        if "UuidOnly" in item:
            return replace(place, uuid=_uuid(item["UuidOnly"]))
        if item.get("Url") is None and "Decoded" in item:
            raise ClientFault("media decoded by the frontend is not supported; send its URL")
        url: Any = item.get("Url")  # what is no text is refused with the part's other faults
        return replace(place, url=url, uuid=_uuid(uuid))


def _uuid(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= _MAX_UUID_CHARACTERS):
        raise ClientFault(f"its uuid must be a text of 1 to {_MAX_UUID_CHARACTERS} characters")
    return value


def _with_message_parts(
    kind: MediaKind, given: Sequence[MediaPart], messages: Any, tenant: str | None
) -> list[MediaPart]:
    """`given`, and the parts of `kind` that are in the messages alone, in the order of the messages."""
    sent: list[MediaPart] = []
    waiting = iter(given)
    for message in messages or ():
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            name = str(part.get("type")) if isinstance(part, Mapping) else ""
            if name in kind.message_parts:
                place = MediaPart(len(sent) + 1, kind.name, "", None, tenant)
                with at_part(place):
                    url, uuid = kind.message_parts[name](part), _uuid(part.get("uuid"))
                    sent.append(replace(place, url=url, uuid=uuid))
            elif name == kind.part_type:
                sent += itertools.islice(waiting, 1)
    return [replace(part, position=at) for at, part in enumerate([*sent, *waiting], 1)]


def prompt_ids(raw: Any) -> tuple[int, ...]:
    """A prompt's token ids, which come as a list of ints,
    or packed as little-endian int32 (`DYN_TOKEN_IDS_AS_BYTES`)."""
    if isinstance(raw, (bytes, bytearray)) and raw:
        if len(raw) % 4:
            raise ClientFault("the prompt's packed token ids are not whole 32-bit numbers")
        return struct.unpack(f"<{len(raw) // 4}I", raw)
    if not isinstance(raw, (list, tuple)) or not raw:
        raise ClientFault("the prompt is empty")
    return _token_ids("token_ids", raw)


def _token_ids(name: str, raw: Any) -> tuple[int, ...]:
    """Ids as they may index a vocabulary; whether they lie inside the model's is for the engine to say."""
    if not isinstance(raw, (list, tuple)):
        raise ClientFault(f"{name} must be a list")
    try:
        array("I", raw)  # takes whole numbers from 0 to 32 bits and nothing else but bools, at C's speed
    except (TypeError, OverflowError):
        sound = False
    else:
        sound = bool not in set(map(type, raw))
    if not sound:
        raise ClientFault(f"{name} must hold token ids: whole numbers that are not negative and fit 32 bits")
    return tuple(raw)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return _EMPTY if value is None else _object(key, value)


def _checked(raw: Mapping[str, Any], key: str, checks: Checks) -> dict[str, Any]:
    """What the mapping under `key` says about the names in `checks`, each checked; null says nothing.

    Goes through what is given and not through what is possible: most requests set two or three of many.
    """
    given = raw.get(key)
    if given is None:
        return {}
    return {
        name: checks[name](name, value)
        for name, value in _object(key, given).items()
        if value is not None and name in checks
    }


def _optional(check: Callable[[str, Any], Value], raw: Mapping[str, Any], key: str) -> Value | None:
    value = raw.get(key)
    return None if value is None else check(key, value)


def _number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClientFault(f"{name} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ClientFault(f"{name} must be a number")
    _require_range(name, number, low, high)
    return number


def _integer(name: str, value: Any, low: int = -(1 << 63), high: float = (1 << 64) - 1) -> int:
    """A whole number, written as an integer or not; by default one that JSON can bring as such."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1:
        raise ClientFault(f"{name} must be a whole number")
    _require_range(name, value, low, high)
    return int(value)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if low <= value <= high:
        return
    is_cap = high >= MOST_OF_A_SCALE  # a bound of ours or of a type, not one that the option's meaning has
    bounds = (
        f"at least {_shown(low)}" if value < low and is_cap else f"between {_shown(low)} and {_shown(high)}"
    )
    is_short = isinstance(value, float) or abs(value) < 1 << 64
    raise ClientFault(f"{name} must be {bounds}" + (f", not {_shown(value)}" if is_short else ""))


def _shown(value: float) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _max_tokens(name: str, value: Any) -> int:
    return min(_integer(name, value, 1, math.inf), LARGEST_INT32)  # the context length bounds it further


def _top_k(name: str, value: Any) -> int | None:
    low, high = SAMPLING_RANGES["top_k"]
    top_k = _integer(name, value, int(low), high)
    return top_k if top_k > 0 else None  # 0 and -1 mean all tokens, as in the OpenAI extensions


def _min_tokens(name: str, value: Any) -> int:
    return min(max(0, _integer(name, value)), LARGEST_INT32)  # none that is negative


def _repetition_penalty(name: str, value: Any) -> float:
    penalty = _number(name, value, *SAMPLING_RANGES["repetition_penalty"])
    if penalty == 0.0:
        raise ClientFault(f"{name} must be greater than 0")
    return penalty


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ClientFault(f"{name} must be true or false")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ClientFault(f"{name} must be a string")
    return value


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ClientFault(f"{name} must be a list")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not all(isinstance(each, str) for each in _list(name, value)):
        raise ClientFault(f"{name} must hold strings")
    return tuple(value)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, (dict, Mapping)):  # a dict is found without asking the abstract class
        raise ClientFault(f"{name} must be an object")
    return value


def _within(name: str) -> Callable[[str, Any], float]:
    low, high = SAMPLING_RANGES[name]
    return partial(_number, low=low, high=high)


_count = partial(_integer, low=0, high=SAMPLING_RANGES["logprobs"][1])
_rank = partial(_integer, low=0, high=LARGEST_INT32)
_SAMPLING_FIELDS: Checks = {
    "temperature": _within("temperature"),
    "top_p": _within("top_p"),
    "top_k": _top_k,
    "min_p": _within("min_p"),
    "seed": _integer,
    "repetition_penalty": _repetition_penalty,
    "presence_penalty": _within("presence_penalty"),
    "frequency_penalty": _within("frequency_penalty"),
}
"""The frontend's names are those of `Sampling`."""
_OPTIONS: Checks = {
    **_SAMPLING_FIELDS,
    "n": _choice_count,
    "best_of": _choice_count,
    "guided_decoding": _guided,
    "use_beam_search": _no_beam_search,
}
_STOP: Checks = {
    "max_tokens": _max_tokens,
    "min_tokens": _min_tokens,
    "ignore_eos": _truth,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "stop_token_ids_visible": _token_ids,
    "stop_token_ids_hidden": _token_ids,
}
_OUTPUT: Checks = {"logprobs": _count, "prompt_logprobs": _no_echo, "skip_special_tokens": _truth}
_ROUTING: Checks = {"lora_name": _no_lora, "priority": _number, "cache_salt": _string, "dp_rank": _rank}
_EXTRA: Checks = {"messages": _messages, "formatted_prompt": _string, "mm_hashes": _strings}
_PREFILL_RESULT: Checks = {"disaggregated_params": _object}
