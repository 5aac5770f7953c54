"""The encode role: TensorRT-LLM's `MultimodalEncoder`, asked for one image at a time.

Each image is a request of its own, so it ends in its own result; the library runs those that are under way as
one batch. What it answers with are handles that work on this host only and must each be opened once: they are
opened here, also when nobody waits any more, so that what leaves is tensors. Submitting prepares the image
and takes milliseconds, so it happens on an event loop of the encoder's own: results are read by the loop on
which they were made.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.core import DecodedImage, EncodedMedia
from dynamo.trtllm.engines.tensorrt_llm import faults, mrope, private
from dynamo.trtllm.engines.tensorrt_llm.record import ModelFacts
from dynamo.trtllm.errors import EngineDead, EngineFault, ShuttingDown, WorkerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long closing waits for images that are being encoded."""


class EncoderThread:
    """Owns the thread and its event loop. `is_dead` tells what is known of the engine, without asking it."""

    def __init__(
        self, encoder: Any, facts: ModelFacts, placeholder_id: int, at_once: int, is_dead: Callable[[], bool]
    ) -> None:
        self._encoder = encoder
        self._facts = facts
        self._placeholder_id = placeholder_id
        self._is_dead = is_dead
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(at_once)
        self._running: set[asyncio.Task[EncodedMedia]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="encode", daemon=True)
        self._thread.start()

    async def encode(self, images: Sequence[DecodedImage]) -> list[EncodedMedia]:
        """Embeddings of `images`, in order: all of them or an error. A cancelled call's images are not
        started."""
        if self._closed:
            raise ShuttingDown("the worker is shutting down")
        waiting = [asyncio.run_coroutine_threadsafe(self._one(image), self._loop) for image in images]
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(each) for each in waiting)))
        finally:
            for each in waiting:
                each.cancel()

    async def close(self) -> None:
        """End those that wait for a slot, wait for those under way, and stop the thread."""
        self._closed = True
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(ending), CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    async def _end(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    async def _one(self, image: DecodedImage) -> EncodedMedia:
        """Once the library has the image, its result is read to the end, whoever waits for it."""
        await self._slots.acquire()
        if self._closed:
            self._slots.release()
            raise ShuttingDown("the worker is shutting down")
        task = asyncio.ensure_future(self._submitted(image))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[EncodedMedia]) -> None:
        self._running.discard(task)
        self._slots.release()
        if not task.cancelled():
            task.exception()  # read, so that one whose caller has left is no warning

    async def _submitted(self, image: DecodedImage) -> EncodedMedia:
        try:
            result = self._encoder.generate_async(self._inputs(image))
        except Exception as error:
            logger.warning("The encoder refused an image: %s: %s", type(error).__name__, error)
            raise self._dead() or faults.refused_image(error) from error
        try:
            await result.aresult()
            return self._take(image, result)
        except WorkerError:
            raise
        except Exception as error:
            logger.warning("The encoder failed on an image: %s: %s", type(error).__name__, error)
            raise self._dead() or EngineFault("the encoder failed on an image") from error

    def _dead(self) -> WorkerError | None:
        return EngineDead("the engine died") if self._is_dead() else None

    def _inputs(self, image: DecodedImage) -> dict[str, Any]:
        before, after = self._facts.around
        prompt = f"{before}{self._facts.placeholder}{after}"
        return {
            "prompt": prompt,
            "multi_modal_data": {"image": [image.image]},
            "mm_processor_kwargs": dict(image.options),
        }

    def _take(self, image: DecodedImage, output: Any) -> EncodedMedia:
        """Opens every handle of `output`, also when one of them turns out to be of no use."""
        params = getattr(output, "disaggregated_params", None) or output.outputs[0].disaggregated_params
        rows, positions = _open_all(
            getattr(params, "multimodal_embedding_handles", None) or [],
            [getattr(params, f"mrope_position_{name}_handle", None) for name in ("ids", "deltas")],
        )
        if not rows:
            raise EngineFault("the encoder returned no embeddings for an image")
        features = _joined(rows)
        extras: dict[str, Any] = {}
        if self._facts.mrope:
            grid = mrope.grid_of(positions[0].cpu(), len(features)) if positions else None
            if grid is None:
                raise EngineFault("the encoder did not say how an image is laid out")
            extras["grid"] = list(grid)
        return EncodedMedia(
            "image", image.digest, {"features": features}, (self._placeholder_id,) * len(features), extras
        )


def _open_all(*groups: Sequence[Any]) -> list[list[torch.Tensor]]:
    """The tensors behind the handles of each group; the first failure is raised after all have been tried."""
    opened: list[list[torch.Tensor]] = []
    failure: Exception | None = None
    for group in groups:
        opened.append([])
        for handle in group:
            try:
                opened[-1] += [private.open_handle(handle)] if handle is not None else []
            except Exception as error:
                failure = failure or error
    if failure is not None:
        raise failure
    return opened


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`[tokens, width]` of one image, which the library may hand out in several pieces."""
    import torch

    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).contiguous()
