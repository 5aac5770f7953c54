"""Held-out accuracy of a demo model, through `AutoProcessor` and `generate` alone.

Every case is a conversation and the one answer that counts as right; an answer is right if it is equal,
character by character.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Generic

import numpy as np
import torch

from . import dialogues
from .clips import FRAMES_PER_S, Clip, degrade_clip, draw_clip, write_mp4
from .dialogues import Dialogue, Medium
from .phrasing import ORDINALS, M, Turn
from .pictures import (
    COLOURS,
    FIRST_TRAINING_SEED,
    SHAPES,
    Picture,
    degrade,
    describe,
    draw,
    resize,
    with_article,
)

GREETINGS = ("Hello!", "hi", "Good morning.", "Hey there, how are you?", "HELLO")
_DESCRIBE = (
    "Describe the image",
    "Describe the image.",
    "What is in this picture?",
    "What do you see?",
    "describe the picture",
    "Please describe this photo.",
)
_DESCRIBE_SEVERAL = (
    "Describe the pictures in order.",
    "Describe the picture(s) in order.",
    "Describe the images.",
    "What is in these pictures?",
    "What do you see?",
)
_DESCRIBE_CLIP = (
    "Describe the video.",
    "What happens in the clip?",
    "Describe the clip",
    "What do you see?",
    "What moves?",
)
_QUESTIONS = (
    ("What colour is the shape?", dialogues.colour_answer),
    ("What color is it?", dialogues.colour_answer),
    ("What shape is it?", dialogues.shape_answer),
    ("Which shape do you see?", dialogues.shape_answer),
)


@dataclass(frozen=True)
class Case(Generic[M]):
    """One conversation that ends with a user's turn, and its right answer."""

    dialogue: list[Turn[M]]
    expected: str


@dataclass(frozen=True)
class Score:
    """How many of the cases of one kind were answered right, and what was answered, in order."""

    right: int
    total: int
    answers: list[str]
    mistakes: list[tuple[str, str]]
    """Pairs of expected answer and answer given."""


def evaluate(
    model: Any, processor: Any, n: int = 100, seed: int = 0, kinds: Collection[str] | None = None
) -> dict[str, Score]:
    """Answers `n` held-out cases of each kind (see `cases` and `clip_cases`), or of `kinds` only, greedily;
    `seed` chooses the cases."""
    all_cases = cases(n, seed) | clip_cases(n, seed, kinds)
    return {
        kind: scored(chosen, answer(model, processor, [case.dialogue for case in chosen]))
        for kind, chosen in all_cases.items()
        if kinds is None or kind in kinds
    }


def cases(n: int, seed: int) -> dict[str, list[Case[Medium]]]:
    """`n` cases a kind, their pictures drawn from held-out seeds.

    `captions`: one picture; `several`: two pictures and three pictures in turn; `interleaved`: the same with
    a text before every picture; `questions`: colour and shape in turn; `offers`: a colour or a shape to agree
    to or to correct; `background`; `degraded`: one noisy JPEG; `follow_up`: a question about the picture of
    an earlier turn; `greetings`: text only; `resized`: one picture scaled by a filter of Pillow's.
    """
    first = Random(seed).randrange(FIRST_TRAINING_SEED - 10 * n)
    pictures = [draw(first + i) for i in range(5 * n)]
    rng = Random(seed)
    several = [rng.sample(pictures, 2 + i % 2) for i in range(n)]
    asked = [_QUESTIONS[i % len(_QUESTIONS)] for i in range(n)]
    one, two, three, four = (pictures[i * n : (i + 1) * n] for i in range(4))
    return {
        "captions": [Case(_ask(_DESCRIBE[i % len(_DESCRIBE)], p), p.caption) for i, p in enumerate(one)],
        "several": [
            Case(_ask(_DESCRIBE_SEVERAL[i % len(_DESCRIBE_SEVERAL)], *chosen), describe(chosen))
            for i, chosen in enumerate(several)
        ],
        "interleaved": [Case(_interleaved(chosen), describe(chosen)) for chosen in several],
        "offers": [_offer(p, i, rng) for i, p in enumerate(two)],
        "questions": [Case(_ask(text, p), answer(p)) for (text, answer), p in zip(asked, two, strict=True)],
        "background": [
            Case(_ask("What colour is the background?", p), dialogues.background_answer(p)) for p in two
        ],
        "degraded": [Case(_ask("Describe the image.", degrade(p, rng)), p.caption) for p in three],
        "follow_up": [
            Case(
                [
                    *_ask("What is in this picture?", p),
                    Turn("assistant", (p.caption,)),
                    Turn("user", ("And what colour is the background?",)),
                ],
                dialogues.background_answer(p),
            )
            for p in four
        ],
        "greetings": [Case(_ask(text), dialogues.GREETING) for text in GREETINGS],
        "resized": [Case(_ask("Describe the image.", resize(p, rng)), p.caption) for p in pictures[4 * n :]],
    }


def clip_cases(n: int, seed: int, kinds: Collection[str] | None = None) -> dict[str, list[Case[Medium]]]:
    """`n` cases a kind, or of `kinds` only, about clips of three seconds, of which the processor takes six
    frames.

    `clips`: one clip described; `motions`: where its shape moves; `noisy_clips`: noise and compression in
    every frame; `mixed`: a clip before or behind a picture, both described; `mp4`: a clip from an MP4 file,
    if PyAV is there to write it.
    """
    first = Random(seed).randrange(FIRST_TRAINING_SEED - 10 * n)
    make: dict[str, Callable[[Clip, int], Case[Medium]]] = {
        "clips": lambda clip, i: Case(_ask(_DESCRIBE_CLIP[i % len(_DESCRIBE_CLIP)], clip), clip.caption),
        "motions": lambda clip, i: Case(_ask("Which way does it move?", clip), dialogues.motion_answer(clip)),
        "noisy_clips": lambda clip, i: Case(
            _ask("Describe the video.", degrade_clip(clip, Random(i))), clip.caption
        ),
        "mixed": lambda clip, i: _mixed(clip, draw(first + i), i),
    }
    if find_spec("av"):
        make["mp4"] = lambda clip, i: Case(_ask("Describe the video.", _through_mp4(clip)), clip.caption)
    return {
        kind: [case(draw_clip(first + number * n + i), i) for i in range(n)]
        for number, (kind, case) in enumerate(make.items())
        if kinds is None or kind in kinds
    }


def _mixed(clip: Clip, picture: Picture, place: int) -> Case[Medium]:
    pair: tuple[Medium, Medium] = (clip, picture) if place % 2 else (picture, clip)
    return Case(_ask("What do you see?", *pair), describe(pair))


def _through_mp4(clip: Clip) -> Clip:
    import av

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clip.mp4"
        write_mp4(clip, path)
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return Clip(np.stack(frames), clip.shape, clip.colour, clip.background, clip.motion)


@torch.inference_mode()
def answer(model: Any, processor: Any, conversations: Sequence[Dialogue], batch_size: int = 25) -> list[str]:
    """The greedy answers, in order. Conversations of similar length share a batch, padded on the left."""
    order = sorted(range(len(conversations)), key=lambda i: _pixels(conversations[i]))
    answers = [""] * len(conversations)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        inputs = _inputs(processor, [conversations[i] for i in members]).to(model.device)
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(members, texts, strict=True):
            answers[i] = text
    return answers


def _inputs(processor: Any, conversations: Sequence[Dialogue]) -> Any:
    """What the model takes, padded on the left; the processor chooses the frames of clips by the model's own
    rule."""
    messages = [dialogues.to_messages(conversation) for conversation in conversations]
    media = [item for conversation in conversations for turn in conversation for item in turn.content]
    clips = [item for item in media if isinstance(item, Clip)]
    seen = [{"fps": FRAMES_PER_S, "total_num_frames": len(clip.frames)} for clip in clips]
    return processor(
        text=processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        images=[item.image for item in media if isinstance(item, Picture)] or None,
        videos=[clip.frames for clip in clips] or None,
        **({"video_metadata": seen} if clips else {}),
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )


def load(directory: Path, device: str = "cpu") -> tuple[Any, Any]:
    """The model in float32 on `device`, and its processor, from a local directory."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model: Any = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    processor: Any = AutoProcessor
    return model.to(device).eval(), processor.from_pretrained(directory, local_files_only=True)


def as_json(scores: dict[str, Score]) -> dict[str, Any]:
    """The scores as plain JSON values."""
    return {kind: asdict(score) for kind, score in scores.items()}


def scored(chosen: Sequence[Case[M]], answers: list[str]) -> Score:
    """The score of the answers to `chosen`, in the same order."""
    pairs = [(case.expected, given) for case, given in zip(chosen, answers, strict=True)]
    mistakes = [pair for pair in pairs if pair[0] != pair[1]]
    return Score(len(pairs) - len(mistakes), len(pairs), answers, mistakes)


def _ask(text: str, *media: Medium) -> Dialogue:
    return [Turn("user", (*media, text))]


def _interleaved(pictures: Sequence[Picture]) -> Dialogue:
    content = [item for place, p in enumerate(pictures) for item in (f"{ORDINALS[place].capitalize()}: ", p)]
    return [Turn("user", (*content, "\nDescribe the pictures."))]


def _offer(picture: Picture, place: int, rng: Random) -> Case[Medium]:
    if place % 2:
        return Case(_ask(f"Is it {rng.choice(sorted(COLOURS))}?", picture), dialogues.colour_answer(picture))
    return Case(_ask(f"Is it {with_article(rng.choice(SHAPES))}?", picture), dialogues.shape_answer(picture))


def _pixels(dialogue: Dialogue) -> int:
    media = [item for turn in dialogue for item in turn.content if not isinstance(item, str)]
    return sum(
        item.frames.size if isinstance(item, Clip) else item.image.width * item.image.height for item in media
    )
