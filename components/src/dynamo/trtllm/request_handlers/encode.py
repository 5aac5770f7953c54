"""The encode role: media to embeddings for other workers, held until they are read or expire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo.trtllm.core import Context, EncodedMedia, MediaItem, TokenBudget
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import PartFault
from dynamo.trtllm.frontend.request import is_health_check
from dynamo.trtllm.frontend.response import Chunk
from dynamo.trtllm.metrics import Readings, Stage
from dynamo.trtllm.multimodal.kinds.registry import plural_of
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal.options import options_by_kind
from dynamo.trtllm.multimodal.parts import MediaPart
from dynamo.trtllm.peers.messages import EncodeReply, EncodeRequest
from dynamo.trtllm.request_handlers.handler_base import HandlerBase, withdrawn_on_failure
from dynamo.trtllm.stages import measure_until_first_output, measured, passed
from dynamo.trtllm.transfer.port import Transfer


class EncodeHandler(HandlerBase):
    """Called by prefill and aggregated workers, never by the frontend. Replies once, to one item."""

    def __init__(self, engine: Engine, info: EngineInfo, loader: MediaLoader, transfer: Transfer) -> None:
        super().__init__(engine, info, transfer)
        self._loader = loader
        self._transfer = transfer

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        if is_health_check(raw):
            return self._health()
        request = EncodeRequest.parse(raw, "calling")
        passed(Stage.PREPARE)
        return self._reply(request)

    async def _health(self) -> AsyncGenerator[Chunk, None]:
        await self._engine.check_health()
        yield {"token_ids": [], "finish_reason": "stop"}

    async def _reply(self, request: EncodeRequest) -> AsyncGenerator[Chunk, None]:
        options = options_by_kind(request.options, self._info.media).get(request.kind, {})
        part = MediaPart(request.position, request.kind, request.url, request.uuid, request.tenant, options)
        (item,) = await self._loader.load([part], TokenBudget(request.text_tokens, request.context_length))
        encoded = _require_encoded(part, item)
        with measured(Stage.EMBEDDING_HANDOVER):
            offer = await self._transfer.offer(encoded.tensors)
        with withdrawn_on_failure(offer):
            measure_until_first_output(Stage.REPLY)
            reply = EncodeReply(
                kind=encoded.kind,
                digest=encoded.digest,
                token_ids=encoded.token_ids,
                extras=encoded.extras,
                transfer=offer.descriptor,
            )
            yield reply.model_dump(mode="json")

    def stats(self) -> Readings:
        return {**self._loader.stats(), **self._transfer.stats().readings()}

    async def drained(self) -> None:
        await self._transfer.drain()

    async def close(self) -> None:
        await self._loader.close()
        await self._transfer.close()


def _require_encoded(part: MediaPart, item: MediaItem) -> EncodedMedia:
    """`item` of `part`; decoded media are those of a kind that this worker's
    engine does not encode (`MediaInput.encodes`)."""
    if isinstance(item, EncodedMedia):
        return item
    message = (
        "this encode worker takes embedding files only: "
        f"{plural_of(part.kind)} of this model are encoded by prefill and aggregated workers"
    )
    raise PartFault(part.position, message, kind=part.kind)
