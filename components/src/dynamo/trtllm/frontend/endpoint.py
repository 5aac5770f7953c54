"""How a handler's output reaches the frontend, and how a request ends.

Dynamo offers two arms, and both are live. Network requests bring a `response_sender` that the worker pushes
into: Rust then advances the handler once per request instead of once per chunk (5.6 against 57 microseconds
of CPU a token, measured). The health canary and in-process callers bring none and pull. Rust finds out about
push by the parameter's name in the handler's signature.

`send` blocks the calling thread while the frontend's buffer is full, so a client that stops reading would
stop the event loop: the first `DIRECT_CHUNKS` of a stream are sent directly, later ones by threads, and a
stream that gets stuck there is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from dynamo.trtllm import metrics
from dynamo.trtllm.core import Context
from dynamo.trtllm.errors import (
    ClientFault,
    EngineFault,
    Overloaded,
    PeerTimeout,
    RequestCancelled,
    WorkerDead,
    WorkerError,
    to_dynamo,
)
from dynamo.trtllm.frontend.response import Chunk, Output, to_chunk
from dynamo.trtllm.stages import Durations, RequestTimes, carry

logger = logging.getLogger(__name__)

DIRECT_CHUNKS = 2048
"""Chunks of one stream that are sent on the event loop.
The transport buffers more than this for a client that reads nothing."""
STALL_DEADLINE_S = 60.0
"""A stream whose client has not read for this long is cancelled."""
MAX_PENDING_CHUNKS = 4096
"""Chunks that wait for a sending thread before the engine's stream is paused."""
SENDER_THREADS = 64
LATE_MEMORY_S = 5.0
"""Dynamo's frontend sends a request whose deadline has passed once more, under its id and at once. For
this long the repeat is refused without another wait, so that a client waits for one deadline of a worker
and not for one per attempt.
"""
_REASON_CHARACTERS = 200
STOPPED_READING = "the client stopped reading"
_WATCH_INTERVAL_S = 0.05


class Sender(Protocol):
    """Dynamo's `ResponseSender`."""

    def send(self, chunk: Any) -> None: ...
    def close(self) -> None: ...


class Handler(Protocol):
    """What serves a request: parses it once, prepares it and returns its output as it comes."""

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Output, None]: ...


class StreamClosed(Exception):
    """The frontend dropped the response stream; a cancellation, not a fault."""


class CancelWatch:
    """Cancels a request's task when its client goes away, also while nothing is being sent.

    One task looks at all registered contexts; a future per request would cost more than the request's
    whole parsing. Shared by all requests of the process: `_watched`.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Context, asyncio.Task[Any]]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, context: Context) -> None:
        """Cancel the current task if `context` is stopped before it is removed."""
        task = asyncio.current_task()
        assert task is not None
        self._watched[id(context)] = (context, task)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="cancel-watch")

    def remove(self, context: Context) -> None:
        """The request is over. Removing it twice does nothing."""
        self._watched.pop(id(context), None)

    def cancel_all(self) -> None:
        """Cancel the tasks of all requests that are registered now."""
        for _, task in list(self._watched.values()):
            task.cancel()

    async def _look(self) -> None:
        while self._watched:
            for key, (context, task) in list(self._watched.items()):
                if context.is_stopped():
                    self._watched.pop(key, None)
                    task.cancel()
            await asyncio.sleep(_WATCH_INTERVAL_S)


class Outlet:
    """The end of one stream after its first `DIRECT_CHUNKS`:
    sends batches from a thread, in order, one batch at a time.

    `_sending` and `_progress` are written by that thread.
    A slow client and a batch that waits for a thread are no stall.
    """

    def __init__(self, sender: Sender, threads: ThreadPoolExecutor, stall_deadline_s: float) -> None:
        self._sender = sender
        self._threads = threads
        self._deadline_s = stall_deadline_s
        self._pending: list[Chunk] = []
        self._batch: asyncio.Future[None] | None = None
        self._sending = False
        self._progress = 0

    async def put(self, chunk: Chunk) -> None:
        """Queue `chunk`. Raises `StreamClosed` when the client is gone
        or has not read for the stall deadline."""
        self._pending.append(chunk)
        if self._batch is None or self._batch.done():
            self._next_batch()
        elif len(self._pending) >= MAX_PENDING_CHUNKS:
            await self._batch_done()
            self._next_batch()

    async def flush(self) -> None:
        """Return when everything is sent."""
        while self._batch is not None or self._pending:
            await self._batch_done()
            self._next_batch()

    def _next_batch(self) -> None:
        if self._batch is not None and self._batch.done():
            self._batch.result()
            self._batch = None
        if self._pending:
            batch, self._pending = self._pending, []
            self._batch = asyncio.get_running_loop().run_in_executor(self._threads, self._send_all, batch)
            self._batch.add_done_callback(_look_at)

    async def _batch_done(self) -> None:
        while self._batch is not None and not self._batch.done():
            before = self._progress
            await asyncio.wait({self._batch}, timeout=self._deadline_s)
            if not self._batch.done() and self._sending and self._progress == before:
                raise StreamClosed(STOPPED_READING)

    def _send_all(self, batch: list[Chunk]) -> None:
        self._progress += 1
        self._sending = True
        try:
            for chunk in batch:
                send(self._sender, chunk)
                self._progress += 1
        finally:
            self._sending = False


def _look_at(batch: asyncio.Future[None]) -> None:
    """A batch may fail after its stream was given up; nobody asks for that failure any more."""
    if not batch.cancelled():
        batch.exception()


def send(sender: Sender, chunk: Chunk) -> None:
    """Send one chunk. Raises `StreamClosed` where Dynamo reports the dropped stream as a RuntimeError."""
    try:
        sender.send(chunk)
    except RuntimeError as error:
        raise StreamClosed(str(error)) from error


class EndpointServer:
    """Drives a handler for every request, by push or by pull,
    and turns what it raises into Dynamo's exceptions.

    Shared by all requests: the counters, the watch and the sending threads. `on_dead` is called with the
    engine's error when a request found the engine dead, `on_told` with each exception for Dynamo whose
    request has its line in the log.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        on_dead: Callable[[WorkerDead], None],
        push: bool = True,
        stall_deadline_s: float = STALL_DEADLINE_S,
        on_told: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._handler = handler
        self._push_enabled = push
        self._on_dead = on_dead
        self._stall_deadline_s = stall_deadline_s
        self._on_told = on_told
        self._watch = CancelWatch()
        self._threads = ThreadPoolExecutor(SENDER_THREADS, thread_name_prefix="endpoint")
        self._idle = asyncio.Event()
        self._idle.set()
        self._late: dict[str, float] = {}
        self._ended_by: WorkerError | None = None
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.durations = Durations()

    def endpoint_handler(self) -> Callable[..., AsyncGenerator[Chunk, None]]:
        """The callable for `serve_endpoint`, with or without the parameter that switches push on."""
        chosen: Callable[..., AsyncGenerator[Chunk, None]] = self.serve if self._push_enabled else self._pull
        if self._push_enabled != ("response_sender" in inspect.signature(chosen).parameters):
            raise AssertionError(
                "the endpoint handler lost its response_sender parameter; Dynamo would pull silently"
            )
        return chosen

    def serve(
        self, request: Mapping[str, Any], context: Context, response_sender: Sender | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Both arms: an async generator that yields nothing and pushes, or one that yields the chunks."""
        if response_sender is None:
            return self._pull(request, context)
        return self._push(request, context, response_sender, perf_counter())

    async def drained(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return self._ended_by is None

    def end_all(self, reason: WorkerError) -> None:
        """Take no more requests and end those in flight with `reason`; the first reason counts.

        Calling it again cancels once more what has not ended, for instance because it waits as it cleans up.
        """
        self._ended_by = self._ended_by or reason
        self._watch.cancel_all()

    def stats(self) -> metrics.Readings:
        """Requests by how they ended, and those that have not."""
        ended: metrics.Readings = {
            metrics.REQUESTS.of(outcome): count for outcome, count in self.outcomes.items()
        }
        return {**ended, metrics.INFLIGHT_REQUESTS: self.in_flight}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _push(
        self, request: Mapping[str, Any], context: Context, sender: Sender, arrived: float
    ) -> AsyncGenerator[Chunk, None]:
        with _Accounted(self, context, arrived) as times:
            self._watch.add(context)
            try:
                async with aclosing(await self._handler.respond(_object(request), context)) as outputs:
                    # Every token passes here, so the loop is not in a coroutine of its own.
                    sent, push, look_at = 0, sender.send, 1
                    async for output in outputs:
                        try:
                            push(to_chunk(output))
                        except RuntimeError as error:
                            raise StreamClosed(str(error)) from error
                        sent += 1
                        if sent == look_at:
                            if sent == 1:
                                times.had_first_output()
                                look_at = DIRECT_CHUNKS
                            if sent == DIRECT_CHUNKS:
                                await self._send_rest(outputs, sender)
                    _require_output(sent == 0)
            finally:
                self._watch.remove(context)
            sender.close()
        return
        yield {}

    async def _pull(self, request: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        # Each step may run in a task of its own, so there is no one task to cancel:
        # a stopped context ends it between chunks.
        with _Accounted(self, context, perf_counter()) as times:
            async with aclosing(await self._handler.respond(_object(request), context)) as outputs:
                empty = True
                async for output in outputs:
                    if empty:
                        times.had_first_output()
                    empty = False
                    yield to_chunk(output)
                    if context.is_stopped():
                        raise RequestCancelled("the client went away")
            _require_output(empty)

    async def _send_rest(self, outputs: AsyncGenerator[Output, None], sender: Sender) -> None:
        outlet = Outlet(sender, self._threads, self._stall_deadline_s)
        async for output in outputs:
            await outlet.put(to_chunk(output))
        await outlet.flush()

    def _begin(self, context: Context) -> None:
        """Count a request in, unless the worker takes no more or the request has had its time."""
        if self._ended_by is not None:
            logger.info("request %s refused: %s", context.id(), self._ended_by.message)
            raise self._told(self._ended_by)
        if self._late and self._is_late(context.id()):  # it has its line in the log
            raise self._told(PeerTimeout("the request has had its time"))
        self.in_flight += 1
        self._idle.clear()

    def _end(self, error: BaseException | None, context: Context, times: RequestTimes) -> None:
        """Count a request out, and raise Dynamo's exception for what ended it;
        an ending that is none passes as it is."""
        outcome = "failed"
        if self._ended_by is not None and isinstance(error, asyncio.CancelledError):
            error = error if context.is_stopped() else self._ended_by  # `end_all` cancelled it
        try:
            if error is None:
                outcome = "completed"
            elif isinstance(error, (asyncio.CancelledError, GeneratorExit, StreamClosed, RequestCancelled)):
                outcome = "cancelled"
                if isinstance(error, GeneratorExit) or (
                    isinstance(error, asyncio.CancelledError) and not context.is_stopped()
                ):
                    return
                reason = STOPPED_READING if str(error) == STOPPED_READING else "the client went away"
                logger.info("request %s cancelled: %s", context.id(), reason)
                raise self._told(RequestCancelled(reason)) from None
            elif isinstance(error, Exception):
                outcome = self._report(error, context)
                raise self._told(error) from None
        finally:
            self.outcomes[outcome] += 1
            self.durations.take(times, outcome)
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def _told(self, error: Exception) -> BaseException:
        """Dynamo's exception for `error`, which is in the log already:
        Dynamo prints what it is given once more."""
        theirs = to_dynamo(error)
        if self._on_told is not None:
            self._on_told(theirs)
        return theirs

    def _is_late(self, request_id: str) -> bool:
        """True for a request that just ran into a deadline here; forgets those of long ago."""
        oldest = time.monotonic() - LATE_MEMORY_S
        self._late = {name: at for name, at in self._late.items() if at > oldest}
        return request_id in self._late

    def _report(self, error: Exception, context: Context) -> str:
        """Log a failed request, say so if the engine is dead, and name the outcome for the metrics."""
        if isinstance(error, ClientFault):
            logger.info("request %s refused: %s", context.id(), error.message)
            return "refused"
        trace = _traceback_of(error)
        if isinstance(error, WorkerDead):
            trace = trace if self._ended_by is None else None  # of all that a dead engine ends, once
            self._on_dead(error)
        if isinstance(error, (PeerTimeout, Overloaded)):
            self._late[context.id()] = time.monotonic()
        logger.error("request %s failed: %s", context.id(), _reason_of(error), exc_info=trace)
        return "failed"


class _Accounted:
    """One request between `_begin` and `_end`, with its times.
    Not a generator, since every request passes here."""

    __slots__ = ("_arrived", "_context", "_server", "_times")

    def __init__(self, server: EndpointServer, context: Context, arrived: float) -> None:
        self._server = server
        self._context = context
        self._arrived = arrived

    def __enter__(self) -> RequestTimes:
        self._server._begin(self._context)
        self._times = RequestTimes(self._arrived)
        carry(self._times)
        return self._times

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        carry(None)
        self._server._end(error, self._context, self._times)


def _traceback_of(error: Exception) -> BaseException | None:
    """Where a failure of this worker itself came from; what a peer or a deadline did is said by one line."""
    if isinstance(error, WorkerError) and not isinstance(error, (EngineFault, WorkerDead)):
        return None
    return error.__cause__ or error


def _reason_of(error: Exception) -> str:
    """The error's message, and its cause's first line, cut short: a cause may quote what a client sent."""
    cause = error.__cause__
    if cause is None:
        return str(error)
    line = str(cause).partition("\n")[0]
    return f"{error} ({type(cause).__name__}: {line[:_REASON_CHARACTERS]})"


def _object(request: Any) -> Mapping[str, Any]:
    if not isinstance(request, (dict, Mapping)):  # a dict is found without asking the abstract class
        raise ClientFault("the request must be an object")
    return request


def _require_output(empty: bool) -> None:
    if empty:
        raise EngineFault("the engine ended the request without any output")
