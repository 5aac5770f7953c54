"""Decoding as CUDA graphs record it, with static storage and sampling on the device; unrecorded here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm import metrics
from dynamo.trtllm.core import DecodedImage
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.engines.transformers.batch import Chosen
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.engines.transformers.fusion import fuse
from dynamo.trtllm.engines.transformers.graphs import GraphBatch, Recorder
from dynamo.trtllm.engines.transformers.runner import Chunk, ModelRunner
from dynamo.trtllm.engines.transformers.static_cache import StaticCache
from dynamo.trtllm.errors import EngineDead, EngineFault
from engines.contract import Output, generate, place, request, split
from engines.families import (
    MULTIMODAL,
    TEXT,
    WITH_IMAGES,
    make_tiny_engine,
    noise_image,
    reference_model,
    save_tiny_model,
)

Start = Callable[..., Awaitable[TransformersEngine]]
IDS = tuple(range(21, 33))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return directory


@pytest_asyncio.fixture
async def start(directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts an engine that decodes statically, or plainly, whatever the device."""
    engines: list[TransformersEngine] = []

    async def start(family: str = "llama", static: bool = True, **args: Any) -> TransformersEngine:
        monkeypatch.setattr(
            "dynamo.trtllm.engines.transformers.engine.decodes_in_graphs", lambda loaded, options: static
        )
        engines.append(make_tiny_engine(directories(family), family, **args))
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


async def _asked(engine: TransformersEngine, family: str) -> list[EngineRequest]:
    """Requests of different length and sampling, with images where the family takes them."""
    sampling: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "seed": 3},
        {"temperature": 0.9, "seed": -5, "top_p": 0.8, "top_k": 40, "logprobs": 3},
        {"temperature": 1.0, "seed": 1 << 70, "min_p": 0.02, "presence_penalty": 0.8, "logprobs": 0},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_tokens": 9},
    ]
    images = []
    if family in WITH_IMAGES:
        images = await engine.encode(
            [DecodedImage(str(i), noise_image(i, 56, 56)) for i in range(len(sampling))]
        )
    asked = []
    for i, each in enumerate(sampling):
        ids, media = place(IDS[: 3 + i], images[i : i + 1], IDS)
        asked.append(
            request(ids, media=media, request_id=str(i), max_tokens=24 + 3 * i, ignore_eos=True, **each)
        )
    return asked


@pytest.mark.asyncio
@pytest.mark.parametrize("family", [*MULTIMODAL, *TEXT])
async def test_every_family_gives_the_tokens_and_log_probabilities_of_plain_decoding(
    start: Start, family: str
) -> None:
    plain, static = await start(family, static=False), await start(family)
    asked = await _asked(plain, family)
    expected = [await generate(plain, each) for each in asked]
    together = await asyncio.gather(*(generate(static, each) for each in asked))
    handed_over = await asyncio.gather(*(split(static, each) for each in asked))
    for outputs in (together, handed_over):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [(o.finish, o.usage) for o in outputs] == [(o.finish, o.usage) for o in expected]
        for ours, theirs in zip(outputs, expected, strict=True):
            assert [p.chosen.rank for p in ours.logprobs] == [p.chosen.rank for p in theirs.logprobs]
            assert [[t.token_id for t in p.top] for p in ours.logprobs] == [
                [t.token_id for t in p.top] for p in theirs.logprobs
            ]
            values = [p.chosen.logprob for p in theirs.logprobs]
            assert [p.chosen.logprob for p in ours.logprobs] == pytest.approx(values, abs=1e-4)


@pytest.mark.asyncio
async def test_requests_that_join_and_leave_at_any_time_get_the_tokens_that_they_get_alone(
    start: Start,
) -> None:
    plain = await start(static=False)
    chance, asked = random.Random(4), []
    for i in range(24):
        ids = tuple(chance.choices(range(20, 190), k=chance.choice([2, 30, 240, 270])))
        sampling = {"temperature": 1.0, "seed": i} if i % 2 else {}
        asked.append(
            request(ids, request_id=str(i), max_tokens=chance.randrange(1, 40), ignore_eos=True, **sampling)
        )
    expected = [await generate(plain, each) for each in asked]
    static = await start(max_batch_size=6)

    async def after(steps: int, each: EngineRequest) -> Output:
        for _ in range(steps):
            await asyncio.sleep(0)
        return await generate(static, each)

    outputs = await asyncio.gather(*(after(37 * i, each) for i, each in enumerate(asked)))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert static.stats()[metrics.ENGINE_OUTPUT_TOKENS] == sum(len(o.token_ids) for o in outputs)
    assert static.stats()[metrics.ENGINE_USED_BLOCKS] == 0


@pytest.mark.asyncio
async def test_a_request_that_ends_gives_no_token_of_the_step_that_was_under_way(start: Start) -> None:
    engine = await start()
    free = await generate(engine, request(IDS, max_tokens=12, ignore_eos=True, temperature=1.0, seed=2))
    stop = free.token_ids[6]
    asked = request(
        IDS,
        max_tokens=12,
        temperature=1.0,
        seed=2,
        stop_token_ids=frozenset({stop}),
        min_tokens=4,
        ignore_eos=True,
    )
    for output in (await generate(engine, asked), await split(engine, asked)):
        assert output.token_ids == free.token_ids[: free.token_ids.index(stop, 4)]
        assert (output.finish, output.stop_reason) == ("stop", stop)
    assert engine.stats()[metrics.ENGINE_ACTIVE] == 0


@pytest.mark.asyncio
async def test_a_stream_that_is_closed_leaves_the_others_their_tokens(start: Start) -> None:
    engine = await start()
    long = request(IDS, max_tokens=60, ignore_eos=True, temperature=1.0, seed=8)
    alone = await generate(engine, long)
    running = asyncio.create_task(generate(engine, long))
    for _ in range(3):
        async with aclosing(engine.generate(request(IDS[:5], ignore_eos=True))) as steps:
            await anext(steps)
            await anext(steps)
    assert (await running).token_ids == alone.token_ids


@pytest.mark.asyncio
async def test_logits_that_are_not_finite_fail_their_request_and_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()
    asked = [request((40 + i, 50, 51), max_tokens=9, ignore_eos=True) for i in range(3)]
    alone = [await generate(engine, each) for each in asked]
    compute, poisoned = ModelRunner.next_logits, alone[1].token_ids[3]
    assert poisoned not in alone[0].token_ids + alone[2].token_ids

    def spoil(runner: ModelRunner, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = compute(runner, tokens, *rest)
        return torch.where(tokens == poisoned, torch.nan, logits)

    monkeypatch.setattr(ModelRunner, "next_logits", spoil)
    outputs = await asyncio.gather(*(generate(engine, each) for each in asked), return_exceptions=True)
    assert isinstance(outputs[1], EngineFault)
    assert [o.token_ids for o in outputs if isinstance(o, Output)] == [alone[0].token_ids, alone[2].token_ids]
    assert engine.stats()[metrics.ENGINE_ACTIVE] == 0


@pytest.mark.asyncio
async def test_a_request_that_cannot_join_fails_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, join = await start(), StaticCache.join

    def full(cache: StaticCache, keys: torch.Tensor, values: torch.Tensor) -> int:
        if keys.shape[2] == 3:
            raise RuntimeError("out of memory")
        return join(cache, keys, values)

    monkeypatch.setattr(StaticCache, "join", full)
    asked = [request(IDS[:length], max_tokens=9, ignore_eos=True) for length in (4, 3, 5)]
    outputs = await asyncio.gather(*(generate(engine, each) for each in asked), return_exceptions=True)
    assert [type(o) for o in outputs] == [Output, EngineFault, Output]
    assert (await generate(engine, asked[0])).token_ids == outputs[0].token_ids  # type: ignore[union-attr]


def test_steps_run_every_time_where_nothing_can_be_recorded() -> None:
    ran: list[str] = []
    recorder = Recorder(records=False)
    for key in ("a", "b", "a"):
        recorder.run(key, lambda key=key: ran.append(key))
    assert (ran, len(recorder)) == (["a", "b", "a"], 0)


@pytest.mark.parametrize("family", [*MULTIMODAL, *TEXT])
@pytest.mark.asyncio
async def test_a_fused_model_computes_what_it_did(directories: Callable[[str], Path], family: str) -> None:
    model = reference_model(directories(family), family)
    ids = torch.tensor([IDS])
    parameters = sum(p.numel() for p in model.parameters())
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        changed = fuse(model.get_decoder())
        after = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert torch.equal(after, again)
    assert sum(p.numel() for p in model.parameters()) == parameters
    layers = model.config.get_text_config().num_hidden_layers
    norms = {"gemma3": 0, "gemma2": 0, "gpt2": 0}.get(family, 2 * layers + 1)
    norms += 2 * layers if family == "qwen3_vl" else 0
    assert changed == norms + (0 if family == "gpt2" else 5 * layers)


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llama"])
async def test_running_requests_get_tokens_between_the_layers_of_a_long_pass(
    start: Start, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.trtllm.engines.transformers.interleave.SHARE", 0.0)
    plain, static = await start(family, static=False), await start(family)
    asked = await _asked(plain, family)
    alone = [await generate(plain, each) for each in asked]
    long = request(IDS, max_tokens=150, ignore_eos=True, temperature=1.0, seed=8)
    expected = await generate(plain, long)
    inside: list[bool] = []
    prefill, step = ModelRunner.prefill, GraphBatch.step

    def prefilling(runner: ModelRunner, chunks: list[Chunk]) -> torch.Tensor:
        inside.append(True)
        logits = prefill(runner, chunks)
        inside.append(False)
        return logits

    def counted(batch: GraphBatch) -> list[Chosen]:
        steps_inside.append(bool(inside) and inside[-1])
        return step(batch)

    steps_inside: list[bool] = []
    monkeypatch.setattr(ModelRunner, "prefill", prefilling)
    monkeypatch.setattr(GraphBatch, "step", counted)
    running = asyncio.create_task(generate(static, long))
    outputs = [await generate(static, each) for each in asked]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert (await running).token_ids == expected.token_ids
    assert any(steps_inside)
    assert not all(steps_inside)


@pytest.mark.asyncio
async def test_a_decode_step_that_fails_between_layers_ends_the_engine_and_is_not_taken_for_the_prompts_fault(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.trtllm.engines.transformers.interleave.SHARE", 0.0)
    engine = await start()
    broken: list[bool] = []
    prefill, step = ModelRunner.prefill, GraphBatch.step

    def prefilling(runner: ModelRunner, chunks: list[Chunk]) -> torch.Tensor:
        broken.append(chunks[0].sequence.prompt_ids[0] == 99)
        try:
            return prefill(runner, chunks)
        finally:
            broken.pop()

    def failing(batch: GraphBatch) -> list[Chosen]:
        if broken and broken[-1]:
            raise RuntimeError("device lost")
        return step(batch)

    monkeypatch.setattr(ModelRunner, "prefill", prefilling)
    monkeypatch.setattr(GraphBatch, "step", failing)
    async with aclosing(engine.generate(request(IDS, ignore_eos=True))) as steps:
        await anext(steps)
        with pytest.raises(EngineDead):
            await generate(engine, request((99, *IDS), max_tokens=3))
        with pytest.raises(EngineDead):
            async for _ in steps:
                pass


class _Remembered(Recorder):
    """Notes what is recorded, and runs it each time."""

    def __init__(self, records: bool, most: int = 1000) -> None:
        super().__init__(records=True, most=most)
        self.most = most
        self.known: set[Any] = set()
        self.new: list[Any] = []

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, key: Any) -> bool:
        return key in self.known

    @property
    def has_room(self) -> bool:
        return len(self.known) < self.most

    def run(self, key: Any, step: Callable[[], None]) -> None:
        step()
        if key not in self.known:
            self.known.add(key)
            self.new.append(key)

    def clear(self) -> None:
        self.known.clear()


@pytest.mark.asyncio
async def test_steps_are_recorded_before_the_first_request_so_that_none_waits_for_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[_Remembered] = []

    def remembered(records: bool) -> _Remembered:
        recorders.append(_Remembered(records))
        return recorders[-1]

    monkeypatch.setattr("dynamo.trtllm.engines.transformers.graphs.Recorder", remembered)
    plain = await start("qwen2_vl", static=False)
    static = await start("qwen2_vl", max_batch_size=4)
    at_start = len(recorders[-1].new)
    assert at_start > 8
    asked = (await _asked(plain, "qwen2_vl"))[:1]  # greedy; the others are steps of another kind
    asked += [request(IDS[:count], max_tokens=30, ignore_eos=True) for count in (3, 8)]
    expected = [await generate(plain, each) for each in asked]
    outputs = await asyncio.gather(*(generate(static, each) for each in asked))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert len(recorders[-1].new) == at_start
