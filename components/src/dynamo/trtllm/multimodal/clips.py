"""Clips and sounds, read in a process that can be ended (`decoders`);
frames and samples come back in shared memory.

`read_video` and `read_audio` of `video.reading` and `audio.reading` are what runs there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from dynamo.trtllm import metrics
from dynamo.trtllm.config import AudioLimits, VideoLimits
from dynamo.trtllm.core import DecodedAudio, DecodedVideo
from dynamo.trtllm.frame_rules import FrameRule
from dynamo.trtllm.multimodal.decoders import Work, run_apart

_opened = {"video": 0, "audio": 0}


def stats(kind: str) -> metrics.Readings:
    """How many files of `kind` this worker has opened."""
    return {metrics.MEDIA_OPENED.of(kind): _opened[kind]}


async def read_video_apart(data: bytes, rule: FrameRule, limits: VideoLimits) -> DecodedVideo:
    """As `read_video`. Raises what it does, and what `run_apart` does."""
    _opened["video"] += 1
    message = {"kind": "video", "rule": asdict(rule), "limits": asdict(limits)}
    return await run_apart(Work("clips", "video", data, message, limits.decode_timeout_s, _video))


async def read_audio_apart(data: bytes, rate: int, limits: AudioLimits) -> DecodedAudio:
    """As `read_audio`. Raises what it does, and what `run_apart` does."""
    _opened["audio"] += 1
    message = {"kind": "audio", "rate": rate, "limits": asdict(limits)}
    return await run_apart(
        Work("clips", "sound", data, message, limits.decode_timeout_s, partial(_audio, rate=rate))
    )


def _video(answer: Mapping[str, Any], descriptor: int) -> DecodedVideo:
    frames = np.frombuffer(_mapped(descriptor), np.uint8).reshape(answer["shape"])
    return DecodedVideo(
        digest=answer["digest"],
        frames=frames,
        frame_indices=tuple(answer["frame_indices"]),
        fps=answer["fps"],
        total_frames=answer["total_frames"],
        duration_s=answer["duration_s"],
    )


def _audio(answer: Mapping[str, Any], descriptor: int, *, rate: int) -> DecodedAudio:
    samples = np.frombuffer(_mapped(descriptor), np.float32)
    return DecodedAudio(answer["digest"], samples, rate)


def _mapped(descriptor: int) -> mmap.mmap:
    """The memory behind `descriptor`, which lives as long as the array over it.
    Private, so that libraries that want memory which they could write to need no copy.
    """
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
