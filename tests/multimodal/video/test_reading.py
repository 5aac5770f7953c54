"""Odd and broken clips: the right frames, or a refusal in words. Every frame carries its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dynamo.trtllm.config import VideoLimits
from dynamo.trtllm.core import DecodedVideo
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.frame_rules import QWEN2_VL, FrameRule
from dynamo.trtllm.multimodal.video.reading import read_video
from media.clips import (
    clip,
    growing,
    is_upright,
    number_of,
    numbered,
    sound_only,
    trimmed,
    turned,
    without_beginning,
)

EVERY = replace(QWEN2_VL, fps=None)
LIMITS = VideoLimits()
WEBM: dict[str, Any] = {
    "container": "webm",
    "codec": "libvpx-vp9",
    "options": {"deadline": "realtime", "cpu-used": "8"},
}


def read(data: bytes, rule: FrameRule = EVERY, **limits: Any) -> DecodedVideo:
    return read_video(data, rule, replace(LIMITS, **limits))


def numbers(video: DecodedVideo) -> list[int]:
    return [number_of(frame) for frame in video.frames]


def refusal(data: bytes, rule: FrameRule = EVERY, **limits: Any) -> str:
    with pytest.raises(ClientFault) as caught:
        read(data, rule, **limits)
    return caught.value.message


# Files that are read.


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"options": {"g": "10", "bf": "3", "preset": "ultrafast"}},
        {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": "log-level=none"}},
        {"codec": "mpeg4"},
        {"container": "mov"},
        {"container": "mov", "codec": "qtrle", "pixels": "rgb24"},
        {"container": "mov", "codec": "prores", "pixels": "yuv422p10le"},
        {"muxing": {"movflags": "faststart"}},
        {"muxing": {"movflags": "frag_keyframe+empty_moov"}, "options": {"g": "10", "preset": "ultrafast"}},
        WEBM,
        {**WEBM, "codec": "libvpx"},
        {**WEBM, "codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "lp=1"}},
        {"container": "matroska"},
        {"sound_s": 1.0},
        {**WEBM, "sound_s": 1.0},
        {"size": (65, 49), "pixels": "yuv444p"},
        {"rate": 240},
    ],
    ids=str,
)
def test_every_frame_is_read_once_and_in_order(made: dict[str, Any]) -> None:
    made.setdefault("rate", 30)
    video = read(clip(30, **made))
    assert numbers(video) == list(range(30))
    assert all(map(is_upright, video.frames))
    width, height = made.get("size", (64, 48))
    assert video.frames.shape == (30, height, width, 3)
    assert (video.total_frames, video.frame_indices) == (30, tuple(range(30)))
    assert video.fps == pytest.approx(made["rate"], rel=0.02)
    assert not video.frames.flags.writeable


def test_only_the_chosen_frames_are_given_and_their_times_are_those_of_the_clip() -> None:
    video = read(clip(90), replace(EVERY, num_frames=6))
    assert numbers(video) == [0, 15, 30, 45, 60, 75]
    assert video.timestamps_s == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert (video.total_frames, video.duration_s) == (90, pytest.approx(3.0))


@pytest.mark.parametrize("container", [{}, WEBM], ids=["mp4", "webm"])
def test_a_variable_rate_counts_frames_and_not_seconds(container: dict[str, Any]) -> None:
    """Ten frames in a third of a second, then three a second: all are there, and the rate is their mean."""
    made = container or {"options": {"preset": "ultrafast", "bf": "0"}}
    data = clip(20, when=lambda number: number if number < 10 else 10 + (number - 10) * 10, **made)
    video = read(data)
    assert numbers(video) == list(range(20))
    assert video.fps == pytest.approx(20 / (100 / 30), rel=0.1)


@pytest.mark.parametrize(
    ("matrix", "undo"),
    [
        ((1, 0, 0, 1), lambda shown: shown),
        ((0, 1, -1, 0), lambda shown: np.rot90(shown, 1)),
        ((-1, 0, 0, -1), lambda shown: np.rot90(shown, 2)),
        ((0, -1, 1, 0), lambda shown: np.rot90(shown, 3)),
        ((-1, 0, 0, 1), lambda shown: shown[:, ::-1]),
        ((1, 0, 0, -1), lambda shown: shown[::-1]),
    ],
    ids=["upright", "quarter", "half", "three quarters", "mirrored", "upside down mirrored"],
)
def test_a_clip_is_turned_as_its_container_says(
    matrix: tuple[int, int, int, int], undo: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
) -> None:
    """What is shown, turned back, is what was stored."""
    video = read(turned(clip(8), matrix))
    assert video.frames.shape[1:3] == ((64, 48) if matrix[1] else (48, 64))
    stored = [undo(frame) for frame in video.frames]
    assert [number_of(frame) for frame in stored] == list(range(8))
    assert all(map(is_upright, stored))


def test_a_clip_turned_by_something_else_than_quarters_is_refused() -> None:
    assert (
        refusal(turned(clip(8), (1, 1, -1, 1))) == "the video is turned by something else than quarter turns"
    )


@pytest.mark.parametrize("live", [{"live": "1"}, {"cluster_time_limit": "100"}], ids=str)
def test_a_recording_without_a_duration_is_counted(live: dict[str, str]) -> None:
    video = read(clip(30, **{**WEBM, "muxing": live}))
    assert numbers(video) == list(range(30))
    assert video.fps == pytest.approx(30, rel=0.05)


def test_frames_that_a_cut_left_without_their_keyframe_are_left_out() -> None:
    """Open groups of images: frames shown before the first keyframe are stored behind it."""
    whole = clip(
        40, options={"g": "10", "bf": "3", "preset": "ultrafast", "x264-params": "open-gop=1:scenecut=0"}
    )
    video = read(without_beginning(whole, 1))
    found = numbers(video)
    assert found == list(range(found[0], 40))
    assert found[0] in range(8, 12)


def test_an_edit_list_that_begins_later_leaves_the_frames_before_it_out() -> None:
    found = numbers(read(trimmed(clip(30, options={"preset": "ultrafast", "bf": "0"}), 512 * 5)))
    assert found == list(range(5, 30))


def test_transparent_pixels_are_seen_over_white() -> None:
    def draw(number: int) -> NDArray[np.uint8]:
        alpha = np.zeros((48, 64, 1), np.uint8)
        alpha[24:] = 255
        return np.concatenate([numbered(number), alpha], axis=2)

    for made in ({"container": "mov", "codec": "qtrle", "pixels": "argb"}, {**WEBM, "pixels": "yuva420p"}):
        video = read(clip(8, draw=draw, **made))
        assert (video.frames[:, :20] > 235).all()
        assert (video.frames[:, 30:, :, 0] > 150).all()
        assert (video.frames[:, 30:, :, 1] < 60).all()


def test_frames_that_grow_on_the_way_are_brought_to_the_size_of_the_first() -> None:
    video = read(growing(10))
    assert video.frames.shape == (20, 48, 64, 3)
    assert numbers(video) == [*range(10), *range(10)]


def test_one_frame_is_a_clip() -> None:
    assert numbers(read(clip(1))) == [0]
    assert numbers(read(clip(1, **WEBM))) == [0]


def test_the_same_clip_has_another_name_with_another_choice() -> None:
    data = clip(8)
    first, second = read(data), read(data, replace(EVERY, num_frames=2))
    assert first.digest != second.digest
    assert first.digest == read(data).digest
    assert first.digest != read(clip(9)).digest


# Files that are none, or not whole.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the video is empty"),
        (b"hello, this is a text", "the type text is not accepted as a video; accepted are MP4, MOV, WebM"),
        (bytes(range(128, 192)), "not a video of a known type; accepted are MP4, MOV, WebM"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "this is an image (PNG), not a video; send it as image_url"),
        (b"GIF89a" + bytes(40), "this is an image (GIF), not a video; send it as image_url"),
        (b"\x00\x00\x00\x18ftypisom" + bytes(12), "the video is damaged or incomplete"),
        (b"\x1aE\xdf\xa3" + bytes(20), "the video is damaged or incomplete"),
    ],
    ids=["empty", "text", "bytes", "png", "gif", "bare mp4", "bare webm"],
)
def test_what_is_no_clip_is_named(data: bytes, words: str) -> None:
    assert refusal(data) == words


@pytest.mark.parametrize("container", ["mp4", "mov", "webm"])
@pytest.mark.parametrize("cover", [False, True])
def test_sound_without_video_is_sent_elsewhere(container: str, cover: bool) -> None:
    if cover and container == "webm":
        return  # covers of WebM files are attachments, which are no streams
    assert (
        refusal(sound_only(container, cover=cover))
        == "the file holds sound and no video; send it as audio_url"
    )


def test_a_codec_that_is_not_taken_is_refused_by_the_ones_that_are() -> None:
    data = clip(4, container="mov", codec="cinepak", pixels="rgb24")
    assert (
        refusal(data)
        == "the video's codec is not one that this worker decodes; H.264, H.265, VP9 and AV1 are"
    )


INDEX_FIRST: dict[str, Any] = {
    "muxing": {"movflags": "faststart"},
    "options": {"preset": "ultrafast", "bf": "0"},
}


@pytest.mark.parametrize(
    "made", [INDEX_FIRST, {**INDEX_FIRST, "container": "mov"}, WEBM], ids=["mp4", "mov", "webm"]
)
def test_a_clip_cut_anywhere_gives_its_frames_or_says_that_it_is_cut(made: dict[str, Any]) -> None:
    """Chosen frames that came through are right; where one did not, the words say so."""
    data = clip(30, draw=lambda number: numbered(number, (128, 96)), size=(128, 96), **made)
    said = set()
    for tenth in range(1, 20):
        cut = data[: len(data) * tenth // 20]
        try:
            found = numbers(read(cut, replace(EVERY, num_frames=4)))
        except ClientFault as fault:
            said.add(fault.message.partition(" of 30 cannot")[0].rstrip("0123456789"))
        else:
            assert found == [0, 7, 15, 22]
    assert said <= {"the video is cut short: the file ends before it says it does", "frame "}
    assert said


def test_frames_before_a_broken_tail_are_read_and_those_behind_it_are_named() -> None:
    broken = clip(30, **INDEX_FIRST)[:-40]
    assert numbers(read(broken, replace(EVERY, num_frames=2))) == [0, 15]
    words = refusal(broken)
    assert words.startswith("frame ")
    assert words.endswith(" of 30 cannot be decoded: the file is cut short")


def test_a_broken_tail_of_a_file_that_counts_no_frames_is_cut_short() -> None:
    """WebM: how many frames were behind the cut is not known, so nobody can say which ones to choose."""
    cut = clip(30, **WEBM)[:-40]
    assert (
        refusal(cut, replace(EVERY, num_frames=2))
        == "the video is cut short: the file ends before it says it does"
    )


def test_a_clip_without_its_index_is_incomplete() -> None:
    data = clip(30)  # its index, `moov`, comes last
    assert refusal(data[: data.rindex(b"moov") - 4]) == "the video is damaged or incomplete"
    half = data[: data.rindex(b"moov") + 40]
    assert refusal(half) == "the video is cut short: the file ends before it says it does"


def test_a_clip_with_an_index_and_nothing_else_is_cut_short() -> None:
    data = clip(30, **INDEX_FIRST)
    assert (
        refusal(data[: data.index(b"mdat") + 4])
        == "the video is cut short: the file ends before it says it does"
    )


def test_damage_inside_is_named_by_its_frame() -> None:
    data = bytearray(clip(30, **{**INDEX_FIRST, "options": {"preset": "ultrafast", "bf": "0", "g": "5"}}))
    at = data.index(b"mdat")
    middle = at + (len(data) - at) // 2
    data[middle : middle + 300] = bytes(300)
    words = refusal(bytes(data))
    assert words.startswith("frame ")
    assert words.endswith(" of 30 cannot be decoded: the file is damaged")


# Limits, held before memory is spent.


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_duration_s": 0.5}, "the video takes 1.0 s; this worker takes at most 0.5 s"),
        (
            {"max_frames": 12},
            "30 frames would be shown to the model; this worker takes at most 12: "
            "ask for fewer by fps, num_frames or max_frames",
        ),
        (
            {"max_frame_pixels": 3000},
            "64 x 48 pixels a frame exceed this worker's limit of 0.003 million pixels",
        ),
        (
            {"max_pixels": 64 * 48 * 29},
            "30 frames of 64 x 48 pixels exceed this worker's limit of 0.089088 million pixels for one "
            "video; ask for fewer frames",
        ),
    ],
    ids=["duration", "frames", "pixels of a frame", "pixels together"],
)
@pytest.mark.parametrize("made", [{}, WEBM], ids=["mp4", "webm"])
def test_a_limit_is_said_with_both_numbers(made: dict[str, Any], limits: dict[str, Any], words: str) -> None:
    with pytest.raises(LimitFault) as caught:
        read(clip(30, **made), **limits)
    assert caught.value.message == words


def test_frames_that_grow_past_the_limit_are_never_given_whole() -> None:
    assert read(growing(4), max_frame_pixels=64 * 48).frames.shape == (8, 48, 64, 3)


def test_fewer_frames_are_chosen_of_a_clip_over_the_limit_when_asked() -> None:
    assert numbers(read(clip(60), replace(EVERY, num_frames=4), max_frames=4)) == [0, 15, 30, 45]


# Mutations.


@pytest.mark.parametrize(
    "made", [INDEX_FIRST, {}, WEBM, {**WEBM, "codec": "libvpx"}], ids=["faststart", "mp4", "vp9", "vp8"]
)
def test_changed_bytes_are_read_or_refused_and_nothing_else(made: dict[str, Any]) -> None:
    data, rng = clip(12, **made), np.random.default_rng(7)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(40):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), int(rng.integers(1, 12))):
            changed[at] = int(rng.integers(256))
        try:
            video = read(
                bytes(changed), replace(EVERY, num_frames=3), max_frames=16, max_frame_pixels=1 << 20
            )
        except (
            ClientFault,
            MemoryError,
        ):  # a size that was changed; the process that reads turns it into words
            outcomes["refused"] += 1
        else:
            assert video.frames.shape[0] in range(1, 17)
            outcomes["read"] += 1
    assert outcomes["read"]
    assert outcomes["refused"]
