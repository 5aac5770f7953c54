"""Hand-overs between real processes over NIXL, and what remains when one of them dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm.errors import PeerFault, PeerUnavailable, StartupError
from dynamo.trtllm.transfer.descriptor import TransferDescriptor
from dynamo.trtllm.transfer.pooled import PooledTransfer
from dynamo.trtllm.transfer.port import OfferState
from transfer.peers import FakeClock, PeerProcess, over_nixl, resources

MEBIBYTE = 1 << 20
POOL_BYTES = 64 * MEBIBYTE
TIME_TO_LIVE_S = 60.0
DEADLINE_S = 30.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def transfer(clock: FakeClock) -> AsyncIterator[PooledTransfer]:
    """This process's end."""
    transfer = over_nixl(pool_bytes=POOL_BYTES, time_to_live_s=TIME_TO_LIVE_S, clock=clock)
    await transfer.start()
    yield transfer
    await transfer.close()


async def value_of(transfer: PooledTransfer, descriptor: TransferDescriptor) -> int:
    """The one value of all bytes that arrive."""
    async with await transfer.fetch(descriptor, DEADLINE_S) as received:
        low, high = int(received.tensors["x"].min()), int(received.tensors["x"].max())
    assert low == high
    return low


@pytest.mark.asyncio
async def test_two_processes_hand_over_both_ways(transfer: PooledTransfer) -> None:
    with PeerProcess(pool_bytes=POOL_BYTES) as peer:
        assert await value_of(transfer, await peer.offer(3, 5 * MEBIBYTE)) == 3
        offer = await transfer.offer({"x": torch.full((5 * MEBIBYTE,), 4, dtype=torch.uint8)}, DEADLINE_S)
        assert await peer.ask("fetch", offer.descriptor.model_dump_json()) == (4, 4)
        assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED
    assert transfer.stats().pool_used_bytes == 0


@pytest.mark.asyncio
async def test_a_sender_that_reuses_memory_too_early_is_found_out(transfer: PooledTransfer) -> None:
    """The race behind the generation words: what arrives is whole, or nothing does."""
    nbytes = 32 * MEBIBYTE
    outcomes = []
    with PeerProcess(pool_bytes=nbytes + MEBIBYTE) as peer:
        for _ in range(8):
            offered = await peer.offer(1, nbytes)
            fetching = asyncio.create_task(value_of(transfer, offered))
            await peer.ask("reuse", offered.generation, 2, nbytes)
            (outcome,) = await asyncio.gather(fetching, return_exceptions=True)
            outcomes.append(outcome)
            await peer.ask("forget_all")
    assert all(outcome == 1 or isinstance(outcome, PeerFault) for outcome in outcomes)
    assert transfer.stats().pool_used_bytes == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("known", [False, True], ids=["before the first contact", "after a hand-over"])
async def test_a_sender_killed_before_the_read_is_unavailable(transfer: PooledTransfer, known: bool) -> None:
    with PeerProcess(pool_bytes=POOL_BYTES) as peer:
        if known:
            assert await value_of(transfer, await peer.offer(1, MEBIBYTE)) == 1
        offered = await peer.offer(2, MEBIBYTE)
        peer.kill()
        with pytest.raises(PeerUnavailable):
            await transfer.fetch(offered, DEADLINE_S)
    assert transfer.stats().pool_used_bytes == 0


@pytest.mark.asyncio
async def test_a_sender_killed_during_reads_costs_no_memory_and_no_hang(transfer: PooledTransfer) -> None:
    with PeerProcess(pool_bytes=POOL_BYTES) as peer:
        offered = [await peer.offer(value, 4 * MEBIBYTE) for value in range(12)]
        fetches = [asyncio.create_task(value_of(transfer, descriptor)) for descriptor in offered]
        await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
        peer.kill()
        outcomes = await asyncio.wait_for(asyncio.gather(*fetches, return_exceptions=True), DEADLINE_S)
    assert all(
        outcome == value or isinstance(outcome, PeerUnavailable) for value, outcome in enumerate(outcomes)
    )
    assert transfer.stats().pool_used_bytes == 0
    assert transfer.stats().reads_in_flight == 0


@pytest.mark.asyncio
async def test_a_reader_killed_before_it_acknowledges_costs_memory_for_its_time_only(
    transfer: PooledTransfer, clock: FakeClock
) -> None:
    with PeerProcess(pool_bytes=POOL_BYTES) as peer:
        first = await transfer.offer({"x": torch.ones(MEBIBYTE, dtype=torch.uint8)}, DEADLINE_S)
        assert await peer.ask("fetch", first.descriptor.model_dump_json()) == (1, 1)
        second = await transfer.offer({"x": torch.ones(MEBIBYTE, dtype=torch.uint8)}, DEADLINE_S)
        peer.kill()
    clock.now += TIME_TO_LIVE_S
    transfer.sweep()
    assert second.state is OfferState.EXPIRED
    clock.now += TIME_TO_LIVE_S / 2
    transfer.sweep()
    assert transfer.stats().pool_used_bytes == 0


@pytest.mark.asyncio
async def test_a_peer_that_restarts_under_its_name_works_at_once(transfer: PooledTransfer) -> None:
    for value in (1, 2, 3):
        with PeerProcess(pool_bytes=POOL_BYTES, name="encode-0") as peer:
            assert await value_of(transfer, await peer.offer(value, MEBIBYTE)) == value
    assert transfer.stats().failures_total == 0
    assert transfer.stats().retries_total == 0


@pytest.mark.asyncio
async def test_a_thousand_hand_overs_leave_memory_and_descriptors_where_they_were(
    transfer: PooledTransfer,
) -> None:
    with PeerProcess(pool_bytes=POOL_BYTES) as peer:

        async def hand_over(count: int) -> None:
            for number in range(count):
                assert await value_of(transfer, await peer.offer(number % 250, 100_000)) == number % 250

        await hand_over(200)
        before, peer_before = resources(), await peer.ask("resources")
        await hand_over(1000)
        after, peer_after = resources(), await peer.ask("resources")
        assert await peer.ask("used") == 0
    assert transfer.stats().pool_used_bytes == 0
    assert after[1] <= before[1]
    assert peer_after[1] <= peer_before[1]
    assert after[0] - before[0] < 4 * MEBIBYTE
    assert peer_after[0] - peer_before[0] < 4 * MEBIBYTE


@pytest.mark.asyncio
async def test_starting_and_closing_leaves_no_descriptors_and_no_threads(transfer: PooledTransfer) -> None:
    import threading

    async def once() -> None:
        short = over_nixl(pool_bytes=MEBIBYTE)
        await short.start()
        await short.close()

    await once()
    before = resources()[1], threading.active_count()
    for _ in range(3):
        await once()
    assert (resources()[1], threading.active_count()) == before


@pytest.mark.asyncio
async def test_without_nixl_the_start_fails_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    transfer = over_nixl(pool_bytes=MEBIBYTE)
    with pytest.raises(StartupError, match="NIXL is not installed"):
        await transfer.start()
    await transfer.close()


@pytest.mark.asyncio
async def test_without_ucx_the_start_fails_in_one_sentence(
    transfer: PooledTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nixl import _api

    class NoBackends:
        backends: dict[str, int] = {}  # noqa: RUF012 - as the library has it

    monkeypatch.setattr(_api, "nixl_agent", lambda *_: NoBackends())
    with pytest.raises(StartupError, match="no UCX backend"):
        await over_nixl(pool_bytes=MEBIBYTE).start()
