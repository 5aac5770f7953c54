"""Held-out accuracy of an audio model, through `AutoProcessor` and `generate` alone.

As in `demo/evaluation.py`, an answer is right if it is equal to the expected one, character by character.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch

from ..evaluation import GREETINGS, Case, Score, scored
from ..phrasing import Turn
from ..pictures import FIRST_TRAINING_SEED, describe
from . import dialogues
from .dialogues import Dialogue
from .sounds import FORMATS, MODEL_RATE, Sound, draw_sound, heard, reread

_DESCRIBE = (
    "Describe the sound",
    "Describe the sound.",
    "What do you hear?",
    "What is in this recording?",
    "describe the audio",
    "Please describe this sound.",
)
_COUNT = ("How many beeps?", "How many beeps do you hear?", "Count the beeps.", "how many beeps are there")
_SLIDE = ("Does it rise or fall?", "Does the tone rise or fall?", "Rising or falling?")
_PITCH = ("Are they high or low?", "What is the pitch of the beeps?", "High or low?")


def evaluate(
    model: Any, processor: Any, n: int = 100, seed: int = 0, kinds: Collection[str] | None = None
) -> dict[str, Score]:
    """Answers `n` held-out cases of each kind (see `cases`), or of `kinds` only, greedily; `seed` chooses the
    cases."""
    return {
        kind: scored(chosen, answer(model, processor, [case.dialogue for case in chosen]))
        for kind, chosen in cases(n, seed, kinds).items()
    }


def cases(n: int, seed: int, kinds: Collection[str] | None = None) -> dict[str, list[Case[Sound]]]:
    """`n` cases a kind, or of `kinds` only, each about sounds of its own.

    `sounds`: one described; `counted`, `slides`, `pitches`: asked how many beeps, whether it rises or falls,
    how high they are; `several`: two and three in turn, described in order; `follow_up`: how many beeps there
    were in an earlier turn's; `greetings`: text only; `wav`, `flac`, `mp3`, `ogg`: one described from a file
    of that format, as a worker reads it, if PyAV is there.
    """
    first = Random(seed).randrange(FIRST_TRAINING_SEED - 40 * n)
    make: dict[str, Callable[[Sound, int], Case[Sound]]] = {
        "sounds": lambda sound, i: _asked(_DESCRIBE, i, sound, sound.caption),
        "counted": lambda sound, i: _asked(_COUNT, i, sound, dialogues.count_answer(sound)),
        "slides": lambda sound, i: _asked(_SLIDE, i, sound, dialogues.slide_answer(sound)),
        "pitches": lambda sound, i: _asked(_PITCH, i, sound, dialogues.pitch_answer(sound)),
        "several": lambda sound, i: _several(
            [sound, *(draw_sound(first + n * (20 + more) + i) for more in range(1 + i % 2))]
        ),
        "follow_up": lambda sound, i: _follow_up(sound),
    }
    if find_spec("av"):
        for suffix in FORMATS:
            make[suffix[1:]] = lambda sound, i, suffix=suffix: _asked(  # type: ignore[misc]
                _DESCRIBE, i, reread(sound, suffix), sound.caption
            )
    chosen = {
        kind: [case(draw_sound(first + number * n + i), i) for i in range(n)]
        for number, (kind, case) in enumerate(make.items())
        if kinds is None or kind in kinds
    }
    if kinds is None or "greetings" in kinds:
        chosen["greetings"] = [Case([Turn("user", (text,))], dialogues.GREETING) for text in GREETINGS]
    return chosen


def _asked(questions: Sequence[str], place: int, sound: Sound, answer: str) -> Case[Sound]:
    return Case([Turn("user", (sound, questions[place % len(questions)]))], answer)


def _several(sounds: Sequence[Sound]) -> Case[Sound]:
    return Case([Turn("user", (*sounds, "Describe the sounds in order."))], describe(sounds))


def _follow_up(sound: Sound) -> Case[Sound]:
    turns = [Turn("user", (sound, "What do you hear?")), Turn[Sound]("assistant", (sound.caption,))]
    return Case([*turns, Turn("user", ("And how many beeps are there?",))], dialogues.count_answer(sound))


@torch.inference_mode()
def answer(model: Any, processor: Any, conversations: Sequence[Dialogue], batch_size: int = 25) -> list[str]:
    """The greedy answers, in order; conversations of a batch are padded on the left."""
    answers = []
    for start in range(0, len(conversations), batch_size):
        inputs = inputs_of(processor, conversations[start : start + batch_size]).to(model.device)
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        answers += processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def inputs_of(processor: Any, conversations: Sequence[Dialogue]) -> Any:
    """What the model takes, padded on the left."""
    sounds = [
        heard(item)
        for conversation in conversations
        for turn in conversation
        for item in turn.content
        if isinstance(item, Sound)
    ]
    messages = [dialogues.to_messages(conversation) for conversation in conversations]
    return processor(
        text=processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        audio=sounds or None,
        **({"sampling_rate": MODEL_RATE} if sounds else {}),
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )


def load(directory: Path, device: str = "cpu") -> tuple[Any, Any]:
    """The model in float32 on `device`, and its processor, from a local directory."""
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    model: Any = Qwen2AudioForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    processor: Any = AutoProcessor
    return model.to(device).eval(), processor.from_pretrained(directory, local_files_only=True)
