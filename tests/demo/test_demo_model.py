"""The trained demo model on the CPU: held-out accuracy, and that fast training batches are what the processor
would have made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer

from dynamo.trtllm.demo import MODEL_DIR, dialogues, evaluation
from dynamo.trtllm.demo.artifacts import IMAGE_MEAN, IMAGE_STD
from dynamo.trtllm.demo.batches import Encoder, Example, collate
from dynamo.trtllm.demo.clips import Clip, draw_clip
from dynamo.trtllm.demo.dialogues import Dialogue, Mix, Turn, draw_dialogue, to_messages
from dynamo.trtllm.demo.evaluation import Score
from dynamo.trtllm.demo.forward import answer_logits
from dynamo.trtllm.demo.pictures import FIRST_TRAINING_SEED, Picture, describe, draw

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return evaluation.load(MODEL_DIR)


@pytest.fixture(scope="module")
def scores(loaded: tuple[Any, Any]) -> dict[str, Score]:
    return evaluation.evaluate(*loaded, n=100, kinds=["captions", "several", "questions", "greetings"])


@pytest.fixture(scope="module")
def other_scores(loaded: tuple[Any, Any]) -> dict[str, Score]:
    return evaluation.evaluate(
        *loaded, n=40, kinds=["interleaved", "offers", "background", "degraded", "follow_up", "resized"]
    )


@pytest.fixture(scope="module")
def clip_scores(loaded: tuple[Any, Any]) -> dict[str, Score]:
    return evaluation.evaluate(*loaded, n=20, kinds=["clips", "motions", "noisy_clips", "mixed", "mp4"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def encoded(tokenizer: Tokenizer) -> list[tuple[Dialogue, Example]]:
    rng, seeds = Random(5), itertools.count()

    def next_clip() -> Clip:
        return draw_clip(next(seeds), frames=2 + next(seeds) % 9)

    some = [draw_dialogue(rng, lambda: draw(next(seeds)), Mix(clips=0.6), next_clip) for _ in range(16)]
    return [(dialogue, Encoder(tokenizer).encode(dialogue)) for dialogue in some]


def processed(processor: Any, dialogue: Dialogue) -> Any:
    """What the processor makes of the dialogue, all frames of its clips taken."""
    media = [item for turn in dialogue for item in turn.content]
    return processor(
        text=[processor.apply_chat_template(to_messages(dialogue))],
        images=[item.image for item in media if isinstance(item, Picture)] or None,
        videos=[item.frames for item in media if isinstance(item, Clip)] or None,
        do_sample_frames=False,
        return_tensors="pt",
    )


@pytest.mark.parametrize(("kind", "least"), [("captions", 97), ("several", 95), ("questions", 95)])
def test_of_a_hundred_held_out_cases_nearly_all_are_answered_exactly(
    scores: dict[str, Score], kind: str, least: int
) -> None:
    assert scores[kind].total == 100
    assert scores[kind].right >= least, scores[kind].mistakes


@pytest.mark.parametrize("kind", ["interleaved", "offers", "background", "degraded", "follow_up", "resized"])
def test_other_kinds_of_requests_are_answered_as_well(other_scores: dict[str, Score], kind: str) -> None:
    assert other_scores[kind].total == 40
    assert other_scores[kind].right >= 38, other_scores[kind].mistakes


@pytest.mark.parametrize("kind", ["clips", "motions", "noisy_clips", "mixed", "mp4"])
def test_clips_are_described_and_asked_about_also_beside_a_picture_and_from_a_file(
    clip_scores: dict[str, Score], kind: str
) -> None:
    assert clip_scores[kind].total == 20
    assert clip_scores[kind].right >= 19, clip_scores[kind].mistakes


def test_a_greeting_gets_a_sentence(scores: dict[str, Score]) -> None:
    assert scores["greetings"].answers == [dialogues.GREETING] * scores["greetings"].total


def test_no_picture_gets_a_sentence_that_says_so(loaded: tuple[Any, Any]) -> None:
    assert evaluation.answer(*loaded, [[Turn("user", ("Describe the image.",))]]) == [dialogues.NO_PICTURE]


def test_the_cases_are_held_out_and_follow_the_seed() -> None:
    assert FIRST_TRAINING_SEED == 1_000_000_000
    same, other = evaluation.cases(3, 1)["captions"], evaluation.cases(3, 2)["captions"]
    assert [case.expected for case in evaluation.cases(3, 1)["captions"]] == [case.expected for case in same]
    assert [case.expected for case in other] != [case.expected for case in same]


def test_pictures_are_described_in_the_order_of_the_request(loaded: tuple[Any, Any]) -> None:
    one, two, three = draw(101, (224, 160)), draw(102, (112, 300)), draw(103, (200, 200))
    orders = [list(order) for order in itertools.permutations((one, two, three))]
    asked = [[Turn("user", (*order, "Describe the pictures in order."))] for order in orders]
    assert evaluation.answer(*loaded, asked) == [describe(order) for order in orders]


def test_an_answer_does_not_depend_on_the_batch(loaded: tuple[Any, Any]) -> None:
    asked = [case.dialogue for case in evaluation.cases(6, 3)["captions"]]
    assert evaluation.answer(*loaded, asked, batch_size=6) == evaluation.answer(*loaded, asked, batch_size=1)


@pytest.mark.parametrize(
    "content",
    [
        ("{picture}",),
        ("{picture}", "DESCRIBE THE IMAGE!!"),
        ("describe the picture", "{picture}"),
        ("  What is in this picture   ", "{picture}"),
        ("Look: ", "{picture}", " what do you see?"),
    ],
)
def test_other_wordings_and_places_of_the_text_get_the_caption(
    loaded: tuple[Any, Any], content: tuple[str, ...]
) -> None:
    picture = draw(31)
    turn = Turn("user", tuple(picture if item == "{picture}" else item for item in content))
    assert evaluation.answer(*loaded, [[turn]]) == [picture.caption]


def test_it_generates_on_when_the_end_is_ignored(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    inputs = processed(processor, [Turn("user", (draw(1, (56, 56)), "Describe the image."))])
    with torch.inference_mode():
        output = model.generate(**inputs, min_new_tokens=300, max_new_tokens=300, do_sample=False)
    assert output.shape[1] == inputs["input_ids"].shape[1] + 300


def test_it_takes_a_prompt_of_four_thousand_tokens(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(4096)[None] % 500, logits_to_keep=1).logits
    assert logits.shape == (1, 1, model.config.text_config.vocab_size)
    assert bool(logits.isfinite().all())


def test_encoded_ids_and_grids_are_the_processors(
    loaded: tuple[Any, Any], encoded: list[tuple[Dialogue, Example]]
) -> None:
    for dialogue, example in encoded:
        inputs = processed(loaded[1], dialogue)
        assert inputs["input_ids"][0].tolist() == example.ids.tolist()
        for kind, clips in (("image", False), ("video", True)):
            given = inputs.get(f"{kind}_grid_thw")
            assert ([] if given is None else given.tolist()) == [
                list(grid) for grid in _of_kind(example, example.grids, clips)
            ]


def test_patches_are_the_processors_pixel_values(
    loaded: tuple[Any, Any], encoded: list[tuple[Dialogue, Example]]
) -> None:
    compared = 0
    for (dialogue, example), (name, clips) in itertools.product(
        encoded, (("pixel_values", False), ("pixel_values_videos", True))
    ):
        firsts = _of_kind(example, example.patches, clips)
        if firsts:
            seconds = [
                a if b is None else b
                for a, b in zip(firsts, _of_kind(example, example.second_frames, clips), strict=True)
            ]
            frames = [_normalised(np.concatenate(levels)) for levels in (firsts, seconds)]
            pixels = torch.stack(frames, dim=2).flatten(1)
            torch.testing.assert_close(pixels, processed(loaded[1], dialogue)[name], rtol=0, atol=1e-5)
            compared += len(firsts) * (100 if clips else 1)
    assert compared // 100 >= 10
    assert compared % 100 >= 10


def _normalised(levels: npt.NDArray[np.uint8]) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    normalised: torch.Tensor = (torch.from_numpy(levels).view(-1, 3, 14 * 14) / 255 - mean) / std
    return normalised


def _of_kind(example: Example, values: Sequence[Any], clips: bool) -> list[Any]:
    return [
        value
        for value, second in zip(values, example.second_frames, strict=True)
        if (second is not None) == clips
    ]


def test_positions_are_the_models(loaded: tuple[Any, Any], encoded: list[tuple[Dialogue, Example]]) -> None:
    for dialogue, example in encoded:
        if example.grids:
            inputs = processed(loaded[1], dialogue)
            grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
            expected, _ = loaded[0].model.get_rope_index(
                inputs["input_ids"], inputs["mm_token_type_ids"], **grids
            )
            assert expected[:, 0].tolist() == example.positions.tolist()


def test_only_answers_and_the_ends_of_their_turns_are_trained(tokenizer: Tokenizer) -> None:
    picture = draw(31, (56, 56))
    turns = [
        Turn("user", (picture, "What?")),
        Turn("assistant", (picture.caption,)),
        Turn("user", ("Thanks",)),
    ]
    example = Encoder(tokenizer).encode([*turns, Turn("assistant", (dialogues.THANKS,))])
    trained = tokenizer.decode(
        [label for label in example.labels.tolist() if label >= 0], skip_special_tokens=False
    )
    assert trained == f"{picture.caption}<|im_end|>{dialogues.THANKS}<|im_end|>"


def test_the_training_forward_gives_the_models_logits(
    loaded: tuple[Any, Any], tokenizer: Tokenizer, encoded: list[tuple[Dialogue, Example]]
) -> None:
    model, processor = loaded
    batch = collate([example for _, example in encoded], tokenizer)
    expected = []
    with torch.inference_mode():
        for dialogue, example in encoded:
            logits = model(**processed(processor, dialogue)).logits[0]
            expected.append(
                logits[[at - 1 for at, label in enumerate(example.labels.tolist()) if label >= 0]]
            )
        torch.testing.assert_close(answer_logits(model, batch), torch.cat(expected), rtol=1e-3, atol=1e-3)
