"""Whether this worker is still in discovery, and how it gets back.

With discovery in files, every process removes what has not been touched for ten seconds: a worker that
was stopped for longer, a paused machine or a jump of the clock lose their entries, and Dynamo
(observed on 1.6.1) does not write them again. A model without its card or its instance answers 404 or
503, while every process lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from dynamo.trtllm.peers.messages import SCHEMA_KEY, SCHEMA_VERSION

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 1.0
CARD_LOOKS = 5
"""The instance is looked for at every look, which costs nothing;
the model card at every fifth (0.6 ms of CPU)."""
CARD_ASKS = 5
CARD_PAUSE_S = 0.2
FIRST_LOOKS = 10
"""How many looks the first registration may take."""
CALL_S = 5.0
GIVE_UP_S = 20.0
"""A worker that cannot get back for this long is of no use: whoever supervises it starts another one."""


class DynamoClient(Protocol):
    """The part of Dynamo's `Client` that is used here."""

    def instance_ids(self) -> list[int]: ...
    async def wait_for_instances_by_runtime_data(
        self, key: str, value: str, min_count: int, timeout_s: float
    ) -> Sequence[int]: ...


class Presence:
    """Looks for this worker in discovery, and has it registered again.

    `connect` makes a client of the worker's own endpoint, `register` writes all entries of the worker; both
    may raise anything, as Dynamo's binding does. `known` says that this discovery is one that is known to
    show both instance and card; of any other one, only what it has shown once is missed.
    """

    def __init__(
        self,
        instance: int,
        connect: Callable[[], Awaitable[DynamoClient]],
        register: Callable[[], Awaitable[Any]],
        known: bool,
    ) -> None:
        self._instance = instance
        self._connect = connect
        self._register = register
        self._known = known
        self._shows_cards = known

    async def lost(self) -> str:
        """Look for ever; return, with the last failure,
        when the worker is out of discovery and cannot get back."""
        client = await self._connect()
        looks = 0
        while not self._is_served(client) and (looks < FIRST_LOOKS or not self._known):
            await asyncio.sleep(LOOK_S)
            looks += 1
        await self._is_listed(client)
        while True:
            await asyncio.sleep(LOOK_S)
            looks += 1
            if self._is_served(client) and (looks % CARD_LOOKS or await self._is_listed(client)):
                continue
            await asyncio.sleep(LOOK_S)  # a discovery that reconnects forgets for a moment
            if self._is_served(client) and await self._is_listed(client):
                continue
            logger.warning("this worker is not in discovery any more; registering again")
            failure = await self._come_back()
            if failure is not None:
                return failure
            logger.warning("this worker is in discovery again")
            client = await self._connect()

    def _is_served(self, client: DynamoClient) -> bool:
        return self._instance in client.instance_ids()

    async def _is_listed(self, client: DynamoClient) -> bool:
        """Whether discovery has this worker's model card; true where it need not show it."""
        for _ in range(CARD_ASKS):  # a client that has just connected does not know all cards at once
            with suppress(Exception):  # the binding raises plain Exception, also for its own timeout
                value = str(SCHEMA_VERSION)
                found = await client.wait_for_instances_by_runtime_data(SCHEMA_KEY, value, 1, CARD_PAUSE_S)
                if self._instance in found:
                    self._shows_cards = True
                    return True
            await asyncio.sleep(CARD_PAUSE_S)
        return not self._shows_cards

    async def _come_back(self) -> str | None:
        """Register until discovery shows it; the last failure when it does not in time."""
        end = time.monotonic() + GIVE_UP_S
        while True:
            try:
                await _in_time(self._register())
                client = await _in_time(self._connect())
                await asyncio.sleep(LOOK_S)
                if self._is_served(client) and await self._is_listed(client):
                    return None
                failure = "discovery does not show what was registered"
            except Exception as error:  # see above
                failure = str(error) or type(error).__name__
            if time.monotonic() > end:
                return failure
            logger.warning("this worker is not in discovery yet: %s", failure)
            await asyncio.sleep(LOOK_S)


async def _in_time(call: Awaitable[T]) -> T:
    """The result of `call`; unlike `asyncio.wait_for` of Python 3.11 it loses no cancellation."""
    task = asyncio.ensure_future(call)
    try:
        if not (await asyncio.wait({task}, timeout=CALL_S))[0]:
            raise TimeoutError("discovery does not answer")
        return task.result()
    finally:
        task.cancel()


class Republished:
    """A publisher of Dynamo's that can be replaced by a new one, which announces itself again in discovery.

    What the old one had published is forgotten by routers, and comes back as prompts are computed.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._publisher = create()

    def renew(self) -> None:
        self._publisher.shutdown()
        self._publisher = self._create()

    def publish_stored(self, *args: Any, **options: Any) -> None:
        self._publisher.publish_stored(*args, **options)

    def publish_removed(self, *args: Any, **options: Any) -> None:
        self._publisher.publish_removed(*args, **options)
