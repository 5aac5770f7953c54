"""How decode takes a prefilled request over:
from prefill's hand-off to the engine's state, or to letting go of it.

Prefill is pure, so a request whose prefill worker died before its KV cache
was read is prefilled once more by another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from dynamo.trtllm.core import Context, Prompt, Step
from dynamo.trtllm.engines.port import Engine, EngineRequest, EngineState
from dynamo.trtllm.errors import PeerFault, WorkerError
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.metrics import PREFILL_RETRIES, Readings, Stage
from dynamo.trtllm.peers.messages import Handoff
from dynamo.trtllm.peers.prefill import PrefillPeers
from dynamo.trtllm.stages import measured
from dynamo.trtllm.transfer.port import Transfer

logger = logging.getLogger(__name__)


class Takeover:
    """One prefilled request, whose KV cache is being read.

    `asked` is the engine's request with what prefill made of it: the expanded prompt, no media any more,
    and its seed. `first` is prefill's first token; with `finish` set the answer is complete, unless the
    request has other choices.
    """

    def __init__(self, asked: EngineRequest, first: Step, cached_tokens: int) -> None:
        self.asked = asked
        self.first = first
        self.cached_tokens = cached_tokens
        self.reading: asyncio.Task[EngineState] | None = None
        """None: the answer is complete, and there is nothing to decode from."""
        self.is_taken = False

    async def state(self) -> EngineState:
        """What to decode from, once its KV cache is here. Who takes it releases it."""
        assert self.reading is not None, "a complete answer has no state"
        state = await self.reading
        self.is_taken = True
        return state


class Takeovers:
    """The requests that one decode worker takes over."""

    def __init__(self, engine: Engine, transfer: Transfer, prefill: PrefillPeers) -> None:
        self._engine = engine
        self._transfer = transfer
        self._prefill = prefill
        self._prefilled_again = 0
        self._letting_go: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def take_over(self, request: Request, context: Context) -> AsyncIterator[Takeover]:
        """Read the KV cache beside the block.
        What the block leaves unread is freed here and on the prefill worker.

        Raises `PeerFault` for a hand-off of another engine or release,
        and what `PrefillPeers.prefill` raises.
        """
        handoff = await self._handoff(request, context)
        taken = _taken(request.engine_request, handoff, handoff.first_step())
        if taken.first.finish is not None and taken.asked.choices == 1:
            await self._let_go(handoff, taken)
            yield taken
            return
        taken.reading = asyncio.create_task(self._state(handoff, request, context), name="kv-read")
        try:
            yield taken
        except BaseException:
            if not taken.is_taken:
                await self._let_go(handoff, taken)
            raise

    async def _handoff(self, request: Request, context: Context) -> Handoff:
        """What came with the request, or a new one where the frontend could not reach its prefill worker."""
        if not request.handoff:
            return await self._prefill_again(request, context, None)
        with measured(Stage.PREPARE):
            return Handoff.parse(request.handoff, "prefill").for_engine(type(self._engine).__name__)

    async def _state(self, handoff: Handoff, request: Request, context: Context) -> EngineState:
        """The engine's state, its KV cache read; from a second prefill if the first one's worker is gone."""
        try:
            return await self._read(handoff)
        except PeerFault as error:
            logger.warning("request %s: prefilling again: %s", context.id(), error)
        again = await self._prefill_again(request, context, handoff)
        if again.first_token_ids != handoff.first_token_ids or again.finish is not None:
            if again.transfer is not None:
                await self._transfer.discard(again.transfer)
            raise PeerFault("the prefill worker was lost and its work could not be repeated")
        return await self._read(again)

    async def _read(self, handoff: Handoff) -> EngineState:
        if handoff.transfer is None:
            return EngineState(handoff.meta)
        with measured(Stage.KV_HANDOVER):
            received = await self._transfer.fetch(handoff.transfer)
        return EngineState(handoff.meta, received.tensors, received.release)

    async def _prefill_again(self, request: Request, context: Context, lost: Handoff | None) -> Handoff:
        self._prefilled_again += 1
        handoff = await self._prefill.prefill(request, context, lost)
        return handoff.for_engine(type(self._engine).__name__)

    async def _let_go(self, handoff: Handoff, taken: Takeover) -> None:
        """Nobody will decode it: free what is read here, and what prefill holds for it."""
        if self._engine.holds_until_decoded:
            if taken.reading is not None or handoff.meta:
                self._in_background(self._abandon(handoff, taken))
            return
        if taken.reading is not None:
            taken.reading.cancel()
            taken.reading.add_done_callback(_release_unused)
        if handoff.transfer is not None:
            await self._transfer.discard(handoff.transfer)

    async def _abandon(self, handoff: Handoff, taken: Takeover) -> None:
        try:
            state = await (taken.reading or self._read(handoff))
        except WorkerError as error:
            logger.info(
                "request %s: its hand-over could not be taken back: %s", taken.asked.request_id, error
            )
            return
        self._engine.abandon(taken.asked, state)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._letting_go.add(task)
        task.add_done_callback(self._letting_go.discard)

    def stats(self) -> Readings:
        return {PREFILL_RETRIES: self._prefilled_again}

    async def drained(self) -> None:
        """Return when nothing is held any more that clients left; the transfer's deadline ends it."""
        if self._letting_go:
            await asyncio.wait(self._letting_go)


def _release_unused(reading: asyncio.Task[EngineState]) -> None:
    if not reading.cancelled() and reading.exception() is None:
        reading.result().release()


def _taken(request: EngineRequest, handoff: Handoff, first: Step) -> Takeover:
    sampling = request.sampling
    if sampling.seed != handoff.seed:
        sampling = replace(sampling, seed=handoff.seed)
    asked = replace(request, prompt=Prompt(handoff.prompt_token_ids), sampling=sampling, media_hashes=())
    if first.finish is None and sampling.max_tokens == 1:
        first = first._replace(finish="length")
    return Takeover(asked, first, handoff.cached_tokens)
