"""Several choices of one request: one prompt computed, as many answers,
each that of a request with its own seed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig, EngineKind, Modality
from dynamo.trtllm.core import DecodedImage, GuidedDecoding, Prompt, Step
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.errors import ClientFault, EngineFault
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.frontend.response import Chunk, Output
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from dynamo.trtllm.request_handlers.choices import (
    Answer,
    answers_of,
    continue_all,
    generate_all,
    require_forks,
)
from engines.contract import generate, place, request

IDS = tuple(range(300, 316))
SAMPLED: dict[str, Any] = {"temperature": 1.4, "seed": 11, "max_tokens": 20, "ignore_eos": True}


@pytest_asyncio.fixture(params=["eager", "static"])
async def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TransformersEngine]:
    """The demo model, decoding as on a CPU and as CUDA graphs record it."""
    static = request.param == "static"
    monkeypatch.setattr(
        "dynamo.trtllm.engines.transformers.engine.decodes_in_graphs", lambda loaded, options: static
    )
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS, model_path=str(DEMO_DIRECTORY), modality=Modality.MULTIMODAL
    )
    engine = TransformersEngine(config)
    await engine.start()
    yield engine
    await engine.close()


async def unwatched(answer: Answer) -> Answer:
    return answer


async def collect(chunks: AsyncGenerator[Chunk, None], choices: int) -> tuple[list[list[int]], list[Chunk]]:
    """The token ids of each choice, and all chunks;
    every choice must end once, and say nothing afterwards."""
    tokens: list[list[int]] = [[] for _ in range(choices)]
    ended: set[int] = set()
    found = []
    async with aclosing(chunks) as stream:
        async for chunk in stream:
            assert chunk["index"] not in ended
            tokens[chunk["index"]] += chunk["token_ids"]
            if "finish_reason" in chunk:
                ended.add(chunk["index"])
            found.append(chunk)
    assert ended == set(range(choices))
    return tokens, found


async def alone(engine: TransformersEngine, asked: EngineRequest, index: int) -> list[int]:
    seed = asked.sampling.seed
    sampling = asked.sampling if seed is None else replace(asked.sampling, seed=seed + index)
    return (await generate(engine, replace(asked, sampling=sampling, choices=1))).token_ids


async def with_image(engine: TransformersEngine, **sampling: Any) -> EngineRequest:
    encoded = await engine.encode([DecodedImage("image", Image.new("RGB", (112, 84), (40, 90, 200)))])
    ids, media = place(IDS, encoded, IDS[:5])
    return request(ids, media=media, **sampling)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
        {"guided": GuidedDecoding(regex="[a-z ]{30,60}"), "ignore_eos": False},
        {"max_tokens": 1},
        {"ignore_eos": False, "min_tokens": 3, "top_k": 40},
    ],
)
async def test_choices_answer_as_requests_with_their_seeds_do(
    engine: TransformersEngine, changes: dict[str, Any]
) -> None:
    sampling = {**SAMPLED, **changes}
    for asked in (
        replace(request(IDS, **sampling), choices=4),
        replace(await with_image(engine, **sampling), choices=3),
    ):
        expected = [await alone(engine, asked, index) for index in range(asked.choices)]
        whole, _ = await collect(generate_all(engine, asked, unwatched), asked.choices)
        assert whole == expected
        prefilled = await engine.prefill(replace(asked, sampling=replace(asked.sampling, max_tokens=None)))
        assert prefilled.state is not None
        follow = replace(asked, prompt=Prompt(prefilled.prompt_token_ids))
        first = prefilled.first if sampling["max_tokens"] > 1 else prefilled.first._replace(finish="length")
        handed, _ = await collect(
            continue_all(engine, follow, first, prefilled.state, unwatched), asked.choices
        )
        assert handed == expected


@pytest.mark.asyncio
async def test_the_prompt_is_computed_once_and_everything_is_free_afterwards(
    engine: TransformersEngine,
) -> None:
    before = engine.stats()[metrics.ENGINE_PROMPT_TOKENS]
    await collect(generate_all(engine, replace(request(IDS, **SAMPLED), choices=5), unwatched), 5)
    assert engine.stats()[metrics.ENGINE_PROMPT_TOKENS] == before + len(IDS)
    assert (engine.stats()[metrics.ENGINE_ACTIVE], engine.stats()[metrics.ENGINE_USED_BLOCKS]) == (0, 0)


@pytest.mark.asyncio
async def test_more_choices_than_rows_of_a_batch_take_turns(engine: TransformersEngine) -> None:
    asked = replace(request(IDS, **{**SAMPLED, "max_tokens": 3}), choices=70)
    tokens, _ = await collect(generate_all(engine, asked, unwatched), 70)
    assert tokens == [await alone(engine, asked, index) for index in range(70)]


@pytest.mark.asyncio
async def test_a_prompt_of_one_token_has_choices_too(engine: TransformersEngine) -> None:
    asked = replace(request(IDS[:1], **SAMPLED), choices=3)
    tokens, _ = await collect(generate_all(engine, asked, unwatched), 3)
    assert tokens == [await alone(engine, asked, index) for index in range(3)]


@pytest.mark.asyncio
async def test_a_first_choice_that_ends_at_once_leaves_the_others(engine: TransformersEngine) -> None:
    first = (await alone(engine, request(IDS, **SAMPLED), 0))[0]
    asked = replace(request(IDS, stop_token_ids=frozenset([first]), **SAMPLED), choices=3)
    tokens, chunks = await collect(generate_all(engine, asked, unwatched), 3)
    assert tokens == [await alone(engine, asked, index) for index in range(3)]
    assert tokens[0] == []
    assert next(c["stop_reason"] for c in chunks if c["index"] == 0 and "finish_reason" in c) == first


@pytest.mark.asyncio
async def test_without_a_seed_the_choices_differ(engine: TransformersEngine) -> None:
    asked = replace(request(IDS, max_tokens=20, temperature=2.0, ignore_eos=True), choices=4)
    tokens, _ = await collect(generate_all(engine, asked, unwatched), 4)
    assert len({tuple(each) for each in tokens}) == 4


@pytest.mark.asyncio
async def test_usage_is_said_at_the_start_and_for_all_choices_at_the_end(engine: TransformersEngine) -> None:
    tokens, chunks = await collect(
        generate_all(engine, replace(request(IDS, **SAMPLED), choices=3), unwatched), 3
    )
    usages = [chunk["completion_usage"] for chunk in chunks if "completion_usage" in chunk]
    total = sum(map(len, tokens))
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in usages] == [
        (len(IDS), 1),
        (len(IDS), total),
    ]
    assert "completion_usage" in chunks[0]
    assert "completion_usage" in chunks[-1]


@pytest.mark.asyncio
async def test_each_choice_is_watched_for_stop_strings_by_itself(engine: TransformersEngine) -> None:
    watched: list[Answer] = []

    async def until_three(answer: Answer) -> Answer:
        watched.append(answer)
        return answer if len(watched) != 2 else cut(answer)

    async def cut(answer: Answer) -> AsyncGenerator[Output, None]:
        """Three tokens of the answer, and its end."""
        async with aclosing(answer) as outputs:
            count = 0
            async for output in outputs:
                count += 1
                if count == 3:
                    yield Step((), None, "stop", "word")
                    return
                yield output

    asked = replace(request(IDS, **SAMPLED), choices=3)
    tokens, chunks = await collect(generate_all(engine, asked, until_three), 3)
    expected = [await alone(engine, asked, index) for index in range(3)]
    assert sorted(map(len, tokens)) == [2, 20, 20]
    assert all(each == whole[: len(each)] for each, whole in zip(tokens, expected, strict=True))
    assert sum(chunk.get("stop_reason") == "word" for chunk in chunks) == 1
    assert engine.stats()[metrics.ENGINE_ACTIVE] == 0


@pytest.mark.asyncio
async def test_closing_the_stream_ends_all_choices(engine: TransformersEngine) -> None:
    asked = replace(request(IDS, **{**SAMPLED, "max_tokens": 4000}), choices=3)
    async with aclosing(generate_all(engine, asked, unwatched)) as chunks:
        seen = {(await anext(chunks))["index"] for _ in range(12)}
    assert seen == {0, 1, 2}
    other = await generate(engine, request(IDS, max_tokens=4))
    assert len(other.token_ids) <= 4
    assert (engine.stats()[metrics.ENGINE_ACTIVE], engine.stats()[metrics.ENGINE_USED_BLOCKS]) == (0, 0)


@pytest.mark.asyncio
async def test_a_choice_that_fails_ends_the_request_with_its_error(engine: TransformersEngine) -> None:
    async def failing(answer: Answer) -> Answer:
        return broken(answer)

    async def broken(answer: Answer) -> AsyncGenerator[Output, None]:
        async with aclosing(answer) as outputs:
            yield await anext(outputs)
            raise EngineFault("the engine failed on this request")

    with pytest.raises(EngineFault, match="failed on this request"):
        await collect(generate_all(engine, replace(request(IDS, **SAMPLED), choices=2), failing), 2)


@pytest.mark.asyncio
async def test_an_engine_that_cannot_fork_answers_each_choice_from_the_prompt() -> None:
    engine = DoubleEngine(EngineConfig(kind=EngineKind.DOUBLE))
    await engine.start()
    asked = replace(request(IDS, **SAMPLED), choices=3)
    tokens, _ = await collect(generate_all(engine, asked, unwatched), 3)
    assert [len(each) for each in tokens] == [20, 20, 20]
    with pytest.raises(
        ClientFault, match="n must be 1: this deployment's engine continues a prefilled prompt once"
    ):
        require_forks(engine, asked)
    require_forks(engine, request(IDS))
    await engine.close()


@pytest.mark.asyncio
async def test_an_image_at_the_very_end_of_the_prompt_is_named(engine: TransformersEngine) -> None:
    asked = await with_image(engine, **SAMPLED)
    end = asked.prompt.media[-1].start + asked.prompt.media[-1].length
    bare = replace(asked, prompt=Prompt(asked.prompt.token_ids[:end], asked.prompt.media), choices=2)
    with pytest.raises(ClientFault, match="image 1: with n above 1 text must follow it"):
        await asyncio.wait_for(collect(generate_all(engine, bare, unwatched), 2), 60)


@pytest.mark.asyncio
@pytest.mark.parametrize("shown", [False, True])
async def test_the_best_choices_are_those_of_the_highest_mean_log_probability(
    engine: TransformersEngine, shown: bool
) -> None:
    asked = replace(request(IDS, logprobs=0, **{**SAMPLED, "ignore_eos": False}), choices=6)
    singles = []
    for index in range(6):
        sampling = replace(asked.sampling, seed=SAMPLED["seed"] + index)
        singles.append(await generate(engine, replace(asked, sampling=sampling, choices=1)))
    means = [sum(p.chosen.logprob for p in each.logprobs) / max(1, len(each.token_ids)) for each in singles]
    ranked = sorted(range(6), key=lambda index: -means[index])
    asking = Request(model="m", engine_request=asked, best_choices=2, shows_logprobs=shown)
    tokens, chunks = await collect(answers_of(asking, generate_all(engine, asked, unwatched)), 2)
    assert tokens == [singles[index].token_ids for index in ranked[:2]]
    assert len(chunks) == 2
    assert all(("log_probs" in chunk) is shown for chunk in chunks)
    assert [chunk["finish_reason"] for chunk in chunks] == [singles[index].finish for index in ranked[:2]]
