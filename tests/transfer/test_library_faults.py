"""Whatever a call of NIXL does (raise, fail, come late, never return): each read ends by itself and in
time, the others go on, and memory comes back or is counted as lost. The library is replaced by one whose
calls can be made to misbehave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm.errors import Overloaded, PeerTimeout, StartupError, TransferDead, WorkerError
from dynamo.trtllm.transfer import nixl_thread
from dynamo.trtllm.transfer.pooled import PooledTransfer
from transfer.faulty_nixl import CALLS, Library, Once, erring, hanging, raising
from transfer.peers import over_nixl

POOL_BYTES = 1 << 20
NBYTES = 10_000
TIME_TO_LIVE_S = 0.6
DEADLINE_S = 20.0
SHORT_S = 0.05

Start = Callable[[], Awaitable[PooledTransfer]]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    library.install(monkeypatch)
    # So that a call which does not return is noticed, and left behind, within the test's patience.
    monkeypatch.setattr(nixl_thread, "LONGEST_CALL_S", TIME_TO_LIVE_S)
    monkeypatch.setattr(nixl_thread, "STOP_S", SHORT_S)
    return library


@pytest_asyncio.fixture
async def start(library: Library) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def starter() -> PooledTransfer:
            transfer = over_nixl(pool_bytes=POOL_BYTES, time_to_live_s=TIME_TO_LIVE_S)
            await transfer.start()
            stack.push_async_callback(transfer.close)
            return transfer

        yield starter


async def fetched(
    reader: PooledTransfer, sender: PooledTransfer, value: int, deadline_s: float = DEADLINE_S
) -> bool:
    """Hand `value` over: true when it arrived, false when the fetch said in its own words why it did not."""
    offer = await sender.offer({"x": torch.full((NBYTES,), value, dtype=torch.uint8)}, DEADLINE_S)
    try:
        async with await asyncio.wait_for(reader.fetch(offer.descriptor, deadline_s), DEADLINE_S) as received:
            assert bool((received.tensors["x"] == value).all())
            return True
    except WorkerError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), DEADLINE_S)


def settled(reader: PooledTransfer) -> bool:
    """No read is open, and all memory is free but that of reads which are counted as lost."""
    stats = reader.stats()
    return stats.reads_in_flight == 0 and (stats.pool_used_bytes > 0) == (stats.lost_reads > 0)


def dead(transfer: PooledTransfer) -> bool:
    try:
        transfer.check_health()
    except TransferDead:
        return True
    return False


@pytest.mark.asyncio
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("call", CALLS)
async def test_an_error_of_one_call_costs_one_read_at_most(
    library: Library, start: Start, call: str, late: bool
) -> None:
    sender, other, reader = await start(), await start(), await start()
    assert await fetched(reader, other, 1)
    before, posted = library.calls[call], library.calls["transfer"]
    library.hold = late
    library.fault(call, Once(raising))
    first = asyncio.create_task(fetched(reader, sender, 2))
    beside = asyncio.create_task(fetched(reader, other, 3))
    await until(lambda: library.calls[call] > before or library.calls["transfer"] > posted)
    library.hold = False
    assert (await first) + (await beside) >= 1
    await until(lambda: settled(reader))
    assert await fetched(reader, sender, 4)
    assert await fetched(reader, other, 5)
    await until(lambda: settled(reader))
    assert not dead(reader)


@pytest.mark.asyncio
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("act", [raising, erring])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_never_works_ends_every_read_in_time_and_is_over_when_it_works_again(
    library: Library, start: Start, call: str, late: bool, act: Callable[[str], object]
) -> None:
    sender, reader = await start(), await start()
    library.fault(call, act)
    library.hold = late
    reads = [asyncio.create_task(fetched(reader, sender, value)) for value in range(4)]
    leaving = [asyncio.create_task(fetched(reader, sender, value)) for value in range(4)]
    await until(lambda: library.calls["transfer"] > 0 or library.calls[call] > 3)
    for each in leaving:
        each.cancel()
    await asyncio.gather(*reads)
    await asyncio.gather(*leaving, return_exceptions=True)
    await until(lambda: settled(reader))
    library.mend()
    library.hold = False
    await until(lambda: reader.stats().waiting_offers == 0 and settled(reader))
    assert await fetched(reader, sender, 9)


@pytest.mark.asyncio
async def test_memory_of_a_read_that_cannot_be_stopped_is_never_used_again_and_is_counted(
    library: Library, start: Start
) -> None:
    sender, reader = await start(), await start()
    library.hold = True
    library.fault("release_xfer_handle", raising)
    assert not await fetched(reader, sender, 1, SHORT_S)
    await until(lambda: reader.stats().lost_reads == 1)
    kept = reader.stats().pool_used_bytes
    assert kept > 0
    assert reader.stats().reads_in_flight == 0
    library.mend()
    library.hold = False
    assert await fetched(reader, sender, 2)
    assert reader.stats().pool_used_bytes == kept


@pytest.mark.asyncio
async def test_a_transfer_that_has_lost_most_of_its_memory_says_so(library: Library, start: Start) -> None:
    sender, reader = await start(), await start()
    library.hold = True
    library.fault("release_xfer_handle", raising)
    half = {"x": torch.zeros(POOL_BYTES // 2 - 1000, dtype=torch.uint8)}
    for lost in (1, 2):
        assert not dead(reader)
        offer = await sender.offer(half if lost == 1 else {"x": torch.zeros(3000)}, DEADLINE_S)
        with pytest.raises(PeerTimeout):
            await reader.fetch(offer.descriptor, SHORT_S)
        await until(lambda lost=lost: reader.stats().lost_reads == lost)
    assert dead(reader)
    assert not dead(sender)


@pytest.mark.asyncio
async def test_a_read_that_the_library_lets_go_of_late_gives_its_memory_back_only_then(
    library: Library, start: Start
) -> None:
    sender, reader = await start(), await start()
    library.hold = True
    library.fault("release_xfer_handle", raising)
    assert not await fetched(reader, sender, 1, SHORT_S)
    await until(lambda: library.calls["release_xfer_handle"] > 2)
    assert reader.stats().pool_used_bytes > 0
    library.mend()
    await until(lambda: reader.stats().pool_used_bytes == 0)
    assert reader.stats().lost_reads == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_does_not_return_is_noticed_and_named_and_holds_up_nobody(
    library: Library, start: Start, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, other, reader = await start(), await start(), await start()
    # Known on the thread alone: calls to a peer that is connected may be made on the event loop.
    library.hold = call in ("check_xfer_state", "remove_remote_agent")
    if call == "remove_remote_agent":
        library.fault("check_xfer_state", erring)
    with hanging(library, call) as inside:
        first = asyncio.create_task(fetched(reader, sender, 1, SHORT_S))
        await until(inside.is_set)
        others = [asyncio.create_task(fetched(reader, other, value, SHORT_S)) for value in range(4)]
        await asyncio.wait_for(asyncio.gather(first, *others), DEADLINE_S)
        await until(lambda: dead(reader))
        assert f" > {call} > " in caplog.text
        await until(lambda: reader.stats().reads_in_flight <= 1)
        library.hold = False
    await until(lambda: settled(reader))
    await until(lambda: not dead(reader))
    assert await fetched(reader, sender, 7)
    assert reader.stats().lost_reads == 0


@pytest.mark.asyncio
async def test_a_thread_that_is_idle_or_busy_is_not_taken_for_one_that_hangs(
    library: Library, start: Start
) -> None:
    sender, reader = await start(), await start()
    loop = asyncio.get_running_loop()
    end = loop.time() + 3 * TIME_TO_LIVE_S
    while loop.time() < end:
        assert await fetched(reader, sender, 1)
        assert not dead(reader)
        assert not dead(sender)


@pytest.mark.asyncio
async def test_closing_ends_though_the_library_does_not_return(library: Library, start: Start) -> None:
    sender, reader = await start(), await start()
    with hanging(library, "add_remote_agent") as inside:
        assert not await fetched(reader, sender, 1, SHORT_S)
        assert inside.is_set()
        await asyncio.wait_for(reader.close(), DEADLINE_S)


@pytest.mark.asyncio
async def test_memory_that_is_registered_too_late_for_its_object_is_given_back(
    library: Library, start: Start
) -> None:
    transfer = await start()
    large = {"x": torch.zeros(2 * POOL_BYTES, dtype=torch.uint8)}
    with hanging(library, "register_memory"):
        with pytest.raises(Overloaded):
            await transfer.offer(large, SHORT_S)
        leaving = asyncio.create_task(transfer.offer(large, DEADLINE_S))
        await until(lambda: not leaving.done())
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await until(lambda: library.calls["deregister_memory"] == library.calls["register_memory"] - 2)
    assert transfer.stats().own_registrations == 0
    (await transfer.offer(large, DEADLINE_S)).release()


@pytest.mark.asyncio
async def test_a_library_that_does_not_start_ends_the_start_in_one_sentence(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nixl import _api

    monkeypatch.setattr(nixl_thread, "START_S", SHORT_S)
    monkeypatch.setattr(_api, "nixl_agent", lambda *_: library.enter("start"))
    with hanging(library, "start"), pytest.raises(StartupError, match="NIXL did not start within"):
        await over_nixl(pool_bytes=POOL_BYTES).start()
