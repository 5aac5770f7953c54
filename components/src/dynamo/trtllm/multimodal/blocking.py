"""The one way to run blocking work beside the event loop: a small pool of threads of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 4
"""Hashing, reading files and headers, inflating: short work. Images are decoded elsewhere (`decoders`)."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="media")


async def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the media pool. A caller that is cancelled leaves at once;
    a call that has begun ends by itself."""
    return await asyncio.get_running_loop().run_in_executor(_pool(), partial(function, *args, **kwargs))


async def all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of `calls`, side by side, in order; the first failure cancels the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
