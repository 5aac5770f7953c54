"""Small fakes of what Dynamo gives a worker: a request's context,
the sender of its stream, and a client of peers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from dynamo.trtllm.errors import EngineDead
from dynamo.trtllm.frontend.endpoint import EndpointServer, Handler
from dynamo.trtllm.frontend.response import Chunk, to_chunk

MAX_TURNS = 10_000


class FakeContext:
    """A request's context; `children` are those detached from it."""

    def __init__(self, name: str = "request", headers: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._stopped = False
        self._headers = headers
        self.children: list[FakeContext] = []

    def id(self) -> str:
        return self._name

    def is_stopped(self) -> bool:
        return self._stopped

    def stop_generating(self) -> None:
        self._stopped = True

    def detached(self, id: str) -> FakeContext:
        self.children.append(FakeContext(id))
        return self.children[-1]

    def trace_headers(self) -> Mapping[str, str] | None:
        return self._headers


class FakeSender:
    """Keeps what is sent; from `fails_at` chunks on the stream is closed, as Dynamo reports it."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.closed = False
        self._fails_at = fails_at

    def send(self, chunk: Chunk) -> None:
        if self._fails_at is not None and len(self.chunks) >= self._fails_at:
            raise RuntimeError("response stream is closed: tcp 10.0.0.1:9000")
        self.chunks.append(chunk)

    def close(self) -> None:
        self.closed = True


Answer = Callable[[Mapping[str, Any], FakeContext | None], AsyncIterator[Any]]


class FakeClient:
    """Dynamo's client over functions: `answers` maps an instance to what it streams.
    `calls` holds the instances asked."""

    def __init__(self, answers: Mapping[int, Answer]) -> None:
        self.answers = dict(answers)
        self.calls: list[int] = []
        self.requests: list[Mapping[str, Any]] = []

    def instance_ids(self) -> list[int]:
        return list(self.answers)

    async def direct(
        self, request: Any, instance_id: int, annotated: bool | None = True, context: Any = None
    ) -> AsyncIterator[Any]:
        assert annotated is False
        self.calls.append(instance_id)
        self.requests.append(request)
        return self.answers[instance_id](request, context)


def replies(*items: Any) -> Answer:
    """An instance that streams `items`; an exception among them is raised in its turn."""

    async def answer(request: Mapping[str, Any], context: FakeContext | None) -> AsyncGenerator[Any, None]:
        for item in items:
            if isinstance(item, BaseException):
                raise item
            yield item

    return answer


def served_by(handler: Handler) -> Answer:
    """An instance that is one of our workers: requests and replies are JSON,
    errors are Dynamo's, as on the network."""
    server = EndpointServer(handler, on_dead=ignore_death, push=False)

    async def answer(request: Mapping[str, Any], context: FakeContext | None) -> AsyncGenerator[Any, None]:
        chunks = server.serve(json.loads(json.dumps(request)), context or FakeContext())
        async for chunk in chunks:
            yield json.loads(json.dumps(chunk))

    return answer


def ignore_death(error: EngineDead) -> None:
    """For `EndpointServer(on_dead=...)` where no engine dies."""


async def answered(
    handler: Handler, raw: Mapping[str, Any], context: FakeContext | None = None
) -> AsyncGenerator[Chunk, None]:
    """The chunks of one request, as the frontend would get them."""
    async with aclosing(await handler.respond(raw, context or FakeContext())) as outputs:
        async for output in outputs:
            yield to_chunk(output)


async def collect(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds; it must come by the loop's own work."""
    for _ in range(MAX_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for its end."""
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def outcome(call: Awaitable[Any]) -> BaseException | None:
    """What `call` raised, or None."""
    try:
        await call
    except BaseException as error:
        return error
    return None


def raw_request(
    *token_ids: int, images: tuple[str, ...] = (), stop: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A request as the frontend sends it; `options` are sampling options,
    or top-level fields by their own names."""
    top = {
        key: options.pop(key)
        for key in ("output_options", "routing", "extra_args", "prefill_result")
        if key in options
    }
    return {
        "model": "m",
        "token_ids": list(token_ids),
        "stop_conditions": dict(stop or {}),
        "sampling_options": options,
        **({"multi_modal_data": {"image_url": [{"Url": url} for url in images]}} if images else {}),
        **top,
    }


async def eventually(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, which something outside of the event loop brings about."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never came true")
