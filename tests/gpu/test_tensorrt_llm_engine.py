"""The adapter over an installed TensorRT-LLM: one engine, and prefill and decode against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from dynamo.trtllm import metrics
from dynamo.trtllm.config import Role
from dynamo.trtllm.core import Prompt, Sampling
from dynamo.trtllm.engines.port import EngineRequest, EngineState
from dynamo.trtllm.errors import ClientFault, StartupError
from engines.contract import Output, add, generate
from gpu.tensorrt_llm_machine import NEEDS_LIBRARY, config, started

pytestmark = [*NEEDS_LIBRARY, pytest.mark.asyncio(loop_scope="module")]
PROMPT = tuple(range(1000, 1024))


def ask(ids: tuple[int, ...] = PROMPT, **sampling: Any) -> EngineRequest:
    return EngineRequest(request_id="r", prompt=Prompt(ids), sampling=Sampling(**sampling))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Any]:
    async with started(config()) as (made, _):
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def halves() -> AsyncIterator[tuple[Any, Any]]:
    async with started(config(Role.PREFILL)) as (prefill, _), started(config(Role.DECODE)) as (decode, _):
        yield prefill, decode


async def split(halves: tuple[Any, Any], asked: EngineRequest) -> Output:
    prefill, decode = halves
    prefilled = await prefill.prefill(asked)
    output = Output()
    add(output, prefilled.first)
    if prefilled.state is None:
        return output
    state = EngineState(json.loads(json.dumps(prefilled.state.meta)), prefilled.state.tensors)
    follow = EngineRequest(request_id="r", prompt=Prompt(prefilled.prompt_token_ids), sampling=asked.sampling)
    async with aclosing(decode.decode(follow, prefilled.first, state)) as steps:
        async for step in steps:
            add(output, step)
    return output


async def test_a_greedy_request_repeats_itself_and_streams_token_by_token(engine: Any) -> None:
    first, second = [await generate(engine, ask(max_tokens=32, ignore_eos=True)) for _ in range(2)]
    assert first.token_ids == second.token_ids
    assert (len(first.token_ids), first.finish) == (32, "length")
    assert first.steps >= 16
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(PROMPT), 32)


async def test_a_stop_token_is_not_passed_on(engine: Any) -> None:
    free = await generate(engine, ask(max_tokens=16, ignore_eos=True))
    stop = free.token_ids[3]
    stopped = await generate(engine, ask(max_tokens=16, ignore_eos=True, stop_token_ids=frozenset({stop})))
    ended = await generate(engine, ask(max_tokens=16, eos_token_ids=frozenset({stop})))
    expected = free.token_ids[: free.token_ids.index(stop)]
    assert (stopped.token_ids, stopped.finish, stopped.stop_reason) == (expected, "stop", stop)
    assert (ended.token_ids, ended.finish, ended.stop_reason) == (expected, "eos", None)


@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs_come_one_per_token(engine: Any, count: int) -> None:
    output = await generate(engine, ask(max_tokens=8, ignore_eos=True, logprobs=count))
    assert [row.chosen.token_id for row in output.logprobs] == output.token_ids
    assert [len(row.top) for row in output.logprobs] == [count] * 8


async def test_leaving_a_stream_frees_the_engine_for_others(engine: Any) -> None:
    async with aclosing(engine.generate(ask(max_tokens=2000, ignore_eos=True))) as steps:
        async for _ in steps:
            break
    await asyncio.wait_for(generate(engine, ask(max_tokens=8, ignore_eos=True)), 60)
    assert engine.stats()[metrics.ENGINE_ACTIVE] == 0


async def test_a_bad_request_is_refused_and_the_engine_serves_on(engine: Any) -> None:
    with pytest.raises(ClientFault):
        await generate(engine, ask(tuple(range(1000, 1000 + 5000)), max_tokens=2))
    with pytest.raises(ClientFault):
        await generate(engine, ask(max_tokens=2, top_p=3.0))
    await engine.check_health()
    assert (await generate(engine, ask(max_tokens=4, ignore_eos=True))).finish == "length"


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"min_tokens": 4}])
async def test_prefill_and_decode_give_what_one_engine_gives(
    engine: Any, halves: Any, options: dict[str, Any]
) -> None:
    asked = ask(max_tokens=24, ignore_eos=True, **options)
    whole, parts = await generate(engine, asked), await split(halves, asked)
    assert parts.token_ids == whole.token_ids
    assert parts.finish == whole.finish
    assert [row.chosen.token_id for row in parts.logprobs] == (
        parts.token_ids if "logprobs" in options else []
    )


async def test_a_decode_that_its_client_leaves_harms_no_other(halves: Any) -> None:
    prefill, decode = halves
    asked = ask(max_tokens=500, ignore_eos=True)
    prefilled = await prefill.prefill(asked)
    task = asyncio.create_task(anext(decode.decode(asked, prefilled.first, prefilled.state)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert len((await split(halves, ask(max_tokens=8, ignore_eos=True))).token_ids) == 8


async def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="max_batch_sise"):
        async with started(config(max_batch_sise=3)):
            pass
