"""Sampling options to TensorRT-LLM's `SamplingParams`, and its logprobs and finish reasons to the port's.

The library writes into the parameters that it is given, so each request gets its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.trtllm.core import FinishReason, GuidedDecoding, Sampling, StepLogprobs, TokenLogprob
from dynamo.trtllm.engines.tensorrt_llm.library import Library
from dynamo.trtllm.errors import ClientFault, EngineFault

_SAME_NAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NO_END_ID = -1
"""No token ends the answer: what the library itself makes of `ignore_eos`, which would drop the request's
stop tokens as well. It has to be said in any case, since the library without a tokenizer refuses None."""


def build_sampling_params(
    library: Library,
    sampling: Sampling,
    max_tokens: int,
    *,
    guided_backend: bool,
    special_tokens: bool = True,
) -> Any:
    """A fresh `SamplingParams`. `special_tokens=False` keeps the library
    from adding a second BOS to a rendered prompt.

    Raises `ClientFault` for options that this engine cannot honour.
    """
    values = _values(sampling, max_tokens)
    if not special_tokens:
        values["add_special_tokens"] = False
    if sampling.guided is not None:
        if not guided_backend:
            raise ClientFault("this worker was started without a guided decoding backend")
        values["guided_decoding"] = _guided(library, sampling.guided)
    try:
        return library.sampling_params(**values)
    except (ValueError, AssertionError) as error:
        raise ClientFault("the sampling options are outside of what the engine accepts") from error


def _values(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """Only what differs from the defaults: constructing the object is a part of each request's cost."""
    if sampling.prompt_logprobs is not None:
        raise ClientFault("prompt_logprobs are not supported by this engine")
    end_id, stop_ids = end_ids(sampling)
    values: dict[str, Any] = {"max_tokens": max_tokens, "detokenize": False, "end_id": end_id}
    if end_id == NO_END_ID:
        values["pad_id"] = 0
    if stop_ids and not sampling.min_tokens:
        values["stop_token_ids"] = stop_ids
    if sampling.min_tokens and end_id != NO_END_ID:
        values["min_tokens"] = min(sampling.min_tokens, max_tokens)
    if sampling.top_k is not None and sampling.top_k > 0:
        values["top_k"] = sampling.top_k
    if sampling.seed is not None:
        values["seed"] = sampling.seed % (1 << 64)
    if sampling.logprobs is not None:
        values["logprobs"] = max(1, sampling.logprobs)
    for name in _SAME_NAME:
        value = getattr(sampling, name)
        if value is not None:
            values[name] = value
    return values


def end_ids(sampling: Sampling) -> tuple[int, list[int]]:
    """The one end-of-sequence id that the library takes, and all other ids that end the answer, sorted."""
    ends, stops = sampling.eos_token_ids, sampling.stop_token_ids
    if sampling.ignore_eos:
        return NO_END_ID, sorted(stops)
    end_id = min(ends, default=NO_END_ID)
    if len(ends) > 1:
        stops = (stops | ends) - ({end_id} - stops)
    return end_id, sorted(stops)


def late_stop_ids(sampling: Sampling) -> frozenset[int]:
    """Stop tokens that the adapter looks for itself:
    the library keeps `min_tokens` for its one end id only."""
    return frozenset(end_ids(sampling)[1]) if sampling.min_tokens else frozenset()


def find_stop(token_ids: Sequence[int], start: int, stops: frozenset[int], min_tokens: int) -> int | None:
    """Index of the first of `stops` among `token_ids[start:]` that may end the output."""
    return next((i for i in range(max(start, min_tokens), len(token_ids)) if token_ids[i] in stops), None)


def end_at(token_id: int, index: int, sampling: Sampling) -> tuple[FinishReason, int | None] | None:
    """How a token at `index` of the output ends the request, if it does:
    the library itself lets the length win."""
    if index < sampling.min_tokens:
        return None
    if token_id in sampling.stop_token_ids:
        return "stop", token_id
    return ("eos", None) if token_id in sampling.eos_token_ids and not sampling.ignore_eos else None


def _guided(library: Library, guided: GuidedDecoding) -> Any:
    if guided.choice is not None:
        return library.guided_decoding_params(regex="(" + "|".join(re.escape(c) for c in guided.choice) + ")")
    if guided.json is not None:
        return library.guided_decoding_params(
            json=guided.json if isinstance(guided.json, str) else json.dumps(guided.json)
        )
    if guided.structural_tag is not None:
        tag = guided.structural_tag
        return library.guided_decoding_params(structural_tag=tag if isinstance(tag, str) else json.dumps(tag))
    if guided.regex is not None:
        return library.guided_decoding_params(regex=guided.regex)
    if guided.grammar is not None:
        return library.guided_decoding_params(grammar=guided.grammar)
    return library.guided_decoding_params(json_object=True)


def finish_of(reason: str, stop_reason: Any, sampling: Sampling) -> tuple[FinishReason, int | str | None]:
    """The port's finish reason and the stop reason to report beside it."""
    if reason == "stop":
        if stop_reason is None or (
            stop_reason in sampling.eos_token_ids and stop_reason not in sampling.stop_token_ids
        ):
            return "eos", None
        return "stop", stop_reason
    if reason == "length":
        return "length", None
    if reason == "cancelled":
        return "cancelled", None
    raise EngineFault("the engine gave the request up before it was finished")


def step_logprobs(token_ids: Sequence[int], logprobs: Sequence[Any], k: int) -> tuple[StepLogprobs, ...]:
    """Logprobs of `token_ids`, position by position, from the library's dictionaries (or plain numbers)."""
    return tuple(_one(token, entry, k) for token, entry in zip(token_ids, logprobs, strict=False))


def _one(token: int, entry: Any, k: int) -> StepLogprobs:
    if not isinstance(entry, Mapping):
        return StepLogprobs(TokenLogprob(token, float(entry), 1), ())
    ranked = [
        TokenLogprob(int(i), float(p.logprob), int(p.rank) if p.rank is not None else n)
        for n, (i, p) in enumerate(entry.items(), 1)
    ]
    ranked.sort(key=lambda t: t.rank)
    chosen = next((t for t in ranked if t.token_id == token), None)
    if chosen is None:
        raise EngineFault("the engine gave no log probability for a token that it chose")
    return StepLogprobs(chosen, tuple(ranked[:k]))
