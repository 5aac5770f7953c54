"""Hand-overs of CUDA tensors, directly from device memory and staged through the host.
Runs where there is a GPU and NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.transfer.nixl import NixlTransport
from dynamo.trtllm.transfer.pooled import PooledTransfer
from dynamo.trtllm.transfer.port import OfferState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

POOL_BYTES = 64 << 20
DEADLINE_S = 30.0


@pytest.fixture(params=[False, True], ids=["direct", "staged on the host"])
def staged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest_asyncio.fixture
async def pair(staged: bool) -> AsyncIterator[tuple[PooledTransfer, PooledTransfer]]:
    """Sender and reader."""
    async with AsyncExitStack() as stack:
        ends = [
            PooledTransfer(NixlTransport(), pool_bytes=POOL_BYTES, stage_cuda_on_host=staged)
            for _ in range(2)
        ]
        for end in ends:
            await end.start()
            stack.push_async_callback(end.close)
        yield ends[0], ends[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 576, 16384])
async def test_cuda_tensors_arrive_unchanged(
    pair: tuple[PooledTransfer, PooledTransfer], staged: bool, dtype: torch.dtype, rows: int
) -> None:
    sender, reader = pair
    tensor = torch.randn(rows, 4096, device="cuda").to(dtype)
    offer = await sender.offer({"features": tensor, "turned": tensor.t()[:8]}, DEADLINE_S)
    assert offer.descriptor.device == ("cpu" if staged else "cuda")
    received = await reader.fetch(offer.descriptor, DEADLINE_S, device="cuda:0")
    assert received.tensors["features"].device.type == "cuda"
    assert torch.equal(received.tensors["features"], tensor)
    assert torch.equal(received.tensors["turned"], tensor.t()[:8])
    received.release()
    assert await offer.settled(DEADLINE_S) is OfferState.ACKNOWLEDGED
    assert sender.stats().pool_used_bytes == reader.stats().pool_used_bytes == 0


@pytest.mark.asyncio
async def test_a_reused_device_segment_is_never_returned(pair: tuple[PooledTransfer, PooledTransfer]) -> None:
    sender, reader = pair
    first = await sender.offer({"x": torch.ones(1 << 20, device="cuda")}, DEADLINE_S)
    await reader.discard(first.descriptor)
    await first.settled(DEADLINE_S)
    second = await sender.offer({"x": torch.zeros(1 << 20, device="cuda")}, DEADLINE_S)
    assert second.descriptor.address == first.descriptor.address
    with pytest.raises(PeerFault, match="expired"):
        await reader.fetch(first.descriptor, DEADLINE_S)
    assert reader.stats().pool_used_bytes == 0


@pytest.mark.asyncio
async def test_many_device_hand_overs_at_once_leave_the_pools_empty(
    pair: tuple[PooledTransfer, PooledTransfer],
) -> None:
    sender, reader = pair

    async def hand_over(value: int) -> bool:
        offer = await sender.offer({"x": torch.full((1 << 20,), float(value), device="cuda")}, DEADLINE_S)
        async with await reader.fetch(offer.descriptor, DEADLINE_S) as received:
            same = bool((received.tensors["x"] == value).all())
        await offer.settled(DEADLINE_S)
        return same

    assert all(await asyncio.gather(*(hand_over(value) for value in range(32))))
    assert sender.stats().pool_used_bytes == reader.stats().pool_used_bytes == 0
