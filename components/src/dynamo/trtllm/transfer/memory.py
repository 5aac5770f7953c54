"""The registered memory of one process: which pool a segment comes from, and where it goes back to."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo.trtllm.config import MEBIBYTE
from dynamo.trtllm.errors import LimitFault, Overloaded, StartupError
from dynamo.trtllm.transfer.descriptor import ALIGNMENT_BYTES, TransferDescriptor
from dynamo.trtllm.transfer.pool import Pool, Segment, Slots, round_up
from dynamo.trtllm.transfer.transport import INLINE_COPY_BYTES, Transport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_OWN_REGISTRATIONS = 4
"""Objects larger than the pool that may exist at once; more wait."""


class Memory:
    """One pool for each device, those of CUDA devices made when first used,
    and memory of its own for what is larger.

    State shared by requests, touched on the event loop only: the pools, `_making` (pools that are being
    registered, by device), and `_own` (the pool of each large object, and the slot that it takes up).
    """

    def __init__(
        self, transport: Transport, *, pool_bytes: int, max_object_bytes: int, stage_cuda_on_host: bool
    ) -> None:
        self._transport = transport
        self._pool_bytes = pool_bytes
        self._max_object_bytes = max_object_bytes
        self._stage_cuda_on_host = stage_cuda_on_host
        self._pools: dict[str, Pool] = {}
        self._making: dict[str, asyncio.Task[Pool]] = {}
        self._own: dict[Pool, int] = {}
        self._own_slots = Slots(MAX_OWN_REGISTRATIONS)
        self._background: set[asyncio.Task[Any]] = set()
        self._settled = False

    async def open(self) -> None:
        """Reserve and register the pool in this process's ordinary memory. Raises `StartupError`."""
        try:
            await self._pool_for("cpu", math.inf)
        except RuntimeError as error:  # what torch raises where there is no memory
            size = f"{self._pool_bytes / MEBIBYTE:g} MB"
            raise StartupError(
                f"no memory for a transfer pool of {size}: lower --transfer-pool-mb"
            ) from error

    async def settle(self) -> None:
        """From now on nothing is given back: the transport, which is closed next, still knows all memory."""
        self._settled = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def forget(self) -> None:
        """Let go of all memory, after the transport's end."""
        self._pools.clear()
        self._own.clear()

    def device_of(self, tensors: Iterable[torch.Tensor]) -> str:
        """The device whose pool `tensors` are offered from. Raises `ValueError` when they lie on several."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError("the tensors of one offer must be on one device")
        (device,) = devices
        if device.type == "cpu" or self._stage_cuda_on_host:
            return "cpu"
        return f"{device.type}:{device.index or 0}"

    def device_for(self, descriptor: TransferDescriptor) -> str:
        """The device that an offer is read into:
        of the same kind as the sender's, where this process has one."""
        import torch

        if descriptor.device == "cpu" or self._stage_cuda_on_host or not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{torch.cuda.current_device()}"

    async def allocate(self, device: str, nbytes: int, end: float) -> Segment:
        """A segment on `device` before the loop's time `end`;
        larger than the pool, it comes from a registration of its own.

        Raises `Overloaded` when there is no room in time, and `LimitFault` for what is too large altogether.
        """
        if nbytes > self._max_object_bytes:
            raise LimitFault("the data of this request is too large to hand to another worker")
        if nbytes > self._pool_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES:
            return await self._allocate_own(device, nbytes, end)
        pool = self._pools.get(device) or await self._pool_for(device, end)
        return await pool.allocate(nbytes, end - asyncio.get_running_loop().time())

    def free(self, segment: Segment) -> None:
        """Take a segment back. Does nothing after `settle`."""
        if self._settled:
            return
        pool = segment.pool
        pool.free(segment)
        if pool in self._own:
            self._in_background(self._drop_own(pool, self._own.pop(pool)))

    @property
    def waiting(self) -> int:
        """Callers that wait for room."""
        return self._own_slots.waiting + sum(pool.room.waiting for pool in self._all())

    @property
    def own_registrations(self) -> int:
        """Objects that have memory of their own."""
        return len(self._own)

    def sizes(self) -> tuple[int, int, int]:
        """Bytes of all pools: altogether, taken now, and taken at most so far."""
        rooms = [pool.room.allocator for pool in self._all()]
        return sum(r.capacity for r in rooms), sum(r.used for r in rooms), sum(r.peak for r in rooms)

    def _all(self) -> tuple[Pool, ...]:
        return (*self._pools.values(), *self._own)

    async def _pool_for(self, device: str, end: float) -> Pool:
        """The pool of `device`. It is made once, whoever of those that wait for it leaves meanwhile."""
        if device not in self._pools:
            if device not in self._making:
                self._making[device] = self._in_background(self._add_pool(device))
            await _until(self._making[device], end)
        return self._pools[device]

    async def _add_pool(self, device: str) -> Pool:
        try:
            self._pools[device] = await self._make_pool(device, self._pool_bytes)
            return self._pools[device]
        finally:
            del self._making[device]

    async def _make_pool(self, device: str, nbytes: int) -> Pool:
        import torch

        pinned = self._stage_cuda_on_host and device == "cpu" and torch.cuda.is_available()
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return Pool(memory, await self._transport.register(memory))

    async def _allocate_own(self, device: str, nbytes: int, end: float) -> Segment:
        slot = await self._own_slots.take(end - asyncio.get_running_loop().time())
        making = self._in_background(self._make_pool(device, round_up(nbytes)))
        try:
            pool = await _until(making, end)
        except BaseException:
            self._in_background(self._drop_unused(making, slot))
            raise
        self._own[pool] = slot
        return await pool.allocate(nbytes, 0.0)

    async def _drop_unused(self, making: asyncio.Task[Pool], slot: int) -> None:
        """Undo a registration that nobody waits for any more, when it has ended."""
        (made,) = await asyncio.gather(making, return_exceptions=True)
        if isinstance(made, Pool):
            await self._drop_own(made, slot)
        else:
            self._own_slots.give_back(slot)

    async def _drop_own(self, pool: Pool, slot: int) -> None:
        try:
            await self._transport.unregister(pool.registration)
        except Exception:
            logger.exception("the memory of a large object could not be given back")
        finally:
            self._own_slots.give_back(slot)

    def _in_background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # looked at by whoever waited, if anybody still does


async def _until(task: asyncio.Task[Result], end: float) -> Result:
    """The result of `task`, which goes on without a caller that leaves.
    Raises `Overloaded` after the loop's time `end`."""
    await asyncio.wait(
        {task}, timeout=None if end == math.inf else max(end - asyncio.get_running_loop().time(), 0.0)
    )
    if not task.done():
        raise Overloaded("memory for the transfer could not be registered in time; try again later")
    return task.result()


async def copy_bytes(nbytes: int, work: Callable[[], Result]) -> Result:
    """Do `work`, which copies `nbytes`: here if that is short, else off the event loop.

    A cancelled caller still waits for its end, so that memory is not freed under it.
    """
    if nbytes <= INLINE_COPY_BYTES:
        return work()
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
