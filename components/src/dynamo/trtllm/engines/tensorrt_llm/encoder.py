"""The encode role: TensorRT-LLM's `MultimodalEncoder`, asked for one image at a time and run in batches.

The encoder answers with handles that work on this host only and must each be opened once; they are opened here, so that what
leaves is tensors. Its calls block, so they run on one thread, and images that arrive meanwhile make the next batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.engines.port import DecodedImage, EncodedImage
from dynamo.trtllm.engines.tensorrt_llm import mrope, private
from dynamo.trtllm.engines.tensorrt_llm.record import ModelFacts
from dynamo.trtllm.errors import EngineFault, ShuttingDown, WorkerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    image: DecodedImage
    future: asyncio.Future[EncodedImage]


class ImageEncoder:
    """Owns the encoder object, its thread and the task that fills batches."""

    def __init__(self, encoder: Any, facts: ModelFacts, placeholder_id: int, max_batch: int) -> None:
        self._encoder = encoder
        self._facts = facts
        self._placeholder_id = placeholder_id
        self._max_batch = max_batch
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def encode(self, images: Sequence[DecodedImage]) -> list[EncodedImage]:
        """Embeddings of `images`, in order: all of them or an error. A cancelled call's images are not started."""
        loop = asyncio.get_running_loop()
        pending = [_Pending(image, loop.create_future()) for image in images]
        for item in pending:
            self._queue.put_nowait(item)
        try:
            return list(await asyncio.gather(*(item.future for item in pending)))
        finally:
            for item in pending:
                item.future.cancel()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        while not self._queue.empty():
            future = self._queue.get_nowait().future
            if not future.done():
                future.set_exception(ShuttingDown("the worker is shutting down"))
        await asyncio.to_thread(self._thread.shutdown)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._max_batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [item for item in batch if not item.future.done()]
            if not batch:
                continue
            results = await loop.run_in_executor(self._thread, self._run, [item.image for item in batch])
            for item, result in zip(batch, results, strict=True):
                if item.future.done():
                    continue
                if isinstance(result, WorkerError):
                    item.future.set_exception(result)
                else:
                    item.future.set_result(result)

    def _run(self, images: list[DecodedImage]) -> list[EncodedImage | WorkerError]:
        """One batch on the thread. If it fails, its images are tried alone, so that only the bad one fails."""
        try:
            outputs = self._encoder.generate([self._inputs(image) for image in images], use_tqdm=False)
            return [self._take(image, output) for image, output in zip(images, outputs, strict=True)]
        except Exception as error:
            if len(images) > 1:
                return [result for image in images for result in self._run([image])]
            logger.warning("The encoder failed on an image: %s", error)
            return [error if isinstance(error, WorkerError) else _fault(error)]

    def _inputs(self, image: DecodedImage) -> dict[str, Any]:
        before, after = self._facts.around
        return {"prompt": f"{before}{self._facts.placeholder}{after}", "multi_modal_data": {"image": [image.image]}}

    def _take(self, image: DecodedImage, output: Any) -> EncodedImage:
        """Opens every handle of `output`, also when one of them turns out to be of no use."""
        params = getattr(output, "disaggregated_params", None) or output.outputs[0].disaggregated_params
        handles = getattr(params, "multimodal_embedding_handles", None) or []
        opened = [private.open_handle(handle) for handle in handles]
        positions = [
            private.open_handle(handle)
            for handle in (getattr(params, f"mrope_position_{name}_handle", None) for name in ("ids", "deltas"))
            if handle is not None
        ]
        if not opened:
            raise EngineFault("the encoder returned no embeddings for an image")
        features = _rows(opened)
        extras: dict[str, Any] = {}
        if self._facts.mrope:
            grid = mrope.grid_of(positions[0].cpu(), len(features)) if positions else None
            if grid is None:
                raise EngineFault("the encoder did not say how an image is laid out")
            extras["grid"] = list(grid)
        return EncodedImage(image.digest, {"features": features}, (self._placeholder_id,) * len(features), extras)


def _rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`[tokens, width]` of one image, which the library may hand out in several pieces."""
    import torch

    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).contiguous()


def _fault(error: Exception) -> EngineFault:
    fault = EngineFault("the encoder failed on an image")
    fault.__cause__ = error
    return fault
