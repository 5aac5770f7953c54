"""The decode role: take a prefilled request over and stream the rest of it.
Never fetches media, never tokenizes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from dynamo.trtllm.core import Context, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.frontend.request import Request, parse_request
from dynamo.trtllm.frontend.response import Chunk, Output
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.metrics import Readings, Stage
from dynamo.trtllm.peers.prefill import PrefillPeers
from dynamo.trtllm.request_handlers.choices import answers_of, continue_all
from dynamo.trtllm.request_handlers.handler_base import HandlerBase
from dynamo.trtllm.request_handlers.takeover import Takeovers
from dynamo.trtllm.stages import measure_until_first_output, passed
from dynamo.trtllm.transfer.port import Transfer


class DecodeHandler(HandlerBase):
    """Emits prefill's first token at once, while the KV cache is still being read."""

    def __init__(
        self, engine: Engine, info: EngineInfo, transfer: Transfer, prefill: PrefillPeers, stops: StopStrings
    ) -> None:
        super().__init__(engine, info, transfer)
        self._stops = stops
        self._transfer = transfer
        self._takeovers = Takeovers(engine, transfer, prefill)

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Output, None]:
        request = parse_request(raw, context)
        passed(Stage.PREPARE)
        if request.is_health_check:
            return self._canary(request)
        if request.engine_request.choices > 1:
            return answers_of(request, self._decode_all(request, context))
        answer = self._decode(request, context)
        return await self._stops.watch(request, answer) if request.stop_strings else answer

    async def _decode(self, request: Request, context: Context) -> AsyncGenerator[Step | Tokens, None]:
        async with self._takeovers.take_over(request, context) as taken:
            measure_until_first_output(Stage.REPLY)
            yield taken.first
            if taken.first.finish is not None:
                return
            state = await taken.state()
            attaching = True
            try:
                async with aclosing(self._engine.decode(taken.asked, taken.first, state)) as steps:
                    async for step in steps:
                        if attaching:
                            # the engine has copied it; the memory is another request's from here on
                            state.release()
                            attaching = False
                        yield _with_cached(step, taken.cached_tokens)
            finally:
                state.release()

    async def _decode_all(self, request: Request, context: Context) -> AsyncGenerator[Chunk, None]:
        """All choices of a request, each continued from the one KV cache."""
        async with self._takeovers.take_over(request, context) as taken:
            state = await taken.state()
            answers = continue_all(
                self._engine, taken.asked, taken.first, state, partial(self._stops.watch, request)
            )
            async with aclosing(answers) as chunks:
                async for chunk in chunks:
                    yield chunk

    def stats(self) -> Readings:
        return {**self._transfer.stats().readings(), **self._takeovers.stats()}

    async def drained(self) -> None:
        await self._takeovers.drained()

    async def close(self) -> None:
        await self._transfer.close()


def _with_cached(step: Step | Tokens, cached_tokens: int) -> Step | Tokens:
    if isinstance(step, list) or step.usage is None or step.usage.cached_tokens == cached_tokens:
        return step
    return step._replace(usage=step.usage._replace(cached_tokens=cached_tokens))
