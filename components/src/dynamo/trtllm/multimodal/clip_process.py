"""What `decoder_process` does for clips and sounds: it reads them into memory that the worker maps.

A job is `{"kind": "video", "rule": ..., "limits": ...}` or `{"kind": "audio", "rate": ..., "limits":
...}`, with the fields of `FrameRule`, `VideoLimits` and `AudioLimits`.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.trtllm.config import AudioLimits, VideoLimits
from dynamo.trtllm.errors import LimitFault
from dynamo.trtllm.frame_rules import FrameRule, Spread
from dynamo.trtllm.multimodal.audio.reading import read_audio
from dynamo.trtllm.multimodal.video.reading import read_video

_NICENESS = 10
"""Clips take seconds of a processor: where there are few, running requests go first (`setpriority(2)`)."""
_OWN_BYTES = 2 << 30
"""Memory for decoding one clip or sound beside its frames or samples; a codec's own frames are most of it."""


def serve(job: Mapping[str, Any], data: bytes) -> tuple[Mapping[str, object], int]:
    """The answer to `job` and a descriptor of the frames or samples, which the caller closes."""
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    if job["kind"] == "video":
        return _serve_video(job, data)
    return _serve_audio(job, data)


def _serve_video(job: Mapping[str, Any], data: bytes) -> tuple[Mapping[str, object], int]:
    limits = VideoLimits(**job["limits"])
    rule = FrameRule(**{**job["rule"], "spread": Spread(job["rule"]["spread"])})
    shared: list[int] = []

    def allocate(shape: tuple[int, int, int, int]) -> NDArray[np.uint8]:
        descriptor, memory = _shared_memory(int(np.prod(shape)))
        shared.append(descriptor)
        return np.frombuffer(memory, np.uint8).reshape(shape)

    try:
        with _memory_bounded(_OWN_BYTES + 3 * limits.max_pixels, "video"):
            video = read_video(data, rule, limits, allocate)
    except BaseException:
        for descriptor in shared:
            os.close(descriptor)
        raise
    answer = {
        "digest": video.digest,
        "shape": video.frames.shape,
        "frame_indices": video.frame_indices,
        "fps": video.fps,
        "total_frames": video.total_frames,
        "duration_s": video.duration_s,
    }
    return answer, shared[0]


def _serve_audio(job: Mapping[str, Any], data: bytes) -> tuple[Mapping[str, object], int]:
    limits = AudioLimits(**job["limits"])
    samples_bytes = int(2 * 4 * limits.max_duration_s * job["rate"])
    with _memory_bounded(_OWN_BYTES + samples_bytes, "sound"):
        audio = read_audio(data, job["rate"], limits)
    descriptor, memory = _shared_memory(audio.samples.nbytes)
    memory[:] = audio.samples.tobytes()
    return {"digest": audio.digest, "samples": len(audio.samples)}, descriptor


def _shared_memory(nbytes: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create("clip", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor, mmap.mmap(descriptor, nbytes)


@contextmanager
def _memory_bounded(nbytes: int, noun: str) -> Iterator[None]:
    """Let this process take at most `nbytes` more than it has;
    a file that needs more is refused with `LimitFault`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    bound = now + nbytes if hard == resource.RLIM_INFINITY else min(now + nbytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    except MemoryError as error:
        message = f"decoding the {noun} takes more memory than this worker gives to one"
        raise LimitFault(message) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
