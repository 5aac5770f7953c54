"""The aggregated role: one worker fetches, encodes, and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo.trtllm.core import Context, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.frontend.request import parse_request
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.request_handlers.handler_base import HandlerBase, engine_request, transfer_stats
from dynamo.trtllm.transfer.port import Transfer


class AggregatedHandler(HandlerBase):
    """Context and generation in one engine."""

    def __init__(
        self, engine: Engine, info: EngineInfo, processor: MultimodalProcessor, transfer: Transfer | None = None
    ) -> None:
        super().__init__(engine, info, transfer)
        self._processor = processor
        self._transfer = transfer

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Step | Tokens, None]:
        request = parse_request(raw)
        prompt = await self._processor.prepare(request, context)
        return self._engine.generate(engine_request(request, prompt, context))

    async def close(self) -> None:
        await self._processor.close()
        if self._transfer is not None:
            await self._transfer.close()

    def stats(self) -> Mapping[str, float]:
        return {**self._processor.stats(), **(transfer_stats(self._transfer) if self._transfer else {})}
