"""The board through which readers acknowledge."""

from __future__ import annotations

import asyncio
import ctypes
import threading

import pytest

from dynamo.trtllm.errors import Overloaded
from dynamo.trtllm.transfer.board import INBOX_WORDS, OUTBOX_WORDS, Board


def write(address: int, generation: int) -> None:
    """What a peer's one-sided write does."""
    ctypes.c_int64.from_address(address).value = generation


@pytest.mark.asyncio
async def test_what_a_peer_writes_arrives_once() -> None:
    board = Board()
    first, second = await board.take(1.0), await board.take(1.0)
    assert board.arrived() == []
    write(board.address_of(second), 7)
    assert board.arrived() == [7]
    assert board.arrived() == []
    write(board.address_of(first), 8)
    assert board.arrived() == [8]


@pytest.mark.asyncio
async def test_every_offer_has_a_word_of_its_own_and_more_wait() -> None:
    board = Board()
    words = [await board.take(1.0) for _ in range(INBOX_WORDS)]
    assert len({board.address_of(word) for word in words}) == INBOX_WORDS
    with pytest.raises(Overloaded):
        await board.take(0.01)
    waiting = asyncio.create_task(board.take(10.0))
    await asyncio.sleep(0)
    assert board.waiting == 1
    board.give_back(words[3])
    assert await waiting == words[3]


def test_an_outgoing_word_holds_its_generation_until_it_is_sent() -> None:
    board = Board()
    words = [board.post(generation) for generation in range(1, OUTBOX_WORDS + 1)]
    assert board.post(1) is None
    held = [
        ctypes.c_int64.from_address(board.outgoing_address(word)).value for word in words if word is not None
    ]
    assert held == list(range(1, OUTBOX_WORDS + 1))
    board.sent(0)
    assert board.post(99) == 0
    assert board.arrived() == []


@pytest.mark.asyncio
async def test_words_written_while_the_board_is_read_are_not_lost() -> None:
    board = Board()
    words = [await board.take(1.0) for _ in range(INBOX_WORDS)]

    def peer() -> None:
        for word in words:
            write(board.address_of(word), word + 1)

    thread = threading.Thread(target=peer)
    thread.start()
    arrived: set[int] = set()
    while thread.is_alive():
        arrived.update(board.arrived())
    arrived.update(board.arrived())
    assert arrived == {word + 1 for word in words}
