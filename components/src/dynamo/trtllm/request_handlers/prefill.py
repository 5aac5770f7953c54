"""The prefill role: media, encode and the context stage,
then one reply that carries the hand-off to decode."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from dynamo.trtllm.core import Context, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState, Prefilled
from dynamo.trtllm.frontend.request import parse_request
from dynamo.trtllm.frontend.response import Chunk, to_chunk
from dynamo.trtllm.metrics import Readings, Stage
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.peers.messages import Handoff, wire_logprobs
from dynamo.trtllm.request_handlers.choices import require_forks
from dynamo.trtllm.request_handlers.handler_base import HandlerBase, withdrawn_on_failure
from dynamo.trtllm.stages import measure_until_first_output, measured, passed
from dynamo.trtllm.transfer.port import Offer, Transfer


class PrefillHandler(HandlerBase):
    """Offers each request's KV cache to whoever decodes it;
    it is freed on acknowledgement or after its time to live."""

    def __init__(
        self, engine: Engine, info: EngineInfo, processor: MultimodalProcessor, transfer: Transfer
    ) -> None:
        super().__init__(engine, info, transfer)
        self._processor = processor
        self._transfer = transfer

    async def respond(
        self, raw: Mapping[str, Any], context: Context
    ) -> AsyncGenerator[Step | Tokens, None] | AsyncGenerator[Chunk, None]:
        request = parse_request(raw, context)
        passed(Stage.PREPARE)
        if request.is_health_check:
            return self._canary(request)
        require_forks(self._engine, request.engine_request)
        return self._prefill(_for_context_stage(await self._processor.prepare(request, context)))

    async def _prefill(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        with measured(Stage.PREFILL):
            prefilled = await self._engine.prefill(request)
        offer = await self._offer(prefilled.state)
        with withdrawn_on_failure(offer):
            measure_until_first_output(Stage.REPLY)
            yield _reply(type(self._engine).__name__, prefilled, offer, request.sampling.seed)

    async def _offer(self, state: EngineState | None) -> Offer | None:
        """The offer of `state`'s tensors, which are free here then; None where there are none."""
        if state is None:
            return None
        try:
            if not state.tensors:
                return None
            with measured(Stage.KV_HANDOVER):
                return await self._transfer.offer(state.tensors)
        finally:
            state.release()

    def stats(self) -> Readings:
        return {**self._processor.stats(), **self._transfer.stats().readings()}

    async def drained(self) -> None:
        """Hand-overs in flight end by acknowledgement or by their time to live."""
        await self._transfer.drain()

    async def close(self) -> None:
        await self._processor.close()
        await self._transfer.close()


def _for_context_stage(request: EngineRequest) -> EngineRequest:
    """The frontend asks prefill for one token; the request goes on,
    so the engine must keep its state after it.

    A sampled request without a seed gets one here, so that both stages draw from one random stream.
    """
    sampling = replace(request.sampling, max_tokens=None)
    if sampling.seed is None and (
        sampling.temperature or sampling.top_p is not None or sampling.top_k is not None
    ):
        sampling = replace(sampling, seed=secrets.randbits(31))
    return replace(request, sampling=sampling)


def _reply(engine: str, prefilled: Prefilled, offer: Offer | None, seed: int | None) -> Chunk:
    """The one reply. "length" makes the frontend call decode, which lets go of what this engine holds;
    at any other finish reason the frontend answers from this chunk.
    """
    first = prefilled.first
    handoff = Handoff(
        engine=engine,
        prompt_token_ids=prefilled.prompt_token_ids,
        first_token_ids=tuple(first.token_ids),
        logprobs=wire_logprobs(first.logprobs),
        cached_tokens=prefilled.cached_tokens,
        finish=first.finish,
        stop_reason=first.stop_reason,
        seed=seed,
        meta=prefilled.state.meta if prefilled.state is not None else {},
        transfer=offer.descriptor if offer is not None else None,
    )
    usage = first.usage if first.usage is not None and first.finish is not None else handoff.usage()
    finish = first.finish if prefilled.state is None and first.finish is not None else "length"
    chunk = to_chunk(Step(first.token_ids, first.logprobs, finish, first.stop_reason, usage))
    chunk["disaggregated_params"] = handoff.model_dump(mode="json")
    return chunk
