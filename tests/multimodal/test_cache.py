"""The content-addressed cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.trtllm import metrics
from dynamo.trtllm.errors import EngineFault
from dynamo.trtllm.multimodal.cache import ContentCache


class Work:
    """A computation that can be held, fails on demand, and counts how often it began and was cancelled."""

    def __init__(self, value: str = "v", error: Exception | None = None, held: bool = False) -> None:
        self.value, self.error = value, error
        self.begun = self.cancelled = 0
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        if not held:
            self.release.set()

    async def __call__(self) -> str:
        self.begun += 1
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.value


def cache_of(capacity_bytes: int) -> ContentCache[str]:
    return ContentCache(capacity_bytes, len)


def counts(cache: ContentCache[Any]) -> dict[str, float]:
    """The cache's metrics under the last words of their names."""
    words = {
        "hits": metrics.MEDIA_CACHE_HITS,
        "misses": metrics.MEDIA_CACHE_MISSES,
        "evictions": metrics.MEDIA_CACHE_EVICTIONS,
        "bytes": metrics.MEDIA_CACHE_BYTES,
        "entries": metrics.MEDIA_CACHE_ENTRIES,
    }
    return {word: cache.stats()[metric] for word, metric in words.items()}


@pytest.mark.asyncio
async def test_a_value_is_computed_once_and_then_served_from_the_cache() -> None:
    cache, work = cache_of(10), Work("abc")
    assert [await cache.get_or_compute("k", work) for _ in range(3)] == ["abc"] * 3
    assert work.begun == 1
    assert counts(cache) == {"hits": 2, "misses": 1, "evictions": 0, "bytes": 3, "entries": 1}


@pytest.mark.asyncio
async def test_the_least_recently_used_leave_first_and_the_bytes_stay_within_the_capacity() -> None:
    cache = cache_of(6)
    for key in ("a", "b", "a", "c"):
        await cache.get_or_compute(key, Work(key * 3))
    assert counts(cache) == {"hits": 1, "misses": 3, "evictions": 1, "bytes": 6, "entries": 2}
    again = {key: Work(key * 3) for key in ("a", "c", "b")}
    for key, work in again.items():
        await cache.get_or_compute(key, work)
    assert {key: work.begun for key, work in again.items()} == {"a": 0, "c": 0, "b": 1}


@pytest.mark.asyncio
async def test_a_value_larger_than_the_cache_is_served_but_evicts_nothing() -> None:
    cache = cache_of(4)
    await cache.get_or_compute("small", Work("abc"))
    assert await cache.get_or_compute("large", Work("abcde")) == "abcde"
    assert cache.stats()[metrics.MEDIA_CACHE_ENTRIES] == 1
    assert cache.stats()[metrics.MEDIA_CACHE_EVICTIONS] == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("capacity", [0, 10])
async def test_all_who_ask_at_once_share_one_computation(capacity: int) -> None:
    cache, work = cache_of(capacity), Work(held=True)
    callers = [asyncio.create_task(cache.get_or_compute("k", work)) for _ in range(50)]
    await work.started.wait()
    work.release.set()
    assert await asyncio.gather(*callers) == ["v"] * 50
    assert work.begun == 1
    assert (cache.stats()[metrics.MEDIA_CACHE_MISSES], cache.stats()[metrics.MEDIA_CACHE_HITS]) == (1, 49)


@pytest.mark.asyncio
async def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    cache, bad = cache_of(10), Work(error=EngineFault("no"), held=True)
    callers = [asyncio.create_task(cache.get_or_compute("k", bad)) for _ in range(3)]
    await bad.started.wait()
    bad.release.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(result) for result in results] == [EngineFault] * 3
    assert await cache.get_or_compute("k", Work("good")) == "good"


@pytest.mark.asyncio
async def test_a_cancelled_first_caller_does_not_cancel_the_others() -> None:
    cache, work = cache_of(10), Work(held=True)
    first, second = (asyncio.create_task(cache.get_or_compute("k", work)) for _ in range(2))
    await work.started.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    work.release.set()
    assert await second == "v"
    assert (work.begun, work.cancelled) == (1, 0)


@pytest.mark.asyncio
async def test_a_computation_that_nobody_awaits_is_cancelled_and_the_next_caller_begins_anew() -> None:
    cache, work = cache_of(10), Work(held=True)
    callers = [asyncio.create_task(cache.get_or_compute("k", work)) for _ in range(2)]
    await work.started.wait()
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    fresh = Work("fresh")
    assert await cache.get_or_compute("k", fresh) == "fresh"
    assert (work.begun, work.cancelled, fresh.begun) == (1, 1, 1)
    assert await cache.get_or_compute("k", Work("other")) == "fresh"
