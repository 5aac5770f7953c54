"""The allocator: no overlap, no leak, no lost bytes, whatever the order of requests;
and waiting for room in it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.trtllm.errors import Overloaded
from dynamo.trtllm.transfer.descriptor import ALIGNMENT_BYTES
from dynamo.trtllm.transfer.pool import Allocator, Room, Slots, round_up

UNIT = ALIGNMENT_BYTES


@given(
    capacity=st.integers(0, 64).map(lambda units: units * UNIT + units % 3),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 20 * UNIT)), max_size=80),
)
def test_ranges_never_overlap_and_all_bytes_come_back(capacity: int, steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(capacity)
    taken: dict[int, int] = {}
    for give_back, number in steps:
        if give_back and taken:
            offset = list(taken)[number % len(taken)]
            allocator.free(offset)
            del taken[offset]
        elif not give_back:
            offset_or_none = allocator.allocate(number)
            if offset_or_none is None:
                assert largest_hole(taken, allocator.capacity) < max(number, 1)
            else:
                taken[offset_or_none] = round_up(max(number, 1))
        ranges = sorted((offset, offset + length) for offset, length in taken.items())
        assert all(offset % UNIT == 0 for offset in taken)
        assert all(first[1] <= second[0] for first, second in pairwise(ranges))
        assert not ranges or ranges[-1][1] <= allocator.capacity
        assert allocator.used == sum(taken.values())
        assert allocator.segments == len(taken)
    for offset in list(taken):
        allocator.free(offset)
    assert allocator.used == 0
    assert allocator.capacity == 0 or allocator.allocate(allocator.capacity) == 0


def largest_hole(taken: dict[int, int], capacity: int) -> int:
    """The largest free range, computed from what is handed out alone."""
    holes, end = [0], 0
    for offset, length in sorted(taken.items()):
        holes.append(offset - end)
        end = offset + length
    return max([*holes, capacity - end])


def test_the_smallest_hole_that_fits_is_taken() -> None:
    allocator = Allocator(10 * UNIT)
    offsets = [allocator.allocate(units * UNIT) for units in (3, 1, 2, 1, 3)]
    assert offsets == [0, 3 * UNIT, 4 * UNIT, 6 * UNIT, 7 * UNIT]
    for hole in (0, 4 * UNIT, 7 * UNIT):
        allocator.free(hole)
    assert allocator.allocate(2 * UNIT) == 4 * UNIT
    assert allocator.allocate(2 * UNIT) == 0


def test_freed_neighbours_become_one_hole() -> None:
    allocator = Allocator(3 * UNIT)
    first, second, third = (allocator.allocate(UNIT) for _ in range(3))
    assert allocator.allocate(1) is None
    assert first is not None
    assert second is not None
    assert third is not None
    allocator.free(first)
    allocator.free(third)
    assert allocator.allocate(2 * UNIT) is None
    allocator.free(second)
    assert allocator.allocate(3 * UNIT) == 0


def test_freeing_twice_is_an_error() -> None:
    allocator = Allocator(UNIT)
    offset = allocator.allocate(1)
    assert offset == 0
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


def test_the_peak_is_remembered() -> None:
    allocator = Allocator(4 * UNIT)
    first, second = allocator.allocate(UNIT), allocator.allocate(2 * UNIT)
    assert first is not None
    assert second is not None
    allocator.free(first)
    allocator.free(second)
    assert (allocator.used, allocator.peak) == (0, 3 * UNIT)


@pytest.mark.asyncio
@pytest.mark.parametrize("places", [Room(Allocator(UNIT)), Slots(1)], ids=["room", "slots"])
async def test_a_grant_that_meets_a_cancellation_goes_to_the_next_who_waits(places: Room | Slots) -> None:
    async def take() -> int:
        return await (places.take(1.0) if isinstance(places, Slots) else places.take(UNIT, 1.0))

    first = await take()
    cancelled, patient = asyncio.create_task(take()), asyncio.create_task(take())
    await asyncio.sleep(0)
    assert places.waiting == 2
    places.give_back(first)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await patient == first
    assert places.waiting == 0


@pytest.mark.asyncio
async def test_slots_are_waited_for_until_the_deadline_and_given_out_in_order() -> None:
    slots = Slots(2)
    assert [await slots.take(1.0), slots.take_now(), slots.take_now()] == [0, 1, None]
    with pytest.raises(Overloaded):
        await slots.take(0.01)
    slots.give_back(1)
    assert await slots.take(1.0) == 1
