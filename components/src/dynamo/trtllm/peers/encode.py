"""Media items from encode workers: choose an instance, ask it, and read the embeddings that it offers.

Which instance is asked for an item is `placement`'s choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig, PeerConfig
from dynamo.trtllm.core import Context, EncodedMedia, MediaItem, TokenBudget
from dynamo.trtllm.errors import ClientFault, PartFault, PeerUnavailable
from dynamo.trtllm.metrics import Stage
from dynamo.trtllm.multimodal.blocking import all_or_none
from dynamo.trtllm.multimodal.cache import ContentCache
from dynamo.trtllm.multimodal.kinds.registry import require_counts
from dynamo.trtllm.multimodal.loader import MediaLoader, nbytes
from dynamo.trtllm.multimodal.parts import MediaPart, at_part, reference_of
from dynamo.trtllm.multimodal.uuids import TWO_CONTENTS
from dynamo.trtllm.peers.client import PeerClient, first_answer
from dynamo.trtllm.peers.messages import EncodeReply, EncodeRequest
from dynamo.trtllm.peers.placement import Placement
from dynamo.trtllm.stages import measured
from dynamo.trtllm.transfer.port import Transfer

logger = logging.getLogger(__name__)


class RemoteEncoder:
    """Loads parts through encode workers. Shared by requests:
    the calls under way and the cache of what was read.

    `fallback` loads here while no encode worker lives or is reachable; None answers 503 instead.
    """

    def __init__(
        self,
        client: PeerClient,
        transfer: Transfer,
        peers: PeerConfig,
        media: MediaConfig,
        fallback: MediaLoader | None,
    ) -> None:
        self._client = client
        self._transfer = transfer
        self._timeout_s = peers.timeout_s
        self._media = media
        self._fallback = fallback
        self._placement = Placement()
        self._cache: ContentCache[MediaItem] = ContentCache(media.cache_bytes, nbytes)
        self._retries = 0

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[MediaItem]:
        """As `MediaLoader.load`, equal references asked for once;
        raises `PeerUnavailable` and `PeerTimeout` besides."""
        self._check(parts)
        if self._fallback is not None and not self._client.instances():
            return await self._fallback.load(parts, budget, context)
        try:
            return await self._items(parts, budget, context)
        except PeerUnavailable as error:
            if self._fallback is None:
                raise
            logger.warning("encoding here: %s", error)
            return await self._fallback.load(parts, budget, context)

    def stats(self) -> metrics.Readings:
        calls: metrics.Readings = {
            metrics.ENCODE_RETRIES: self._retries,
            metrics.INFLIGHT_ENCODE_CALLS: self._placement.calls,
        }
        here = self._fallback.stats() if self._fallback is not None else {}
        return metrics.merged(self._cache.stats(), calls, here)

    async def close(self) -> None:
        if self._fallback is not None:
            await self._fallback.close()

    def _check(self, parts: Sequence[MediaPart]) -> None:
        """Refuse before any call what no encode worker takes."""
        for part in parts:
            with at_part(part):
                if not isinstance(part.url, str):
                    raise ClientFault("its url is missing or not a string")
        require_counts((part.kind for part in parts), self._media)

    async def _items(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None
    ) -> list[MediaItem]:
        keys = _keys_of(parts)
        first: dict[_Key, MediaPart] = {}
        for part, key in zip(parts, keys, strict=True):
            if key not in first or not first[key].url:
                first[key] = part
        items = await all_or_none([self._item(part, budget, context) for part in first.values()])
        found = dict(zip(first, items, strict=True))
        _require_one_content_each(first.values(), items)
        return [found[key] for key in keys]

    async def _item(self, part: MediaPart, budget: TokenBudget, context: Context | None) -> MediaItem:
        """Ask the chosen instance, and another one when that is dead or late."""

        async def ask(instance: int, seconds: float) -> MediaItem:
            with self._placement.call(instance):
                return await self._ask(instance, part, budget, context, seconds)

        order = self._placement.order(self._client.instances(), part)
        return await first_answer("encode", order, self._timeout_s, ask, self._count_retry)

    def _count_retry(self) -> None:
        self._retries += 1

    async def _ask(
        self, instance: int, part: MediaPart, budget: TokenBudget, context: Context | None, timeout_s: float
    ) -> MediaItem:
        end = time.monotonic() + timeout_s
        with measured(Stage.REMOTE_ENCODE):
            request = EncodeRequest(
                kind=part.kind,
                position=part.position,
                url=part.url,
                uuid=part.uuid,
                tenant=part.tenant,
                options=part.options,
                text_tokens=budget.text_tokens,
                context_length=budget.context_length,
            )
            raw = await self._client.call(request.model_dump(mode="json"), instance, context, timeout_s)
            reply = EncodeReply.parse(raw, "encode")
        read = False

        async def compute() -> MediaItem:
            nonlocal read
            read = True
            return await self._read(reply, end - time.monotonic())

        try:
            return await self._cache.get_or_compute(f"{reply.kind}:{reply.digest}", compute)
        finally:
            if not read:
                await self._transfer.discard(reply.transfer)

    async def _read(self, reply: EncodeReply, timeout_s: float) -> MediaItem:
        with measured(Stage.EMBEDDING_HANDOVER):
            received = await self._transfer.fetch(reply.transfer, max(timeout_s, 0.001), copy=True)
        return EncodedMedia(reply.kind, reply.digest, received.tensors, reply.token_ids, reply.extras)


_Key = tuple[str, str, str | None]
"""Parts of one key are one item: kind, reference, and the uuid that names it."""


def _keys_of(parts: Sequence[MediaPart]) -> list[_Key]:
    """A part that is its uuid alone has the key of one of the same request that brings the content."""
    sent = {(part.kind, part.uuid): reference_of(part.url) for part in parts if part.url}
    return [
        (
            part.kind,
            reference_of(part.url) or (part.uuid and sent.get((part.kind, part.uuid))) or "",
            part.uuid,
        )
        for part in parts
    ]


def _require_one_content_each(parts: Iterable[MediaPart], items: Sequence[MediaItem]) -> None:
    named: dict[tuple[str, str], str] = {}
    for part, item in zip(parts, items, strict=True):
        if part.uuid is not None and named.setdefault((part.kind, part.uuid), item.digest) != item.digest:
            raise PartFault(part.position, TWO_CONTENTS, kind=part.kind)
