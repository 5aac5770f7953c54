"""The aggregated role: one worker fetches, encodes, and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from dynamo.trtllm.core import Context
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.frontend.request import parse_request
from dynamo.trtllm.frontend.response import Output
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.metrics import Readings, Stage
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.request_handlers.choices import answers_of, generate_all
from dynamo.trtllm.request_handlers.handler_base import HandlerBase
from dynamo.trtllm.stages import measure_until_first_output, passed
from dynamo.trtllm.transfer.port import Transfer


class AggregatedHandler(HandlerBase):
    """Context and generation in one engine."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        processor: MultimodalProcessor,
        stops: StopStrings,
        transfer: Transfer | None = None,
    ) -> None:
        super().__init__(engine, info, transfer)
        self._processor = processor
        self._stops = stops
        self._transfer = transfer

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Output, None]:
        request = parse_request(raw, context)
        passed(Stage.PREPARE)
        asked = await self._processor.prepare(request, context)
        measure_until_first_output(Stage.PREFILL)
        if asked.choices > 1:
            return answers_of(request, generate_all(self._engine, asked, partial(self._stops.watch, request)))
        answer = self._engine.generate(asked)
        return await self._stops.watch(request, answer) if request.stop_strings else answer

    async def close(self) -> None:
        await self._processor.close()
        if self._transfer is not None:
            await self._transfer.close()

    def stats(self) -> Readings:
        return {**self._processor.stats(), **(self._transfer.stats().readings() if self._transfer else {})}
