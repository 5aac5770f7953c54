"""What a request yields: one object, changed in place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    logprob: float
    rank: int | None


pending: list[asyncio.Future[None]] = []
"""Steps that the engine has not made yet; shutting down ends them."""


class CompletionOutput:
    def __init__(self) -> None:
        self.index = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.disaggregated_params: Any = None


class RequestOutput:
    """Made by the engine only. Awaitable, and an async iterator that yields itself after each step."""

    def __init__(
        self, request_id: int, prompt_token_ids: list[int], steps: AsyncIterator[None], on_abort: Callable[[], None]
    ) -> None:
        asyncio.get_running_loop()
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self.disaggregated_params: Any = None
        self._steps = steps
        self._pending: asyncio.Future[None] | None = None
        self._on_abort = on_abort
        self._aborted = False

    def abort(self) -> None:
        assert not self._aborted, "aborted twice"
        assert not self.finished, "aborted after its end"
        self._aborted = True
        self._on_abort()

    def aborted(self) -> bool:
        return self._aborted

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._next()
        return self

    async def aresult(self) -> RequestOutput:
        while not self.finished:
            await self._next()
        return self

    async def _next(self) -> None:
        """A reader that is cancelled stops waiting; the engine goes on."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._steps.__anext__())  # type: ignore[arg-type]
            pending.append(self._pending)
        try:
            await asyncio.shield(self._pending)
        finally:
            if self._pending.done():
                pending.remove(self._pending)
                self._pending = None

    def __await__(self) -> Any:
        return self.aresult().__await__()


class IterationResult:
    """One per engine. Ends at its timeout and can be asked again."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.timeout = 2.0
        self.consumers = 0

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> Any:
        try:
            return await asyncio.wait_for(self.queue.get(), self.timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise StopAsyncIteration from None
