"""The drawn pictures and the dialogues about them."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

from dynamo.trtllm.demo import dialogues
from dynamo.trtllm.demo.dialogues import Mix, draw_dialogue
from dynamo.trtllm.demo.pictures import (
    COLOURS,
    JITTER,
    MAX_EXTENT,
    MAX_SIDE,
    MIN_EXTENT,
    MIN_SIDE,
    SHAPES,
    Picture,
    degrade,
    describe,
    draw,
)


def distance(pixel: tuple[int, int, int], colour: str) -> int:
    return max(abs(level - wanted) for level, wanted in zip(pixel, COLOURS[colour], strict=True))


def test_a_seed_always_draws_the_same_picture() -> None:
    first, second = draw(5), draw(5)
    assert first.image.tobytes() == second.image.tobytes()
    assert first.caption == second.caption
    assert draw(6).image.tobytes() != first.image.tobytes()


@pytest.mark.parametrize(
    ("seed", "size", "caption"),
    [
        (0, (188, 317), "a purple star on a black background."),
        (4, (425, 258), "an orange square on a blue background."),
        (31, (447, 257), "a red circle on a blue background."),
    ],
)
def test_known_seeds_keep_their_size_and_caption(seed: int, size: tuple[int, int], caption: str) -> None:
    picture = draw(seed)
    assert (picture.image.size, picture.caption) == (size, caption)


def test_two_hundred_seeds_show_every_shape_and_colour_on_another_colour_at_sizes_of_the_whole_range() -> (
    None
):
    pictures = [draw(seed) for seed in range(200)]
    assert {picture.shape for picture in pictures} == set(SHAPES)
    assert len(SHAPES) >= 4
    assert (
        {picture.colour for picture in pictures}
        == {picture.background for picture in pictures}
        == set(COLOURS)
    )
    assert len(COLOURS) == 10
    assert all(picture.colour != picture.background for picture in pictures)
    sides = [side for picture in pictures for side in picture.image.size]
    assert MIN_SIDE <= min(sides) < MIN_SIDE + 20
    assert MAX_SIDE - 20 < max(sides) <= MAX_SIDE
    assert sum(picture.image.width != picture.image.height for picture in pictures) > 150


@pytest.mark.parametrize("seed", range(12))
def test_the_named_colours_fill_the_picture_and_the_shape_lies_inside(seed: int) -> None:
    picture = draw(seed)
    pixels: Any = picture.image.load()
    width, height = picture.image.size
    places = list(itertools.product(range(width), range(height)))
    shape = [(x, y) for x, y in places if distance(pixels[x, y], picture.colour) <= JITTER]
    background = [(x, y) for x, y in places if distance(pixels[x, y], picture.background) <= JITTER]
    assert len(shape) + len(background) > 0.9 * len(places)
    extent = max(max(axis) - min(axis) + 1 for axis in zip(*shape, strict=True))
    assert 0.6 * MIN_EXTENT * min(width, height) < extent <= MAX_EXTENT * min(width, height) + 1


def test_the_caller_can_choose_the_size() -> None:
    assert draw(9, (300, 70)).image.size == (300, 70)


def test_a_degraded_picture_keeps_its_words_and_stays_close() -> None:
    picture = draw(21)
    degraded = degrade(picture, Random(1))
    assert degraded.caption == picture.caption
    assert degraded.image.size == picture.image.size
    assert degraded.image.tobytes() != picture.image.tobytes()
    changes = [abs(a - b) for a, b in zip(picture.image.tobytes(), degraded.image.tobytes(), strict=True)]
    assert sum(changes) / len(changes) < 10


def test_several_pictures_are_described_in_their_order() -> None:
    red, star = draw(31), draw(0)
    assert describe([red, star]) == "a red circle on a blue background. a purple star on a black background."


def test_every_turn_of_a_dialogue_about_pictures_is_answered_in_words_of_the_pictures() -> None:
    rng = Random(3)
    seeds = itertools.count(50)
    fixed = {dialogues.GREETING, dialogues.IDENTITY, dialogues.NO_PICTURE, dialogues.THANKS}
    for _ in range(600):
        dialogue = draw_dialogue(rng, lambda: draw(next(seeds), (56, 56)), Mix())
        pictures = [item for turn in dialogue for item in turn.content if isinstance(item, Picture)]
        spoken = [turn for turn in dialogue if turn.role != "system"]
        assert [turn.role for turn in spoken] == ["user", "assistant"] * (len(spoken) // 2)
        for turn in spoken[1::2]:
            (answer,) = turn.content
            allowed = fixed | {dialogues.number_answer(count) for count in range(1, 6)}
            for picture in pictures:
                allowed |= {dialogues.colour_answer(picture), dialogues.shape_answer(picture)}
                allowed |= {dialogues.background_answer(picture)}
            assert answer in allowed or set(str(answer).split(". ")) <= {
                part for picture in pictures for part in (picture.caption, picture.caption.rstrip("."))
            }


def test_a_dialogue_without_pictures_is_answered_with_a_sentence() -> None:
    rng = Random(4)
    mix = Mix(text_only=1.0)
    for _ in range(100):
        for turn in draw_dialogue(rng, lambda: pytest.fail("no picture was asked for"), mix):
            if turn.role == "assistant":
                assert str(turn.content[0]).endswith(".")
