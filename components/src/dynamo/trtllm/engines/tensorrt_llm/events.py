"""KV cache events to Dynamo's publisher, and iteration statistics to gauges.

The library's iterators end at their timeout and start again when asked again; before the first request they
refuse or are empty. One consumer per engine is allowed. Both loops are tasks that the engine owns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dynamo.trtllm import metrics

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 2.0
_MIN_PAUSE_S = 0.1


class KvPublisher(Protocol):
    """The part of `dynamo.llm.KvEventPublisher` that is used. Hashes are signed 64-bit."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


async def follow(read: Callable[..., Any], first_request: asyncio.Event, take: Callable[[Any], None]) -> None:
    """Feed every item of the iterator that `read` (`get_stats_async`,
    `get_kv_cache_events_async`) gives to `take`, for ever."""
    await first_request.wait()
    while True:
        started = time.monotonic()
        try:
            async for item in read(timeout=POLL_TIMEOUT_S):
                if item:
                    take(json.loads(item) if isinstance(item, str) else item)
        except AssertionError:
            logger.debug("The engine has not begun to record yet")
        except Exception:
            logger.warning("An engine event could not be used", exc_info=True)
        await asyncio.sleep(max(0.0, _MIN_PAUSE_S - (time.monotonic() - started)))


class KvEvents:
    """Turns the library's KV cache events into calls of Dynamo's publishers, one per attention-DP rank.

    Only full blocks of the largest attention window are told: the router compares prefixes of whole blocks.
    """

    def __init__(self, create: Callable[[int], KvPublisher], block_size: int) -> None:
        self._create = create
        self._block_size = block_size
        self._publishers: dict[int, KvPublisher] = {}
        self._windows: set[int] = set()
        self._partial: set[int] = set()
        self.published = 0
        """Events that were passed on."""

    def take(self, event: Mapping[str, Any]) -> None:
        data = event.get("data") or {}
        window = event.get("window_size")
        if window is not None:
            self._windows.add(int(window))
            if int(window) != max(self._windows):
                return
        publisher = self._publisher(int(event.get("attention_dp_rank") or 0))
        if data.get("type") == "stored":
            self._stored(publisher, data)
        elif data.get("type") == "removed":
            self._removed(publisher, data)
        else:
            return
        self.published += 1

    def _publisher(self, rank: int) -> KvPublisher:
        if rank not in self._publishers:
            self._publishers[rank] = self._create(rank)
        return self._publishers[rank]

    def _stored(self, publisher: KvPublisher, data: Mapping[str, Any]) -> None:
        tokens: list[int] = []
        hashes: list[int] = []
        media: list[dict[str, Any] | None] = []
        blocks = data.get("blocks") or ()
        for block in blocks:
            ids = [int(token["token_id"]) for token in block.get("tokens") or ()]
            block_hash = signed_hash(block["block_hash"])
            if len(ids) != self._block_size:
                self._partial.add(block_hash)
                break
            tokens += ids
            hashes.append(block_hash)
            media.append(media_of(block))
        salts = {block.get("cache_salt") for block in blocks} if hashes else set()
        if len(salts) > 1:
            logger.warning(
                "Blocks of different cache salts came in one KV event: they are not told to the router"
            )
        elif hashes:
            parent = data.get("parent_hash")
            publisher.publish_stored(
                tokens,
                [self._block_size] * len(hashes),
                hashes,
                None if parent is None else signed_hash(parent),
                media if any(media) else None,
                cache_salt=salts.pop() or data.get("cache_salt"),
            )

    def _removed(self, publisher: KvPublisher, data: Mapping[str, Any]) -> None:
        hashes = [signed_hash(h) for h in data.get("block_hashes") or ()]
        told = [h for h in hashes if h not in self._partial]
        self._partial.difference_update(hashes)
        if told:
            publisher.publish_removed(told)


def signed_hash(value: int | str) -> int:
    """A block hash as a signed 64-bit number.
    Newer releases may use wider ones, as numbers or hexadecimal text."""
    number = int(value, 16) if isinstance(value, str) else int(value)
    if -(1 << 63) <= number < 1 << 63:
        return number
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def media_of(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the router needs to know of the media in a block: the first 64 bits of each content hash."""
    objects = []
    for key in block.get("mm_keys") or ():
        try:
            objects.append({"mm_hash": int(str(key["hash"])[:16], 16), "offsets": []})
        except (KeyError, ValueError):
            continue
    return {"mm_objects": objects} if objects else None


_BY_RANK: dict[metrics.Metric, tuple[str, ...]] = {
    metrics.TOTAL_BLOCKS: ("kvCacheStats", "maxNumBlocks"),
    metrics.CACHE_HIT_RATE: ("kvCacheStats", "cacheHitRate"),
}
_SUMMED: dict[metrics.Metric, tuple[str, ...]] = {
    metrics.ENGINE_ACTIVE: ("numActiveRequests",),
    metrics.ENGINE_QUEUED: ("numQueuedRequests",),
    metrics.ENGINE_USED_BLOCKS: ("kvCacheStats", "usedNumBlocks"),
    metrics.ENGINE_GPU_MEMORY: ("gpuMemUsage",),
}
_ITERATION_MS = ("iterLatencyMS",)


class Gauges:
    """The latest iteration of each attention-DP rank:
    what Dynamo shows by rank stays apart, counts are added over the ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, Mapping[str, Any]] = {}

    def take(self, stats: Mapping[str, Any]) -> None:
        rank = stats.get("attentionDpRank")
        self._ranks[rank if isinstance(rank, int) else 0] = stats

    def readings(self) -> metrics.Readings:
        """What the release reports; the duration of a step is that of the slowest rank."""
        found: dict[metrics.Metric | metrics.Series, float] = {}
        for rank, stats in self._ranks.items():
            for metric, path in _BY_RANK.items():
                _put(found, metric.of(str(rank)), _number(stats, path))
            used, total = (
                _number(stats, ("kvCacheStats", name)) for name in ("usedNumBlocks", "maxNumBlocks")
            )
            if used is not None and total:
                found[metrics.CACHE_USAGE.of(str(rank))] = used / total
        for metric, path in _SUMMED.items():
            values = [
                number for stats in self._ranks.values() if (number := _number(stats, path)) is not None
            ]
            _put(found, metric, sum(values) if values else None)
        steps_ms = [
            number for stats in self._ranks.values() if (number := _number(stats, _ITERATION_MS)) is not None
        ]
        _put(found, metrics.ENGINE_ITERATION, max(steps_ms) / 1e3 if steps_ms else None)
        return found


def _put(
    found: dict[metrics.Metric | metrics.Series, float],
    key: metrics.Metric | metrics.Series,
    value: float | None,
) -> None:
    if value is not None:
        found[key] = value


def _number(stats: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """The number at `path`; None where the release does not report one."""
    value: Any = stats
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
