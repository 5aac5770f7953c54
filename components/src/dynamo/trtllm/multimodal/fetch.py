"""From sources to bytes: the only step of the pipeline that does I/O, over the network and from the disk.

Nothing is remembered between requests by URL, since what a URL leads to may change; see `cache` for content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dynamo.trtllm.config import MEBIBYTE, MediaConfig
from dynamo.trtllm.errors import LimitFault, Overloaded
from dynamo.trtllm.multimodal.blocking import run_blocking
from dynamo.trtllm.multimodal.content_encoding import FetchError
from dynamo.trtllm.multimodal.data_url import decode_payload
from dynamo.trtllm.multimodal.files import read_file
from dynamo.trtllm.multimodal.http_client import TIMED_OUT, MediaHttpClient, host_of
from dynamo.trtllm.multimodal.parts import (
    DataSource,
    EmbeddingFile,
    HttpSource,
    MediaFile,
    MediaPart,
    Source,
    at_part,
)

_LONG_PAYLOAD = 1 << 16
"""Data URLs up to this length are decoded on the event loop, in well under a millisecond."""


@dataclass
class _HostSlots:
    """Downloads at once from one host; `users` counts those that hold or await a slot."""

    semaphore: asyncio.Semaphore
    users: int = 0


class Fetcher:
    """Reads sources, with bounds on how much is downloaded at once: in all, and from one host.

    Requests share the slots, overall and per host, and the HTTP client.
    One event loop; close it with `close`.
    """

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._client = MediaHttpClient(
            allow_internal=config.allow_internal, allowed_hosts=config.allowed_hosts
        )
        self._slots = asyncio.Semaphore(config.max_fetches)
        self._hosts: dict[str, _HostSlots] = {}

    async def close(self) -> None:
        """Close the connections that are kept open for reuse."""
        await self._client.close()

    async def fetch(self, source: Source) -> bytes:
        """The bytes of `source`, at most `max_file_bytes`.

        Raises `ClientFault` (without a position; see `at_part`), and `Overloaded` when no place among
        the downloads came free within `fetch_timeout_s`; the download itself then has
        `fetch_timeout_s` of its own.
        """
        if isinstance(source, HttpSource):
            return await self._download(source)
        if isinstance(source, DataSource):
            if len(source.payload) <= _LONG_PAYLOAD:
                return decode_payload(source, self._config)
            return await run_blocking(decode_payload, source, self._config)
        # what is known by its uuid alone is not fetched
        assert isinstance(source, (MediaFile, EmbeddingFile))
        return await run_blocking(
            read_file, source.path, self._config.allowed_local_path, self._config.max_file_bytes
        )

    async def fetch_all(self, items: Sequence[tuple[MediaPart, Source]]) -> list[bytes]:
        """The bytes of all `items`, in order, read side by side; equal sources of one request are read once.

        The first failure ends the others. Raises `PartFault`,
        `LimitFault` when all together exceed `max_request_bytes`, and `Overloaded`.
        """
        first: dict[Source, MediaPart] = {}
        for part, source in items:
            first.setdefault(source, part)
        tasks = {
            source: asyncio.ensure_future(self._fetch_part(part, source)) for source, part in first.items()
        }
        total = 0
        try:
            for ended in asyncio.as_completed(tasks.values()):
                total += len(await ended)
                self._check_total(total)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [tasks[source].result() for _, source in items]

    async def _fetch_part(self, part: MediaPart, source: Source) -> bytes:
        with at_part(part):
            return await self.fetch(source)

    def _check_total(self, total: int) -> None:
        limit = self._config.max_request_bytes
        if total > limit:
            raise LimitFault(
                f"the media of this request exceed this worker's limit of {limit / MEBIBYTE:g} MiB in all"
            )

    async def _download(self, source: HttpSource) -> bytes:
        timeout_s = self._config.fetch_timeout_s
        async with self._slot(host_of(source.url)):
            try:
                download = self._client.get(
                    source.url,
                    timeout_s=timeout_s,
                    max_bytes=self._config.max_file_bytes,
                    accept=source.accept,
                )
                return await asyncio.wait_for(download, timeout_s)
            except asyncio.TimeoutError as error:
                raise FetchError(TIMED_OUT) from error

    @asynccontextmanager
    async def _slot(self, host: str) -> AsyncIterator[None]:
        """Hold a slot of the host and one of the process;
        waiting for the host first keeps a slow one from taking them all."""
        slots = self._hosts.setdefault(host, _HostSlots(asyncio.Semaphore(self._config.fetches_per_host)))
        slots.users += 1
        end = time.monotonic() + self._config.fetch_timeout_s
        try:
            await self._acquire(slots.semaphore, end, "downloads from the same host")
            try:
                await self._acquire(self._slots, end, "downloads")
                try:
                    yield
                finally:
                    self._slots.release()
            finally:
                slots.semaphore.release()
        finally:
            slots.users -= 1
            if not slots.users:
                del self._hosts[host]

    async def _acquire(self, semaphore: asyncio.Semaphore, end: float, what: str) -> None:
        if not semaphore.locked():
            await semaphore.acquire()
            return
        try:
            await asyncio.wait_for(semaphore.acquire(), max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError as error:
            raise Overloaded(f"this worker is busy with other {what}") from error
