"""Prefill and decode over one hand-off: what aggregated answers,
nothing held on any path, a second prefill where one is lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm import metrics
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, Overloaded, PeerFault, PeerUnavailable
from dynamo.trtllm.frontend.endpoint import EndpointServer
from fakes import (
    FakeContext,
    FakeSender,
    answered,
    cancelled,
    collect,
    ignore_death,
    outcome,
    raw_request,
    until,
)
from media_parts import PLACEHOLDER, png_url
from request_handlers.topology import (
    KV_BYTES,
    POOL_BYTES,
    Pair,
    aggregated,
    joined,
    pair,
    prefill_worker,
    start_transfer,
)

PROMPT = (1, 2, 3)
LONG = {"max_tokens": 12, "ignore_eos": True}


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest_asyncio.fixture
async def both(stack: AsyncExitStack) -> Pair:
    return await pair(stack)


def imaged(**options: Any) -> dict[str, Any]:
    return raw_request(1, PLACEHOLDER, 2, PLACEHOLDER, images=(png_url(1), png_url(2)), **options)


# What the client is told.


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "raw",
    [
        raw_request(*PROMPT, stop=LONG),
        raw_request(*PROMPT, stop={"max_tokens": 1}),
        raw_request(*PROMPT, stop={"max_tokens": 2}),
        raw_request(*PROMPT),
        raw_request(*PROMPT, stop={"max_tokens": 40, "min_tokens": 5}),
        raw_request(*PROMPT, stop={"max_tokens": 40}, seed=5, temperature=1.0),
        raw_request(*PROMPT, stop=LONG, output_options={"logprobs": 2}),
        raw_request(*PROMPT, stop={"max_tokens": 1}, output_options={"logprobs": 0}),
        raw_request(*PROMPT, stop={"max_tokens": 30, "stop_token_ids": list(range(300, 332))}),
        imaged(stop=LONG),
        imaged(stop={"max_tokens": 1}, output_options={"logprobs": 3}),
    ],
    ids=lambda raw: "-".join(
        f"{key}={value}" for part in list(raw.values())[2:] for key, value in part.items()
    )[:60],
)
async def test_two_stages_answer_what_one_worker_answers(both: Pair, raw: dict[str, Any]) -> None:
    assert joined(await both.run(raw)) == joined(await aggregated(raw))
    both.assert_nothing_held()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "finish"), [({"answer_tokens": -8}, "eos"), ({"context_length": 4}, "length")]
)
async def test_a_first_token_that_ends_the_request_is_the_whole_answer(
    stack: AsyncExitStack, script: dict[str, Any], finish: str
) -> None:
    both = await pair(stack, **script)
    raw = raw_request(*PROMPT, output_options={"logprobs": 1})
    expected = joined(await aggregated(raw, **script))
    assert expected["finish_reason"] == finish
    assert joined(await both.run(raw)) == expected
    assert both.prefill.transfer.stats().offers_total == 0
    assert [len(each.engine.requests) for each in both.workers] == [1]
    assert both.engine.requests == []


@pytest.mark.asyncio
async def test_a_stop_token_that_comes_first_is_named(both: Pair) -> None:
    (first,) = joined(await aggregated(raw_request(*PROMPT, stop={"max_tokens": 1})))["token_ids"]
    raw = raw_request(*PROMPT, stop={"max_tokens": 9, "stop_token_ids": [first]})
    (chunk,) = await both.run(raw)
    assert (chunk["token_ids"], chunk["finish_reason"], chunk["stop_reason"]) == ([], "stop", first)
    assert chunk["completion_usage"]["completion_tokens"] == 0


@pytest.mark.asyncio
async def test_usage_counts_the_expanded_prompt_and_the_cached_tokens_of_prefill(both: Pair) -> None:
    usage = (await both.run(imaged(stop=LONG)))[-1]["completion_usage"]
    details = {"cached_tokens": 2}
    assert usage == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": details,
    }


@pytest.mark.asyncio
async def test_prefill_tells_the_frontend_to_call_decode(both: Pair) -> None:
    reply = await both.prefilled(raw_request(*PROMPT, stop=LONG))
    assert (reply["finish_reason"], len(reply["token_ids"])) == ("length", 1)
    assert reply["completion_usage"]["prompt_tokens"] == 3
    handoff = reply["disaggregated_params"]
    assert (handoff["prompt_token_ids"], handoff["first_token_ids"]) == ([1, 2, 3], reply["token_ids"])
    assert (handoff["engine"], handoff["finish"], handoff["schema_version"]) == ("RecordingEngine", None, 2)
    assert handoff["transfer"]["tensors"][0]["shape"] == [3 * KV_BYTES]


@pytest.mark.asyncio
async def test_the_seed_travels_to_both_engines(both: Pair) -> None:
    await both.run(raw_request(*PROMPT, stop=LONG, seed=41, temperature=0.7))
    assert [each.sampling.seed for each in (*both.prefill.engine.requests, *both.engine.requests)] == [41, 41]


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_p": 0.5}, {"top_k": 3}])
async def test_an_unseeded_sampled_request_gets_one_seed_for_both_stages(
    both: Pair, sampling: dict[str, Any]
) -> None:
    raw = raw_request(*PROMPT, stop=LONG, **sampling)
    chunks = await both.run(raw)
    seeds = {each.sampling.seed for each in (*both.prefill.engine.requests, *both.engine.requests)}
    (seed,) = seeds
    assert seed is not None
    raw["sampling_options"]["seed"] = seed
    assert joined(chunks) == joined(await aggregated(raw))


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}])
async def test_a_greedy_request_gets_no_seed(both: Pair, sampling: dict[str, Any]) -> None:
    assert (await both.prefilled(raw_request(*PROMPT, **sampling)))["disaggregated_params"]["seed"] is None


@pytest.mark.asyncio
async def test_each_engine_is_asked_with_what_the_request_brought(both: Pair) -> None:
    raw = imaged(
        stop=LONG,
        routing={"priority": 1, "cache_salt": "s", "dp_rank": 2},
        extra_args={"mm_hashes": ["0f", "1e"]},
    )
    context = FakeContext("id-7", {"traceparent": "00-1"})
    reply = await both.prefilled(raw, context)
    await collect(both.decoded(raw, reply, context))
    (asked,), (continued,) = both.prefill.engine.requests, both.engine.requests
    for each in (asked, continued):
        assert (each.request_id, each.priority, each.cache_salt, each.dp_rank) == ("id-7", 1.0, "s", 2)
        assert each.trace_headers == {"traceparent": "00-1"}
    assert (asked.media_hashes, continued.media_hashes) == (("0f", "1e"), ())
    assert (len(asked.prompt.media), continued.prompt.media) == (2, ())
    assert (asked.sampling.max_tokens, continued.sampling.max_tokens) == (None, 12)
    assert continued.prompt.token_ids == asked.prompt.token_ids


@pytest.mark.asyncio
async def test_a_health_check_hands_nothing_over_in_either_role(both: Pair) -> None:
    raw = {**raw_request(1, stop={"max_tokens": 1, "ignore_eos": True}), "_HEALTH_CHECK": True}
    for handler in (both.prefill.handler, both.decode):
        (chunk,) = await collect(answered(handler, raw))
        assert (chunk["finish_reason"], len(chunk["token_ids"]), "disaggregated_params" in chunk) == (
            "length",
            1,
            False,
        )
    assert (both.prefill.engine.requests, both.engine.requests) == ([], [])
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_the_first_token_goes_out_while_the_kv_cache_is_still_being_read(both: Pair) -> None:
    both.transfer.gate = asyncio.Event()
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    stream = both.decoded(raw, reply)
    assert (await anext(stream))["token_ids"] == tuple(reply["token_ids"])
    assert both.transfer.stats().fetches_total == 0
    both.transfer.gate.set()
    assert len(await collect(stream)) == 11
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_the_read_kv_cache_is_freed_at_the_engines_first_step(both: Pair) -> None:
    raw = raw_request(*PROMPT, stop=LONG)
    stream = both.decoded(raw, await both.prefilled(raw))
    await anext(stream)
    await anext(stream)
    assert both.transfer.stats().pool_used_bytes == 0
    await stream.aclose()
    both.assert_nothing_held()


# Nothing stays held, however a request ends.


@pytest.mark.asyncio
async def test_prefills_state_is_freed_once_it_is_offered(both: Pair) -> None:
    await both.prefilled(raw_request(*PROMPT))
    assert both.prefill.engine.released == 1


@pytest.mark.asyncio
async def test_an_offer_that_finds_no_room_frees_the_state_and_ends_in_its_own_words(both: Pair) -> None:
    async def full(*args: Any) -> Any:
        raise Overloaded("no room")

    both.prefill.transfer.offer = full  # type: ignore[method-assign]
    with pytest.raises(Overloaded, match="no room"):
        await both.prefilled(raw_request(*PROMPT))
    assert both.prefill.engine.released == 1
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_reply_that_the_frontend_no_longer_takes_withdraws_its_offer(both: Pair) -> None:
    server = EndpointServer(both.prefill.handler, on_dead=ignore_death)
    raised = await outcome(
        collect(server.serve(raw_request(*PROMPT), FakeContext(), response_sender=FakeSender(fails_at=0)))
    )
    assert type(raised).__name__ == "Cancelled"
    assert both.prefill.transfer.stats().offers_total == 1
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_reply_that_was_taken_keeps_its_offer(both: Pair) -> None:
    server, sender = EndpointServer(both.prefill.handler, on_dead=ignore_death), FakeSender()
    await collect(server.serve(raw_request(*PROMPT), FakeContext(), response_sender=sender))
    assert (len(sender.chunks), both.prefill.transfer.stats().open_offers) == (1, 1)


@pytest.mark.asyncio
async def test_a_client_that_leaves_during_prefill_leaves_no_offer(both: Pair) -> None:
    both.prefill.engine.prefill_gate = asyncio.Event()
    running = asyncio.create_task(both.prefilled(raw_request(*PROMPT)))
    await both.prefill.engine.prefilling.wait()
    await cancelled(running)
    assert both.prefill.transfer.stats().offers_total == 0
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_its_offer_waits_for_room_frees_the_state(
    stack: AsyncExitStack,
) -> None:
    worker = await prefill_worker(stack, {"pool_bytes": 4096}, kv_bytes_per_token=1000)
    raw = raw_request(*PROMPT)
    (_,) = await collect(answered(worker.handler, raw))
    running = asyncio.create_task(collect(answered(worker.handler, raw)))
    await until(lambda: worker.transfer.stats().waiting_offers == 1)
    await cancelled(running)
    assert worker.engine.released == 2
    assert (worker.transfer.stats().waiting_offers, worker.transfer.stats().open_offers) == (0, 1)


async def taken(both: Pair, steps: int) -> Any:
    """Decode's stream after `steps` chunks were taken."""
    raw = raw_request(*PROMPT, stop=LONG)
    stream = both.decoded(raw, await both.prefilled(raw))
    for _ in range(steps):
        await anext(stream)
    return stream


@pytest.mark.asyncio
@pytest.mark.parametrize("steps", [1, 2, 5])
async def test_a_client_that_leaves_after_a_token_leaves_nothing_on_either_worker(
    both: Pair, steps: int
) -> None:
    stream = await taken(both, steps)
    await stream.aclose()
    await until(lambda: both.prefill.transfer.stats().open_offers == 0)
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_client_that_leaves_after_the_kv_cache_was_read_and_not_yet_used_leaves_nothing(
    both: Pair,
) -> None:
    stream = await taken(both, 1)
    await until(lambda: both.transfer.stats().fetches_total == 1)
    assert both.transfer.stats().pool_used_bytes > 0
    await stream.aclose()
    await until(lambda: both.transfer.stats().pool_used_bytes == 0)
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_the_kv_cache_is_read_leaves_nothing(both: Pair) -> None:
    both.transfer.gate = asyncio.Event()
    stream = await taken(both, 1)
    waiting = asyncio.create_task(anext(stream))
    await both.transfer.reading.wait()
    await cancelled(waiting)
    await stream.aclose()
    both.assert_nothing_held()
    assert both.prefill.transfer.stats().acknowledged_total == 1


@pytest.mark.asyncio
async def test_an_engine_that_dies_while_the_kv_cache_is_read_leaves_nothing(both: Pair) -> None:
    both.transfer.gate = asyncio.Event()
    raw = raw_request(*PROMPT, stop=LONG)
    result = {"disaggregated_params": (await both.prefilled(raw))["disaggregated_params"]}
    server, sender = EndpointServer(both.decode, on_dead=ignore_death), FakeSender()
    stream = server.serve({**raw, "prefill_result": result}, FakeContext(), response_sender=sender)
    running = asyncio.create_task(collect(stream))
    await both.transfer.reading.wait()
    server.end_all(EngineDead("the engine died"))
    assert str(await outcome(running)) == "the engine died"
    assert (len(sender.chunks), sender.closed) == (1, False)
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_an_engine_that_fails_in_decode_leaves_nothing(both: Pair) -> None:
    both.engine.fail_decode = EngineFault("broke")
    with pytest.raises(EngineFault, match="broke"):
        await both.run(raw_request(*PROMPT, stop=LONG))
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_an_engine_that_refuses_the_request_leaves_nothing(both: Pair) -> None:
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    both.engine.fail_decode = ClientFault("the prompt has 3 tokens")
    with pytest.raises(ClientFault, match="the prompt has 3 tokens"):
        await collect(both.decoded(raw, reply))
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_reader_without_room_gives_the_offer_back_and_says_so(both: Pair) -> None:
    both.transfer.fail = Overloaded("no room here")
    with pytest.raises(Overloaded, match="no room here"):
        await both.run(raw_request(*PROMPT, stop=LONG))
    both.assert_nothing_held()
    assert both.client.calls == []


@pytest.mark.asyncio
async def test_a_read_that_fails_after_its_client_left_is_no_unread_exception(both: Pair) -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: problems.append(about))
    both.transfer.fail = Overloaded("no room here")
    stream = await taken(both, 1)
    await both.transfer.reading.wait()
    await until(lambda: not any(task.get_name() == "kv-read" for task in asyncio.all_tasks()))
    await stream.aclose()
    del stream
    gc.collect()
    await until(lambda: True)
    assert problems == []


# A second prefill.


async def lose(both: Pair) -> None:
    """The prefill worker's process ends, and its offers with it."""
    await both.prefill.transfer.close()
    both.workers.remove(both.prefill)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 3}],
    ids=["greedy", "unseeded", "seeded"],
)
async def test_a_lost_kv_cache_is_prefilled_again_elsewhere_and_the_answer_goes_on(
    stack: AsyncExitStack, both: Pair, options: dict[str, Any]
) -> None:
    other = await both.add(stack, 2)
    raw = raw_request(*PROMPT, stop=LONG, **options)
    reply = await both.prefilled(raw)
    await lose(both)
    chunks = await collect(both.decoded(raw, reply))
    raw["sampling_options"]["seed"] = reply["disaggregated_params"]["seed"]
    assert joined(chunks) == joined(await aggregated(raw))
    assert both.decode.stats()[metrics.PREFILL_RETRIES] == 1
    assert len(other.engine.requests) == 1
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_the_first_token_does_not_wait_for_the_second_prefill(
    stack: AsyncExitStack, both: Pair
) -> None:
    other = await both.add(stack, 2)
    other.engine.prefill_gate = asyncio.Event()
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    await lose(both)
    stream = both.decoded(raw, reply)
    assert (await anext(stream))["token_ids"] == tuple(reply["token_ids"])
    await other.engine.prefilling.wait()
    other.engine.prefill_gate.set()
    assert len(await collect(stream)) == 11


@pytest.mark.asyncio
async def test_a_client_that_leaves_during_the_second_prefill_stops_it(
    stack: AsyncExitStack, both: Pair
) -> None:
    other = await both.add(stack, 2)
    other.engine.prefill_gate = asyncio.Event()
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    await lose(both)
    context = FakeContext()
    stream = both.decoded(raw, reply, context)
    await anext(stream)
    await other.engine.prefilling.wait()
    await stream.aclose()
    await until(lambda: all(child.is_stopped() for child in context.children))
    assert len(context.children) == 1
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_second_prefill_with_another_first_token_ends_the_request_and_frees_its_offer(
    stack: AsyncExitStack, both: Pair
) -> None:
    await both.add(stack, 2, first_token_id=500)
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    await lose(both)
    with pytest.raises(PeerFault, match="the prefill worker was lost and its work could not be repeated"):
        await collect(both.decoded(raw, reply))
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_without_another_prefill_worker_a_lost_kv_cache_is_a_503(both: Pair) -> None:
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    await lose(both)
    with pytest.raises(PeerUnavailable, match="no prefill worker is available"):
        await collect(both.decoded(raw, reply))
    both.assert_nothing_held()


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
async def test_a_request_that_comes_without_a_handoff_is_prefilled_by_decode(
    stack: AsyncExitStack, both: Pair, packed: bool
) -> None:
    await both.add(stack, 2)
    raw = raw_request(*PROMPT, stop=LONG)
    expected = joined(await aggregated(raw))
    if packed:
        raw["token_ids"] = b"".join(each.to_bytes(4, "little") for each in PROMPT)
    assert joined(await collect(both.decoded(raw, None))) == expected
    both.assert_nothing_held()


@pytest.mark.asyncio
@pytest.mark.parametrize("script", [{"answer_tokens": -8}, {"context_length": 4}])
async def test_a_request_prefilled_by_decode_may_end_at_its_first_token(
    stack: AsyncExitStack, script: dict[str, Any]
) -> None:
    both = await pair(stack, **script)
    await both.add(stack, 2, **script)
    raw = raw_request(*PROMPT)
    assert joined(await collect(both.decoded(raw, None))) == joined(await aggregated(raw, **script))
    both.assert_nothing_held()


@pytest.mark.asyncio
async def test_prefills_refusal_reaches_the_client_of_decode_in_its_words(
    stack: AsyncExitStack, both: Pair
) -> None:
    await both.add(stack, 2, reject_prompt_over=2)
    with pytest.raises(ClientFault) as caught:
        await collect(both.decoded(raw_request(*PROMPT), None))
    assert caught.value.message == "the prompt has 3 tokens, the engine takes 2"


# Handoffs that are not understood.


@pytest.mark.asyncio
@pytest.mark.parametrize("change", [{"schema_version": 1}, {"more": 1}, {"meta": None}])
async def test_a_handoff_of_another_release_is_refused_before_a_token_is_sent(
    both: Pair, change: dict[str, Any]
) -> None:
    raw = raw_request(*PROMPT)
    reply = await both.prefilled(raw)
    reply["disaggregated_params"] |= change
    with pytest.raises(PeerFault, match="the prefill worker speaks another schema than this one"):
        await anext(both.decoded(raw, reply))


@pytest.mark.asyncio
async def test_a_handoff_of_another_engine_is_refused(both: Pair) -> None:
    raw = raw_request(*PROMPT)
    reply = await both.prefilled(raw)
    reply["disaggregated_params"]["engine"] = "TransformersEngine"
    with pytest.raises(PeerFault, match="the prefill worker runs another engine than this decode worker"):
        await anext(both.decoded(raw, reply))


@pytest.mark.asyncio
async def test_an_engine_without_tensors_hands_over_its_meta_alone(stack: AsyncExitStack) -> None:
    both = await pair(stack, kv_bytes_per_token=0)
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    assert reply["disaggregated_params"]["transfer"] is None
    assert joined(await collect(both.decoded(raw, reply))) == joined(await aggregated(raw))
    assert both.transfer.stats().fetches_total == 0


# Life of the handlers.


@pytest.mark.asyncio
async def test_prefill_is_drained_when_its_offers_are_taken(both: Pair) -> None:
    raw = raw_request(*PROMPT, stop=LONG)
    reply = await both.prefilled(raw)
    draining = asyncio.create_task(both.prefill.handler.drained())
    await until(lambda: len(asyncio.all_tasks()) > 2)
    assert not draining.done()
    await collect(both.decoded(raw, reply))
    await draining


@pytest.mark.asyncio
async def test_handlers_show_their_transfers_and_close_them(stack: AsyncExitStack, both: Pair) -> None:
    assert both.decode.stats()[metrics.TRANSFER_POOL_BYTES] == POOL_BYTES
    assert both.prefill.handler.stats()[metrics.TRANSFER_OPEN_OFFERS] == 0
    offer = await both.prefill.transfer.offer({"kv": torch.zeros(8)})
    await both.decode.drained()
    await both.decode.close()
    await both.prefill.handler.close()
    probe = await start_transfer(stack)
    with pytest.raises(PeerUnavailable):
        await probe.fetch(offer.descriptor)
