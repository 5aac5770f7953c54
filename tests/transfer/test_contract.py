"""The port's contract, held by every adapter. Both ends are in this process;
`test_processes.py` has them in two."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm.errors import LimitFault, Overloaded, PeerFault, PeerTimeout, PeerUnavailable
from dynamo.trtllm.transfer import layout
from dynamo.trtllm.transfer.descriptor import ITEM_BYTES, PeerIdentity, TransferDescriptor
from dynamo.trtllm.transfer.memory import MAX_OWN_REGISTRATIONS
from dynamo.trtllm.transfer.pool import Segment
from dynamo.trtllm.transfer.pooled import PooledTransfer
from dynamo.trtllm.transfer.port import Offer, OfferState
from dynamo.trtllm.transfer.registry import TRANSPORTS, create_transport
from dynamo.trtllm.transfer.transport import Place
from transfer.peers import FakeClock

POOL_BYTES = 1 << 20
TIME_TO_LIVE_S = 60.0
DEADLINE_S = 20.0
SHORT_S = 0.05

Start = Callable[..., Any]


@pytest.fixture(params=sorted(TRANSPORTS))
def kind(request: pytest.FixtureRequest) -> str:
    """Every registered transport."""
    return str(request.param)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def start(kind: str, clock: FakeClock) -> AsyncIterator[Start]:
    """Starts transfers of the adapter under test and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def starter(**options: Any) -> PooledTransfer:
            common = {"pool_bytes": POOL_BYTES, "time_to_live_s": TIME_TO_LIVE_S, "clock": clock}
            transfer = PooledTransfer(create_transport(kind), **(common | options))
            await transfer.start()
            stack.push_async_callback(transfer.close)
            return transfer

        yield starter


@pytest_asyncio.fixture
async def sender(start: Start) -> PooledTransfer:
    transfer: PooledTransfer = await start()
    return transfer


@pytest_asyncio.fixture
async def reader(start: Start) -> PooledTransfer:
    transfer: PooledTransfer = await start()
    return transfer


def sample(nbytes: int = 1000, value: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.full((nbytes,), value, dtype=torch.uint8)}


def sent(descriptor: TransferDescriptor) -> TransferDescriptor:
    """The descriptor as the other process sees it."""
    return TransferDescriptor.model_validate_json(descriptor.model_dump_json())


def used(transfer: PooledTransfer) -> int:
    return transfer.stats().pool_used_bytes


async def acknowledge(reader: PooledTransfer, offer: Offer) -> None:
    """A reader says that it is done with `offer`, and the sender has heard of it."""
    await reader.discard(offer.descriptor)
    assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED


async def until_free(transfer: PooledTransfer) -> None:
    """Wait until the pool is empty and no memory of its own is registered."""

    async def look() -> None:
        while used(transfer) or transfer.stats().own_registrations:  # noqa: ASYNC110 - nothing signals an empty pool
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), DEADLINE_S)


class HeldReads:
    """Replaces a reader's reads by ones that end when the test says so."""

    def __init__(self, reader: PooledTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.futures: list[asyncio.Future[None]] = []
        self.started = asyncio.Event()
        monkeypatch.setattr(reader.transport, "read", self._read)

    def _read(self, *args: object) -> asyncio.Future[None]:
        self.futures.append(asyncio.get_running_loop().create_future())
        self.started.set()
        return self.futures[-1]


# What arrives.


@pytest.mark.asyncio
async def test_tensors_of_every_dtype_and_shape_arrive_unchanged(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    tensors = {name: torch.randint(0, 2, (3, 5)).to(getattr(torch, name)) for name in ITEM_BYTES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "no rows": torch.zeros(0, 4096, dtype=torch.bfloat16),
        "deep": torch.rand(2, 1, 3, 4),
    }
    offer = await sender.offer(tensors, DEADLINE_S)
    async with await reader.fetch(sent(offer.descriptor), DEADLINE_S) as received:
        assert list(received.tensors) == list(tensors)
        for name, tensor in tensors.items():
            arrived = received.tensors[name]
            assert arrived.dtype == tensor.dtype
            assert arrived.shape == tensor.shape
            assert torch.equal(
                arrived.view(torch.uint8) if tensor.ndim else arrived,
                tensor.view(torch.uint8) if tensor.ndim else tensor,
            )


@pytest.mark.asyncio
async def test_tensors_that_are_not_contiguous_arrive_as_they_look(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"transposed": base.t(), "strided": base[:, ::2], "expanded": torch.ones(1, 3).expand(5, 3)}
    offer = await sender.offer(tensors, DEADLINE_S)
    async with await reader.fetch(offer.descriptor, DEADLINE_S) as received:
        assert all(torch.equal(received.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.asyncio
async def test_the_senders_tensors_may_change_once_they_are_offered(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    tensors = sample(value=1)
    offer = await sender.offer(tensors, DEADLINE_S)
    tensors["x"].fill_(2)
    async with await reader.fetch(offer.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample(value=1)["x"])


@pytest.mark.asyncio
async def test_views_hold_the_readers_memory_until_they_are_released(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    received = await reader.fetch(offer.descriptor, DEADLINE_S)
    assert used(reader) > 0
    received.release()
    received.release()
    assert used(reader) == 0
    assert received.tensors == {}


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [{"copy": True}, {"device": "meta"}], ids=["copy", "another device"])
async def test_copies_hold_no_memory_of_the_pool(
    sender: PooledTransfer, reader: PooledTransfer, how: dict[str, Any]
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    received = await reader.fetch(offer.descriptor, DEADLINE_S, **how)
    assert used(reader) == 0
    assert received.tensors["x"].shape == (1000,)
    assert received.tensors["x"].device.type == how.get("device", "cpu")
    received.release()


@pytest.mark.asyncio
async def test_staging_on_the_host_changes_nothing_where_there_is_no_gpu(start: Start) -> None:
    sender, reader = await start(stage_cuda_on_host=True), await start(stage_cuda_on_host=True)
    offer = await sender.offer(sample(value=3), DEADLINE_S)
    async with await reader.fetch(sent(offer.descriptor), DEADLINE_S, device="cpu") as received:
        assert torch.equal(received.tensors["x"], sample(value=3)["x"])


@pytest.mark.asyncio
async def test_many_hand_overs_at_once_through_a_small_pool_all_arrive(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    async def hand_over(value: int) -> bool:
        offer = await sender.offer(sample(100_000, value), DEADLINE_S)
        async with await reader.fetch(sent(offer.descriptor), DEADLINE_S) as received:
            return torch.equal(received.tensors["x"], sample(100_000, value)["x"])

    assert all(await asyncio.gather(*(hand_over(value) for value in range(64))))
    await until_free(sender)
    assert used(reader) == 0
    assert sender.stats().acknowledged_total == reader.stats().fetches_total == 64
    assert sender.stats().offered_bytes_total == reader.stats().fetched_bytes_total == 64 * 100_000
    assert sender.stats().pool_peak_bytes <= POOL_BYTES


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "tensors", [{}, {"x": torch.zeros(1, dtype=torch.complex64)}], ids=["nothing", "a dtype that has no name"]
)
async def test_what_cannot_be_offered_is_the_callers_mistake(
    sender: PooledTransfer, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(ValueError, match=r"offer|handed over"):
        await sender.offer(tensors, DEADLINE_S)
    assert used(sender) == 0


# Who frees what, and when.


@pytest.mark.asyncio
async def test_the_acknowledgement_frees_the_senders_memory(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    assert (used(sender) > 0, offer.state) == (True, OfferState.OPEN)
    (await reader.fetch(offer.descriptor, DEADLINE_S)).release()
    assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED
    assert used(sender) == 0
    assert sender.stats().quarantined_segments == 0


@pytest.mark.asyncio
async def test_a_reader_that_wants_nothing_can_say_so(sender: PooledTransfer, reader: PooledTransfer) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    await reader.discard(offer.descriptor)
    assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED
    assert used(sender) == 0


@pytest.mark.asyncio
async def test_an_offer_that_nobody_fetches_expires_and_is_set_aside_before_reuse(
    sender: PooledTransfer, reader: PooledTransfer, clock: FakeClock
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    clock.now += TIME_TO_LIVE_S - 1
    assert sender.sweep() == 1.0
    assert offer.state is OfferState.OPEN
    clock.now += 1
    assert sender.sweep() == TIME_TO_LIVE_S / 2
    assert offer.state is OfferState.EXPIRED
    assert (used(sender) > 0, sender.stats().quarantined_segments) == (True, 1)
    with pytest.raises(PeerFault, match="expired"):
        await reader.fetch(offer.descriptor, DEADLINE_S)
    clock.now += TIME_TO_LIVE_S / 2
    assert sender.sweep() is None
    assert (used(sender), sender.stats().quarantined_segments) == (0, 0)
    assert sender.stats().expired_total == 1


@pytest.mark.asyncio
async def test_a_withdrawn_offer_is_set_aside_until_a_reader_cannot_be_reading(
    sender: PooledTransfer, clock: FakeClock
) -> None:
    async with await sender.offer(sample(), DEADLINE_S) as offer:
        assert offer.state is OfferState.OPEN
    assert offer.state is OfferState.RELEASED
    offer.release()
    assert sender.stats().quarantined_segments == 1
    clock.now += TIME_TO_LIVE_S / 2
    sender.sweep()
    assert used(sender) == 0


@pytest.mark.asyncio
async def test_an_acknowledgement_ends_the_quarantine_at_once(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    offer.release()
    assert sender.stats().quarantined_segments == 1
    await reader.discard(offer.descriptor)
    await until_free(sender)
    assert sender.stats().quarantined_segments == 0


@pytest.mark.asyncio
async def test_expiry_needs_no_caller(start: Start, clock: FakeClock) -> None:
    sender = await start(time_to_live_s=SHORT_S, clock=asyncio.get_running_loop().time)
    offer = await sender.offer(sample(), DEADLINE_S)
    assert await offer.settled(DEADLINE_S) is OfferState.EXPIRED
    await until_free(sender)


@pytest.mark.asyncio
async def test_draining_waits_for_open_offers(sender: PooledTransfer, reader: PooledTransfer) -> None:
    assert await sender.drain(SHORT_S)
    offers = [await sender.offer(sample(), DEADLINE_S) for _ in range(3)]
    assert not await sender.drain(SHORT_S)
    draining = asyncio.create_task(sender.drain(DEADLINE_S))
    for offer in offers:
        (await reader.fetch(offer.descriptor, DEADLINE_S)).release()
    assert await draining


@pytest.mark.asyncio
async def test_waiting_for_a_reader_ends_at_its_deadline(sender: PooledTransfer) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    with pytest.raises(PeerTimeout):
        await offer.settled(SHORT_S)


# A segment that changes under a reader.


@pytest.mark.asyncio
async def test_a_segment_that_was_used_again_is_never_returned(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    first = await sender.offer(sample(value=1), DEADLINE_S)
    await acknowledge(reader, first)
    second = await sender.offer(sample(value=2), DEADLINE_S)
    assert second.descriptor.address == first.descriptor.address
    with pytest.raises(PeerFault, match="expired"):
        await reader.fetch(first.descriptor, DEADLINE_S)
    assert used(reader) == 0
    assert (reader.stats().failures_total, reader.stats().retries_total) == (1, 1)
    async with await reader.fetch(second.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample(value=2)["x"])


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [0, -8], ids=["header", "trailer"])
async def test_one_wrong_end_is_enough_to_refuse_a_segment(
    sender: PooledTransfer, reader: PooledTransfer, end: int
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    word = offer.descriptor.address + end
    ctypes.memset(word if end >= 0 else word + offer.descriptor.length, 0, 8)
    with pytest.raises(PeerFault, match="expired"):
        await reader.fetch(offer.descriptor, DEADLINE_S)
    assert used(reader) == 0


@pytest.mark.asyncio
async def test_a_read_that_was_torn_once_is_repeated(
    sender: PooledTransfer, reader: PooledTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    read = reader.transport.read

    def torn_then_whole(identity: PeerIdentity, source: Place, target: Segment) -> asyncio.Future[None]:
        monkeypatch.setattr(reader.transport, "read", read)
        future = read(identity, source, target)
        if future.done():
            layout.mark(target.memory, 1)
        else:
            future.add_done_callback(lambda _: layout.mark(target.memory, 1))
        return future

    monkeypatch.setattr(reader.transport, "read", torn_then_whole)
    async with await reader.fetch(offer.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample()["x"])
    assert (reader.stats().retries_total, reader.stats().failures_total) == (1, 0)


# Full pools and large objects.


@pytest.mark.asyncio
async def test_a_full_pool_lets_the_next_offer_wait_for_room(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    first = await sender.offer(sample(700_000), DEADLINE_S)
    waiting = asyncio.create_task(sender.offer(sample(700_000, 2), DEADLINE_S))
    await asyncio.sleep(0)
    assert sender.stats().waiting_offers == 1
    (await reader.fetch(first.descriptor, DEADLINE_S)).release()
    second = await waiting
    async with await reader.fetch(second.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample(700_000, 2)["x"])


@pytest.mark.asyncio
async def test_a_pool_that_stays_full_is_an_overload_at_the_deadline(sender: PooledTransfer) -> None:
    first = await sender.offer(sample(700_000), DEADLINE_S)
    with pytest.raises(Overloaded):
        await sender.offer(sample(700_000), SHORT_S)
    assert sender.stats().waiting_offers == 0
    assert first.state is OfferState.OPEN


@pytest.mark.asyncio
async def test_a_full_reader_leaves_the_offer_for_another_try(sender: PooledTransfer, start: Start) -> None:
    reader = await start()
    held = await reader.fetch((await sender.offer(sample(700_000), DEADLINE_S)).descriptor, DEADLINE_S)
    await until_free(sender)
    offer = await sender.offer(sample(700_000, 2), DEADLINE_S)
    with pytest.raises(Overloaded):
        await reader.fetch(offer.descriptor, SHORT_S)
    held.release()
    async with await reader.fetch(offer.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample(700_000, 2)["x"])


@pytest.mark.asyncio
async def test_a_small_offer_does_not_overtake_a_large_one_that_waits(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    first = await sender.offer(sample(700_000), DEADLINE_S)
    order: list[str] = []

    async def offer(name: str, nbytes: int) -> None:
        await sender.offer(sample(nbytes), DEADLINE_S)
        order.append(name)

    large = asyncio.create_task(offer("large", 700_000))
    await asyncio.sleep(0)
    small = asyncio.create_task(offer("small", 1000))
    await asyncio.sleep(0)
    assert order == []
    await acknowledge(reader, first)
    await asyncio.gather(large, small)
    assert order == ["large", "small"]


@pytest.mark.asyncio
async def test_a_cancelled_wait_leaves_room_for_those_behind_it(sender: PooledTransfer) -> None:
    await sender.offer(sample(700_000), DEADLINE_S)
    large = asyncio.create_task(sender.offer(sample(700_000), DEADLINE_S))
    await asyncio.sleep(0)
    small = asyncio.create_task(sender.offer(sample(1000), DEADLINE_S))
    await asyncio.sleep(0)
    large.cancel()
    assert (await small).state is OfferState.OPEN
    assert sender.stats().waiting_offers == 0


@pytest.mark.asyncio
async def test_an_object_larger_than_the_pool_gets_memory_of_its_own(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    for value in (1, 2, 3):
        offer = await sender.offer(sample(3 * POOL_BYTES, value), DEADLINE_S)
        assert sender.stats().own_registrations == 1
        async with await reader.fetch(sent(offer.descriptor), DEADLINE_S) as received:
            assert reader.stats().own_registrations == 1
            assert torch.equal(received.tensors["x"], sample(3 * POOL_BYTES, value)["x"])
        await until_free(sender)
        await until_free(reader)
    small = await sender.offer(sample(value=4), DEADLINE_S)
    async with await reader.fetch(small.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample(value=4)["x"])


@pytest.mark.asyncio
async def test_a_late_read_of_freed_own_memory_fails_and_costs_only_a_retry(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    offer = await sender.offer(sample(3 * POOL_BYTES), DEADLINE_S)
    await acknowledge(reader, offer)
    await until_free(sender)
    with pytest.raises((PeerFault, PeerUnavailable)):
        await reader.fetch(offer.descriptor, DEADLINE_S)
    await until_free(reader)
    small = await sender.offer(sample(value=4), DEADLINE_S)
    async with await reader.fetch(small.descriptor, DEADLINE_S) as received:
        assert torch.equal(received.tensors["x"], sample(value=4)["x"])


@pytest.mark.asyncio
async def test_only_so_many_objects_get_memory_of_their_own_at_once(
    sender: PooledTransfer, reader: PooledTransfer, clock: FakeClock
) -> None:
    offers = [await sender.offer(sample(POOL_BYTES), DEADLINE_S) for _ in range(MAX_OWN_REGISTRATIONS)]
    with pytest.raises(Overloaded):
        await sender.offer(sample(POOL_BYTES), SHORT_S)
    await acknowledge(reader, offers[0])
    assert (await sender.offer(sample(POOL_BYTES), DEADLINE_S)).state is OfferState.OPEN


@pytest.mark.asyncio
async def test_what_is_too_large_is_refused_on_both_sides(sender: PooledTransfer, start: Start) -> None:
    small = await start(max_object_bytes=10_000)
    with pytest.raises(LimitFault):
        await small.offer(sample(10_000), DEADLINE_S)
    offer = await sender.offer(sample(10_000), DEADLINE_S)
    with pytest.raises(LimitFault):
        await small.fetch(offer.descriptor, DEADLINE_S)
    assert used(small) == 0


# Peers that are not there, or not what they say.


@pytest.mark.asyncio
async def test_nothing_arrives_from_a_sender_that_has_left(start: Start, reader: PooledTransfer) -> None:
    leaving = await start()
    offers = [await leaving.offer(sample(), DEADLINE_S) for _ in range(2)]
    (await reader.fetch(offers[0].descriptor, DEADLINE_S)).release()
    await leaving.close()
    with pytest.raises(PeerFault):
        await reader.fetch(offers[1].descriptor, DEADLINE_S)
    assert used(reader) == 0


@pytest.mark.asyncio
async def test_an_unknown_sender_is_unavailable(start: Start, reader: PooledTransfer) -> None:
    leaving = await start()
    offer = await leaving.offer(sample(), DEADLINE_S)
    await leaving.close()
    with pytest.raises(PeerUnavailable):
        await reader.fetch(offer.descriptor, DEADLINE_S)
    await reader.discard(offer.descriptor)
    assert used(reader) == 0


@pytest.mark.asyncio
async def test_a_sender_that_comes_back_under_its_name_works_at_once(
    start: Start, reader: PooledTransfer
) -> None:
    for value in (1, 2, 3):
        sender = await start(name="encode-0")
        offer = await sender.offer(sample(value=value), DEADLINE_S)
        async with await reader.fetch(offer.descriptor, DEADLINE_S) as received:
            assert torch.equal(received.tensors["x"], sample(value=value)["x"])
        assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED
        await sender.close()
    assert reader.stats().failures_total == 0


@pytest.mark.asyncio
async def test_another_transport_is_a_peers_fault(sender: PooledTransfer, reader: PooledTransfer) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    other = "local" if sender.transport.name == "nixl" else "nixl"
    with pytest.raises(PeerFault, match="transport"):
        await reader.fetch(offer.descriptor.model_copy(update={"transport": other}), DEADLINE_S)


@pytest.mark.asyncio
async def test_an_address_outside_of_registered_memory_is_a_peers_fault(
    sender: PooledTransfer, reader: PooledTransfer
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    wrong = offer.descriptor.model_copy(update={"address": offer.descriptor.address + 2 * POOL_BYTES})
    with pytest.raises(PeerFault, match="not where"):
        await reader.fetch(wrong, DEADLINE_S)
    assert used(reader) == 0
    (await reader.fetch(offer.descriptor, DEADLINE_S)).release()


# Deadlines and cancellation while a read is in flight.


@pytest.mark.asyncio
async def test_a_read_that_outlasts_the_deadline_frees_its_memory_when_it_ends(
    sender: PooledTransfer, reader: PooledTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    reads = HeldReads(reader, monkeypatch)
    with pytest.raises(PeerTimeout):
        await reader.fetch(offer.descriptor, SHORT_S)
    assert (used(reader) > 0, reader.stats().reads_in_flight) == (True, 1)
    reads.futures[0].set_result(None)
    await until_free(reader)
    assert reader.stats().reads_in_flight == 0


@pytest.mark.asyncio
async def test_a_readers_deadline_is_at_most_half_of_the_time_to_live(
    start: Start, reader: PooledTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = await start(time_to_live_s=2 * SHORT_S)
    offer = await sender.offer(sample(), DEADLINE_S)
    HeldReads(reader, monkeypatch)
    with pytest.raises(PeerTimeout):
        await asyncio.wait_for(reader.fetch(offer.descriptor, 1000 * DEADLINE_S), DEADLINE_S)


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["done", "failed"])
async def test_a_cancelled_fetch_frees_its_memory_when_the_read_has_ended(
    sender: PooledTransfer, reader: PooledTransfer, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    offer = await sender.offer(sample(), DEADLINE_S)
    reads = HeldReads(reader, monkeypatch)
    fetching = asyncio.create_task(reader.fetch(offer.descriptor, DEADLINE_S))
    await reads.started.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert used(reader) > 0
    if ending == "done":
        reads.futures[0].set_result(None)
    else:
        reads.futures[0].set_exception(PeerFault("broken"))
    await until_free(reader)


@pytest.mark.asyncio
async def test_fetches_cancelled_at_any_point_leave_nothing_on_either_side(
    sender: PooledTransfer, reader: PooledTransfer, clock: FakeClock
) -> None:
    for steps in range(60):
        offer = await sender.offer(sample(100_000), DEADLINE_S)
        fetching = asyncio.create_task(reader.fetch(offer.descriptor, DEADLINE_S))
        for _ in range(steps % 12):
            await asyncio.sleep(0)
        fetching.cancel()
        with suppress(asyncio.CancelledError):
            (await fetching).release()
        if steps % 12 == 0:
            await reader.discard(offer.descriptor)
        assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED
    await until_free(reader)
    assert used(sender) == 0


# Life.


@pytest.mark.asyncio
async def test_closing_twice_and_with_open_offers_is_fine(kind: str) -> None:
    transfer = PooledTransfer(create_transport(kind), pool_bytes=POOL_BYTES)
    await transfer.start()
    offer = await transfer.offer(sample(), DEADLINE_S)
    await transfer.close()
    await transfer.close()
    assert offer.state is OfferState.RELEASED
    offer.release()


@pytest.mark.asyncio
async def test_closing_in_the_moment_of_a_change_ends(kind: str) -> None:
    transfer = PooledTransfer(create_transport(kind), pool_bytes=POOL_BYTES)
    await transfer.start()
    offer = await transfer.offer(sample(), DEADLINE_S)
    await asyncio.sleep(0)
    offer.release()
    await asyncio.sleep(0)
    await asyncio.wait_for(transfer.close(), DEADLINE_S)
    assert transfer.stats().open_offers == 0


@pytest.mark.asyncio
async def test_closing_before_starting_is_fine(kind: str) -> None:
    transfer = PooledTransfer(create_transport(kind), pool_bytes=POOL_BYTES)
    await transfer.close()
    assert (transfer.stats().pool_bytes, transfer.stats().open_offers) == (0, 0)


@pytest.mark.asyncio
async def test_tensors_outlive_the_transfer_that_fetched_them(sender: PooledTransfer, start: Start) -> None:
    reader = await start()
    offer = await sender.offer(sample(), DEADLINE_S)
    received = await reader.fetch(offer.descriptor, DEADLINE_S)
    await reader.close()
    assert torch.equal(received.tensors["x"], sample()["x"])
    received.release()
