"""What both adapters share: offers, expiry, quarantine, checks and counters. An adapter adds memory registration and
the read itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from dynamo.trtllm.errors import LimitFault, PeerFault, PeerTimeout, PeerUnavailable
from dynamo.trtllm.transfer.descriptor import ALIGNMENT_BYTES, HEADER_BYTES, PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.pool import Allocator, Pool, Room, Segment, round_up
from dynamo.trtllm.transfer.port import Offer, OfferState, Received, Transfer, TransferStats, wait_for_event

if TYPE_CHECKING:
    import torch

    from dynamo.trtllm.transfer.board import Board

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

INLINE_COPY_BYTES = 8 << 20
"""Larger copies leave the event loop; at memory speed this many bytes take one or two milliseconds."""
MAX_OWN_REGISTRATIONS = 4
"""Objects larger than the pool that may exist at once; more wait."""
RETRIES = 1


class ConnectionLost(Exception):
    """Raised by an adapter's read when the connection broke; a new one may work."""


@dataclass(eq=False)
class _Held:
    """A segment of an offer. `due` is when it expires while the offer is open, and when it is free again once quarantined."""

    offer: Offer
    segment: Segment
    word: int
    due: float


async def copy_bytes(nbytes: int, work: Callable[[], Result]) -> Result:
    """Do `work`, which copies `nbytes`: here if that is short, else off the event loop."""
    return work() if nbytes <= INLINE_COPY_BYTES else await off_loop(work)


async def off_loop(work: Callable[[], Result]) -> Result:
    """Run blocking work in the default executor; a cancelled caller still waits for its end, so that memory is not
    freed under it.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise


class PooledTransfer(Transfer):
    """Offers and fetches over pools of registered memory, one pool per device, those of CUDA devices made when first
    used.

    State shared by requests, all touched on the event loop only: the pools, `_open` (offers by generation), `_quarantine`
    (segments by generation that a reader may still be reading) and the counters. One task, `_housekeeping`, expires offers
    and ends quarantines. `clock` is monotonic, in seconds; tests inject their own and call `sweep`.
    """

    transport: ClassVar[Literal["nixl", "local"]]

    def __init__(
        self,
        *,
        name: str | None = None,
        pool_bytes: int = 256 << 20,
        time_to_live_s: float = 60.0,
        max_object_bytes: int = 16 << 30,
        stage_cuda_on_host: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is stable over restarts and unique among live processes; without one, a random name is used."""
        self._incarnation = secrets.token_hex(8)
        self._name = name or self._incarnation
        self._pool_bytes = pool_bytes
        self._time_to_live_s = time_to_live_s
        self._max_object_bytes = max_object_bytes
        self._stage_cuda_on_host = stage_cuda_on_host
        self._clock = clock
        self._generation = secrets.randbelow(1 << 20) << 32
        self._pools: dict[str, Pool] = {}
        self._pools_lock = asyncio.Lock()
        self._own_slots = Room(Allocator(MAX_OWN_REGISTRATIONS * ALIGNMENT_BYTES))
        self._own_pools: set[Pool] = set()
        self._open: dict[int, _Held] = {}
        self._quarantine: dict[int, _Held] = {}
        self._reads: set[asyncio.Future[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._board: Board | None = None
        self._identity: PeerIdentity | None = None
        self._changed = asyncio.Event()
        self._housekeeper: asyncio.Task[None] | None = None

    # What an adapter adds.

    @abstractmethod
    async def _connect(self) -> None:
        """Make the transport usable, or raise `StartupError`."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Undo `_connect`; no read is in flight any more."""

    @abstractmethod
    async def _register(self, memory: torch.Tensor) -> Any:
        """Make `memory` readable by peers and usable for reads."""

    @abstractmethod
    async def _unregister(self, registration: Any) -> None:
        """Undo `_register`, before the memory is freed."""

    @abstractmethod
    def _metadata(self) -> str:
        """What peers must know to read from this process, with all memory registered so far; base64."""

    @abstractmethod
    def _read(self, sender: PeerIdentity, source: tuple[str, int, int], target: Segment) -> asyncio.Future[None]:
        """Start reading `target.nbytes` bytes from `source` (device kind, device index, address) into `target`.

        The future is never cancelled and always completes: when the transport will not touch `target` any more. It fails with
        `ConnectionLost` or a `PeerFault`.
        """

    @abstractmethod
    def _acknowledge(self, descriptor: TransferDescriptor) -> None:
        """Tell the sender that its segment is not needed any more; does not wait, ignores failure."""

    def _offered(self) -> None:
        """An offer was made: an adapter that has to look for acknowledgements starts looking, until
        `_awaits_acknowledgement` is false.
        """

    def _awaits_acknowledgement(self) -> bool:
        """True while a reader's word could free memory. May be asked from another thread."""
        return bool(self._open or self._quarantine)

    # Life.

    async def start(self) -> None:
        from dynamo.trtllm.transfer.board import Board

        await self._connect()
        try:
            await self._pool_for("cpu")
            board = Board()
            board.registration = await self._register(board.memory)
        except BaseException:
            await self._disconnect()
            raise
        self._board, self._identity = board, None
        self._housekeeper = asyncio.create_task(self._housekeeping(), name="transfer-housekeeping")

    async def close(self) -> None:
        tasks = [task for task in (self._housekeeper, *self._background) if task is not None]
        self._housekeeper = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in list(self._open.values()):
            self._invalidate(held.segment)
            held.offer.settle(OfferState.RELEASED)
        self._open.clear()
        self._quarantine.clear()
        await self._disconnect()
        self._pools.clear()
        self._own_pools.clear()

    @property
    def identity(self) -> PeerIdentity:
        metadata = self._metadata()
        if self._identity is None or self._identity.metadata != metadata:
            beacon = self._require_board().base
            self._identity = PeerIdentity(name=self._name, incarnation=self._incarnation, metadata=metadata, beacon=beacon)
        return self._identity

    def _require_board(self) -> Board:
        if self._board is None:
            raise RuntimeError("the transfer is not started")
        return self._board

    async def drain(self, deadline_s: float) -> bool:
        end = asyncio.get_running_loop().time() + deadline_s
        while self._open:
            waits = {asyncio.ensure_future(held.offer.settled(deadline_s)) for held in self._open.values()}
            try:
                await asyncio.wait(waits, timeout=max(end - asyncio.get_running_loop().time(), 0.0))
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            if asyncio.get_running_loop().time() >= end:
                break
        return not self._open

    def stats(self) -> TransferStats:
        pools = (*self._pools.values(), *self._own_pools)
        waiting = (self._own_slots.waiting, 0 if self._board is None else self._board.waiting)
        counted = ("offers", "offered_bytes", "fetches", "fetched_bytes", "acknowledged", "expired", "failures", "retries")
        return TransferStats(
            **{f"{name}_total": self._counts[name] for name in counted},
            open_offers=len(self._open),
            waiting_offers=sum(waiting) + sum(pool.room.waiting for pool in pools),
            quarantined_segments=len(self._quarantine),
            reads_in_flight=len(self._reads),
            own_registrations=len(self._own_pools),
            pool_bytes=sum(pool.room.allocator.capacity for pool in pools),
            pool_used_bytes=sum(pool.room.allocator.used for pool in pools),
            pool_peak_bytes=sum(pool.room.allocator.peak for pool in pools),
        )

    # Memory.

    async def _pool_for(self, device: str) -> Pool:
        async with self._pools_lock:
            if device not in self._pools:
                self._pools[device] = await self._make_pool(device, self._pool_bytes)
            return self._pools[device]

    async def _make_pool(self, device: str, nbytes: int, slot: int | None = None) -> Pool:
        import torch

        pinned = self._stage_cuda_on_host and device == "cpu" and torch.cuda.is_available()
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return Pool(memory, await self._register(memory), slot=slot)

    async def _allocate(self, device: str, nbytes: int, end: float) -> Segment:
        """A segment on `device` before the loop's time `end`; larger than the pool, it comes from a registration of its own."""
        if nbytes > self._max_object_bytes:
            raise LimitFault("the data of this request is too large to hand to another worker")
        loop = asyncio.get_running_loop()
        if nbytes <= self._pool_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES:
            pool = self._pools.get(device) or await self._pool_for(device)
            return await pool.allocate(nbytes, end - loop.time())
        slot = await self._own_slots.take(1, end - loop.time())
        try:
            pool = await self._make_pool(device, round_up(nbytes), slot)
        except BaseException:
            self._own_slots.give_back(slot)
            raise
        self._own_pools.add(pool)
        return await pool.allocate(nbytes, 0.0)

    def _free(self, segment: Segment) -> None:
        pool = segment.pool
        pool.free(segment)
        if pool.slot is not None and pool in self._own_pools:
            self._own_pools.remove(pool)
            task = asyncio.ensure_future(self._drop_own(pool, pool.slot))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _drop_own(self, pool: Pool, slot: int) -> None:
        try:
            await self._unregister(pool.registration)
        finally:
            self._own_slots.give_back(slot)

    # Sender.

    async def offer(self, tensors: Mapping[str, torch.Tensor], deadline_s: float) -> Offer:
        from dynamo.trtllm.transfer import layout

        specs, length = layout.plan(tensors)
        device = self._device_of(tensors.values())
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        segment = await self._allocate(device, length, end)
        self._generation += 1
        generation = self._generation
        word: int | None = None
        try:
            word = await self._require_board().take(end - loop.time())
            layout.mark(segment.memory, generation)
            await copy_bytes(length, lambda: layout.write(segment.memory, specs, tensors))
        except BaseException:
            self._free(segment)
            if word is not None:
                self._require_board().give_back(word)
            raise
        kind, _, index = device.partition(":")
        descriptor = TransferDescriptor(
            transport=self.transport,
            sender=self.identity,
            device="cuda" if kind == "cuda" else "cpu",
            device_index=int(index or 0),
            address=segment.address,
            length=length,
            acknowledge_at=self._require_board().address_of(word),
            generation=generation,
            time_to_live_s=self._time_to_live_s,
            tensors=specs,
        )
        offer = Offer(descriptor, lambda: self._withdraw(generation, OfferState.RELEASED))
        first = not self._open and not self._quarantine
        self._open[generation] = _Held(offer, segment, word, self._clock() + self._time_to_live_s)
        self._counts["offers"] += 1
        self._counts["offered_bytes"] += descriptor.payload_bytes
        if first:
            self._changed.set()
        self._offered()
        return offer

    def _device_of(self, tensors: Iterable[torch.Tensor]) -> str:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError("the tensors of one offer must be on one device")
        (device,) = devices
        if device.type == "cpu" or self._stage_cuda_on_host:
            return "cpu"
        return f"{device.type}:{device.index or 0}"

    def _acknowledged(self, generation: int) -> None:
        """The reader is done with a segment: free it at once, wherever it is."""
        held = self._open.pop(generation, None)
        if held is not None:
            held.offer.settle(OfferState.ACKNOWLEDGED)
            self._counts["acknowledged"] += 1
        else:
            held = self._quarantine.pop(generation, None)
        if held is not None:
            self._invalidate(held.segment)
            self._free_held(held)

    def _withdraw(self, generation: int, state: OfferState) -> None:
        """End an open offer that a reader may be reading right now: mark it invalid and keep its memory aside."""
        held = self._open.pop(generation)
        self._invalidate(held.segment)
        held.due = self._clock() + self._time_to_live_s / 2
        self._quarantine[generation] = held
        held.offer.settle(state)
        self._changed.set()

    def _free_held(self, held: _Held) -> None:
        self._require_board().give_back(held.word)
        self._free(held.segment)

    @staticmethod
    def _invalidate(segment: Segment) -> None:
        from dynamo.trtllm.transfer import layout

        layout.mark(segment.memory, layout.INVALID_GENERATION)

    def sweep(self) -> float | None:
        """Expire offers and end quarantines that are due. Returns the seconds until the next is due, None when there is
        nothing.
        """
        now = self._clock()
        for generation in [key for key, held in self._quarantine.items() if held.due <= now]:
            self._free_held(self._quarantine.pop(generation))
        for generation in [key for key, held in self._open.items() if held.due <= now]:
            self._counts["expired"] += 1
            self._withdraw(generation, OfferState.EXPIRED)
        due = [held.due for held in (*self._open.values(), *self._quarantine.values())]
        return max(min(due) - now, 0.0) if due else None

    async def _housekeeping(self) -> None:
        while True:
            self._changed.clear()
            pause_s = self.sweep()
            await wait_for_event(self._changed, pause_s)

    # Reader.

    async def warm(self, peer: PeerIdentity, deadline_s: float) -> None:
        end = asyncio.get_running_loop().time() + deadline_s
        target = await self._allocate("cpu", HEADER_BYTES, end)
        await self._read_in_time(peer, ("cpu", 0, peer.beacon), target, end)
        self._free(target)

    async def fetch(
        self,
        descriptor: TransferDescriptor,
        deadline_s: float,
        *,
        copy: bool = False,
        device: str | None = None,
    ) -> Received:
        from dynamo.trtllm.transfer import layout

        if descriptor.transport != self.transport:
            raise PeerFault("the other worker hands over by another transport; use one for all workers")
        end = asyncio.get_running_loop().time() + min(deadline_s, descriptor.time_to_live_s / 2)
        try:
            home = self._home_of(descriptor)
            segment = await self._allocate(home, descriptor.length, end)
            await self._fetch_into(segment, descriptor, end)
        except asyncio.CancelledError:
            self._acknowledge(descriptor)
            raise
        except Exception:
            self._counts["failures"] += 1
            raise
        # After the caller has gone on: nobody waits for the acknowledgement.
        asyncio.get_running_loop().call_soon(self._acknowledge, descriptor)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += descriptor.payload_bytes
        tensors = layout.views(segment.memory, descriptor.tensors)
        if copy or device not in (None, home):
            try:
                copies = await copy_bytes(descriptor.length, lambda: {name: _copied(x, device) for name, x in tensors.items()})
            finally:
                self._free(segment)
            return Received(copies)
        return Received(tensors, lambda: self._free(segment))

    def _home_of(self, descriptor: TransferDescriptor) -> str:
        """The device that an offer is read into: of the same kind as the sender's, where this process has one."""
        import torch

        if descriptor.device == "cpu" or self._stage_cuda_on_host or not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{torch.cuda.current_device()}"

    async def _fetch_into(self, segment: Segment, descriptor: TransferDescriptor, end: float) -> None:
        """Read and check the offer, once more if that fails. The segment is the caller's only when this returns."""
        from dynamo.trtllm.transfer import layout

        source = (descriptor.device, descriptor.device_index, descriptor.address)
        for attempt in range(1 + RETRIES):
            self._counts["retries"] += attempt
            await self._read_in_time(descriptor.sender, source, segment, end)
            if layout.is_marked(segment.memory, descriptor.generation):
                return
        self._free(segment)
        raise PeerFault("the data from the other worker expired before it was read")

    async def _read_in_time(self, sender: PeerIdentity, source: tuple[str, int, int], target: Segment, end: float) -> None:
        """One read, over a new connection if the first one is lost. Unless it returns, `target` is freed when its read
        has ended.
        """
        loop = asyncio.get_running_loop()
        for attempt in range(1 + RETRIES):
            self._counts["retries"] += attempt
            read = self._read(sender, source, target)
            self._reads.add(read)
            read.add_done_callback(self._reads.discard)
            try:
                if not read.done():
                    await asyncio.wait({read}, timeout=max(end - loop.time(), 0.0))
            except asyncio.CancelledError:
                read.add_done_callback(lambda read: self._free_after(read, target))
                raise
            if not read.done():
                read.add_done_callback(lambda read: self._free_after(read, target))
                raise PeerTimeout("the data from the other worker did not arrive in time")
            error = read.exception()
            if error is None:
                return
            if not isinstance(error, ConnectionLost):
                self._free(target)
                raise error
        self._free(target)
        raise PeerUnavailable("the worker that holds this request's data is gone") from error

    def _free_after(self, read: asyncio.Future[None], target: Segment) -> None:
        if not read.cancelled():
            read.exception()
        if target.pool in self._own_pools or target.pool in self._pools.values():
            self._free(target)

    async def discard(self, descriptor: TransferDescriptor) -> None:
        if descriptor.transport == self.transport:
            self._acknowledge(descriptor)


def _copied(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    """An independent tensor on `device`, None for its own; on return nothing reads the original any more."""
    import torch

    copy = tensor.to(tensor.device if device is None else device, copy=True)
    for end in (tensor, copy):
        if end.is_cuda:
            torch.cuda.current_stream(end.device).synchronize()
    return copy
