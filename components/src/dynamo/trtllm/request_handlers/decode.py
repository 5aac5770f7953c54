"""The decode role: attach a prefilled request and stream the rest of it. Never fetches media, never tokenizes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from dynamo.trtllm.core import Context, Prompt, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState
from dynamo.trtllm.errors import PeerFault, WorkerError
from dynamo.trtllm.frontend.request import Request, parse_request
from dynamo.trtllm.frontend.response import Chunk, Output
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.metrics import PREFILL_RETRIES, Readings, Stage
from dynamo.trtllm.peers.messages import Handoff
from dynamo.trtllm.peers.prefill import PrefillPeers
from dynamo.trtllm.request_handlers.choices import answers_of, continue_all, require_forks
from dynamo.trtllm.request_handlers.handler_base import HandlerBase
from dynamo.trtllm.stages import measure_until_first_output, measured, passed
from dynamo.trtllm.transfer.port import Transfer

logger = logging.getLogger(__name__)


class DecodeHandler(HandlerBase):
    """Emits prefill's first token at once, while the KV cache is still being read.

    Prefill is pure, so a request whose prefill worker died before the KV cache was read is prefilled once more by another one.
    """

    def __init__(self, engine: Engine, info: EngineInfo, transfer: Transfer, prefill: PrefillPeers, stops: StopStrings) -> None:
        super().__init__(engine, info, transfer)
        self._stops = stops
        self._transfer = transfer
        self._prefill = prefill
        self._prefilled_again = 0
        self._background: set[asyncio.Task[None]] = set()
        """Hand-overs that nobody waits for any more."""

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Output, None]:
        request = parse_request(raw, context)
        passed(Stage.PREPARE)
        if request.is_health_check:
            return self._canary(request)
        if request.engine_request.choices > 1:
            require_forks(self._engine, request.engine_request)
            return answers_of(request, self._decode_all(request, context))
        answer = self._decode(request, context)
        return await self._stops.watch(request, answer) if request.stop_strings else answer

    async def _decode(self, request: Request, context: Context) -> AsyncGenerator[Step | Tokens, None]:
        handoff = await self._handoff(request, context)
        measure_until_first_output(Stage.REPLY)
        asked = _continued(request.engine_request, handoff)
        first = handoff.first_step()
        if first.finish is None and asked.sampling.max_tokens == 1:
            first = first._replace(finish="length", usage=handoff.usage())
        if first.finish is not None:
            await self._give_up(handoff, asked)
            yield first
            return
        async with self._reading(handoff, asked, self._state(handoff, request, context)) as reading:
            yield first
            state = await reading
        attaching = True
        try:
            async with aclosing(self._engine.decode(asked, first, state)) as steps:
                async for step in steps:
                    if attaching:
                        state.release()  # the engine has copied it; the memory is another request's from here on
                        attaching = False
                    yield _with_cached(step, handoff.cached_tokens)
        finally:
            state.release()

    async def _decode_all(self, request: Request, context: Context) -> AsyncGenerator[Chunk, None]:
        """All choices of a request, each continued from the one KV cache."""
        handoff = await self._handoff(request, context)
        asked, first = _continued(request.engine_request, handoff), handoff.first_step()
        if first.finish is None and asked.sampling.max_tokens == 1:
            first = first._replace(finish="length", usage=handoff.usage())
        async with self._reading(handoff, asked, self._state(handoff, request, context)) as reading:
            state = await reading
        answers = continue_all(self._engine, asked, first, state, partial(self._stops.watch, request))
        async with aclosing(answers) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _handoff(self, request: Request, context: Context) -> Handoff:
        """The hand-off that came with the request, or a new one where the frontend could not reach its prefill worker."""
        if not request.handoff:
            return await self._prefill_again(request, context, None)
        with measured(Stage.PREPARE):
            return self._checked(Handoff.parse(request.handoff, "prefill"))

    def _checked(self, handoff: Handoff) -> Handoff:
        if handoff.engine != type(self._engine).__name__:
            raise PeerFault("the prefill worker runs another engine than this decode worker")
        return handoff

    @asynccontextmanager
    async def _reading(
        self, handoff: Handoff, asked: EngineRequest, read: Coroutine[Any, Any, EngineState]
    ) -> AsyncIterator[asyncio.Task[EngineState]]:
        """Read the KV cache beside the block. If the block ends without it, it is freed here and on the prefill worker."""
        reading = asyncio.create_task(read, name="kv-read")
        try:
            yield reading
        except BaseException:
            if self._engine.holds_until_decoded:
                self._in_background(self._abandon(reading, asked))
            else:
                reading.cancel()
                reading.add_done_callback(_release_unused)
                await self._discard(handoff)
            raise

    async def _give_up(self, handoff: Handoff, asked: EngineRequest) -> None:
        """The answer is complete without decode: let go of what prefill holds for it."""
        if self._engine.holds_until_decoded and handoff.meta:
            reading = asyncio.create_task(self._read(handoff), name="kv-read")
            self._in_background(self._abandon(reading, asked))
        else:
            await self._discard(handoff)

    async def _abandon(self, reading: asyncio.Task[EngineState], asked: EngineRequest) -> None:
        try:
            state = await reading
        except WorkerError as error:
            logger.info("request %s: its hand-over could not be taken back: %s", asked.request_id, error)
            return
        self._engine.abandon(asked, state)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _discard(self, handoff: Handoff) -> None:
        if handoff.transfer is not None:
            await self._transfer.discard(handoff.transfer)

    async def _state(self, handoff: Handoff, request: Request, context: Context) -> EngineState:
        """The engine's state, its KV cache read; from a second prefill if the first one's worker is gone."""
        try:
            return await self._read(handoff)
        except PeerFault as error:
            logger.warning("request %s: prefilling again: %s", context.id(), error)
        again = await self._prefill_again(request, context, handoff)
        if again.first_token_ids != handoff.first_token_ids or again.finish is not None:
            await self._discard(again)
            raise PeerFault("the prefill worker was lost and its work could not be repeated")
        return await self._read(again)

    async def _read(self, handoff: Handoff) -> EngineState:
        if handoff.transfer is None:
            return EngineState(handoff.meta)
        with measured(Stage.KV_HANDOVER):
            received = await self._transfer.fetch(handoff.transfer)
        return EngineState(handoff.meta, received.tensors, received.release)

    async def _prefill_again(self, request: Request, context: Context, lost: Handoff | None) -> Handoff:
        self._prefilled_again += 1
        return self._checked(await self._prefill.prefill(request, context, lost))

    def stats(self) -> Readings:
        return {**self._transfer.stats().readings(), PREFILL_RETRIES: self._prefilled_again}

    async def drained(self) -> None:
        """Hand-overs that are being taken back end by the transfer's deadline."""
        if self._background:
            await asyncio.wait(self._background)

    async def close(self) -> None:
        await self._transfer.close()


def _release_unused(reading: asyncio.Task[EngineState]) -> None:
    if not reading.cancelled() and reading.exception() is None:
        reading.result().release()


def _continued(asked: EngineRequest, handoff: Handoff) -> EngineRequest:
    """The engine's request with what prefill made of it: the expanded prompt, no media any more, and its seed."""
    sampling = asked.sampling if asked.sampling.seed == handoff.seed else replace(asked.sampling, seed=handoff.seed)
    return replace(asked, prompt=Prompt(handoff.prompt_token_ids), sampling=sampling, media_hashes=())


def _with_cached(step: Step | Tokens, cached_tokens: int) -> Step | Tokens:
    if isinstance(step, list) or step.usage is None or step.usage.cached_tokens == cached_tokens:
        return step
    return step._replace(usage=step.usage._replace(cached_tokens=cached_tokens))
