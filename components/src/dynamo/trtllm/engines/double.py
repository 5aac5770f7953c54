"""A deterministic engine that computes nothing, for tests and benchmarks;
it ships, so a deployment can be tried without a model.

Its tokens depend on the prompt, on the digests of its media and on a given seed: all topologies give
the same. `--override-engine-args '{"double": {...}}'` scripts delays and failures; `DoubleScript` lists them.
"""

from __future__ import annotations

import asyncio
import math
import os
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.core import (
    DecodedMedia,
    EncodedMedia,
    FinishReason,
    MediaShape,
    Sampling,
    Step,
    StepLogprobs,
    TokenLogprob,
    Tokens,
    Usage,
)
from dynamo.trtllm.engines.embedding_shape import rows_of_one_item
from dynamo.trtllm.engines.port import (
    Engine,
    EngineInfo,
    EngineRequest,
    EngineState,
    MediaInput,
    Prefilled,
    ProcessorOption,
)
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, StartupError, require_room

STATE_SCHEMA = 1
_HIDDEN = 8
TOKENS_OPTION = "tokens"
"""The one key of `mm_processor_kwargs` that the double knows: the length of an item's expansion."""
_OPTIONS = {TOKENS_OPTION: ProcessorOption(least=1, most=1000)}


@dataclass(frozen=True, kw_only=True)
class DoubleScript:
    """What the double plays. Token numbers count output tokens from 0; times are seconds."""

    first_token_id: int = 300
    token_span: int = 50
    """Output ids lie in `first_token_id ... first_token_id + token_span - 1`; a tokenizer must know them."""
    placeholder_ids: dict[str, int] = field(default_factory=dict)
    """The kinds of media that it takes, and the id that stands for an item of each in a prompt."""
    media_tokens: int = 4
    """Length of the expansion of an item of any kind."""
    context_length: int = 1 << 20
    max_num_seqs: int = 1 << 16
    answer_tokens: int = 16
    """An answer ends by itself after this many tokens or up to 8 more, unless end-of-sequence is ignored."""
    start_delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    step_delay_s: float = 0.0
    encode_delay_s: float = 0.0
    close_delay_s: float = 0.0
    fail_start: bool = False
    reject_prompt_over: int | None = None
    """Prompts of more tokens are refused as the client's fault."""
    fail_at_token: int | None = None
    """Every request fails with `EngineFault` at this token."""
    die_at_token: int | None = None
    """The engine dies at this token: `EngineDead` for this and all later requests."""
    stall_at_token: int | None = None
    """Every request stands still from this token on, as if the engine did not answer."""
    dies_with_file: str | None = None
    """The engine dies in silence when this file appears: only `check_health` says so."""
    kv_bytes_per_token: int = 0
    """Size of the opaque state that prefill hands over, so that transfers can be loaded without a model."""


class DoubleEngine(Engine):
    """See the module. State shared by requests: the counters and `_dead`."""

    def __init__(self, config: EngineConfig) -> None:
        script = {**config.double_script, **_limits(config.args)}
        unknown = sorted(set(script) - {f.name for f in fields(DoubleScript)})
        if unknown:
            raise StartupError(
                f"the double engine knows no script key {', '.join(unknown)}; see DoubleScript"
            )
        self._script = DoubleScript(**script)
        first, span = self._script.first_token_id, self._script.token_span
        self._plain_steps: list[Tokens] = [[token] for token in range(first, first + span)]
        self._dead = False
        self._active = 0
        self._generated = 0
        self._encoded = 0

    async def start(self) -> EngineInfo:
        script = self._script
        await asyncio.sleep(script.start_delay_s)
        if script.fail_start:
            raise StartupError(
                "the double engine was told to fail at start; remove fail_start from its script"
            )
        return EngineInfo(
            context_length=script.context_length,
            kv_block_size=32,
            total_kv_blocks=script.context_length // 32,
            max_num_seqs=script.max_num_seqs,
            max_num_batched_tokens=script.context_length,
            media={kind: _media_input(token) for kind, token in script.placeholder_ids.items()},
            hidden_size=_HIDDEN,
        )

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        return self._stream(request, None)

    async def prefill(self, request: EngineRequest) -> Prefilled:
        self._check(request)
        self._active += 1
        try:
            await asyncio.sleep(self._script.prefill_delay_s)
            key = _request_key(request)
            first = self._step(request, key, 0, self._length(request))
            if not first.token_ids or first.finish is not None:
                return Prefilled(first, request.prompt.token_ids, None)
            return Prefilled(first, request.prompt.token_ids, self._state(request, key))
        finally:
            self._active -= 1

    def decode(
        self, request: EngineRequest, first: Step | None, state: EngineState
    ) -> AsyncGenerator[Step | Tokens, None]:
        return self._stream(request, state)

    def media_tokens(self, shape: MediaShape, options: Mapping[str, Any]) -> int | None:
        return int(options.get(TOKENS_OPTION, self._script.media_tokens))

    async def encode(self, items: Sequence[DecodedMedia]) -> list[EncodedMedia]:
        import torch

        lengths = [int(item.options.get(TOKENS_OPTION, self._script.media_tokens)) for item in items]
        expansions = [(self._placeholder_of(item.kind),) * n for item, n in zip(items, lengths, strict=True)]
        await asyncio.sleep(self._script.encode_delay_s)
        self._encoded += len(items)
        shades = [float(zlib.crc32(item.digest.encode()) % 97) for item in items]
        return [
            EncodedMedia(item.kind, item.digest, {"features": torch.full((len(ids), _HIDDEN), shade)}, ids)
            for item, ids, shade in zip(items, expansions, shades, strict=True)
        ]

    def _placeholder_of(self, kind: str) -> int:
        placeholder = self._script.placeholder_ids.get(kind)
        if placeholder is None:
            raise ClientFault(f"this model takes no {kind}")
        return placeholder

    def adopt_embeddings(
        self, kind: str, digest: str, tensors: Mapping[str, Any], extras: Mapping[str, Any]
    ) -> EncodedMedia:
        features = rows_of_one_item("embeddings", tensors["features"], _HIDDEN)
        ids = (self._placeholder_of(kind),) * int(features.shape[0])
        return EncodedMedia(kind, digest, {"features": features}, ids, extras)

    async def check_health(self) -> None:
        if self._has_died_by_file():
            self._dead = True
        if self._dead:
            raise EngineDead("the engine died")

    def _has_died_by_file(self) -> bool:
        return self._script.dies_with_file is not None and os.path.exists(self._script.dies_with_file)

    def stats(self) -> metrics.Readings:
        return {
            metrics.ENGINE_ACTIVE: self._active,
            metrics.ENGINE_OUTPUT_TOKENS: self._generated,
            metrics.ENGINE_ENCODED_IMAGES: self._encoded,
        }

    async def close(self) -> None:
        self._dead = True
        await asyncio.sleep(self._script.close_delay_s)

    def _check(self, request: EngineRequest) -> None:
        if self._dead:
            raise EngineDead("the engine died")
        count, limit = len(request.prompt.token_ids), self._script.reject_prompt_over
        if limit is not None and count > limit:
            raise ClientFault(f"the prompt has {count} tokens, the engine takes {limit}")
        require_room(count, self._script.context_length)

    def _length(self, request: EngineRequest) -> int:
        """Number of output tokens after which the request ends by length."""
        room = self._script.context_length - len(request.prompt.token_ids)
        return min(request.sampling.max_tokens or room, room)

    async def _stream(
        self, request: EngineRequest, state: EngineState | None
    ) -> AsyncGenerator[Step | Tokens, None]:
        """Both `generate` and, from a prefilled `state`, `decode`.
        One generator deep: this is run for every token."""
        if state is not None and (
            state.meta.get("schema") != STATE_SCHEMA or state.meta.get("engine") != "double"
        ):
            raise EngineFault("the prefill worker's state is not one that this engine understands")
        self._check(request)
        script, length = self._script, self._length(request)
        scripted = {script.fail_at_token, script.die_at_token, script.stall_at_token} != {None}
        plain = _is_plain(request.sampling) and not scripted
        steps, span, delay, last = self._plain_steps, script.token_span, script.step_delay_s, length - 1
        self._active += 1
        try:
            if state is None and script.prefill_delay_s:
                await asyncio.sleep(script.prefill_delay_s)
            key = _request_key(request) if state is None else int(state.meta["key"])
            for index in range(0 if state is None else 1, length):
                await asyncio.sleep(delay)
                if plain and 0 < index < last:  # the benchmark's path: nothing but a ready-made token
                    self._generated += 1
                    yield steps[(key + index * 7) % span]
                    continue
                if index == script.stall_at_token:
                    await asyncio.Event().wait()
                step = self._step(request, key, index, length)
                yield step
                if step.finish is not None:
                    return
        finally:
            self._active -= 1

    def _step(self, request: EngineRequest, key: int, index: int, length: int) -> Step:
        script, sampling, prompt_tokens = self._script, request.sampling, len(request.prompt.token_ids)
        if index == script.die_at_token:
            self._dead = True
        if self._dead:
            raise EngineDead("the engine died")
        if index == script.fail_at_token:
            raise EngineFault("the engine failed this request")
        token = script.first_token_id + (key + index * 7) % script.token_span
        while index < sampling.min_tokens and token in sampling.stop_token_ids:
            token = script.first_token_id + (token - script.first_token_id + 1) % script.token_span
        reason = self._end_without_token(sampling, key, index, token)
        if reason is not None:
            return Step((), None, reason, token if reason == "stop" else None, Usage(prompt_tokens, index))
        self._generated += 1
        finish: FinishReason | None = "length" if index == length - 1 else None
        usage = Usage(prompt_tokens, index + 1) if finish or not index else None
        return Step((token,), self._logprobs(sampling, token), finish, None, usage)

    def _end_without_token(self, sampling: Sampling, key: int, index: int, token: int) -> FinishReason | None:
        if index < sampling.min_tokens:
            return None
        if token in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and index >= self._script.answer_tokens + key % 9:
            return "eos"
        return None

    def _logprobs(self, sampling: Sampling, token: int) -> tuple[StepLogprobs, ...] | None:
        if sampling.logprobs is None:
            return None
        span, first = self._script.token_span, self._script.first_token_id
        top = tuple(
            TokenLogprob(first + (token - first + k) % span, math.log(0.5) - k, k + 1)
            for k in range(min(sampling.logprobs, span))
        )
        return (StepLogprobs(TokenLogprob(token, math.log(0.5), 1), top),)

    def _state(self, request: EngineRequest, key: int) -> EngineState:
        meta = {"engine": "double", "schema": STATE_SCHEMA, "key": key}
        size = self._script.kv_bytes_per_token * len(request.prompt.token_ids)
        if not size:
            return EngineState(meta)
        import torch

        return EngineState(meta, {"kv": torch.full((size,), key % 251, dtype=torch.uint8)})


def _media_input(placeholder: int) -> MediaInput:
    return MediaInput(
        placeholder_id=placeholder, encodes=True, takes_encoded=True, takes_files=True, options=_OPTIONS
    )


def _is_plain(sampling: Sampling) -> bool:
    return sampling.ignore_eos and sampling.logprobs is None and not sampling.stop_token_ids


def _request_key(request: EngineRequest) -> int:
    """A number that stands for everything that the answer depends on."""
    key = zlib.crc32(b"".join(i.to_bytes(4, "little") for i in request.prompt.token_ids))
    for media in request.prompt.media:
        key = zlib.crc32(media.item.digest.encode(), key)
    if request.sampling.seed is not None and request.sampling.temperature:
        key = zlib.crc32(str(request.sampling.seed).encode(), key)
    return key


def find_script_faults(script: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each key of a script that the double does not know
    or whose value is of another kind."""
    kinds = {entry.name: str(entry.type).split(" | ") for entry in fields(DoubleScript)}
    for name, value in script.items():
        if name not in kinds:
            yield f"the double engine knows no script key {name}; see DoubleScript"
        elif not _is_of(value, kinds[name]):
            yield f"double.{name} {value!r} must be {_SCRIPT_KINDS[kinds[name][0]]}"


_SCRIPT_KINDS = {
    "dict[str, int]": "an object of whole numbers",
    "int": "a whole number of at least 0",
    "float": "a number of at least 0",
    "bool": "true or false",
    "str": "a text",
}


def _is_of(value: Any, kinds: Sequence[str]) -> bool:
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    if isinstance(value, str):
        return "str" in kinds
    if isinstance(value, dict):
        return "dict[str, int]" in kinds and all(_is_of(each, ("int",)) for each in value.values())
    allowed = (int, float) if "float" in kinds else (int,) if "int" in kinds else ()
    return isinstance(value, allowed) and math.isfinite(value) and value >= 0


def _limits(args: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that the double honours, under its own names."""
    names = {"max_seq_len": "context_length", "max_batch_size": "max_num_seqs"}
    return {ours: args[theirs] for theirs, ours in names.items() if args.get(theirs) is not None}
