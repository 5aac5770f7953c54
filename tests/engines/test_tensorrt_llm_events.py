"""KV cache events and statistics of the TensorRT-LLM adapter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm import metrics
from dynamo.trtllm.config import Role
from dynamo.trtllm.engines.tensorrt_llm import events
from engines.contract import generate
from engines.tensorrt_llm_subject import (
    LLAVA,
    ask,
    ask_about,
    engine_config,
    instances,
    model_directory,
    picture,
    release,
    started,
)

__all__ = ["release"]


@dataclass
class Publisher:
    """Keeps what it is told, as `dynamo.llm.KvEventPublisher` would send it."""

    rank: int = 0
    stored: list[tuple[Any, ...]] = field(default_factory=list)
    salts: list[str | None] = field(default_factory=list)
    removed: list[list[int]] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def publish_stored(self, *args: Any, cache_salt: str | None = None) -> None:
        self.stored.append(args)
        self.salts.append(cache_salt)
        self.told.set()

    def publish_removed(self, block_hashes: list[int]) -> None:
        self.removed.append(block_hashes)


def block(number: int, tokens: list[int], **extra: Any) -> dict[str, Any]:
    return {"block_hash": number, "tokens": [{"token_id": t, "token_extra_id": 0} for t in tokens], **extra}


def stored(blocks: list[Any], **event: Any) -> dict[str, Any]:
    return {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": blocks}, **event}


def removed(*hashes: int) -> dict[str, Any]:
    return {"event_id": 2, "data": {"type": "removed", "block_hashes": list(hashes)}}


def test_full_blocks_are_told_and_a_partial_one_is_not_taken_back() -> None:
    publisher = Publisher()
    told = events.KvEvents(lambda rank: publisher, 2)
    told.take(stored([block(1, [7, 8]), block(2, [9, 10]), block(3, [11])]))
    told.take(removed(3, 1))
    told.take(removed(3))
    assert publisher.stored == [([7, 8, 9, 10], [2, 2], [1, 2], None, None)]
    assert publisher.removed == [[1], [3]]


def test_hashes_become_signed_numbers_of_64_bits() -> None:
    assert events.signed_hash(5) == 5
    assert events.signed_hash((1 << 63) + 5) == 5 - (1 << 63)
    assert events.signed_hash(-3) == -3
    assert events.signed_hash("ff" * 32) == -1
    publisher = Publisher()
    event = stored([block((1 << 64) - 2, [7, 8])])
    event["data"]["parent_hash"] = (1 << 64) - 1
    events.KvEvents(lambda rank: publisher, 2).take(event)
    assert publisher.stored[0][2:4] == ([-2], -1)


def test_blocks_with_images_name_the_first_64_bits_of_their_hash() -> None:
    publisher = Publisher()
    keys = [
        {"type": "mm_key", "hash": "00000000000000ff" + "a" * 48, "start_offset": 0},
        {"hash": "not hexadecimal"},
    ]
    events.KvEvents(lambda rank: publisher, 2).take(
        stored([block(1, [7, 8], mm_keys=keys), block(2, [9, 9])])
    )
    assert publisher.stored[0][4] == [{"mm_objects": [{"mm_hash": 255, "offsets": []}]}, None]


def test_only_the_largest_attention_window_is_told() -> None:
    publisher = Publisher()
    told = events.KvEvents(lambda rank: publisher, 2)
    for window in (64, 4096):
        told.take({"data": {"type": "created"}, "window_size": window})
    told.take(stored([block(1, [7, 8])], window_size=64))
    told.take(stored([block(2, [7, 8])], window_size=4096))
    assert [args[2] for args in publisher.stored] == [[2]]


def test_each_attention_rank_has_its_publisher() -> None:
    made: dict[int, Publisher] = {}

    def create(rank: int) -> Publisher:
        return made.setdefault(rank, Publisher(rank))

    told = events.KvEvents(create, 2)
    told.take(stored([block(1, [7, 8])]))
    told.take(stored([block(2, [7, 8])], attention_dp_rank=3))
    assert {rank: [args[2] for args in p.stored] for rank, p in made.items()} == {0: [[1]], 3: [[2]]}


def test_blocks_are_told_with_their_salt_and_mixed_ones_not_at_all() -> None:
    publisher = Publisher()
    told = events.KvEvents(lambda rank: publisher, 2)
    told.take(stored([block(1, [7, 8], cache_salt="a"), block(2, [9, 10], cache_salt="a")]))
    told.take(stored([block(3, [7, 8])]))
    told.take(stored([block(4, [7, 8], cache_salt="a"), block(5, [9, 10], cache_salt="b")]))
    assert [args[2] for args in publisher.stored] == [[1, 2], [3]]
    assert publisher.salts == ["a", None]


def test_counts_of_attention_dp_ranks_are_added_and_what_dynamo_shows_by_rank_stays_apart() -> None:
    gauges = events.Gauges()
    for rank, active, latency, used in ((0, 3, 2.0, 1), (1, 4, 4.0, 6), (0, 5, 2.0, 2)):
        blocks = {"usedNumBlocks": used, "maxNumBlocks": 8, "cacheHitRate": rank / 2}
        gauges.take(
            {
                "attentionDpRank": rank,
                "numActiveRequests": active,
                "iterLatencyMS": latency,
                "kvCacheStats": blocks,
            }
        )
    assert gauges.readings() == {
        metrics.ENGINE_ACTIVE: 9.0,
        metrics.ENGINE_ITERATION: 0.004,
        metrics.ENGINE_USED_BLOCKS: 8.0,
        metrics.TOTAL_BLOCKS.of("0"): 8.0,
        metrics.TOTAL_BLOCKS.of("1"): 8.0,
        metrics.CACHE_USAGE.of("0"): 0.25,
        metrics.CACHE_USAGE.of("1"): 0.75,
        metrics.CACHE_HIT_RATE.of("0"): 0.0,
        metrics.CACHE_HIT_RATE.of("1"): 0.5,
    }


def test_gauges_are_what_the_release_reports() -> None:
    gauges = events.Gauges()
    gauges.take({"numActiveRequests": 3, "kvCacheStats": {"maxNumBlocks": 9}, "iterLatencyMS": "n/a"})
    assert gauges.readings() == {metrics.ENGINE_ACTIVE: 3.0, metrics.TOTAL_BLOCKS.of("0"): 9.0}
    assert events.Gauges().readings() == {}


@pytest.mark.asyncio
async def test_an_iterator_that_ends_or_is_not_ready_is_asked_again() -> None:
    asked: list[float] = []
    taken: list[Any] = []
    enough = asyncio.Event()

    async def items(*values: Any) -> Any:
        for value in values:
            yield value

    def read(timeout: float) -> Any:
        asked.append(timeout)
        if len(asked) == 1:
            raise AssertionError("no request yet")
        if len(asked) == 3:
            enough.set()
        return items({"a": len(asked)}, {}, '{"a": 9}')

    first = asyncio.Event()
    task = asyncio.create_task(events.follow(read, first, taken.append))
    await asyncio.sleep(0)
    assert asked == []
    first.set()
    await asyncio.wait_for(enough.wait(), 5)
    task.cancel()
    assert taken[:2] == [{"a": 2}, {"a": 9}]


@pytest.mark.asyncio
async def test_a_bad_event_does_not_end_the_loop() -> None:
    good = asyncio.Event()
    taken: list[Any] = []

    async def one() -> Any:
        yield {"n": 1}

    def take(item: Any) -> None:
        taken.append(item)
        if len(taken) == 1:
            raise ValueError("bad event")
        good.set()

    first = asyncio.Event()
    first.set()
    task = asyncio.create_task(events.follow(lambda timeout: one(), first, take))
    await asyncio.wait_for(good.wait(), 5)
    task.cancel()
    assert taken[:2] == [{"n": 1}, {"n": 1}]


@pytest.mark.asyncio
async def test_the_engines_events_reach_the_publisher_with_images(release: str, tmp_path: Path) -> None:
    config = engine_config(model_directory(tmp_path, LLAVA), images=True, publish_kv_events=True)
    publisher = Publisher()
    async with started(config) as (engine, info):
        assert instances()[-1].args.kv_cache_config.event_buffer_max_size == 100_000
        assert engine.attach_kv_publisher(lambda rank: publisher)
        asked = ask_about([picture(224, 224)], placeholder="<image>", max_tokens=2)
        await generate(engine, replace(asked, media_hashes=("0f" * 8,)))
        await asyncio.wait_for(publisher.told.wait(), 5)
    tokens, sizes, hashes, parent, media = publisher.stored[0]
    assert len(publisher.stored) == 1
    assert (len(tokens), sizes, parent) == (64, [info.kv_block_size] * 2, None)
    assert all(-(1 << 63) <= h < 1 << 63 for h in hashes)
    if release == "1.2.1":
        assert media is None
    else:
        assert media[0] == {"mm_objects": [{"mm_hash": 0x0F0F0F0F0F0F0F0F, "offsets": []}]}


@pytest.mark.asyncio
async def test_statistics_become_gauges(release: str, tmp_path: Path) -> None:
    config = engine_config(model_directory(tmp_path), publish_metrics=True)
    async with started(config) as (engine, _):
        await generate(engine, ask(tuple(range(300, 350)) * 2, max_tokens=2))
        for _ in range(500):
            if metrics.TOTAL_BLOCKS.of("0") in engine.stats():
                break
            await asyncio.sleep(0.01)
        assert (engine.stats()[metrics.TOTAL_BLOCKS.of("0")], engine.stats()[metrics.ENGINE_USED_BLOCKS]) == (
            128,
            3,
        )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("role", "changes"),
    [
        (Role.AGGREGATED, {}),
        (Role.DECODE, {"publish_kv_events": True}),
        (
            Role.AGGREGATED,
            {"publish_kv_events": True, "args": {"kv_cache_config": {"enable_block_reuse": False}}},
        ),
    ],
)
async def test_no_events_without_the_flag_on_decode_or_without_reuse(
    release: str, tmp_path: Path, role: Role, changes: dict[str, Any]
) -> None:
    made: list[int] = []
    async with started(engine_config(model_directory(tmp_path), role, **changes)) as (engine, _):
        assert not engine.attach_kv_publisher(lambda rank: made.append(rank))
        cache = instances()[-1].args.kv_cache_config
        assert cache is None or not cache.event_buffer_max_size
        assert made == []
