"""Every family of the portable engine against Transformers' own `generate`,
from a saved directory with a tiny random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import torch
from PIL import Image

from dynamo.trtllm.core import DecodedImage, MediaShape, PlacedMedia
from dynamo.trtllm.engines.port import EngineInfo, EngineRequest
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.multimodal_processor import expand
from engines.contract import Output, generate, request, split
from engines.families import (
    MULTIMODAL,
    TEXT,
    make_tiny_engine,
    noise_image,
    reference_model,
    reference_tokens,
    save_tiny_model,
    saved_processor,
)

OUTPUT_TOKENS = 20
SIZES = [(56, 56), (84, 56), (56, 140), (112, 84), (70, 90)]


@dataclass
class Subject:
    family: str
    engine: TransformersEngine
    info: EngineInfo
    reference: Any
    processor: Any

    @property
    def takes_images(self) -> bool:
        return "image" in self.info.media

    async def prompt(
        self, turns: Sequence[tuple[Sequence[int], Sequence[Image.Image]]]
    ) -> tuple[list[int], list[PlacedMedia]]:
        """Turns of text and images, one text token between two images, expanded as a worker does it."""
        ids, media = [1], []
        for text, images in turns:
            pending = [DecodedImage(f"image {at}", image) for at, image in enumerate(images)]
            for item in await self.engine.encode(pending) if pending else []:
                media.append(PlacedMedia(item, len(ids), len(item.token_ids)))
                ids += [*item.token_ids, 20]
            ids += text
        return ids, media

    def expected(
        self, ids: Sequence[int], images: Sequence[Image.Image], count: int = OUTPUT_TOKENS
    ) -> list[int]:
        return reference_tokens(self.reference, self.processor, self.family, ids, images, count)


@pytest.fixture(scope="module", params=[*MULTIMODAL, *TEXT])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    family = request.param
    directory = save_tiny_model(family, tmp_path_factory.mktemp(family))
    return family, directory, reference_model(directory, family)


@pytest_asyncio.fixture
async def subject(saved: tuple[str, Any, Any]) -> AsyncIterator[Subject]:
    family, directory, reference = saved
    engine = make_tiny_engine(directory, family)
    info = await engine.start()
    processor = saved_processor(directory) if info.media else None
    yield Subject(family, engine, info, reference, processor)
    await engine.close()


def _text(seed: int, length: int) -> list[int]:
    return torch.randint(21, 190, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def _mixed_requests(subject: Subject, count: int) -> tuple[list[EngineRequest], list[list[int]]]:
    """Requests of different length with none to two images of different sizes,
    and what `generate` answers to each."""
    requests, expected = [], []
    for k in range(count):
        images = (
            [noise_image(100 * k + j, *SIZES[(k + j) % len(SIZES)]) for j in range(k % 3)]
            if subject.takes_images
            else []
        )
        ids, media = await subject.prompt([(_text(k, 3 + (5 * k) % 37), images)])
        requests.append(
            request(ids, media=media, request_id=str(k), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        )
        expected.append(subject.expected(ids, images))
    return requests, expected


@pytest.mark.asyncio
async def test_sixteen_requests_at_once_get_the_tokens_that_generate_gives_each_alone(
    subject: Subject,
) -> None:
    requests, expected = await _mixed_requests(subject, 16)
    outputs = await asyncio.gather(*(generate(subject.engine, each) for each in requests))
    assert [o.token_ids for o in outputs] == expected
    assert {o.finish for o in outputs} == {"length"}
    alone = [await generate(subject.engine, each) for each in requests[:3]]
    assert [o.token_ids for o in alone] == expected[:3]


@pytest.mark.asyncio
async def test_end_of_sequence_ends_the_output_where_generate_ends(subject: Subject) -> None:
    ids, _ = await subject.prompt([(_text(50, 9), [])])
    free = subject.expected(ids, [])
    eos = free[len(free) // 2]
    subject.reference.generation_config.eos_token_id = eos
    ended = subject.expected(ids, [])
    subject.reference.generation_config.eos_token_id = None
    output = await generate(
        subject.engine, request(ids, max_tokens=OUTPUT_TOKENS, eos_token_ids=frozenset({eos}))
    )
    assert [*output.token_ids, eos] == ended
    assert output.finish == "eos"
    assert output.usage is not None
    assert output.usage == (len(ids), len(ended) - 1, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.3}]
)
async def test_prefill_and_decode_give_tokens_logprobs_and_usage_of_generate(
    subject: Subject, sampling: dict[str, Any]
) -> None:
    images = [noise_image(7, 84, 56)] if subject.takes_images else []
    ids, media = await subject.prompt([(_text(60, 6), images), (_text(61, 4), [])])
    asked = request(ids, media=media, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=3, **sampling)
    whole, halves = await generate(subject.engine, asked), await split(subject.engine, asked)
    _require_same(whole, halves)


def _require_same(whole: Output, halves: Output) -> None:
    assert halves.token_ids == whole.token_ids
    assert (halves.finish, halves.usage) == (whole.finish, whole.usage)
    for ours, theirs in zip(halves.logprobs, whole.logprobs, strict=True):
        assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)
        assert [t.token_id for t in ours.top] == [t.token_id for t in theirs.top]


@pytest.mark.asyncio
async def test_a_long_prompt_in_chunks_gives_what_it_gives_in_one(saved: tuple[str, Any, Any]) -> None:
    family, directory, reference = saved
    engine = make_tiny_engine(directory, family, max_num_tokens=16)
    info = await engine.start()
    try:
        processor = saved_processor(directory) if info.media else None
        subject = Subject(family, engine, info, reference, processor)
        images = [noise_image(9, 112, 84), noise_image(10, 56, 56)] if subject.takes_images else []
        ids, media = await subject.prompt([(_text(70, 21), images), (_text(71, 30), [])])
        other, _ = await subject.prompt([(_text(72, 5), [])])
        outputs = await asyncio.gather(
            generate(engine, request(other, max_tokens=OUTPUT_TOKENS, ignore_eos=True)),
            generate(engine, request(ids, media=media, max_tokens=OUTPUT_TOKENS, ignore_eos=True)),
        )
        assert outputs[0].token_ids == subject.expected(other, [])
        assert outputs[1].token_ids == subject.expected(ids, images)
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_images_of_earlier_turns_are_seen_where_they_stand(subject: Subject) -> None:
    if not subject.takes_images:
        assert subject.info.placeholder_id("image") is None
        return
    first, second = noise_image(20, 56, 112), noise_image(21, 112, 56)
    ids, media = await subject.prompt([(_text(80, 5), [first]), (_text(81, 8), []), (_text(82, 3), [second])])
    output = await generate(
        subject.engine, request(ids, media=media, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    )
    assert output.token_ids == subject.expected(ids, [first, second])


CONVERSATIONS: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("w20 w21 {image} w22", ((84, 56),)),
    ("{image}", ((56, 56),)),
    ("{image} w30 w31", ((56, 140),)),
    ("w32 {image} w33 {image} w34", ((70, 90), (112, 84))),
    ("{image} {image} w40", ((56, 56), (84, 56))),
    ("w41 w42 {image} w43 w44 w45 {image} w46 {image}", ((56, 84), (140, 56), (56, 56))),
    ("w50 w51 w52 w53 w54 w55 w56 w57 {image}", ((112, 112),)),
    ("{image} w60 {image} w61 {image} w62 {image}", ((56, 56), (84, 84), (56, 112), (90, 70))),
)
MARKS = {"gemma3": "<|vision_start|>", "mistral3": "<|image_pad|>", "llava": "<|image_pad|>"}
"""What the chat template writes for an image, where that is not Qwen's."""


@pytest.mark.asyncio
async def test_prompts_of_eight_conversations_are_those_of_the_processor(subject: Subject) -> None:
    if not subject.takes_images:
        assert subject.info.placeholder_id("image") is None
        return
    mark = MARKS.get(subject.family.removesuffix("_next"), "<|vision_start|><|image_pad|><|vision_end|>")
    placeholders = {"image": subject.info.media["image"].placeholder_id}
    for at, (turn, sizes) in enumerate(CONVERSATIONS):
        text, images = turn.format(image=mark), [noise_image(at, *size) for size in sizes]
        theirs = subject.processor(text=[text], images=[images], return_tensors="pt")["input_ids"][0].tolist()
        ids = subject.processor.tokenizer.encode(text, add_special_tokens=False)
        items = await subject.engine.encode([DecodedImage(str(n), each) for n, each in enumerate(images)])
        assert list(expand(ids, placeholders, items).token_ids) == theirs, turn


@pytest.mark.asyncio
async def test_an_image_takes_the_tokens_that_were_foretold_and_is_the_same_in_any_batch(
    subject: Subject,
) -> None:
    if not subject.takes_images:
        assert "image" not in subject.info.media
        return
    images = [DecodedImage(str(i), noise_image(30 + i, *size)) for i, size in enumerate(SIZES)]
    together = await asyncio.gather(*(subject.engine.encode([image]) for image in images))
    for image, (encoded,) in zip(images, together, strict=True):
        (alone,) = await subject.engine.encode([image])
        assert len(encoded.token_ids) == subject.engine.media_tokens(
            MediaShape("image", image.image.size), {}
        )
        assert (
            encoded.token_ids.count(subject.info.extras["image_token_id"])
            == encoded.tensors["features"].shape[0]
        )
        assert encoded.digest == image.digest
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(encoded.tensors[name], tensor, rtol=1e-4, atol=1e-5)
