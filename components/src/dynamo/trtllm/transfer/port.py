"""The transfer port: how tensors are handed from one process to another, and what every adapter guarantees.

Life: `start` once, then any number of `offer` and `fetch` side by side on one event loop, then `close`
once. The sender copies tensors into registered memory and gets an `Offer`, whose `descriptor` travels
to the reader inside some message. The reader fetches, checks and acknowledges; the acknowledgement
frees the sender's memory.

Contract, held by one test suite for every adapter (`tests/transfer/test_contract.py`):
* Every wait ends at its deadline. `deadline_s` is always a duration in seconds from the call.
* What arrives is exactly what was offered, or an error is raised:
  a segment that was reused while it was read is never returned.
* An offer's memory is held until it is acknowledged, released or `time_to_live_s` old, whichever comes first.
  Memory that a reader may still be reading (released or expired, not acknowledged) is kept aside for another
  half of the time to live before it is used again.
* Cancelling `offer` or `fetch` leaks nothing. A peer that dies costs at most a retry, never memory or a hang.
* Memory of a read that could be given up but not stopped is never used again, and is counted (`lost_reads`).
  When most of it is lost so, `check_health` says that a new process serves better.
* A full pool lets callers wait, first come first served.
  An object larger than the pool gets memory of its own, freed afterwards.

Errors: `Overloaded` (no room within the deadline), `PeerTimeout` (the read outlasted its deadline),
`PeerUnavailable` (the peer is gone or unreachable), `PeerFault` (the descriptor is inconsistent, or the offer
has expired), `LimitFault` (larger than can be handed over).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dynamo.trtllm import metrics
from dynamo.trtllm.errors import PeerTimeout
from dynamo.trtllm.transfer.descriptor import PeerIdentity, TransferDescriptor

if TYPE_CHECKING:
    import torch


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until `event` is set, at most `timeout_s` seconds; true when it is.

    Unlike `asyncio.wait_for` before Python 3.12, it never loses a cancellation that meets the event.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()
    return event.is_set()


class OfferState(str, Enum):
    """What became of an offer. Only `OPEN` holds memory that a reader may ask for."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    RELEASED = "released"
    EXPIRED = "expired"


class Offer:
    """Tensors that wait to be fetched. Owned by the transfer,
    which frees it at the latest when its time to live ends.

    A handler that replies with the descriptor and returns may drop the object. One that outlives the
    hand-over holds it with `async with`, which releases at the end. `release` may be called in any
    state, any number of times.
    """

    def __init__(self, descriptor: TransferDescriptor, release: Callable[[], None]) -> None:
        self.descriptor = descriptor
        self.state = OfferState.OPEN
        self._release = release
        self._settled = asyncio.Event()

    def release(self) -> None:
        """Withdraw the offer if nobody has acknowledged it yet."""
        if self.state is OfferState.OPEN:
            self._release()

    def settle(self, state: OfferState) -> None:
        """Called by the transfer, once, when the offer leaves `OPEN`."""
        self.state = state
        self._settled.set()

    async def settled(self, deadline_s: float) -> OfferState:
        """Wait until the offer is no longer open.
        Raises `PeerTimeout` when it still is after `deadline_s`."""
        if not await wait_for_event(self._settled, deadline_s):
            raise PeerTimeout("the other worker did not fetch its data in time")
        return self.state

    async def __aenter__(self) -> Offer:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


class Received:
    """Tensors that were fetched. `tensors` are views of pool memory until `release`,
    or independent where a copy was asked for.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], release: Callable[[], None] | None = None
    ) -> None:
        self.tensors = tensors
        self._release = release

    def release(self) -> None:
        """Give the memory back. The views must not be used afterwards,
        and work queued on them on a GPU must have ended.

        Calling again does nothing.
        """
        release, self._release = self._release, None
        if release is not None:
            self.tensors = {}
            release()

    async def __aenter__(self) -> Received:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


@dataclass(frozen=True)
class TransferStats:
    """Counters since the start (`..._total`) and gauges of this moment.
    Bytes count payload, pool gauges count whole segments.
    """

    offers_total: int
    offered_bytes_total: int
    fetches_total: int
    fetched_bytes_total: int
    acknowledged_total: int
    expired_total: int
    failures_total: int
    retries_total: int
    open_offers: int
    waiting_offers: int
    """Callers, senders and readers alike, that wait for room."""
    quarantined_segments: int
    reads_in_flight: int
    lost_reads: int
    """Reads that were given up and could not be stopped;
    their memory stays out of use for as long as the process lives."""
    own_registrations: int
    pool_bytes: int
    pool_used_bytes: int
    pool_peak_bytes: int

    def readings(self) -> metrics.Readings:
        """These under their declarations."""
        return {
            metrics.TRANSFER_OFFERS: self.offers_total,
            metrics.TRANSFER_OFFERED_BYTES: self.offered_bytes_total,
            metrics.TRANSFER_ACKNOWLEDGED: self.acknowledged_total,
            metrics.TRANSFER_EXPIRED: self.expired_total,
            metrics.TRANSFER_OPEN_OFFERS: self.open_offers,
            metrics.TRANSFER_QUARANTINED: self.quarantined_segments,
            metrics.TRANSFER_FETCHES: self.fetches_total,
            metrics.TRANSFER_FETCHED_BYTES: self.fetched_bytes_total,
            metrics.TRANSFER_FAILURES: self.failures_total,
            metrics.TRANSFER_RETRIES: self.retries_total,
            metrics.TRANSFER_READS: self.reads_in_flight,
            metrics.TRANSFER_LOST_READS: self.lost_reads,
            metrics.TRANSFER_WAITING: self.waiting_offers,
            metrics.TRANSFER_OWN_REGISTRATIONS: self.own_registrations,
            metrics.TRANSFER_POOL_BYTES: self.pool_bytes,
            metrics.TRANSFER_POOL_USED_BYTES: self.pool_used_bytes,
            metrics.TRANSFER_POOL_PEAK_BYTES: self.pool_peak_bytes,
        }


class Transfer(ABC):
    """One process's end of all transfers. See the module's docstring for what all adapters guarantee."""

    @abstractmethod
    async def start(self) -> None:
        """Reserve and register memory.
        Raises `StartupError` when the transport cannot be used on this machine."""

    @abstractmethod
    async def close(self) -> None:
        """End reads in flight and free everything. Safe to call twice, and after a failed start."""

    @property
    @abstractmethod
    def identity(self) -> PeerIdentity:
        """Who this process is to its readers. Valid between `start` and `close`."""

    @abstractmethod
    async def offer(self, tensors: Mapping[str, torch.Tensor], deadline_s: float | None = None) -> Offer:
        """Copy `tensors`, of any layout but all on one device, and offer them to one reader.

        They may be changed or freed as soon as this returns. Waits at most `deadline_s` for room, by default
        half of this transfer's time to live. Raises `Overloaded`, `LimitFault`, and `ValueError` for no
        tensors, several devices or a dtype outside `descriptor.ITEM_BYTES`.
        """

    @abstractmethod
    async def fetch(
        self,
        descriptor: TransferDescriptor,
        deadline_s: float | None = None,
        *,
        copy: bool = False,
        device: str | None = None,
    ) -> Received:
        """Read an offer and acknowledge it.

        The wait for room and the read together take at most `deadline_s`, and never more than half of the
        offer's time to live: later, the sender may use the memory again. With `copy`, or a `device` other
        than the memory's own, the tensors are independent of the pool and there is nothing to release. Raises
        `Overloaded`, `PeerTimeout`, `PeerUnavailable`, `PeerFault` and `LimitFault`.
        """

    @abstractmethod
    async def discard(self, descriptor: TransferDescriptor) -> None:
        """Acknowledge an offer without reading it, so that its sender frees it.
        Failures are ignored: the time to live follows.
        """

    @abstractmethod
    async def drain(self, deadline_s: float | None = None) -> bool:
        """Wait until no offer is open, at most `deadline_s` (by default the time to live);
        true when none is left."""

    @abstractmethod
    def check_health(self) -> None:
        """Return at once while tensors can be handed over;
        raise `TransferDead` when they never will be again.

        To be called about once a second.
        """

    @abstractmethod
    def stats(self) -> TransferStats:
        """Counters and gauges, for metrics and tests."""
