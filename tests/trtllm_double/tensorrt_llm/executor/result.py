"""What a request yields (executor/result.py): one object, changed in place."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._double.release import release


@dataclass(slots=True)
class Logprob:
    """Log probability of a token and its rank in the vocabulary, from 1."""

    logprob: float
    rank: int | None = None


pending: list[asyncio.Future[None]] = []
"""Steps that the engine has not made yet; shutting down ends them."""


@dataclass(slots=True)
class CompletionOutput:
    """`token_ids`, `text` and `logprobs` are cumulative."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_token_ids_len: int = 0
    _last_logprobs_len: int = 0
    _last_text_len: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return self.logprobs[self._last_logprobs_len :]

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]


class GenerationResult:
    """Awaitable, an async iterator that yields itself after each step, and readable with `result()` where no
    loop runs.

    `abort` may be called at any time; once the request is over it has no effect (base_worker.py,
    `abort_request`).
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        steps: AsyncIterator[None],
        on_abort: Callable[[], None],
        choices: int = 1,
    ) -> None:
        self._loop = _running_loop()
        self.id = self.request_id = request_id
        self.prompt: str | None = None
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index) for index in range(choices)]
        self.finished = False
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, Any] = {}
        self.disaggregated_params: Any = None
        self.context_logits: Any = None
        if release.error_finishes:
            self.error: str | None = None
        self._terminal_error: BaseException | None = None
        self._steps = steps
        self._pending: asyncio.Future[None] | None = None
        self._on_abort = on_abort
        self._aborted = False

    def abort(self) -> None:
        if not self.finished:
            self._on_abort()
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self.finished and self._terminal_error is None:
            raise StopAsyncIteration
        await self._next()
        return self

    async def aresult(self) -> GenerationResult:
        while not self.finished or self._terminal_error is not None:
            await self._next()
        return self

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Reads to the end on the calling thread. Not for a thread whose loop runs."""
        return asyncio.run(self._read_out())

    async def _read_out(self) -> GenerationResult:
        while not self.finished:
            try:
                await self._steps.__anext__()
            except StopAsyncIteration:
                break
        return self

    async def _next(self) -> None:
        """A reader that is cancelled stops waiting; the engine goes on."""
        assert self._loop is not None, "no event loop ran when this result was made"
        if self._terminal_error is not None:
            raise self._terminal_error
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._steps.__anext__())  # type: ignore[arg-type]
            pending.append(self._pending)
        try:
            await asyncio.shield(self._pending)
        except StopAsyncIteration:
            self.finished = True
            raise
        finally:
            if self._pending is not None and self._pending.done():
                if self._pending in pending:
                    pending.remove(self._pending)
                self._pending = None

    def __await__(self) -> Any:
        return self.aresult().__await__()


RequestOutput = GenerationResult


class IterationResult:
    """One per engine and readable from any loop. Ends at its timeout and can be asked again."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.timeout = 2.0

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> Any:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self.queue.get_nowait()
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise StopAsyncIteration from None
                await asyncio.sleep(0.002)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
