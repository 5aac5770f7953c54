"""The prefill role: media, encode and the context stage, then one reply that carries the hand-off to decode."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from dynamo.trtllm.config import TransferConfig
from dynamo.trtllm.egress import Chunk, Context
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineState, Prefilled, Step, Usage
from dynamo.trtllm.messages import Handoff
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.request import Request, parse_request
from dynamo.trtllm.request_handlers.handler_base import HandlerBase, engine_request, to_chunk, transfer_stats
from dynamo.trtllm.transfer.descriptor import TransferDescriptor
from dynamo.trtllm.transfer.port import Transfer


class PrefillHandler(HandlerBase):
    """Offers each request's KV cache to whoever decodes it; it is freed on acknowledgement or after its time to live."""

    def __init__(
        self, engine: Engine, info: EngineInfo, processor: MultimodalProcessor, transfer: Transfer, config: TransferConfig
    ) -> None:
        super().__init__(engine, info)
        self._processor = processor
        self._transfer = transfer
        self._config = config

    async def generate(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        request = _for_context_stage(parse_request(raw))
        prompt = await self._processor.prepare(request, context)
        prefilled = await self._engine.prefill(engine_request(request, prompt, context.id()))
        if prefilled.state is None or request.is_health_check:
            yield to_chunk(_finished(prefilled))
            return
        yield await self._handoff(prefilled, prefilled.state, request.sampling.seed)

    async def _handoff(self, prefilled: Prefilled, state: EngineState, seed: int | None) -> Chunk:
        """The reply on which the frontend calls decode. `finish_reason` "length" is what tells it to."""
        try:
            descriptor = await self._offer(state)
        finally:
            state.release()
        first = prefilled.first
        handoff = Handoff(
            engine=type(self._engine).__name__,
            prompt_token_ids=prefilled.prompt_token_ids,
            first_token_ids=tuple(first.token_ids),
            logprobs=None if first.logprobs is None else tuple(first.logprobs),
            cached_tokens=prefilled.cached_tokens,
            seed=seed,
            meta=state.meta,
            transfer=descriptor,
        )
        usage = Usage(len(prefilled.prompt_token_ids), len(first.token_ids), prefilled.cached_tokens)
        chunk = to_chunk(Step(first.token_ids, first.logprobs, "length", None, usage))
        chunk["disaggregated_params"] = handoff.model_dump(mode="json")
        return chunk

    async def _offer(self, state: EngineState) -> TransferDescriptor | None:
        if not state.tensors:
            return None
        offer = await self._transfer.offer(state.tensors, self._config.time_to_live_s / 2)
        return offer.descriptor

    def stats(self) -> Mapping[str, float]:
        return {**self._processor.stats(), **transfer_stats(self._transfer)}

    async def drained(self) -> None:
        """Hand-overs in flight end by acknowledgement or by their time to live."""
        await self._transfer.drain(self._config.time_to_live_s)

    async def close(self) -> None:
        await self._processor.close()
        await self._transfer.close()


def _for_context_stage(request: Request) -> Request:
    """The frontend asks prefill for one token; the request goes on, so the engine must keep its state after it.

    A sampled request without a seed gets one here, so that both stages draw from one random stream.
    """
    sampling = replace(request.sampling, max_tokens=None)
    if sampling.seed is None and (sampling.temperature or sampling.top_p is not None or sampling.top_k is not None):
        sampling = replace(sampling, seed=secrets.randbits(31))
    return replace(request, sampling=sampling)


def _finished(prefilled: Prefilled) -> Step:
    """The whole answer of a request whose first token ended it: the frontend answers from it and never calls decode."""
    first = prefilled.first
    usage = first.usage or Usage(len(prefilled.prompt_token_ids), len(first.token_ids), prefilled.cached_tokens)
    return first._replace(finish=first.finish or "length", usage=usage)
