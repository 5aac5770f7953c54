"""The drawn clips, their files, and the pictures that are scaled."""

from __future__ import annotations

from pathlib import Path
from random import Random

import av
import numpy as np
import pytest

from dynamo.trtllm.demo import dialogues
from dynamo.trtllm.demo.clips import (
    DIRECTIONS,
    MAX_DRIFT,
    MIN_WAY,
    Clip,
    degrade_clip,
    draw_clip,
    film_strip,
    write_mp4,
)
from dynamo.trtllm.demo.dialogues import Mix, draw_dialogue
from dynamo.trtllm.demo.pictures import COLOURS, JITTER, MAX_SIDE, MIN_RESIZED_SIDE, draw, resize


def box(clip: Clip, frame: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the pixels of the shape's colour."""
    distance = np.abs(clip.frames[frame].astype(int) - COLOURS[clip.colour]).max(-1)
    rows, columns = np.nonzero(distance <= JITTER)
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def test_a_seed_always_draws_the_same_clip() -> None:
    assert np.array_equal(draw_clip(5).frames, draw_clip(5).frames)
    assert not np.array_equal(draw_clip(6, (96, 96)).frames, draw_clip(5, (96, 96)).frames)


@pytest.mark.parametrize("seed", range(40))
def test_the_shape_goes_where_the_caption_says_and_stays_inside(seed: int) -> None:
    clip = draw_clip(seed, (200, 160))
    (left, top, right, bottom), (new_left, new_top, *_) = box(clip, 0), box(clip, len(clip.frames) - 1)
    across, down = new_left - left, new_top - top
    if clip.motion is None:
        assert (across, down) == (0, 0)
        assert np.array_equal(clip.frames[0], clip.frames[-1])
        assert clip.caption.endswith("background.")
        return
    assert clip.caption.endswith(f"moves {DIRECTIONS[clip.motion]}.")
    along, aside = (across, down) if clip.motion in ("left", "right") else (down, across)
    assert (along < 0) == (clip.motion in ("left", "up"))
    room = {"left": 200 - (right - left), "right": 200 - (right - left)}.get(
        clip.motion, 160 - (bottom - top)
    )
    assert abs(along) > 0.9 * MIN_WAY * room
    assert abs(aside) <= MAX_DRIFT * 200
    for frame in range(len(clip.frames)):
        assert min(box(clip, frame)[:2]) >= 0


def test_every_direction_and_standing_still_are_drawn() -> None:
    assert {draw_clip(seed, (96, 96), frames=2).motion for seed in range(60)} == {None, *DIRECTIONS}


def test_fewer_frames_are_those_of_the_same_clip() -> None:
    few, many = draw_clip(3, frames=6), draw_clip(3, frames=36)
    assert np.array_equal(few.frames, many.frames[::6])


def test_a_file_holds_the_frames_that_were_drawn(tmp_path: Path) -> None:
    clip = draw_clip(8, (97, 131), frames=10)
    write_mp4(clip, tmp_path / "clip.mp4", frames_per_s=5)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert container.streams.video[0].average_rate == 5
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == (10, 130, 96, 3)
    assert np.abs(frames.astype(int) - clip.frames[:, :130, :96]).mean() < 8


def test_a_strip_shows_all_frames_side_by_side() -> None:
    clip = draw_clip(1, (200, 100), frames=4)
    strip = film_strip(clip.frames, height=50, gap=2)
    assert strip.size == (4 * 102 - 2, 50)
    assert np.asarray(strip)[:, 100:102].min() == 255


def test_noise_leaves_a_clip_what_it_is() -> None:
    clip = draw_clip(2, frames=3)
    noisy = degrade_clip(clip, Random(1))
    assert noisy.caption == clip.caption
    assert 0 < np.abs(noisy.frames.astype(int) - clip.frames).mean() < 16


def test_scaled_pictures_keep_their_caption_and_their_least_side() -> None:
    rng, sizes = Random(3), []
    for seed in range(80):
        picture = draw(seed)
        scaled = resize(picture, rng)
        assert scaled.caption == picture.caption
        sizes.append(scaled.image.size)
    assert min(min(size) for size in sizes) == MIN_RESIZED_SIDE
    assert max(max(size) for size in sizes) > 0.9 * MAX_SIDE
    assert sum(min(size) < 2 * MIN_RESIZED_SIDE for size in sizes) > 30


def test_dialogues_about_clips_end_with_what_the_clips_show() -> None:
    rng = Random(11)
    answers = set()
    for seed in range(120):
        clip = draw_clip(seed, (96, 96), frames=2)
        dialogue = draw_dialogue(
            rng, lambda seed=seed: draw(seed), Mix(clips=1.0, several_turns=0), lambda clip=clip: clip
        )
        media = [item for turn in dialogue for item in turn.content if not isinstance(item, str)]
        answer = dialogue[-1].content[0]
        if len(media) > 1:
            assert answer == " ".join(item.caption for item in media)
            answers.add("several")
        else:
            said = [
                clip.caption,
                dialogues.motion_answer(clip),
                dialogues.colour_answer(clip),
                dialogues.shape_answer(clip),
            ]
            answers.add([*said, dialogues.background_answer(clip)].index(answer))
    assert answers == {"several", 0, 1, 2, 3, 4}
