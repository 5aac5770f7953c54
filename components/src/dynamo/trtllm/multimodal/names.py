"""Looking up host names, in threads and within a deadline of their own.

A silent name server holds a thread of the system's resolver for many seconds, and nothing can end that. So
look-ups share no pool with other work, there are more threads than downloads, and callers that ask for one
name at a time share one look-up.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

from dynamo.trtllm.errors import Overloaded

LOOKUP_TIMEOUT_S = 5.0
"""As long as glibc waits for one answer of a name server, by default."""
MAX_LOOKUPS = 128
"""Threads, made when they are needed: twice `MediaConfig.max_fetches`, since a look-up outlives the caller
that gave up.
"""

AddressInfo: TypeAlias = tuple[Any, ...]
"""One answer of `socket.getaddrinfo`."""
_Key: TypeAlias = tuple[str, int, int]


class NameTimeout(OSError):
    """No answer about a name came within the deadline."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="names")


class _Lookup:
    """A look-up under way and the number of callers that wait for it."""

    def __init__(self, key: _Key) -> None:
        self.waiting = 0
        self.abandoned = False
        self.work: Future[list[AddressInfo]] = _pool().submit(self._run, key)
        self.done = asyncio.wrap_future(self.work)

    def _run(self, key: _Key) -> list[AddressInfo]:
        if self.abandoned:
            return []  # all gave up before a thread came free
        host, port, family = key
        try:
            return list(
                socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            )
        except ValueError as error:
            raise OSError("no name that could be asked for") from error  # a label that is too long, say


class Lookups:
    """Look-ups of stream addresses. Callers share those under way, by name. One event loop."""

    def __init__(self) -> None:
        self._under_way: dict[_Key, _Lookup] = {}

    async def find(self, host: str, port: int, family: int = socket.AF_UNSPEC) -> list[AddressInfo]:
        """As `socket.getaddrinfo`. Raises `OSError`, `NameTimeout`, and `Overloaded` when no thread came free
        in time.
        """
        key = (host, port, int(family))
        lookup = self._under_way.get(key) or self._begin(key)
        lookup.waiting += 1
        try:
            return await asyncio.wait_for(asyncio.shield(lookup.done), LOOKUP_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            if not lookup.work.running():
                raise Overloaded("this worker is busy looking up other names") from error
            raise NameTimeout("no name server answered in time") from error
        finally:
            lookup.waiting -= 1
            if not lookup.waiting:
                lookup.abandoned = True
                self._under_way.pop(key, None)

    def _begin(self, key: _Key) -> _Lookup:
        lookup = self._under_way[key] = _Lookup(key)
        lookup.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        return lookup
