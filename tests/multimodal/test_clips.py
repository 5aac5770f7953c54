"""Clips and sounds are read in a process of their own: the same frames and samples, the same words, and an
end to what takes too long or is asked for no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from dynamo.trtllm import metrics
from dynamo.trtllm.config import AudioLimits, VideoLimits
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.frame_rules import QWEN2_VL
from dynamo.trtllm.multimodal import decoders
from dynamo.trtllm.multimodal.audio.reading import read_audio
from dynamo.trtllm.multimodal.clips import read_audio_apart, read_video_apart
from dynamo.trtllm.multimodal.video.reading import read_video
from fakes import eventually
from media.clips import clip, number_of, numbered
from media.sounds import encoded, tone, wav

EVERY = replace(QWEN2_VL, fps=None)
SLOW = {"size": (640, 480), "options": {"preset": "ultrafast", "bf": "0"}}


@pytest.mark.asyncio
async def test_a_process_apart_reads_what_is_read_here() -> None:
    data, rule = clip(12), replace(EVERY, num_frames=4)
    here, apart = read_video(data, rule, VideoLimits()), await read_video_apart(data, rule, VideoLimits())
    assert np.array_equal(here.frames, apart.frames)
    assert replace(here, frames=apart.frames) == apart
    sound = encoded(tone(0.5, rate=48000), container="flac", codec="flac")
    near, far = read_audio(sound, 16000, AudioLimits()), await read_audio_apart(sound, 16000, AudioLimits())
    assert np.array_equal(near.samples, far.samples)
    assert (near.digest, near.rate) == (far.digest, far.rate)


REFUSED: list[tuple[Callable[[], Awaitable[Any]], type[ClientFault], str]] = [
    (partial(read_video_apart, b"", EVERY, VideoLimits()), ClientFault, "the video is empty"),
    (
        partial(read_video_apart, clip(8), EVERY, VideoLimits(max_duration_s=0.1)),
        LimitFault,
        "the video takes 0.3 s; this worker takes at most 0.1 s",
    ),
    (partial(read_audio_apart, b"", 16000, AudioLimits()), ClientFault, "the sound is empty"),
    (
        partial(read_audio_apart, wav(tone(2.0)), 16000, AudioLimits(max_duration_s=1.0)),
        LimitFault,
        "the sound takes 2.0 s; this worker takes at most 1 s",
    ),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("read", "kind", "words"), REFUSED, ids=["no clip", "long clip", "no sound", "long sound"]
)
async def test_a_refusal_comes_through_in_its_words(
    read: Callable[[], Awaitable[Any]], kind: type[ClientFault], words: str
) -> None:
    with pytest.raises(ClientFault) as caught:
        await read()
    assert (type(caught.value), caught.value.message) == (kind, words)


@pytest.mark.asyncio
async def test_a_clip_of_as_many_pixels_as_may_be_shown_is_read() -> None:
    limits, size = VideoLimits(), (1920, 1216)
    assert limits.max_pixels * 0.99 < size[0] * size[1] * limits.max_frames <= limits.max_pixels
    shape = numbered(5, size)
    options = {"preset": "ultrafast", "bf": "0"}
    data = clip(limits.max_frames, size=size, draw=lambda number: shape, options=options)
    video = await read_video_apart(data, EVERY, limits)
    assert {number_of(frame) for frame in video.frames} == {5}
    assert video.frames.shape == (limits.max_frames, size[1], size[0], 3)


@pytest.mark.asyncio
async def test_a_clip_that_takes_too_long_is_refused_and_the_next_one_is_read() -> None:
    limits = VideoLimits(decode_timeout_s=0.02, max_frames=1000)
    with pytest.raises(LimitFault, match=r"takes? (too long|longer|more)"):
        await read_video_apart(clip(120, **SLOW), EVERY, limits)
    assert (await read_video_apart(clip(4), EVERY, VideoLimits())).frames.shape[0] == 4


@pytest.mark.asyncio
async def test_a_caller_that_leaves_ends_the_reading() -> None:
    limits = VideoLimits(max_frames=1000, max_pixels=1 << 40)
    reading = asyncio.create_task(read_video_apart(clip(240, **SLOW), EVERY, limits))
    await eventually(lambda: decoders.stats()[metrics.MEDIA_DECODING.of("clips")] > 0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually(lambda: decoders.stats()[metrics.MEDIA_DECODING.of("clips")] == 0)
    assert (await read_video_apart(clip(4), EVERY, VideoLimits())).frames.shape[0] == 4
