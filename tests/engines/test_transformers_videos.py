"""Videos in the portable engine: prompts as Transformers' processor makes them,
tokens as `generate` gives them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL import Image

from dynamo.trtllm.core import DecodedImage, DecodedVideo, MediaShape, Prompt
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.errors import ClientFault, PartFault
from dynamo.trtllm.multimodal_processor import expand
from engines.contract import as_it_arrives, generate, request, split
from engines.families import (
    IMAGE,
    VIDEO,
    make_tiny_engine,
    noise_image,
    noise_video,
    reference_model,
    reference_tokens,
    save_tiny_model,
    saved_processor,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
OUTPUT_TOKENS = 16
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO}
MARK = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
Medium = Image.Image | DecodedVideo

CONVERSATIONS: tuple[tuple[str, tuple[Medium, ...]], ...] = (
    ("w20 w21 {video} w22", (noise_video(1, 4, 84, 56),)),
    ("{video}", (noise_video(2, 2, 56, 56, fps=30.0, every=7),)),
    ("{video} w30 {video} w31", (noise_video(3, 6, 70, 90), noise_video(4, 3, 112, 84, fps=29.97))),
    ("w40 {image} w41 {video} w42", (noise_image(5, 84, 56), noise_video(6, 4, 56, 84, every=1))),
    ("w50 {video} w51 {image} w52", (noise_video(7, 5, 56, 112), noise_image(8, 112, 84))),
    ("{image} {video} {image} {video} w60", (noise_image(9, 56, 56), noise_video(10, 2, 56, 84)) * 2),
    ("w70 {video} w71 w72 w73 w74", (noise_video(11, 12, 56, 56, fps=10.0, every=10),)),
    (
        "w80 {image} {image} w81 {video}",
        (noise_image(12, 56, 84), noise_image(13, 84, 84), noise_video(14, 7, 90, 70)),
    ),
)


class Subject:
    """A started engine of one family, and the same weights in Transformers."""

    def __init__(self, family: str, engine: TransformersEngine, reference: Any, directory: Path) -> None:
        self.family, self.engine, self.reference = family, engine, reference
        self.processor = saved_processor(directory)

    async def prompt(self, text: str, media: Sequence[Medium]) -> Prompt:
        """The prompt that a worker makes of the frontend's ids of `text`."""
        ids = self.processor.tokenizer.encode(text.format(**MARK), add_special_tokens=False)
        decoded = [
            m if isinstance(m, DecodedVideo) else DecodedImage(f"image {at}", m) for at, m in enumerate(media)
        ]
        return expand(ids, PLACEHOLDERS, await self.engine.encode(decoded))

    def expected_ids(self, text: str, media: Sequence[Medium]) -> list[int]:
        """What Transformers' processor makes of the text and all its media."""
        videos = [m for m in media if isinstance(m, DecodedVideo)]
        seen = [
            {"fps": v.fps, "total_num_frames": v.total_frames, "frames_indices": list(v.frame_indices)}
            for v in videos
        ]
        made = self.processor(
            text=[text.format(**MARK)],
            images=[m for m in media if not isinstance(m, DecodedVideo)] or None,
            videos=[v.frames for v in videos],
            video_metadata=seen,
            do_sample_frames=False,
            return_tensors="pt",
        )
        ids: list[int] = made["input_ids"][0].tolist()
        return ids

    def expected(self, ids: Sequence[int], media: Sequence[Medium]) -> list[int]:
        images = [m for m in media if not isinstance(m, DecodedVideo)]
        videos = [m for m in media if isinstance(m, DecodedVideo)]
        return reference_tokens(
            self.reference, self.processor, self.family, ids, images, OUTPUT_TOKENS, videos
        )


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    directory = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, directory, reference_model(directory, request.param)


@pytest_asyncio.fixture
async def subject(saved: tuple[str, Path, Any]) -> AsyncIterator[Subject]:
    family, directory, reference = saved
    engine = make_tiny_engine(directory, family)
    await engine.start()
    yield Subject(family, engine, reference, directory)
    await engine.close()


@pytest.mark.asyncio
async def test_prompts_of_eight_conversations_are_those_of_the_processor(subject: Subject) -> None:
    for text, media in CONVERSATIONS:
        prompt = await subject.prompt(text, media)
        assert list(prompt.token_ids) == subject.expected_ids(text, media), text
        assert len(prompt.media) == len(media)


@pytest.mark.asyncio
async def test_eight_conversations_at_once_get_the_tokens_that_generate_gives_each_alone(
    subject: Subject,
) -> None:
    prompts = [await subject.prompt(text, media) for text, media in CONVERSATIONS]
    asked = [
        request(p.token_ids, media=p.media, request_id=str(i), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    outputs = await asyncio.gather(*(generate(subject.engine, each) for each in asked))
    pairs = zip(prompts, CONVERSATIONS, strict=True)
    expected = [subject.expected(prompt.token_ids, media) for prompt, (_, media) in pairs]
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@pytest.mark.asyncio
async def test_prefill_and_decode_give_what_one_engine_gives_from_embeddings_of_another(
    subject: Subject,
) -> None:
    text, media = CONVERSATIONS[4]
    prompt = await subject.prompt(text, media)
    placed = [dataclasses.replace(p, item=as_it_arrives(p.item)) for p in prompt.media]
    asked = request(prompt.token_ids, media=placed, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    halves = await split(subject.engine, asked)
    assert halves.token_ids == subject.expected(prompt.token_ids, media)
    assert halves.usage == (len(prompt.token_ids), OUTPUT_TOKENS, 0)


@pytest.mark.asyncio
async def test_a_long_prompt_with_videos_in_chunks_gives_what_it_gives_in_one(
    saved: tuple[str, Path, Any],
) -> None:
    family, directory, reference = saved
    engine = make_tiny_engine(directory, family, max_num_tokens=16)
    await engine.start()
    try:
        subject = Subject(family, engine, reference, directory)
        text, media = CONVERSATIONS[2]
        prompt = await subject.prompt(" ".join(f"w{i}" for i in range(90, 130)) + text, media)
        output = await generate(
            engine, request(prompt.token_ids, media=prompt.media, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        )
        assert output.token_ids == subject.expected(prompt.token_ids, media)
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_a_video_takes_the_tokens_that_were_foretold_and_is_the_same_in_any_batch(
    subject: Subject,
) -> None:
    videos = [
        noise_video(20 + i, 2 + i, *size) for i, size in enumerate([(56, 56), (84, 56), (300, 90), (40, 30)])
    ]
    together = await asyncio.gather(
        *(subject.engine.encode([video]) for video in videos),
        subject.engine.encode([DecodedImage("i", noise_image(1, 84, 56))]),
    )
    for video, (encoded,) in zip(videos, together[:-1], strict=True):
        (alone,) = await subject.engine.encode([video])
        shape = MediaShape("video", (len(video.frames), video.frames.shape[2], video.frames.shape[1]))
        foretold = subject.engine.media_tokens(shape, {})
        assert foretold is not None
        rows = encoded.token_ids.count(VIDEO)
        assert rows == encoded.tensors["features"].shape[0]
        if subject.family == "qwen3_vl":
            assert rows < foretold <= len(encoded.token_ids)
        else:
            assert rows == foretold == len(encoded.token_ids)
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(encoded.tensors[name], tensor, rtol=1e-4, atol=1e-5)
    assert together[-1][0].kind == "image"


@pytest.mark.asyncio
@pytest.mark.parametrize("frames", [1, 3])
async def test_frames_that_fill_no_whole_patch_are_filled_with_the_last_one(
    subject: Subject, frames: int
) -> None:
    few = noise_video(30, frames, 56, 56)
    filled = dataclasses.replace(few, frames=np.concatenate([few.frames, few.frames[-1:]]))
    (one,), (two,) = await asyncio.gather(subject.engine.encode([few]), subject.engine.encode([filled]))
    torch.testing.assert_close(one.tensors["features"], two.tensors["features"])
    assert one.extras["video_grid_thw"] == two.extras["video_grid_thw"] == [(frames + 1) // 2, 4, 4]
    assert one.token_ids.count(VIDEO) == two.token_ids.count(VIDEO)


@pytest.mark.asyncio
async def test_the_pace_of_a_clip_is_part_of_its_answer_where_the_model_hears_of_time(
    subject: Subject,
) -> None:
    slow = noise_video(31, 8, 84, 84, fps=4.0, every=4)
    fast = dataclasses.replace(slow, fps=16.0, duration_s=slow.duration_s / 4)
    prompts = [await subject.prompt("w20 {video} w21", [video]) for video in (slow, fast)]
    outputs = [
        await generate(
            subject.engine, request(p.token_ids, media=p.media, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        )
        for p in prompts
    ]
    for prompt, output, video in zip(prompts, outputs, (slow, fast), strict=True):
        assert output.token_ids == subject.expected(prompt.token_ids, [video])
    if subject.family == "qwen2_vl":
        assert outputs[0].token_ids == outputs[1].token_ids
    else:
        assert outputs[0].token_ids != outputs[1].token_ids


@pytest.mark.asyncio
async def test_what_the_model_cannot_take_is_refused_in_words(subject: Subject) -> None:
    with pytest.raises(ClientFault, match="this model cannot take a video of 6000 x 20 pixels"):
        await subject.engine.encode([noise_video(40, 2, 6000, 20)])
    assert subject.engine.media_tokens(MediaShape("video", (2, 6000, 20)), {}) is None
    (encoded,) = await subject.engine.encode([noise_video(41, 2, 56, 56)])
    prompt = expand([20, VIDEO, 21], PLACEHOLDERS, [encoded])
    torn = dataclasses.replace(encoded, tensors={n: t[:-1] for n, t in encoded.tensors.items()})
    placed = [dataclasses.replace(prompt.media[0], item=torn)]
    with pytest.raises(PartFault, match="video 1: its embeddings are not the 4 x 64 that the prompt needs"):
        await generate(subject.engine, request(prompt.token_ids, media=placed, max_tokens=2))


@pytest.mark.asyncio
async def test_a_family_without_videos_does_not_offer_them(tmp_path: Path) -> None:
    engine = make_tiny_engine(tmp_path, "llava")
    info = await engine.start()
    try:
        assert set(info.media) == {"image"}
        with pytest.raises(ClientFault, match="this model takes no video"):
            await engine.encode([noise_video(1, 2, 56, 56)])
    finally:
        await engine.close()
