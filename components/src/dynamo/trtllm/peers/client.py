"""Calls from this worker to another one. `PeerClient` wraps Dynamo's client;
nothing else in the package calls `client()`.

What Dynamo's client does that its name does not tell (observed on 1.6.1): an `InvalidArgument` of the remote
stays typed, while a dead or late peer arrives as a plain `ValueError` or `Exception` ("Unavailable: ...",
"DeadlineExceeded: ..."), which the frontend would answer with a client's 400 or a 500; cancelling the task
does not stop the remote, passing the request's context does.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dynamo.llm.exceptions import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
)

from dynamo.trtllm.core import Context
from dynamo.trtllm.errors import (
    ClientFault,
    EngineFault,
    PeerFault,
    PeerTimeout,
    PeerUnavailable,
    RequestCancelled,
    WorkerError,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

TRIES = 2
"""Encode and prefill are pure: what one instance failed is tried once on another, inside one deadline."""


_GONE = (Cancelled, CannotConnect, Disconnected, EngineShutdown, StreamIncomplete)
"""The instance is lost or leaving; a `Cancelled` that this side did not ask for means the same."""


class DynamoClient(Protocol):
    """The part of Dynamo's `Client` that is used here."""

    def instance_ids(self) -> list[int]: ...
    async def direct(
        self, request: Any, instance_id: int, annotated: bool | None = True, context: Any = None
    ) -> AsyncIterator[Any]: ...


class PeerClient:
    """Asks one endpoint's instances for single replies, each inside a deadline."""

    def __init__(self, client: DynamoClient, name: str) -> None:
        self._client = client
        self._name = name

    def instances(self) -> list[int]:
        """Ids of the instances that live now, in no order."""
        return list(self._client.instance_ids())

    async def call(
        self, request: Mapping[str, Any], instance: int, context: Context | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """The one reply of `instance` to `request`.

        Raises `ClientFault` with the peer's words, `PeerTimeout` after `timeout_s`, `RequestCancelled`,
        and `PeerUnavailable` for everything that another instance might do better.
        """
        # A context of its own: leaving early, by the deadline or because the client left,
        # must stop the remote as well.
        own = context.detached(uuid.uuid4().hex) if context is not None else None
        try:
            return await asyncio.wait_for(self._first_reply(request, instance, own), timeout_s)
        except asyncio.TimeoutError as error:
            raise PeerTimeout(f"the {self._name} worker did not answer within {timeout_s:.3g} s") from error
        finally:
            if own is not None:
                own.stop_generating()

    async def _first_reply(
        self, request: Mapping[str, Any], instance: int, context: Context | None
    ) -> Mapping[str, Any]:
        try:
            stream = await self._client.direct(dict(request), instance, annotated=False, context=context)
            reply: Mapping[str, Any] | None = None
            async for item in stream:
                reply = item if reply is None else reply
        except Exception as error:  # a refused connection is a plain Exception
            raise self._translate(error, context) from error
        if reply is None:
            raise PeerUnavailable(f"the {self._name} worker ended its reply without sending anything")
        return reply

    def _translate(self, error: Exception, context: Context | None) -> WorkerError:
        if isinstance(error, Cancelled) and context is not None and context.is_stopped():
            return RequestCancelled("the client went away")
        if isinstance(error, InvalidArgument):
            return ClientFault(_own_words(str(error)))
        if isinstance(error, (ConnectionTimeout, TimeoutError)) or "DeadlineExceeded" in str(error):
            return PeerTimeout(f"the {self._name} worker took too long")
        if not isinstance(error, DynamoException) or isinstance(error, _GONE):
            logger.warning("the %s worker %s", self._name, f"failed: {error}")
            return PeerUnavailable(f"the {self._name} worker is not reachable")
        return EngineFault(f"the {self._name} worker failed")


async def connect(runtime: Any, endpoint: str, name: str) -> PeerClient:
    """A client for `endpoint`; `name` stands in messages ("the `name` worker ...")."""
    return PeerClient(await runtime.endpoint(endpoint).client(), name)


async def first_answer(
    name: str,
    instances: Sequence[int],
    timeout_s: float,
    ask: Callable[[int, float], Awaitable[Answer]],
    on_retry: Callable[[], None] | None = None,
) -> Answer:
    """What `ask(instance, seconds)` gives for the first of `instances` that serves, `TRIES` of them at most.

    All tries together take `timeout_s`; each leaves the ones after it an equal share of what is left.
    `on_retry` is called before each try but the first. Raises the last try's `PeerFault`, and
    `PeerUnavailable` where there is no instance.
    """
    end = time.monotonic() + timeout_s
    failure: PeerFault = PeerUnavailable(f"no {name} worker is available")
    chosen = instances[:TRIES]
    for tried, instance in enumerate(chosen):
        if tried and on_retry is not None:
            on_retry()
        left_s = (end - time.monotonic()) / (len(chosen) - tried)
        try:
            return await ask(instance, left_s)
        except PeerFault as error:
            logger.warning("%s instance %x failed, try %d: %s", name, instance, tried + 1, error)
            failure = error
    raise failure


def _own_words(text: str) -> str:
    """The message of a peer's `InvalidArgument`, without the type name that the transport puts before it."""
    return text.removeprefix("InvalidArgument: ")
