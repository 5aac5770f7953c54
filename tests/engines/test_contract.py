"""The engine port's contract, held against every engine that can be imported here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.core import DecodedImage, DecodedMedia, DecodedVideo
from dynamo.trtllm.engines.factory import create_engine
from dynamo.trtllm.errors import ClientFault, EngineDead
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from engines.contract import Subject, generate, place, request, shape_of, split, steps_of

TEXT_IDS = tuple(range(300, 312))


def _images() -> list[DecodedImage]:
    sizes = [(56, 56), (112, 84), (140, 196)]
    return [
        DecodedImage(f"image{i}", Image.new("RGB", size, (40 * i, 90, 200))) for i, size in enumerate(sizes)
    ]


def _videos() -> list[DecodedVideo]:
    found = []
    for frames, width, height in ((4, 112, 112), (7, 84, 140)):
        pixels = np.arange(frames * height * width * 3).reshape(frames, height, width, 3) % (200 + frames)
        indices = tuple(range(0, 12 * frames, 12))
        found.append(
            DecodedVideo(f"video{frames}", pixels.astype(np.uint8), indices, 24.0, 12 * frames, frames / 2)
        )
    return found


def _config(kind: str) -> EngineConfig:
    if kind == "double":
        script = {"placeholder_ids": {"image": 299, "video": 298}, "context_length": 512}
        return EngineConfig(kind=EngineKind.DOUBLE, double_script=script)
    return EngineConfig(
        kind=EngineKind(kind),
        model_path=str(DEMO_DIRECTORY),
        modality=EngineConfig(kind=EngineKind(kind)).modality.MULTIMODAL,
        device="cpu",
        args={"max_seq_len": 512, "max_batch_size": 8},
    )


@pytest_asyncio.fixture(params=["double", "transformers"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    engine = create_engine(_config(request.param))
    info = await engine.start()
    yield Subject(engine, info, TEXT_IDS, _images(), _videos())
    await engine.close()


@pytest.mark.asyncio
async def test_a_request_gets_the_same_tokens_alone_and_beside_others(subject: Subject) -> None:
    asked = [
        request(subject.text_ids[: 4 + i], request_id=str(i), max_tokens=12, ignore_eos=True)
        for i in range(6)
    ]
    alone = [await generate(subject.engine, each) for each in asked]
    together = await asyncio.gather(*(generate(subject.engine, each) for each in asked))
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert all(len(o.token_ids) == 12 and o.finish == "length" for o in alone)


@pytest.mark.asyncio
async def test_a_sampled_request_with_a_seed_repeats_itself_and_another_seed_differs(
    subject: Subject,
) -> None:
    def sampled(seed: int) -> object:
        return request(subject.text_ids, max_tokens=24, ignore_eos=True, temperature=1.5, seed=seed)

    first, again, other = [await generate(subject.engine, sampled(seed)) for seed in (7, 7, 8)]  # type: ignore[arg-type]
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.3}]
)
async def test_prefill_and_decode_give_what_generate_gives(
    subject: Subject, sampling: dict[str, float]
) -> None:
    asked = request(subject.text_ids, max_tokens=16, logprobs=2, **sampling)
    whole, halves = await generate(subject.engine, asked), await split(subject.engine, asked)
    assert halves.token_ids == whole.token_ids
    assert (halves.finish, halves.usage) == (whole.finish, whole.usage)
    assert [p.chosen.token_id for p in halves.logprobs] == whole.token_ids
    for ours, theirs in zip(halves.logprobs, whole.logprobs, strict=True):
        assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)


@pytest.mark.asyncio
async def test_the_first_step_says_the_usage_so_far_and_the_last_says_all_of_it(subject: Subject) -> None:
    asked = request(subject.text_ids, max_tokens=6, ignore_eos=True)
    steps = await steps_of(subject.engine.generate(asked))
    first, last = steps[0].usage, steps[-1].usage
    assert first is not None
    assert last is not None
    assert (first.prompt_tokens, first.completion_tokens) == (len(subject.text_ids), len(steps[0].token_ids))
    assert (last.prompt_tokens, last.completion_tokens) == (first.prompt_tokens, 6)
    assert all(step.usage is None for step in steps[1:-1])


@pytest.mark.asyncio
async def test_usage_counts_the_prompt_and_the_output(subject: Subject) -> None:
    output = await generate(subject.engine, request(subject.text_ids, max_tokens=5, ignore_eos=True))
    assert output.usage is not None
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(subject.text_ids), 5)


@pytest.mark.asyncio
async def test_a_stop_token_ends_the_output_and_is_not_part_of_it(subject: Subject) -> None:
    free = await generate(subject.engine, request(subject.text_ids, max_tokens=12, ignore_eos=True))
    stop = free.token_ids[-1]
    at = free.token_ids.index(stop)
    stopped = await generate(
        subject.engine,
        request(subject.text_ids, max_tokens=12, ignore_eos=True, stop_token_ids=frozenset({stop})),
    )
    assert (stopped.token_ids, stopped.finish) == (free.token_ids[:at], "stop")
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == at


@pytest.mark.asyncio
async def test_end_of_sequence_waits_for_min_tokens(subject: Subject) -> None:
    free = await generate(subject.engine, request(subject.text_ids, max_tokens=12, ignore_eos=True))
    eos = frozenset({free.token_ids[0]})
    at_once = await generate(subject.engine, request(subject.text_ids, max_tokens=12, stop_token_ids=eos))
    later = await generate(
        subject.engine, request(subject.text_ids, max_tokens=12, min_tokens=4, stop_token_ids=eos)
    )
    assert at_once.token_ids == []
    assert len(later.token_ids) >= 4


@pytest.mark.asyncio
async def test_tokens_that_would_end_the_request_are_not_chosen_before_min_tokens(subject: Subject) -> None:
    free = await generate(subject.engine, request(subject.text_ids, max_tokens=4, ignore_eos=True))
    asked = request(subject.text_ids, max_tokens=12, min_tokens=6, stop_token_ids=frozenset(free.token_ids))
    whole, halves = await generate(subject.engine, asked), await split(subject.engine, asked)
    assert len(whole.token_ids) >= 6
    assert not set(whole.token_ids[:6]) & set(free.token_ids)
    assert halves.token_ids == whole.token_ids


@pytest.mark.asyncio
async def test_logprobs_come_one_per_token_with_ranks_from_one(subject: Subject) -> None:
    output = await generate(
        subject.engine, request(subject.text_ids, max_tokens=6, ignore_eos=True, logprobs=3)
    )
    assert len(output.logprobs) == len(output.token_ids) == 6
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert position.chosen.token_id == token
        assert [t.rank for t in position.top] == [1, 2, 3]
        assert position.chosen == position.top[0]  # greedy takes the best
        assert all(t.logprob <= 0 for t in position.top)
    bare = await generate(
        subject.engine, request(subject.text_ids, max_tokens=6, ignore_eos=True, logprobs=0)
    )
    assert [p.top for p in bare.logprobs] == [()] * 6


@pytest.mark.asyncio
async def test_a_prompt_over_the_context_length_is_refused_with_both_counts(subject: Subject) -> None:
    ids = subject.text_ids * 60
    with pytest.raises(ClientFault, match=rf"{len(ids)}.*{subject.info.context_length}"):
        await generate(subject.engine, request(ids, max_tokens=4))


@pytest.mark.asyncio
async def test_output_without_a_limit_ends_at_the_context_length(subject: Subject) -> None:
    output = await generate(subject.engine, request(subject.text_ids, ignore_eos=True))
    assert output.finish == "length"
    assert len(output.token_ids) + len(subject.text_ids) == subject.info.context_length


@pytest.mark.asyncio
async def test_closing_a_stream_frees_its_slot_and_leaves_others_alone(subject: Subject) -> None:
    other = asyncio.create_task(
        generate(
            subject.engine, request(subject.text_ids, request_id="other", max_tokens=200, ignore_eos=True)
        )
    )
    async with aclosing(
        subject.engine.generate(request(subject.text_ids, request_id="left", ignore_eos=True))
    ) as steps:
        async for _ in steps:
            break
    assert len((await other).token_ids) == 200
    for _ in range(1000):
        if subject.engine.stats()[metrics.ENGINE_ACTIVE] == 0:
            break
        await asyncio.sleep(0.01)
    assert subject.engine.stats()[metrics.ENGINE_ACTIVE] == 0


@pytest.mark.asyncio
async def test_images_are_encoded_in_order_to_the_length_that_was_foretold(subject: Subject) -> None:
    await _require_foretold(subject, subject.images)


@pytest.mark.asyncio
async def test_videos_and_images_are_encoded_in_order_to_the_length_that_was_foretold(
    subject: Subject,
) -> None:
    await _require_foretold(subject, [subject.videos[0], subject.images[0], subject.videos[1]])


async def _require_foretold(subject: Subject, items: Sequence[DecodedMedia]) -> None:
    encoded = await subject.engine.encode(items)
    assert [(each.kind, each.digest) for each in encoded] == [(item.kind, item.digest) for item in items]
    for each, item in zip(encoded, items, strict=True):
        assert len(each.token_ids) == subject.engine.media_tokens(shape_of(item), {})
        assert each.tensors["features"].shape == (len(each.token_ids), subject.info.hidden_size)


@pytest.mark.asyncio
async def test_images_split_over_prefill_and_decode_give_what_generate_gives(subject: Subject) -> None:
    await _require_the_same_split(subject, subject.images)


@pytest.mark.asyncio
async def test_videos_beside_images_split_over_prefill_and_decode_give_what_generate_gives(
    subject: Subject,
) -> None:
    await _require_the_same_split(subject, [subject.images[1], *subject.videos])


async def _require_the_same_split(subject: Subject, items: Sequence[DecodedMedia]) -> None:
    ids, placed = place(subject.text_ids, await subject.engine.encode(items), subject.text_ids)
    asked = request(ids, media=placed, max_tokens=10, ignore_eos=True)
    whole, halves = await generate(subject.engine, asked), await split(subject.engine, asked)
    assert halves.token_ids == whole.token_ids
    assert halves.usage == whole.usage


@pytest.mark.asyncio
async def test_a_request_cancelled_in_prefill_leaves_nothing_behind(subject: Subject) -> None:
    task = asyncio.create_task(subject.engine.prefill(request(subject.text_ids * 20, max_tokens=5)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await split(subject.engine, request(subject.text_ids, max_tokens=5, ignore_eos=True))
    assert len(after.token_ids) == 5
    assert subject.engine.stats()[metrics.ENGINE_ACTIVE] == 0


@pytest.mark.asyncio
async def test_a_closed_engine_says_that_it_is_dead(subject: Subject) -> None:
    await subject.engine.check_health()
    await subject.engine.close()
    await subject.engine.close()
    with pytest.raises(EngineDead):
        await subject.engine.check_health()
    with pytest.raises(EngineDead):
        await generate(subject.engine, request(subject.text_ids, max_tokens=2))
