"""The frames that a model is shown are those that Transformers' processors choose: indices, pixels, times."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.trtllm.config import MediaConfig, VideoLimits
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.frame_rules import QWEN2_VL, QWEN3_VL, FrameRule, Spread
from dynamo.trtllm.multimodal.kinds.registry import KINDS
from dynamo.trtllm.multimodal.video.reading import read_video
from media.clips import clip

OPTIONS: list[dict[str, Any]] = [
    {"fps": 2},
    {"fps": 0.5},
    {"fps": 7.5},
    {"fps": 24},
    {"fps": 100},
    {"num_frames": 2},
    {"num_frames": 8},
    {"num_frames": 30},
    {"num_frames": 90},
    {"fps": 1, "min_frames": 16},
    {"fps": 24, "max_frames": 10},
    {"fps": 4, "min_frames": 6, "max_frames": 12},
]


@cache
def family(name: str) -> tuple[FrameRule, Any]:
    """Our rule and Transformers' processor; that of Qwen2.5-VL is Qwen2-VL's own."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    return {
        "qwen2_vl": (QWEN2_VL, Qwen2VLVideoProcessor),
        "qwen3_vl": (QWEN3_VL, Qwen3VLVideoProcessor),
    }[name]


@cache
def processor_of(name: str, **bounds: int) -> Any:
    """`bounds` are the processor's own settings: Qwen3-VL's takes them no other way."""
    return family(name)[1](**bounds)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three and a bit seconds at 29 frames a second, so that no step is a whole number."""
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    path.write_bytes(clip(91, rate=29, options={"g": "12", "bf": "2", "preset": "ultrafast"}))
    return path


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_frames_and_times_equal_transformers(name: str, options: dict[str, Any], path: Path) -> None:
    from transformers.video_utils import load_video

    rule = family(name)[0]
    bounds = {key: value for key, value in options.items() if key in ("min_frames", "max_frames")}
    choice = {key: value for key, value in options.items() if key not in bounds}
    processor = processor_of(name, **bounds)
    theirs, metadata = load_video(str(path), sample_indices_fn=partial(processor.sample_frames, **choice))
    ours = read_video(path.read_bytes(), rule.asked(**options), VideoLimits())
    assert ours.frame_indices == tuple(int(index) for index in metadata.frames_indices)
    assert np.array_equal(ours.frames, theirs)
    # Qwen2-VL's indices are a tensor, so Transformers divides them in single precision.
    assert ours.timestamps_s == pytest.approx([float(time) for time in metadata.timestamps], rel=1e-7, abs=0)
    assert (ours.total_frames, ours.fps, ours.duration_s) == (
        91,
        float(metadata.fps),
        float(metadata.duration),
    )


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_choices_equal_transformers_for_clips_of_many_lengths_and_rates(name: str) -> None:
    from transformers.video_utils import VideoMetadata

    rule, processor = family(name)[0], processor_of(name)
    asked: list[dict[str, Any]] = [{"fps": fps} for fps in (0.3, 1, 2, 3.7, 30)]
    asked += [{"num_frames": count} for count in (2, 3, 7, 8, 20, 61)]
    compared = 0
    for total in (4, 5, 6, 7, 10, 30, 31, 61, 62, 100, 119, 250, 299, 1801, 18000):
        for rate in (1.0, 12.5, 24000 / 1001, 30.0, 59.94):
            for options in asked:
                if options.get("num_frames", 0) > total - 1 or options.get("fps", 0) > rate:
                    continue  # Some of Transformers' processors refuse these.
                metadata = VideoMetadata(total_num_frames=total, fps=rate)
                theirs = processor.sample_frames(metadata=metadata, **options)
                # Rounding can make its list one longer than the clip; no frame belongs to that index.
                expected = tuple(int(index) for index in theirs if index < total)
                assert rule.asked(**options).choose(total, rate) == expected, (total, rate, options)
                compared += 1
    assert compared > 280


@pytest.mark.parametrize("rule", [QWEN2_VL, QWEN3_VL], ids=lambda rule: rule.spread.value)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_clip_shorter_than_the_least_number_of_frames_is_shown_as_far_as_it_goes(
    rule: FrameRule, total: int
) -> None:
    chosen = rule.choose(total, 30.0)
    assert chosen[0] == 0
    assert len(chosen) == (2 if rule is QWEN2_VL and total == 3 else total)


@pytest.mark.parametrize("spread", list(Spread))
def test_asking_for_more_frames_than_there_are_is_refused_with_both_numbers(spread: Spread) -> None:
    with pytest.raises(ClientFault, match="the video has 10 frames, and num_frames asks for 12"):
        FrameRule(spread=spread, num_frames=12).choose(10, 30.0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"fps": 2, "num_frames": 8}, "fps and num_frames exclude each other; give one of them"),
        ({"fps": 0}, "fps must be a number above 0"),
        ({"fps": -1}, "fps must be a number above 0"),
        ({"fps": float("nan")}, "fps must be a number above 0"),
        ({"fps": float("inf")}, "fps must be a number above 0"),
        ({"num_frames": 0}, "num_frames must be at least 1"),
        ({"min_frames": 0}, "min_frames must be at least 1"),
        ({"max_frames": -3}, "max_frames must be at least 1"),
        ({"max_frames": 2}, "min_frames is 4, above max_frames, which is 2"),
    ],
    ids=str,
)
def test_a_choice_that_no_clip_can_meet_is_refused_in_words(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ClientFault) as caught:
        QWEN2_VL.asked(**asked)
    assert caught.value.message == words


def test_num_frames_takes_the_place_of_the_models_own_rate() -> None:
    assert QWEN3_VL.asked(num_frames=3).choose(100, 10.0) == (0, 50, 99)
    assert QWEN3_VL.asked(fps=1).choose(100, 10.0) == tuple(range(0, 100, 11))


def test_a_long_clip_is_shown_in_as_many_frames_as_the_worker_takes() -> None:
    few = MediaConfig(video=VideoLimits(max_frames=3))
    kind = KINDS["video"]
    assert len(kind.rule(QWEN3_VL, {}, MediaConfig()).choose(10_000, 10.0)) == 128
    assert kind.rule(QWEN3_VL, {}, few).choose(10_000, 10.0) == (0, 5000, 9999)
    assert len(kind.rule(QWEN3_VL, {"num_frames": 5}, few).choose(10_000, 10.0)) == 5
