"""Videos on the TensorRT-LLM adapter, over the double of each recorded release: which are served and how, and
what a client reads where none are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.trtllm.config import Role
from dynamo.trtllm.core import DecodedVideo, PlacedMedia, Prompt, Sampling
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.engines.tensorrt_llm.record import MODELS, RECORD, SOURCES
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.frame_rules import Spread
from dynamo.trtllm.multimodal_processor import expand
from engines.contract import generate, split
from engines.families import VIDEO, make_tiny_engine, noise_video, save_tiny_model, saved_processor
from engines.tensorrt_llm_subject import (
    ALL_RELEASES,
    IMAGE_ID,
    QWEN3,
    QWEN25,
    TRANSCEIVER,
    engine_config,
    installed,
    instances,
    leaked_handles,
    model_directory,
    picture,
    started,
)

VIDEO_ID = 298
LATER = ALL_RELEASES[1:]
SERVED = {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}


def config_of(path: Path, architecture: str = QWEN3, role: Role = Role.AGGREGATED, **args: Any) -> Any:
    model = model_directory(path / architecture, architecture, video_token_id=VIDEO_ID)
    return engine_config(model, role, images=True, args=args)


def clip(
    frames: int = 6,
    *,
    shade: int = 40,
    fps: float = 10.0,
    step: int = 5,
    digest: str = "clip",
    **options: Any,
) -> DecodedVideo:
    """Chosen frames of 84 by 56 pixels, which differ; each is six rows."""
    pixels = np.full((frames, 56, 84, 3), shade, np.uint8)
    pixels[:, 0, 0, 0] = np.arange(frames)
    indices = tuple(range(0, frames * step, step))
    total = frames * step
    return DecodedVideo(digest, pixels, indices, fps, total, total / fps, options=options)


def about(*items: Any, text: bool = True, hashes: tuple[str, ...] = ()) -> EngineRequest:
    """A question with media, as the multimodal processor makes it of what Qwen's template writes."""
    ids, words, placed = [301], ["301"], []
    for item in items:
        token, name = (VIDEO_ID, "video") if item.kind == "video" else (IMAGE_ID, "image")
        placed.append(PlacedMedia(item, len(ids) + 1, 1))
        ids += [4, token, 5, 305]
        words += [f"<|vision_start|><|{name}_pad|><|vision_end|>", "305"]
    prompt = Prompt((*ids, 306), tuple(placed), " ".join([*words, "306"]) if text else None)
    return EngineRequest(request_id="v", prompt=prompt, sampling=Sampling(**OPTIONS), media_hashes=hashes)


# What is served


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_each_release_says_of_every_model_with_videos_whether_it_serves_them_and_from_what_source(
    release: str,
) -> None:
    record = RECORD[release]
    facts = {
        name: record.video_facts(name, model) for name, model in MODELS.items() if "V" in model.modalities
    }
    assert {name for name, each in facts.items() if each.served} == (SERVED if release in LATER else set())
    assert {key for each in facts.values() for key in each.source.split(", ")} <= set(SOURCES)
    assert all(each.why_not_apart for each in facts.values())


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", [QWEN25, "Qwen2VLForConditionalGeneration"])
@pytest.mark.parametrize("release", ALL_RELEASES)
async def test_a_model_whose_videos_are_not_served_names_itself_the_release_and_the_reason(
    release: str, architecture: str, tmp_path: Path
) -> None:
    with installed(release):
        async with started(config_of(tmp_path, architecture)) as (engine, info):
            assert set(info.media) == {"image"}
            why = info.refusals["video"]
            assert why.startswith(f"videos of {architecture} are not served with TensorRT-LLM {release}: ")
            with pytest.raises(ClientFault, match="this model takes no videos"):
                await generate(engine, about(clip()))


@pytest.mark.asyncio
async def test_an_encode_worker_names_itself_and_says_why_it_encodes_no_videos(tmp_path: Path) -> None:
    with installed("1.3.0rc29"):
        async with started(config_of(tmp_path, QWEN3, Role.ENCODE)) as (_, info):
            assert set(info.media) == {"image"}
            assert info.refusals["video"] == (
                f"videos of {QWEN3} are not served with TensorRT-LLM 1.3.0rc29 on an encode worker: it "
                "writes the frames of a video that was encoded elsewhere without their times"
            )


@pytest.mark.asyncio
async def test_text_models_and_text_workers_say_nothing_of_videos_that_a_model_sees(tmp_path: Path) -> None:
    with installed("1.3.0rc29"):
        directory = model_directory(tmp_path / "text", QWEN3, video_token_id=VIDEO_ID)
        async with started(engine_config(directory)) as (_, info):
            assert (dict(info.media), dict(info.refusals)) == ({}, {})


# How


@pytest.mark.asyncio
@pytest.mark.parametrize("release", LATER)
async def test_chosen_frames_go_in_once_with_their_times_and_the_word_that_they_are_chosen(
    release: str, tmp_path: Path
) -> None:
    with installed(release):
        async with started(config_of(tmp_path)) as (engine, info):
            video = info.media["video"]
            assert (video.placeholder_id, video.encodes, video.takes_encoded) == (VIDEO_ID, False, False)
            assert (video.rule.spread, video.rule.fps) == (Spread.TO_BOTH_ENDS, 2.0)
            assert set(video.options) == {"fps", "num_frames", "min_frames", "max_frames"}
            output = await generate(engine, about(clip(6)))
            call = instances()[-1].prepared[-1]
            (given,) = call["multi_modal_data"]["video"]
            assert len(given.frames) == 6
            assert [frame.getpixel((0, 0))[0] for frame in given.frames] == list(range(6))
            assert given.metadata == {
                "fps": 10.0,
                "frames_indices": [0, 5, 10, 15, 20, 25],
                "total_num_frames": 30,
                "duration": 3.0,
            }
            assert call["mm_processor_kwargs"] == {"do_sample_frames": False}
            assert output.usage is not None
            # Three pairs of frames: two words of time, two marks and six rows each.
            assert output.usage.prompt_tokens == 5 + 3 * (2 + 2 + 6)


@pytest.mark.asyncio
@pytest.mark.parametrize("release", LATER)
async def test_answers_depend_on_every_frame_on_its_time_and_on_the_order_of_clips(
    release: str, tmp_path: Path
) -> None:
    with installed(release):
        async with started(config_of(tmp_path)) as (engine, _):
            asked = [
                [clip()],
                [clip(4)],
                [clip(shade=41)],
                [clip(fps=20.0)],
                [clip(step=7)],
                [clip(), clip(shade=90)],
                [clip(shade=90), clip()],
            ]
            outputs = [await generate(engine, about(*items)) for items in asked]
            assert len({tuple(output.token_ids) for output in outputs}) == len(asked)


@pytest.mark.asyncio
@pytest.mark.parametrize(("frames", "shown"), [(1, [0, 0]), (2, [0, 5]), (3, [0, 5, 10])])
async def test_a_clip_of_one_frame_shows_it_twice_and_an_odd_one_is_left_to_the_processor(
    frames: int, shown: list[int], tmp_path: Path
) -> None:
    with installed("1.3.0rc29"):
        async with started(config_of(tmp_path)) as (engine, _):
            await generate(engine, about(clip(frames)))
            (given,) = instances()[-1].prepared[-1]["multi_modal_data"]["video"]
            assert len(given.frames) == len(shown)
            assert given.metadata["frames_indices"] == shown


@pytest.mark.asyncio
@pytest.mark.parametrize("release", LATER)
async def test_videos_over_prefill_and_decode_give_what_one_engine_gives(
    release: str, tmp_path: Path
) -> None:
    both = {**TRANSCEIVER, "disable_overlap_scheduler": True}
    with installed(release):
        async with started(config_of(tmp_path, **both)) as (engine, _):
            asked = about(clip(), clip(3, shade=90))
            whole, halves = await generate(engine, asked), await split(engine, asked)
            assert halves.token_ids == whole.token_ids
            assert halves.usage == whole.usage
            assert leaked_handles() == []


@pytest.mark.asyncio
async def test_images_and_videos_in_one_request_are_refused_in_words(tmp_path: Path) -> None:
    with installed("1.3.0rc29"):
        async with started(config_of(tmp_path)) as (engine, _):
            with pytest.raises(ClientFault, match="images and videos cannot be mixed in one request"):
                await generate(engine, about(picture(), clip()))


@pytest.mark.asyncio
async def test_a_video_without_the_rendered_prompt_is_refused(tmp_path: Path) -> None:
    with installed("1.3.0rc29"):
        async with started(config_of(tmp_path)) as (engine, _):
            with pytest.raises(ClientFault, match="videos and embeddings need the rendered prompt"):
                await generate(engine, about(clip(), text=False))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "hashes", "names"),
    [
        ({}, (), ["clip"]),
        ({}, ("a" * 16,), ["a" * 16]),
        ({"fps": 1.0}, ("a" * 16,), ["clip"]),
        ({}, ("a" * 16, "b" * 16), ["clip"]),
    ],
)
async def test_the_cache_knows_a_video_by_the_frontends_hash_unless_the_request_chooses_frames(
    options: dict[str, Any], hashes: tuple[str, ...], names: list[str], tmp_path: Path
) -> None:
    with installed("1.3.0rc29"):
        async with started(config_of(tmp_path)) as (engine, _):
            await generate(engine, about(replace(clip(), options=options), hashes=hashes))
            assert instances()[-1].prepared[-1]["multi_modal_uuids"] == {"video": names}


# What Transformers' processor, which the library calls, makes of it


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "video", [noise_video(1, 6, 84, 56, fps=29.97), noise_video(2, 3, 56, 84), noise_video(3, 1, 84, 84)]
)
async def test_the_processor_makes_of_what_goes_in_the_prompt_that_the_portable_engine_has(
    video: DecodedVideo, tmp_path: Path
) -> None:
    with installed("1.3.0rc29"):
        async with started(config_of(tmp_path)) as (engine, _):
            await generate(engine, about(video))
            given = instances()[-1].prepared[-1]
    (data,) = given["multi_modal_data"]["video"]
    directory = save_tiny_model("qwen3_vl", tmp_path / "tiny")
    processor, text = saved_processor(directory), "w20 <|vision_start|><|video_pad|><|vision_end|> w21"
    made = processor(  # as `_preprocess` of modeling_qwen3vl.py calls it
        text=[text],
        images=None,
        videos=[data.frames],
        padding=True,
        do_rescale=True,
        return_tensors="pt",
        video_metadata=[{**data.metadata, "total_num_frames": len(data.frames)}],
        **given["mm_processor_kwargs"],
    )
    portable = make_tiny_engine(directory, "qwen3_vl")
    await portable.start()
    try:
        encoded = await portable.encode([video])
    finally:
        await portable.close()
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    assert made["input_ids"][0].tolist() == list(expand(ids, {"video": VIDEO}, encoded).token_ids)
    assert made["video_grid_thw"][0].tolist() == encoded[0].extras["video_grid_thw"]
