"""A cache of results by the content that they were computed from, bounded in bytes; each result is computed
once at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dynamo.trtllm import metrics

V = TypeVar("V")


@dataclass
class _Flight(Generic[V]):
    """A computation under way and the number of callers that wait for it."""

    task: asyncio.Task[V]
    waiting: int = 0


class ContentCache(Generic[V]):
    """Least recently used entries leave first. Requests share the entries and the computations; one event
    loop.

    With a capacity of 0 nothing is kept, while callers that ask at the same time still share one computation.
    """

    def __init__(self, capacity_bytes: int, nbytes: Callable[[V], int]) -> None:
        self._capacity_bytes = capacity_bytes
        self._nbytes = nbytes
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._flights: dict[str, _Flight[V]] = {}
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    def find(self, key: str) -> V | None:
        """The value of `key` if it is kept; counts as a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._entries.move_to_end(key)
        self._hits += 1
        return entry[0]

    async def get_or_compute(self, key: str, compute: Callable[[], Awaitable[V]]) -> V:
        """The value of `key`, from the cache, from a computation under way, or from `compute`.

        A failure reaches all who wait and is not kept. A caller that is cancelled leaves the others'
        computation alone; when the last one has left, it is cancelled.
        """
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self._hits += 1
            return entry[0]
        flight = self._flights.get(key)
        if flight is None:
            self._misses += 1
            flight = self._flights[key] = _Flight(asyncio.create_task(self._run(key, compute)))
        else:
            self._hits += 1
        return await self._join(key, flight)

    def stats(self) -> metrics.Readings:
        """The media cache's metrics; who joins a computation under way counts as a hit."""
        return {
            metrics.MEDIA_CACHE_HITS: self._hits,
            metrics.MEDIA_CACHE_MISSES: self._misses,
            metrics.MEDIA_CACHE_EVICTIONS: self._evictions,
            metrics.MEDIA_CACHE_BYTES: self._bytes,
            metrics.MEDIA_CACHE_ENTRIES: len(self._entries),
        }

    async def _join(self, key: str, flight: _Flight[V]) -> V:
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                # Out of the table at once: who asks next begins anew instead
                # of joining what is being cancelled.
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()

    async def _run(self, key: str, compute: Callable[[], Awaitable[V]]) -> V:
        task = asyncio.current_task()
        try:
            value = await compute()
            self._store(key, value)
            return value
        finally:
            flight = self._flights.get(key)
            if flight is not None and flight.task is task:
                del self._flights[key]

    def _store(self, key: str, value: V) -> None:
        size = self._nbytes(value)
        if size > self._capacity_bytes or key in self._entries:
            return
        self._entries[key] = (value, size)
        self._bytes += size
        while self._bytes > self._capacity_bytes:
            _, (_, removed) = self._entries.popitem(last=False)
            self._bytes -= removed
            self._evictions += 1
