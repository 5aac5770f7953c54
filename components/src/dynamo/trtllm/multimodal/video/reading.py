"""From the bytes of a clip to the frames that a model should see,
with every limit held before memory is spent."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.trtllm.config import VideoLimits
from dynamo.trtllm.core import DecodedVideo
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.frame_rules import FrameRule
from dynamo.trtllm.multimodal.av_files import damage_named, has_cover_art_only, opened
from dynamo.trtllm.multimodal.video.container import demuxer_of, is_cut_short
from dynamo.trtllm.multimodal.video.frames import Allocate, ChosenFrames, check_frame
from dynamo.trtllm.multimodal.video.timeline import Timeline, rate_of, read_timeline

BROKEN = "the video is damaged or incomplete"
CUT_SHORT = "the video is cut short: the file ends before it says it does"
NOTHING = "the video holds no frame that can be decoded"
CODECS = frozenset(
    {
        *("h264", "hevc", "mpeg4", "h263", "mpeg2video", "mjpeg", "prores", "png", "qtrle", "rawvideo"),
        *("vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d"),
    }
)
"""Decoders of FFmpeg that may see a client's bytes."""


def digest_of(data: bytes, rule: FrameRule) -> str:
    """The name of a clip and the choice of its frames: SHA-256, in hexadecimal."""
    content = hashlib.sha256(data).digest()
    return hashlib.sha256(content + json.dumps(asdict(rule), sort_keys=True).encode()).hexdigest()


def read_video(
    data: bytes, rule: FrameRule, limits: VideoLimits, allocate: Allocate | None = None
) -> DecodedVideo:
    """The frames that `rule` chooses of the clip `data`.

    Raises `ClientFault`, and `LimitFault` for what exceeds `limits`.
    `allocate` gives the memory for the frames.
    """
    demuxer = demuxer_of(data)
    cut = is_cut_short(data, demuxer)
    with damage_named(CUT_SHORT if cut else BROKEN):
        with opened(data, demuxer, CODECS) as container:
            stream = _video_stream(container, cut)
            _check_declared(container, stream, limits)
            timeline = read_timeline(container, stream, CUT_SHORT if cut else NOTHING)
            total = _total(stream, timeline, cut)
            fps = rate_of(stream, timeline)
            duration_s = max(total / fps, float(timeline.span() * stream.time_base))
            _check_duration(duration_s, limits)
            indices = rule.choose(total, fps)
            _check_count(len(indices), limits)
            codec = stream.codec_context
            check_frame(codec.width, codec.height, len(indices), limits)
        known = [index for index in indices if index < len(timeline.shown)]
        with opened(data, demuxer, CODECS) as container:
            stream = _video_stream(container, cut)
            chosen = ChosenFrames(stream, timeline, known, limits, allocate or _in_memory)
            frames, missing = chosen.decode(container, stream)
    lost = [known[place] for place in missing] + list(indices[len(known) :])
    if lost:
        why = "the file is cut short" if cut else "the file is damaged"
        raise ClientFault(f"frame {lost[0] + 1} of {total} cannot be decoded: {why}")
    frames.flags.writeable = False
    return DecodedVideo(digest_of(data, rule), frames, indices, fps, total, total / fps)


def _video_stream(container: Any, cut: bool) -> Any:
    for stream in container.streams.video:
        if has_cover_art_only(stream):
            continue
        codec = stream.codec_context
        if codec is None or codec.name not in CODECS:
            raise ClientFault(
                "the video's codec is not one that this worker decodes; H.264, H.265, VP9 and AV1 are"
            )
        return stream
    if container.streams.audio:
        raise ClientFault("the file holds sound and no video; send it as audio_url")
    raise ClientFault(CUT_SHORT if cut else "the file holds no video")


def _check_declared(container: Any, stream: Any, limits: VideoLimits) -> None:
    """Hold what the file says of its length against the limits, before its packets are read."""
    if container.duration is not None and stream.frames:
        _check_duration(container.duration / 1e6, limits)


def _check_duration(duration_s: float, limits: VideoLimits) -> None:
    if duration_s > limits.max_duration_s:
        raise LimitFault(
            f"the video takes {duration_s:.1f} s; this worker takes at most {limits.max_duration_s:g} s"
        )


def _check_count(frames: int, limits: VideoLimits) -> None:
    if frames > limits.max_frames:
        raise LimitFault(
            f"{frames} frames would be shown to the model; this worker takes at most {limits.max_frames}: "
            f"ask for fewer by fps, num_frames or max_frames"
        )


def _total(stream: Any, timeline: Timeline, cut: bool) -> int:
    """Frames of the clip: what a file that was cut short declares, else what it holds."""
    counted = len(timeline.shown)
    if not cut and timeline.is_whole:
        return counted
    if not stream.frames:
        raise ClientFault(CUT_SHORT if cut else BROKEN)
    return max(int(stream.frames), counted)


def _in_memory(shape: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    return np.empty(shape, np.uint8)
