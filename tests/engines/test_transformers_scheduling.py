"""The portable engine's life with many requests: slots, KV cache blocks,
limits, cancellation, hand-over and failure."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm import metrics
from dynamo.trtllm.core import DecodedImage, EncodedMedia, MediaShape, PlacedMedia, Prompt, Sampling, Step
from dynamo.trtllm.engines.port import EngineRequest, EngineState, Prefilled
from dynamo.trtllm.engines.transformers.encoder import ImageEncoder
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.engines.transformers.runner import Chunk, ModelRunner
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, LimitFault, PartFault, ShuttingDown
from engines.contract import Output, add, generate, place, request, split
from engines.families import make_tiny_engine, noise_image, save_tiny_model

Start = Callable[..., Awaitable[TransformersEngine]]
IDS = tuple(range(21, 33))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: save_tiny_model(family, tmp_path_factory.mktemp(family)) for family in ("llama", "qwen2_vl")
    }


@pytest_asyncio.fixture
async def start(directories: dict[str, Path]) -> AsyncIterator[Start]:
    engines = []

    async def start(family: str = "llama", **args: Any) -> TransformersEngine:
        engines.append(make_tiny_engine(directories[family], family, **args))
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not come true")


def _idle(engine: TransformersEngine) -> bool:
    stats = engine.stats()
    return not (
        stats[metrics.ENGINE_ACTIVE] or stats[metrics.ENGINE_QUEUED] or stats[metrics.ENGINE_USED_BLOCKS]
    )


@pytest.mark.asyncio
async def test_a_closed_stream_frees_slot_and_blocks_at_the_next_step(start: Start) -> None:
    engine = await start()
    async with aclosing(engine.generate(request(IDS, ignore_eos=True))) as steps:
        async for _ in steps:
            break
        assert engine.stats()[metrics.ENGINE_USED_BLOCKS] == 64  # 2,048 tokens, the whole context
    await _until(lambda: _idle(engine))


class Gate:
    """Lets decode steps through one by one, so that a test decides what happens between them.
    Made after an engine's start, which takes a step of its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._steps, compute = threading.Semaphore(0), ModelRunner.decode

        def decode(runner: ModelRunner, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            assert self._steps.acquire(timeout=10), "nobody opened the gate"
            return compute(runner, tokens, positions)

        monkeypatch.setattr(ModelRunner, "decode", decode)

    def open(self, steps: int = 100_000) -> None:
        self._steps.release(steps)


@pytest.mark.asyncio
async def test_requests_wait_in_order_while_the_kv_cache_is_full(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await start()
    asked = [
        request(IDS, request_id=str(i), max_tokens=36, ignore_eos=True, temperature=1.0, seed=i)
        for i in range(4)
    ]
    alone = [await generate(free, each) for each in asked]
    engine = await start(kv_cache_config={"max_tokens": 64, "tokens_per_block": 16})
    gate = Gate(monkeypatch)
    assert engine.stats()[metrics.TOTAL_BLOCKS.of("0")] == 4
    order: list[str] = []

    async def run(each: EngineRequest) -> Output:
        output = await generate(engine, each)
        order.append(each.request_id)
        assert engine.stats()[metrics.ENGINE_USED_BLOCKS] <= 4
        return output

    tasks = [asyncio.create_task(run(each)) for each in asked]
    await _until(lambda: engine.stats()[metrics.ENGINE_ACTIVE] == 1)
    gate.open(1)
    await _until(lambda: engine.stats()[metrics.ENGINE_QUEUED] == 3)
    assert engine.stats()[metrics.ENGINE_USED_BLOCKS] == 3
    gate.open()
    outputs = await asyncio.gather(*tasks)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert order == ["0", "1", "2", "3"]
    assert _idle(engine)


@pytest.mark.asyncio
async def test_the_padding_of_short_rows_beside_a_long_one_counts_as_used(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(kv_cache_config={"max_tokens": 96, "tokens_per_block": 16})
    gate = Gate(monkeypatch)
    lengths = (36, 4, 4)
    tasks = [
        asyncio.create_task(generate(engine, request(IDS, max_tokens=n, ignore_eos=True))) for n in lengths
    ]
    gate.open(1)
    await _until(lambda: engine.stats()[metrics.ENGINE_QUEUED] == 1)
    assert engine.stats()[metrics.ENGINE_USED_BLOCKS] == 6
    gate.open()
    assert [len((await task).token_ids) for task in tasks] == list(lengths)
    assert _idle(engine)


@pytest.mark.asyncio
async def test_a_request_that_waits_can_be_cancelled(start: Start) -> None:
    engine = await start(max_batch_size=1)
    async with aclosing(engine.generate(request(IDS, ignore_eos=True))) as steps:
        await anext(steps)
        waiting = asyncio.create_task(generate(engine, request(IDS, max_tokens=2)))
        await _until(lambda: engine.stats()[metrics.ENGINE_QUEUED] == 1)
        waiting.cancel()
        await _until(lambda: engine.stats()[metrics.ENGINE_QUEUED] == 0)
        assert engine.stats()[metrics.ENGINE_ACTIVE] == 1
    await _until(lambda: _idle(engine))


@pytest.mark.asyncio
async def test_a_short_request_joins_and_ends_while_a_long_one_runs(start: Start) -> None:
    engine = await start()
    long = request(IDS, max_tokens=400, ignore_eos=True, temperature=1.0, seed=5)
    alone = await generate(engine, long)
    running = asyncio.create_task(generate(engine, long))
    for length in (3, 40, 9):
        short = await generate(engine, request(tuple(range(30, 30 + length)), max_tokens=4, ignore_eos=True))
        assert len(short.token_ids) == 4
    assert (await running).token_ids == alone.token_ids


@pytest.mark.asyncio
async def test_prompts_over_a_limit_are_refused_with_both_counts(start: Start) -> None:
    engine = await start(max_seq_len=40, max_input_len=20)
    for length, words in ((40, "40 tokens.*40"), (21, "21 tokens.*20")):
        with pytest.raises(LimitFault, match=words):
            await generate(engine, request((30,) * length, max_tokens=1))
    small = await start(kv_cache_config={"max_tokens": 32})
    with pytest.raises(LimitFault, match=r"33 tokens.*32"):
        await generate(small, request((30,) * 33, max_tokens=1))
    output = await generate(small, request((30,) * 20, max_tokens=100, ignore_eos=True))
    assert (len(output.token_ids), output.finish) == (12, "length")


@pytest.mark.asyncio
@pytest.mark.parametrize(("ids", "words"), [((), "empty"), ((5, 200), "200"), ((-1, 5), "-1")])
async def test_prompts_that_are_no_text_of_the_model_are_refused(
    start: Start, ids: tuple[int, ...], words: str
) -> None:
    engine = await start()
    with pytest.raises(ClientFault, match=words):
        await generate(engine, request(ids, max_tokens=1))
    assert len((await generate(engine, request(IDS, max_tokens=2, ignore_eos=True))).token_ids) == 2


@pytest.mark.asyncio
async def test_the_models_own_end_of_sequence_counts_when_the_request_names_none(start: Start) -> None:
    engine = await start()
    drawn = [
        await generate(engine, request(IDS, max_tokens=400, temperature=1.5, seed=seed, eos_token_ids=eos))
        for seed in range(3)
        for eos in (frozenset(), frozenset({2}))
    ]
    assert "eos" in {o.finish for o in drawn}
    assert all(drawn[i].token_ids == drawn[i + 1].token_ids for i in range(0, 6, 2))
    assert all(2 not in o.token_ids for o in drawn)


@pytest.mark.asyncio
async def test_a_first_token_that_ends_the_request_leaves_no_state(start: Start) -> None:
    engine = await start()
    first = (await generate(engine, request(IDS, max_tokens=1, ignore_eos=True))).token_ids[0]
    cases: list[tuple[dict[str, Any], str, tuple[int, ...]]] = [
        ({"max_tokens": 1}, "length", (first,)),
        ({"stop_token_ids": frozenset({first})}, "stop", ()),
        ({"eos_token_ids": frozenset({first})}, "eos", ()),
    ]
    for sampling, finish, tokens in cases:
        prefilled = await engine.prefill(request(IDS, **sampling))
        assert (prefilled.first.finish, tuple(prefilled.first.token_ids)) == (finish, tokens)
        assert prefilled.state is None
        assert prefilled.first.usage == (len(IDS), len(tokens), 0)
    assert _idle(engine)


@pytest.mark.asyncio
async def test_prefill_frees_its_blocks_before_decode_begins_and_leaves_a_state_that_stands_alone(
    start: Start,
) -> None:
    prefill, decode = await start(), await start()
    asked = request(IDS, max_tokens=12, ignore_eos=True, temperature=1.2)
    prefilled = await prefill.prefill(asked)
    assert _idle(prefill)
    assert prefilled.state is not None
    assert {name: tuple(t.shape) for name, t in prefilled.state.tensors.items()} == {
        "k": (4, 2, 12, 16),
        "v": (4, 2, 12, 16),
    }
    assert all(t.is_contiguous() for t in prefilled.state.tensors.values())
    outputs = [await _decode(decode, asked, prefilled.first, prefilled.state) for _ in range(2)]
    assert outputs[0].token_ids == outputs[1].token_ids  # the seed that prefill chose travels in the state
    assert len(outputs[0].token_ids) == 11
    assert outputs[0].usage == (12, 12, 0)


async def _decode(
    engine: TransformersEngine, asked: EngineRequest, first: Step, state: EngineState
) -> Output:
    output = Output()
    async with aclosing(engine.decode(asked, first, state)) as steps:
        async for step in steps:
            add(output, step)
    return output


@pytest.mark.asyncio
async def test_min_tokens_and_stop_tokens_count_the_first_token_of_a_hand_over(start: Start) -> None:
    engine = await start()
    free = await generate(engine, request(IDS, max_tokens=8, ignore_eos=True))
    for minimum in (0, 1, 2, 5):
        asked = request(
            IDS,
            max_tokens=8,
            min_tokens=minimum,
            stop_token_ids=frozenset(free.token_ids[1:3]),
            ignore_eos=True,
        )
        whole, halves = await generate(engine, asked), await split(engine, asked)
        assert halves.token_ids == whole.token_ids
        assert (halves.finish, halves.stop_reason, halves.usage) == (
            whole.finish,
            whole.stop_reason,
            whole.usage,
        )
        assert not set(whole.token_ids[:minimum]) & set(free.token_ids[1:3])
        assert len(whole.token_ids) >= minimum


@pytest.mark.asyncio
async def test_a_state_that_does_not_fit_fails_only_its_request(start: Start) -> None:
    engine = await start()
    asked = request(IDS, max_tokens=4, ignore_eos=True)
    prefilled = await engine.prefill(asked)
    state = prefilled.state
    assert state is not None
    wrong = [
        EngineState({**state.meta, "schema": 99}, state.tensors),
        EngineState({**state.meta, "tokens": 11}, state.tensors),
        EngineState({**state.meta, "seed": "x"}, state.tensors),
        EngineState(state.meta, {"k": state.tensors["k"]}),
        EngineState(state.meta, {name: t[:, :, :-1] for name, t in state.tensors.items()}),
        EngineState(state.meta, {name: t.half() for name, t in state.tensors.items()}),
    ]
    for each in wrong:
        with pytest.raises(EngineFault):
            await _decode(engine, asked, prefilled.first, each)
    with pytest.raises(EngineFault, match="no token to continue"):
        await _decode(engine, asked, Step((), finish="eos"), state)
    assert len((await _decode(engine, asked, prefilled.first, state)).token_ids) == 3


@pytest.mark.asyncio
async def test_one_prompt_that_fails_leaves_the_others_of_its_batch_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, compute = await start(), ModelRunner.prefill

    def fragile(runner: ModelRunner, chunks: list[Chunk]) -> torch.Tensor:
        if any(chunk.sequence.prompt_ids[0] == 99 for chunk in chunks):
            raise RuntimeError("out of memory")
        return compute(runner, chunks)

    monkeypatch.setattr(ModelRunner, "prefill", fragile)
    asked = [request((99 if i == 2 else 40 + i, 50, 51), max_tokens=5, ignore_eos=True) for i in range(5)]
    outputs = await asyncio.gather(*(generate(engine, each) for each in asked), return_exceptions=True)
    assert isinstance(outputs[2], EngineFault)
    # for the log, which has it once: from who waited for the answer
    assert str(outputs[2].__cause__) == "out of memory"
    assert not caplog.records
    assert [len(o.token_ids) for o in outputs if isinstance(o, Output)] == [5] * 4
    assert _idle(engine)


class FailsLater(int):
    """A seed that the sampler can use `uses` times and then no more:
    a request whose value breaks a step that it shares."""

    uses = 3

    def __and__(self, other: int) -> int:
        self.uses -= 1
        if self.uses < 0:
            raise ValueError("this seed is used up")
        return int(self) & other


def _unusable() -> list[EngineRequest]:
    """Requests that get past the engine's door and fail where tokens are chosen:
    at once, or some steps later."""
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    half = cast("tuple[int, ...]", (21, 22.5, 23))
    return [
        request(half, repetition_penalty=1.3, **common),
        request(half, presence_penalty=0.5, **common),
        request(IDS, temperature=1.0, seed=cast("int", 1.5), **common),
        request(IDS, temperature=1.0, seed=cast("int", "seven"), top_p=0.9, **common),
        request(IDS, temperature=1.0, seed=FailsLater(7), **common),
    ]


@pytest.mark.asyncio
async def test_a_request_whose_tokens_cannot_be_chosen_fails_alone(start: Start) -> None:
    engine = await start()
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    sound = [
        request(IDS, **common),
        request(IDS, temperature=1.1, seed=3, logprobs=2, **common),
        request(IDS, repetition_penalty=1.2, frequency_penalty=0.3, **common),
    ]
    alone = [await generate(engine, each) for each in sound]
    for bad in _unusable():
        outputs = await asyncio.gather(
            *(generate(engine, each) for each in (bad, *sound)), return_exceptions=True
        )
        assert isinstance(outputs[0], EngineFault)
        assert [o.token_ids for o in outputs if isinstance(o, Output)] == [o.token_ids for o in alone]
        assert _idle(engine)
    await engine.check_health()


@pytest.mark.asyncio
async def test_a_first_token_outside_the_vocabulary_fails_its_hand_over_alone(start: Start) -> None:
    engine = await start()
    asked = request(IDS, max_tokens=8, ignore_eos=True)
    prefilled = await engine.prefill(asked)
    assert prefilled.state is not None
    good = asyncio.create_task(_decode(engine, asked, prefilled.first, prefilled.state))
    for token in (-1, 200, 1 << 70):
        with pytest.raises(EngineFault):
            await _decode(engine, asked, Step((token,)), prefilled.state)
    for delta in (1 << 70, -(1 << 63)):
        far = EngineState({**prefilled.state.meta, "rope_delta": delta}, prefilled.state.tensors)
        with pytest.raises(EngineFault):
            await _decode(engine, asked, prefilled.first, far)
    assert len((await good).token_ids) == 7
    assert _idle(engine)


@pytest.mark.asyncio
async def test_more_likely_tokens_than_there_are_means_all_of_them(start: Start) -> None:
    engine = await start()
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    every = await generate(engine, request(IDS, **common))
    for top_k in (1 << 20, 1 << 30, (1 << 31) - 1):
        assert await generate(engine, request(IDS, top_k=top_k, **common)) == every


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("decode", RuntimeError("device lost")),
        ("decode", MemoryError()),
        ("decode", SystemExit(3)),
        ("prefill", SystemExit(3)),
    ],
)
async def test_a_step_that_fails_ends_the_engine_and_all_its_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    engine = await start()
    await engine.check_health()

    def broken(*args: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(ModelRunner, step, broken)
    asked = [request(IDS, max_tokens=5, ignore_eos=True) for _ in range(3)]
    outputs = await asyncio.gather(*(generate(engine, each) for each in asked), return_exceptions=True)
    assert [type(o) for o in outputs] == [EngineDead] * 3
    with pytest.raises(EngineDead):
        await engine.check_health()
    with pytest.raises(EngineDead):
        await generate(engine, asked[0])


def _lose_device(*args: Any) -> None:
    raise torch.AcceleratorError("unspecified launch failure")


async def _take(step: str, engine: TransformersEngine) -> Any:
    """A request that takes this step first."""
    if step == "prefill":
        return await generate(engine, request(IDS))
    return await engine.encode([DecodedImage("a", noise_image(1, 56, 56))])


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["prefill", "encode"])
async def test_a_lost_device_ends_the_engine_in_whichever_step_it_shows(
    start: Start, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    engine = await start("qwen2_vl")
    monkeypatch.setattr(torch.accelerator, "synchronize", _lose_device)
    monkeypatch.setattr(ModelRunner if step == "prefill" else ImageEncoder, step, _lose_device)
    outputs = await asyncio.gather(*(_take(step, engine) for _ in range(3)), return_exceptions=True)
    assert {type(o) for o in outputs} == {EngineDead}
    with pytest.raises(EngineDead):
        await engine.check_health()


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["prefill", "encode"])
async def test_an_error_that_the_device_survives_fails_its_request_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    engine = await start("qwen2_vl")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner if step == "prefill" else ImageEncoder, step, _lose_device)
        with pytest.raises(EngineFault):
            await _take(step, engine)
    await engine.check_health()
    assert len((await generate(engine, request(IDS, max_tokens=3, ignore_eos=True))).token_ids) == 3


@pytest.mark.asyncio
async def test_closing_ends_running_requests(start: Start) -> None:
    engine = await start()
    running = asyncio.create_task(generate(engine, request(IDS, ignore_eos=True)))
    await _until(lambda: engine.stats()[metrics.ENGINE_ACTIVE] == 1)
    await engine.close()
    with pytest.raises(ShuttingDown):
        await running


@pytest.mark.asyncio
async def test_values_that_are_not_finite_fail_their_request_and_no_other(start: Start) -> None:
    engine = await start("qwen2_vl")
    (encoded,) = await engine.encode([DecodedImage("a", noise_image(1, 56, 56))])
    broken = replace(encoded, tensors={"features": torch.full_like(encoded.tensors["features"], math.inf)})
    asked = []
    for item in (encoded, broken, encoded):
        ids, media = place(IDS, [item], IDS)
        asked.append(request(ids, media=media, max_tokens=5, ignore_eos=True))
    first, second, third = await asyncio.gather(
        *(generate(engine, each) for each in asked), return_exceptions=True
    )
    assert isinstance(second, EngineFault)
    assert isinstance(first, Output)
    assert isinstance(third, Output)
    assert first.token_ids == third.token_ids


@pytest.mark.asyncio
async def test_media_that_does_not_fit_the_prompt_is_refused_by_position(start: Start) -> None:
    engine = await start("qwen2_vl")
    encoded = await engine.encode([DecodedImage(str(i), noise_image(i, 56, 56)) for i in range(2)])
    ids, media = place(IDS, encoded, IDS)
    swapped = (media[0], PlacedMedia(media[1].item, media[1].start + 2, media[1].length))
    with pytest.raises(PartFault, match="image 2"):
        await generate(engine, request(ids, media=swapped, max_tokens=2))
    side_by_side = (*IDS, *encoded[0].token_ids, *encoded[1].token_ids)
    at = len(IDS) + len(encoded[0].token_ids)
    touching = (
        PlacedMedia(encoded[0], len(IDS), at - len(IDS)),
        PlacedMedia(encoded[1], at, len(encoded[1].token_ids)),
    )
    with pytest.raises(PartFault, match="image 2"):
        await generate(engine, request(side_by_side, media=touching, max_tokens=2))
    raw = PlacedMedia(DecodedImage("a", noise_image(1, 56, 56)), media[0].start, media[0].length)
    with pytest.raises(EngineFault):
        await generate(engine, request(ids, media=(raw, media[1]), max_tokens=2))


@pytest.mark.asyncio
async def test_a_text_model_refuses_images(start: Start) -> None:
    engine = await start()
    image = EncodedMedia("image", "a", {"features": torch.zeros(2, 64)}, (7, 7))
    with pytest.raises(ClientFault, match="takes no image"):
        await generate(engine, request((7, 7, 30), media=[PlacedMedia(image, 0, 2)], max_tokens=2))
    with pytest.raises(ClientFault, match="takes no image"):
        await engine.encode([DecodedImage("a", noise_image(1, 56, 56))])


@pytest.mark.asyncio
async def test_an_image_of_impossible_shape_is_the_clients_fault_and_others_go_on(start: Start) -> None:
    engine = await start("qwen2_vl")
    bad, good = noise_image(1, 4000, 4), DecodedImage("good", noise_image(2, 56, 56))
    results = await asyncio.gather(
        engine.encode([DecodedImage("bad", bad)]), engine.encode([good]), return_exceptions=True
    )
    assert isinstance(results[0], ClientFault)
    assert isinstance(results[1], list)
    assert engine.stats()[metrics.ENGINE_ENCODED_IMAGES] == 1
    assert engine.media_tokens(MediaShape("image", (4000, 4)), {}) is None


@pytest.mark.asyncio
async def test_counters_add_up(start: Start) -> None:
    engine = await start()
    await asyncio.gather(*(generate(engine, request(IDS, max_tokens=7, ignore_eos=True)) for _ in range(3)))
    prefilled: Prefilled = await engine.prefill(
        EngineRequest(request_id="p", prompt=Prompt(IDS), sampling=Sampling(max_tokens=7, ignore_eos=True))
    )
    assert prefilled.state is not None
    stats = engine.stats()
    assert stats[metrics.ENGINE_PROMPT_TOKENS] == 4 * len(IDS)
    assert stats[metrics.ENGINE_OUTPUT_TOKENS] == 3 * 7 + 1


@pytest.mark.asyncio
async def test_images_are_prepared_request_by_request_so_that_the_first_is_served_first(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prepared, prepare = await start("qwen2_vl"), [], ImageEncoder.preprocess

    def noted(encoder: ImageEncoder, item: DecodedImage) -> Any:
        prepared.append(item.digest)
        return prepare(encoder, item)

    monkeypatch.setattr(ImageEncoder, "preprocess", noted)
    asked = [[DecodedImage(f"{name}{i}", noise_image(i, 56, 56)) for i in range(3)] for name in "abc"]
    encoded = await asyncio.gather(*(engine.encode(items) for items in asked))
    expected = [item.digest for items in asked for item in items]
    assert prepared == expected
    assert [item.digest for items in encoded for item in items] == expected


@pytest.mark.asyncio
async def test_of_several_images_that_do_not_fit_the_first_is_told_and_no_other_is_left_behind(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start("qwen2_vl")
    bad = [DecodedImage(str(i), noise_image(i, 1000 + i, 2)) for i in range(3)]
    with pytest.raises(ClientFault, match="1000 x 2"):
        await engine.encode(bad)
    again = await engine.encode([DecodedImage("good", noise_image(1, 56, 56))])
    assert [item.digest for item in again] == ["good"]
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
