"""The one thread that owns the model: it loads it, runs the step loop,
and hands results to the event loop once per phase."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dynamo.trtllm import metrics
from dynamo.trtllm.engines.transformers.encoder import MediaEncoder, TowerInputs
from dynamo.trtllm.engines.transformers.interleave import Interleave
from dynamo.trtllm.engines.transformers.scheduler import Scheduler, device_is_lost
from dynamo.trtllm.engines.transformers.sequence import Sequence
from dynamo.trtllm.errors import EngineDead, EngineFault, ShuttingDown, WorkerError

logger = logging.getLogger(__name__)

_MAX_ENCODE_BATCH = 16
_MAX_ENCODE_VALUES = 1 << 23
"""Pixel values in one pass of the vision tower: running requests wait for no more than that."""
_QUIET_S = 0.5
"""Without a request for so long, the engine gets ready for more of them."""


@dataclass(eq=False)
class EncodeJob:
    """One item on its way through its tower."""

    kind: str
    inputs: TowerInputs
    sink: Any


class Sink:
    """What one waiting coroutine receives, in order.
    Everything but the constructor runs on the event loop."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """The next item; an exception that was put is raised."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item


Setup: TypeAlias = Callable[[], tuple[Scheduler, Mapping[str, MediaEncoder]]]
"""Loads the model: what runs its steps, and what encodes, by the kinds of media that it takes."""


class Worker:
    """Runs `setup` and then the step loop in a thread of its own.

    `submit` and `cancel` are called on the event loop;
    they and the thread share the command queue and `dead`, nothing else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._encodes: deque[EncodeJob] = deque()
        self._scheduler: Scheduler | None = None
        self._encoders: Mapping[str, MediaEncoder] = {}
        self.encoded_images = 0
        self.dead: EngineDead | None = None

    async def start(self, setup: Setup) -> None:
        """Start the thread and wait until `setup` has run in it; its exception is raised here."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(setup, ready), name="engine", daemon=True)
        self._thread.start()
        await ready

    def require_alive(self) -> None:
        """Raises what ended the engine when it has ended."""
        if self.dead is None and self._thread is not None and not self._thread.is_alive():
            self.dead = EngineDead("the engine's thread has ended")  # so hard that it could not say so
        if self.dead is not None:
            raise EngineDead(self.dead.message) from self.dead.__cause__

    def submit(self, item: Sequence | EncodeJob) -> None:
        """Queue a request. Raises what ended the engine when it has ended."""
        self.require_alive()
        self._commands.put(("add", item))

    def cancel(self, item: Sequence | EncodeJob) -> None:
        """Forget a request at the next step; does nothing when it is finished."""
        self._commands.put(("cancel", item))

    async def stop(self) -> None:
        """End the thread after its current step; requests in it end with `ShuttingDown`.
        Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(("stop", None))
            await asyncio.to_thread(thread.join)

    def stats(self) -> metrics.Readings:
        scheduler = self._scheduler
        if scheduler is None:
            return {}
        used = scheduler.used_blocks
        return {
            metrics.ENGINE_ACTIVE: scheduler.active,
            metrics.ENGINE_QUEUED: scheduler.waiting,
            metrics.ENGINE_USED_BLOCKS: used,
            metrics.TOTAL_BLOCKS.of("0"): scheduler.total_blocks,
            metrics.CACHE_USAGE.of("0"): used / scheduler.total_blocks,
            metrics.ENGINE_ENCODED_IMAGES: self.encoded_images,
            metrics.ENGINE_OUTPUT_TOKENS: scheduler.generated_tokens,
            metrics.ENGINE_PROMPT_TOKENS: scheduler.prompt_tokens,
        }

    def _main(self, setup: Setup, ready: asyncio.Future[None]) -> None:
        with torch.inference_mode():
            try:
                self._scheduler, self._encoders = setup()
            except BaseException as error:
                self.dead = EngineDead("the engine did not start")
                self._call(_settle, ready, error)
                return
            self._call(_settle, ready, None)
            try:
                self._run(self._scheduler)
                reason: WorkerError = ShuttingDown("the engine has been closed")
                self.dead = EngineDead(reason.message)
            except BaseException as error:
                self.dead = reason = EngineDead("the engine failed and serves no further request")
                self.dead.__cause__ = error
                logger.critical("the engine's step failed; no request can be served any more", exc_info=error)
            self._end_all(self._scheduler, reason)

    def _run(self, scheduler: Scheduler) -> None:
        if scheduler.interleave is None:
            while self._take_commands(scheduler):
                if self._encodes:
                    self._encode_step()
                    self._flush(scheduler)
                scheduler.prefill_step()
                self._flush(scheduler)
                scheduler.finish_prefill()
                self._flush(scheduler)
                self._decode(scheduler)
        else:
            scheduler.interleave.serve(lambda: scheduler.running, lambda: self._decode(scheduler))
            while self._take_commands(scheduler):
                self._interleaved_step(scheduler, scheduler.interleave)

    def _interleaved_step(self, scheduler: Scheduler, interleave: Interleave) -> None:
        """On a GPU, which works through what was launched: running requests get their tokens meanwhile,
        when they are due.
        """
        if self._encodes:
            self._encode_step()
            self._flush(scheduler)
        scheduler.prefill_step()
        self._flush(scheduler)
        completes = scheduler.completes_prompts
        if completes or interleave.due:
            interleave.step()  # so that the device is busy while first tokens are chosen
        scheduler.finish_prefill()
        self._flush(scheduler)
        if completes or interleave.due or not (self._encodes or scheduler.prefilling):
            interleave.step()

    def _decode(self, scheduler: Scheduler) -> None:
        scheduler.decode_step()
        self._flush(scheduler)

    def _take_commands(self, scheduler: Scheduler) -> bool:
        """Carry out what was asked since the last step, waiting for something when there is no work.
        False: stop."""
        idle, left = not scheduler.has_work and not self._encodes, True
        while idle or not self._commands.empty():
            try:
                name, item = self._commands.get(timeout=_QUIET_S if idle and left else None)
            except queue.Empty:
                left = scheduler.record_ahead()
                continue
            idle = False
            if name == "stop":
                return False
            self._carry_out(scheduler, name, item)
        return True

    def _carry_out(self, scheduler: Scheduler, name: str, item: Any) -> None:
        if isinstance(item, EncodeJob):
            if name == "add":
                self._encodes.append(item)
            elif item in self._encodes:
                self._encodes.remove(item)
        elif name == "add":
            scheduler.add(item)
        else:
            scheduler.cancel(item)

    def _encode_step(self) -> None:
        """Encode what has gathered while the last step ran, up to a batch of one kind."""
        jobs: list[EncodeJob] = []
        values = 0
        while self._encodes and len(jobs) < _MAX_ENCODE_BATCH:
            values += sum(t.numel() for t in self._encodes[0].inputs.tensors.values())
            if jobs and (values > _MAX_ENCODE_VALUES or self._encodes[0].kind != jobs[0].kind):
                break
            jobs.append(self._encodes.popleft())
        assert self._scheduler is not None
        interleave = self._scheduler.interleave
        try:
            with nullcontext() if interleave is None else interleave.block():
                events = self._encode(jobs)
            self._scheduler.events.extend(events)
        except BaseException:
            self._encodes.extend(jobs)  # the engine ends, and these with it
            raise

    def _encode(self, jobs: list[EncodeJob]) -> list[tuple[Any, Any]]:
        try:
            encoded = self._encoders[jobs[0].kind].encode([job.inputs for job in jobs])
        except Exception as error:
            if device_is_lost(error):
                raise
            if len(jobs) > 1:
                return [event for job in jobs for event in self._encode([job])]
            fault = EngineFault(f"the engine failed on this {jobs[0].kind}")
            fault.__cause__ = error
            return [(jobs[0].sink, fault)]
        self.encoded_images += len(jobs)
        return [(job.sink, item) for job, item in zip(jobs, encoded, strict=True)]

    def _end_all(self, scheduler: Scheduler, reason: WorkerError) -> None:
        sinks = [s.sink for s in scheduler.sequences()] + [job.sink for job in self._encodes]
        while not self._commands.empty():
            name, item = self._commands.get()
            if name == "add":
                sinks.append(item.sink)
        scheduler.events.extend((sink, reason) for sink in sinks)
        self._flush(scheduler)
        self._scheduler, self._encoders = None, {}

    def _flush(self, scheduler: Scheduler) -> None:
        if scheduler.events:
            events, scheduler.events = scheduler.events, []
            self._call(_deliver, events)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: nobody waits any more
            self._commands.put(("stop", None))


def _deliver(events: list[tuple[Sink, Any]]) -> None:
    for sink, item in events:
        sink.put(item)


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
