"""What people say about sounds, and what the audio demo model is taught to answer.

As in `demo/dialogues.py`, everything is drawn from a `random.Random` that the caller hands in. The answers,
in full:

* asked for a description, or anything it does not know about sounds: the captions of the sounds of the turn
  that brought them, in order, joined by one space,
* how many beeps: `three beeps.`, `one beep.`, `no beeps.`,
* whether it rises or falls: `it rises.`, `it falls.`, `it neither rises nor falls.`,
* how high the beeps are: `it is high.` of one, `they are high.` of more; of a tone as if asked for its way,
* no sound in the conversation: `GREETING`, `THANKS`, `IDENTITY` or `NO_SOUND`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from ..phrasing import (
    GREET,
    NUMBERS,
    THANK,
    THANKS,
    Turn,
    arrange,
    exchange,
    expand,
    said,
    small_talk,
    vary,
    wild_text,
)
from ..pictures import describe
from .sounds import SLIDES, Sound

GREETING = "hello. send me a sound with beeps and i will describe it."
IDENTITY = "i am a very small demo model. i describe beeps and tones."
NO_SOUND = "i hear no sound. send me a sound with beeps and i will describe it."

_SOUND = "[sound|audio|recording|clip|audio clip|sound file|audio file]"
_SOUNDS = "[sounds|recordings|clips|audio files|sound files]"
_DESCRIBE = (
    f"[Describe|Caption|Explain] [the|this|my] {_SOUND}[.|| in one sentence.| briefly.| please.| for me.]",
    "Describe [the|this] sound[.|]",
    f"What [do you hear|can you hear|is to be heard] in [the|this] {_SOUND}?",
    "What do you hear[?| here?| in it?| there?]",
    "What can you hear[?| here?| in it?]",
    f"What is [in|on] [the|this] {_SOUND}?",
    f"What is this {_SOUND}?",
    "What [sound|kind of sound|noise] is [this|that|it]?",
    "What['s that|'s this| is that] sound?",
    f"Tell me [what you hear|about this {_SOUND}|what is in the {_SOUND}].",
    f"Can you describe [this|the] {_SOUND}?",
    f"Please describe [this|the] {_SOUND}[.| in detail.]",
    f"[Listen to|Hear] [this|the] {_SOUND} and tell me what [it is|you hear|is there].",
    f"Write a [caption|description|short caption] for [this|the] {_SOUND}.",
    "[What is this?|What's this?|And this?|And now?|Describe.|Describe it.|Describe this.|Caption?|Listen.]",
)
_DESCRIBE_SEVERAL = (
    f"[Describe|Caption|Explain] [the|these|all|both|my] {_SOUNDS}[.|| in order.|, one after the other.]",
    "Describe [both|all|all of them|each of them|each one|everything][.| in order.]",
    f"What [do you hear|can you hear|is] in [these|the] {_SOUNDS}?",
    "What do you hear[?| here?| in each?]",
    "Tell me what you hear[.| in each.]",
    "How about these?",
)
_ASK_COUNT = (
    "How many beeps[?| are there?| do you hear?| can you hear?| are in it?]",
    f"How many beeps [are|do you hear] in [the|this] {_SOUND}?",
    "Count the beeps[.|, please.|]",
    "[What is the|Give me the|The] number of beeps[?|]",
    "How often does it beep?",
    "[Is|Are] there [one|two|three|four|five] beep[s|]?",
)
_ASK_SLIDE = (
    "Does [it|the tone|the sound|the pitch] rise or fall?",
    "Does [it|the tone|the sound|the pitch] [fall or rise|go up or down]?",
    "[Is|Does] [it|the tone|the pitch] [rising|falling|going up|going down]?",
    "Does [it|the tone|the pitch] [rise|fall|go up|go down]?",
    "Is [it|the tone|the pitch] [rising or falling|falling or rising]?",
    "Which way does [it|the tone|the pitch] go?",
    "Rising or falling?",
    "Up or down?",
)
_ASK_PITCH = (
    "[Is it|Are they] high or low?",
    "[Is it|Are they] [high|low|middle], [low|high|middle] or [middle|low|high]?",
    "How high [is it|are they|are the beeps|is the beep]?",
    "What [pitch|kind of pitch] [do they have|does it have|do the beeps have]?",
    "What is the pitch[?| of the beeps?| of the beep?]",
    "[Are the beeps|Is the beep] [high|low|in the middle]?",
    "[High|Low] or [low|high]?",
)
_LABELS = (
    "{number}: ",
    "Sound {number}: ",
    "Audio {number}:",
    "({number}) ",
    "\n{number}. ",
    "The {ordinal} one: ",
    "\n{ordinal} sound: ",
    "{letter}) ",
    "Here is a sound: ",
    " and another one: ",
    " then ",
    " and ",
    "\n",
    " ",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that describes sounds.",
    "Answer [briefly|shortly|in one sentence|politely|with care].",
    "You are a [small|friendly|careful|precise] [model|assistant|bot|listener].",
)

Dialogue: TypeAlias = "list[Turn[Sound]]"
NextSound = Callable[[], Sound]


@dataclass(frozen=True)
class Mix:
    """How often which kind of dialogue is drawn; shares of one, the rest being one turn about one sound."""

    text_only: float = 0.08
    several_sounds: float = 0.2
    several_turns: float = 0.12
    system: float = 0.25
    wild_text: float = 0.06


def draw_dialogue(rng: Random, next_sound: NextSound, mix: Mix) -> Dialogue:
    """One training dialogue; `next_sound` is asked for each new sound of it."""
    turns: Dialogue = []
    if rng.random() < mix.system:
        turns.append(Turn("system", (expand(rng.choice(_SYSTEM), rng),)))
    kind = rng.random()
    if kind < mix.text_only:
        return turns + _text_turns(rng)
    if kind < mix.text_only + mix.several_sounds:
        sounds = [next_sound() for _ in range(rng.choice((2, 2, 3)))]
        text = said(rng, expand(rng.choice(_DESCRIBE_SEVERAL), rng))
        turns += exchange(arrange(rng, text, sounds, _LABELS), describe(sounds))
    else:
        sounds = [next_sound()]
        text, answer = _about_one(rng, sounds[0], mix)
        turns += exchange(arrange(rng, text, sounds, _LABELS), answer)
    while rng.random() < mix.several_turns:
        text, answer = _follow_up(rng, sounds)
        turns += exchange((vary(text, rng),), answer)
    return turns


def to_messages(dialogue: Sequence[Turn[Sound]]) -> list[dict[str, Any]]:
    """The dialogue as chat messages in the form that the chat template takes."""
    return [{"role": turn.role, "content": [_part(item) for item in turn.content]} for turn in dialogue]


def count_answer(sound: Sound) -> str:
    """The answer to a question about the number of beeps."""
    return f"{NUMBERS[sound.beeps]} beep{'' if sound.beeps == 1 else 's'}."


def slide_answer(sound: Sound) -> str:
    """The answer to a question about whether a tone rises or falls."""
    return "it neither rises nor falls." if sound.slide is None else f"it {sound.slide}."


def pitch_answer(sound: Sound) -> str:
    """The answer to a question about how high beeps are; of silence its caption."""
    if sound.slide in SLIDES:
        return slide_answer(sound)
    if sound.pitch is None:
        return sound.caption
    return f"{'it is' if sound.beeps == 1 else 'they are'} {sound.pitch}."


def question(rng: Random, sound: Sound) -> tuple[str, str]:
    """A question about the only sound at hand, and its answer."""
    asked, answer = rng.choice(
        ((_ASK_COUNT, count_answer), (_ASK_SLIDE, slide_answer), (_ASK_PITCH, pitch_answer))
    )
    return expand(rng.choice(asked), rng), answer(sound)


def _about_one(rng: Random, sound: Sound, mix: Mix) -> tuple[str, str]:
    """What is said beside one sound, and the answer."""
    kind = rng.random()
    if kind < 0.4:
        text, answer = question(rng, sound)
        return said(rng, text), answer
    kind -= 0.4
    if kind < mix.wild_text:
        return wild_text(rng), sound.caption
    if kind < mix.wild_text + 0.03:
        return "", sound.caption
    if kind < mix.wild_text + 0.06:
        return vary(expand(rng.choice(GREET), rng), rng), sound.caption
    return said(rng, expand(rng.choice(_DESCRIBE), rng)), sound.caption


def _follow_up(rng: Random, sounds: Sequence[Sound]) -> tuple[str, str]:
    """A later question about the sounds sent last, or thanks."""
    if rng.random() < 0.15:
        return expand(rng.choice(THANK), rng), THANKS
    if len(sounds) == 1:
        return question(rng, sounds[0])
    return expand(rng.choice(_DESCRIBE_SEVERAL), rng), describe(sounds)


def _text_turns(rng: Random) -> Dialogue:
    turns: Dialogue = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        text, answer = _text_exchange(rng)
        turns += exchange((text,), answer)
    return turns


def _text_exchange(rng: Random) -> tuple[str, str]:
    asked = (_DESCRIBE, _ASK_COUNT, _ASK_SLIDE, _ASK_PITCH)
    return small_talk(rng, asked, greeting=GREETING, identity=IDENTITY, nothing=NO_SOUND)


def _part(item: str | Sound) -> dict[str, Any]:
    return {"type": "text", "text": item} if isinstance(item, str) else {"type": "audio"}
