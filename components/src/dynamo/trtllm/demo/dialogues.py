"""What people say about pictures and clips, and what the demo model is taught to answer.

A dialogue is a list of turns; a turn's content is a sequence of texts, pictures and clips. Everything is
drawn from a `random.Random` that the caller hands in. The answers, in full:

* asked for a description, or anything it does not know about pictures: `describe(pictures)` of the turn
  that brought them,
* the colour, the shape or the background of one picture: `it is red.`, `it is a circle.`, `the background
  is blue.`,
* a question that offers an answer (`Is it blue?`, `Is it a circle or a star?`): as if it had offered none,
* one of several pictures, named by its place (`the second picture`): as above, of that picture,
* how many pictures there are: `one picture.`, `two pictures.`,
* what a clip shows: its caption; its colour, shape or background: as of a picture,
* where the shape of a clip moves: `it moves to the left.`, `it moves up.`, `it does not move.`,
* no picture in the conversation: `GREETING`, `THANKS`, `IDENTITY` or `NO_PICTURE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from .clips import DIRECTIONS, Clip
from .phrasing import (
    GREET,
    NUMBERS,
    ORDINALS,
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
from .pictures import COLOURS, SHAPES, Picture, describe, with_article

GREETING = "hello. send me a picture with one shape and i will describe it."
IDENTITY = "i am a very small demo model. i describe pictures with one shape."
NO_PICTURE = "i see no picture. send me a picture with one shape and i will describe it."

_IMAGE = "[image|picture|photo|drawing]"
_IMAGES = "[images|pictures|photos|drawings]"
_COLOUR = "[colour|color]"
_DESCRIBE = (
    f"[Describe|Caption|Explain] [the|this|my] {_IMAGE}[.|| in one sentence.| briefly.| please.| for "
    "me.| in a few words.]",
    f"[Describe|Please describe] {_IMAGES}.",
    f"[Describe|Caption|Explain] [the|these|all|both|my] {_IMAGES}[| in order|, one after the other| "
    "in the order sent].",
    "Describe the picture(s)[| in order].",
    "Describe [both|all|all of them|each of them|each one|each picture|every picture|everything].",
    f"[What is|Tell me what is|What do you see] in [each|each {_IMAGE}|every {_IMAGE}]?",
    f"What is [in|on|shown in] [the|this] {_IMAGE}?",
    f"What's [in|on] [the|this] {_IMAGE}?",
    f"What is [in|on] [the|these] {_IMAGES}?",
    "What do you see[?| here?| in it?| there?]",
    f"What do you see [in|on] [the|this|my] {_IMAGE}?",
    f"What can you see[?| here?| in this {_IMAGE}?| in these {_IMAGES}?]",
    f"What does [this|the] {_IMAGE} show?",
    f"What do [these|the] {_IMAGES} show?",
    f"Tell me [what you see|about this {_IMAGE}|about these {_IMAGES}|what is in the {_IMAGE}].",
    f"Can you describe [this|the] {_IMAGE}?",
    f"Please describe [this|the] {_IMAGE}[.| in detail.]",
    f"Look at [this|these|the] {_IMAGE} and tell me what [it shows|is there].",
    f"Write a [caption|description|short caption] for [this|the] {_IMAGE}.",
    "[What is this?|What's this?|And this?|And now?|Describe.|Describe it.|Describe them.|Describe "
    "this.|Caption?]",
)
_ASK_COLOUR = (
    f"What {_COLOUR} is [the shape|it|the object|the figure|the thing][| in the {_IMAGE}| in this {_IMAGE}]?",
    f"[Which|What] {_COLOUR} does the shape have?",
    f"What is the {_COLOUR} of the shape[| in the {_IMAGE}]?",
    f"Tell me the {_COLOUR} of the [shape|object].",
    f"[Name|Give] the {_COLOUR} of the shape.",
    f"What {_COLOUR}?",
    f"The {_COLOUR}?",
)
_ASK_COLOUR_OF = (
    f"What {_COLOUR} is the {{}}[| in the {_IMAGE}| in this {_IMAGE}]?",
    f"What is the {_COLOUR} of the {{}}[| in the {_IMAGE}]?",
    f"[Which|What] {_COLOUR} does the {{}} have?",
)
_ASK_SHAPE = (
    f"[What|Which] shape is [it|this|that|shown|in the {_IMAGE}|in this {_IMAGE}]?",
    "[What|Which] shape do you see?",
    "What shape is [the object|the figure|the thing]?",
    f"[What|Which] shape does [the|this] {_IMAGE} [show|have|contain]?",
    f"What is the shape[| in the {_IMAGE}| in this {_IMAGE}]?",
    "[Name|Tell me|Give] the shape.",
    "What kind of shape is [it|this|there]?",
    "What shape?",
    "The shape?",
)
_ASK_BACKGROUND = (
    f"What {_COLOUR} is the background[| of the {_IMAGE}| of this {_IMAGE}]?",
    f"What is the background {_COLOUR}?",
    f"What is the {_COLOUR} of the background?",
    f"[Which|What] {_COLOUR} does the background have?",
    f"Tell me the [background {_COLOUR}|{_COLOUR} of the background].",
    "And the background?",
    "The background?",
)
_ASK_SHAPE_OF = (
    "What is the {} shape?",
    "What shape is the {} [thing|object|one]?",
    f"What is {{}} in this {_IMAGE}?",
)
_ASK_IF_COLOUR = (
    "Is [it|the shape|the object] {}?",
    "Is the colour of the shape {}?",
    "Is the shape {} or {}?",
    "Is it {} or {}?",
)
_ASK_IF_SHAPE = (
    "Is [it|this|the shape|that] {}?",
    "Do you see {}?",
    "Is there {}[| in the picture]?",
    "Is it {} or {}?",
)
_ASK_PLACE_CAPTION = (
    f"What is [in|on] the {{}} {_IMAGE}?",
    f"What do you see in the {{}} {_IMAGE}?",
    f"Describe [only |just |]the {{}} {_IMAGE}.",
    "[And|What about] the {} one?",
)
_ASK_PLACE_COLOUR = (
    f"What {_COLOUR} is the {{}} shape?",
    f"What {_COLOUR} is the shape in the {{}} {_IMAGE}?",
    f"What is the {_COLOUR} of the shape in the {{}} {_IMAGE}?",
)
_ASK_PLACE_SHAPE = (
    f"What shape is in the {{}} {_IMAGE}?",
    "What is the {} shape?",
    f"[What|Which] shape do you see in the {{}} {_IMAGE}?",
)
_ASK_PLACE_BACKGROUND = (
    f"What {_COLOUR} is the background of the {{}} {_IMAGE}?",
    "What is the {} background?",
)
_CLIP = "[video|clip|animation|movie|video clip]"
_DESCRIBE_CLIP = (
    f"[Describe|Caption|Explain] [the|this|my] {_CLIP}[.|| in one sentence.| briefly.| please.| for "
    "me.| in a few words.]",
    f"What [happens|is happening|is going on|is shown|do you see|can you see] in [the|this] {_CLIP}?",
    f"What does [this|the] {_CLIP} show?",
    f"What is [in|on] [the|this] {_CLIP}?",
    "What [happens|is happening|is going on][?| here?| there?]",
    "What [moves|is moving][?| here?| there?]",
    "What moves, and where[| to]?",
    "What do you see[?| here?| in it?| there?]",
    f"Tell me [what you see|about this {_CLIP}|what happens|what happens in the {_CLIP}|what moves].",
    f"Can you describe [this|the] {_CLIP}?",
    f"Please describe [this|the] {_CLIP}[.| in detail.]",
    f"[Watch|Look at] [this|the] {_CLIP} and tell me what [it shows|happens|moves].",
    f"Write a [caption|description|short caption] for [this|the] {_CLIP}.",
    "[What is this?|And this?|And now?|Describe.|Describe it.|Describe this.|Caption?]",
)
_DESCRIBE_MEDIA = (
    f"[Describe|Caption|Explain] [the|these|all|both|my] [{_CLIP}s|files|pictures|images][| in "
    "order|, one after the other].",
    "Describe [both|all|all of them|each of them|each one|everything][.| in order.]",
    f"Describe the {_IMAGE} and the {_CLIP}[| in order].",
    f"Describe the {_CLIP} and the {_IMAGE}[| in order].",
    "What do you see[?| here?| there?]",
    "What is in each?",
    "Tell me what you see.",
)
_ASK_MOTION = (
    "[Where|Which way] does [it|the shape|the object|the figure|the thing] [move|go][?| to?]",
    f"[Where|Which way] does the shape [move|go][| to] in [the|this] {_CLIP}?",
    "In [which|what] direction does [it|the shape|the object] [move|go]?",
    "[Which|What] direction[?| does it move in?]",
    "Does [it|the shape|the object|anything] move?",
    "Is [it|the shape|anything] moving?",
    "Does it [move|go] to the [left|right]?",
    "Does it [move|go] [up|down]?",
    "Does it move to the [left or to the right|right or to the left]?",
    "How does [it|the shape] move?",
    "Where to?",
)
_ASK_NUMBER = (
    f"How many {_IMAGES} [are there|do you see|did I send]?",
    f"Count the {_IMAGES}.",
)
_LABELS = (
    "{number}: ",
    "Picture {number}: ",
    "Image {number}:",
    "({number}) ",
    "\n{number}. ",
    "image {number} ",
    "\nPicture {number}:\n",
    "{ordinal}: ",
    "{ordinal} ",
    "\n{ordinal} picture: ",
    "The {ordinal} one: ",
    " the {ordinal} image is ",
    "this is the {ordinal} ",
    "{letter}: ",
    "Picture {letter} ",
    "{letter}) ",
    "Here is a picture: ",
    " and another one: ",
    " then ",
    " and ",
    "\n",
    " ",
    "{word} ",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that describes pictures.",
    "Answer [briefly|shortly|in one sentence|politely|with care].",
    "You are a [small|friendly|careful|precise] [model|assistant|bot|painter].",
)

Medium: TypeAlias = "Picture | Clip"
Dialogue: TypeAlias = "list[Turn[Medium]]"
NextPicture = Callable[[], Picture]
NextClip = Callable[[], Clip]


@dataclass(frozen=True)
class Mix:
    """How often which kind of dialogue is drawn; shares of one, the rest being one turn about one picture.

    `clips` is decided first: so many dialogues are about clips, the shares of kinds are those of the others.
    """

    clips: float = 0.0
    text_only: float = 0.08
    several_pictures: float = 0.4
    several_turns: float = 0.15
    system: float = 0.2
    wild_text: float = 0.08


def draw_dialogue(
    rng: Random, next_picture: NextPicture, mix: Mix, next_clip: NextClip | None = None
) -> Dialogue:
    """One training dialogue; `next_picture` and `next_clip` are asked for each new picture and clip of it."""
    turns: Dialogue = []
    if rng.random() < mix.system:
        turns.append(Turn("system", (expand(rng.choice(_SYSTEM), rng),)))
    if next_clip is not None and rng.random() < mix.clips:
        return turns + _turns_about_clips(rng, next_picture, next_clip, mix)
    kind = rng.random()
    if kind < mix.text_only:
        return turns + _text_turns(rng)
    kind -= mix.text_only
    if kind < mix.several_pictures:
        pictures = [next_picture() for _ in range(rng.choice((2, 2, 2, 2, 3, 3, 3, 3, 4, 5)))]
        turns += _turns_about_several(rng, pictures, mix)
    else:
        pictures = [next_picture()]
        turns += _turns_about_one(rng, pictures[0], mix)
    if rng.random() < mix.several_turns:
        for _ in range(rng.randint(1, 3)):
            pictures, more = _follow_up(rng, pictures, next_picture, mix)
            turns += more
    return turns


def to_messages(dialogue: Sequence[Turn[Medium]]) -> list[dict[str, Any]]:
    """The dialogue as chat messages in the form that `AutoProcessor.apply_chat_template` takes."""
    return [{"role": turn.role, "content": [_part(item) for item in turn.content]} for turn in dialogue]


def question(rng: Random, picture: Picture) -> tuple[str, str]:
    """A question about the only picture at hand, and its answer."""
    kind = rng.random()
    if kind < 0.25:
        return expand(rng.choice(_ASK_COLOUR), rng), colour_answer(picture)
    if kind < 0.5:
        return expand(rng.choice(_ASK_SHAPE), rng), shape_answer(picture)
    if kind < 0.68:
        return expand(rng.choice(_ASK_BACKGROUND), rng), background_answer(picture)
    if kind < 0.7:
        return expand(rng.choice(_ASK_NUMBER), rng), number_answer(1)
    if kind < 0.8:
        return expand(rng.choice(_ASK_COLOUR_OF), rng).format(picture.shape), colour_answer(picture)
    if kind < 0.86:
        return expand(rng.choice(_ASK_SHAPE_OF), rng).format(picture.colour), shape_answer(picture)
    return _offer(rng, picture)


def colour_answer(picture: Medium) -> str:
    """The answer to a question about the colour of the shape."""
    return f"it is {picture.colour}."


def shape_answer(picture: Medium) -> str:
    """The answer to a question about the shape."""
    return f"it is {with_article(picture.shape)}."


def background_answer(picture: Medium) -> str:
    """The answer to a question about the colour of the background."""
    return f"the background is {picture.background}."


def motion_answer(clip: Clip) -> str:
    """The answer to a question about where the shape of a clip moves."""
    return "it does not move." if clip.motion is None else f"it moves {DIRECTIONS[clip.motion]}."


def clip_question(rng: Random, clip: Clip) -> tuple[str, str]:
    """A question about the only clip at hand, and its answer."""
    kind = rng.random()
    if kind < 0.5:
        return expand(rng.choice(_ASK_MOTION), rng), motion_answer(clip)
    if kind < 0.68:
        return expand(rng.choice(_ASK_COLOUR), rng), colour_answer(clip)
    if kind < 0.86:
        return expand(rng.choice(_ASK_SHAPE), rng), shape_answer(clip)
    return expand(rng.choice(_ASK_BACKGROUND), rng), background_answer(clip)


def number_answer(count: int) -> str:
    """The answer to a question about the number of pictures."""
    return f"{NUMBERS[count]} picture{'' if count == 1 else 's'}."


def _offer(rng: Random, picture: Picture) -> tuple[str, str]:
    """A question that offers one answer or two, right or wrong; it is answered in the same words as an open
    question."""
    if rng.random() < 0.5:
        first, second = rng.sample([picture.colour, *rng.sample(sorted(COLOURS), 2)], 2)
        return expand(rng.choice(_ASK_IF_COLOUR), rng).format(first, second), colour_answer(picture)
    first, second = rng.sample([picture.shape, *rng.sample(SHAPES, 2)], 2)
    return expand(rng.choice(_ASK_IF_SHAPE), rng).format(
        with_article(first), with_article(second)
    ), shape_answer(picture)


def _place_question(rng: Random, pictures: Sequence[Picture]) -> tuple[str, str]:
    place = rng.randrange(len(pictures))
    picture = pictures[place]
    word = "last" if place == len(pictures) - 1 and rng.random() < 0.3 else ORDINALS[place]
    templates, answer = rng.choice(
        (
            (_ASK_PLACE_CAPTION, picture.caption),
            (_ASK_PLACE_COLOUR, colour_answer(picture)),
            (_ASK_PLACE_SHAPE, shape_answer(picture)),
            (_ASK_PLACE_BACKGROUND, background_answer(picture)),
        )
    )
    return expand(rng.choice(templates), rng).format(word), answer


def _request_for_description(rng: Random, mix: Mix) -> str:
    kind = rng.random()
    if kind < mix.wild_text:
        return wild_text(rng)
    if kind < mix.wild_text + 0.04:
        return ""
    if kind < mix.wild_text + 0.08:
        return vary(expand(rng.choice(GREET), rng), rng)
    return said(rng, expand(rng.choice(_DESCRIBE), rng))


def _turns_about_one(rng: Random, picture: Picture, mix: Mix) -> Dialogue:
    if rng.random() < 0.55:
        text, answer = _request_for_description(rng, mix), picture.caption
    else:
        text, answer = question(rng, picture)
        text = said(rng, text)
    return [Turn("user", arrange(rng, text, [picture], _LABELS)), Turn("assistant", (answer,))]


def _turns_about_clips(rng: Random, next_picture: NextPicture, next_clip: NextClip, mix: Mix) -> Dialogue:
    """One turn about one clip, at times followed by others about it, or one turn about clips and pictures
    side by side."""
    clip = next_clip()
    if rng.random() < 0.25:
        media: list[Medium] = [clip]
        for _ in range(rng.choice((1, 1, 2))):
            media.append(next_clip() if rng.random() < 0.4 else next_picture())
        rng.shuffle(media)
        return exchange(
            arrange(rng, said(rng, expand(rng.choice(_DESCRIBE_MEDIA), rng)), media, _LABELS),
            describe(media),
        )
    text, answer = _about_clip(rng, clip, mix)
    turns: Dialogue = exchange(arrange(rng, text, [clip], _LABELS), answer)
    while rng.random() < mix.several_turns:
        text, answer = clip_question(rng, clip)
        turns += exchange((vary(text, rng),), answer)
    return turns


def _about_clip(rng: Random, clip: Clip, mix: Mix) -> tuple[str, str]:
    """What is said beside a clip, and the answer."""
    kind = rng.random()
    if kind < 0.35:
        text, answer = clip_question(rng, clip)
        return said(rng, text), answer
    if kind < 0.5:
        return _request_for_description(rng, mix), clip.caption
    return said(rng, expand(rng.choice(_DESCRIBE_CLIP), rng)), clip.caption


def _turns_about_several(rng: Random, pictures: list[Picture], mix: Mix) -> Dialogue:
    kind = rng.random()
    if kind < 0.7:
        text, answer = _request_for_description(rng, mix), describe(pictures)
    elif kind < 0.95:
        text, answer = _place_question(rng, pictures)
        text = said(rng, text)
    else:
        text, answer = vary(expand(rng.choice(_ASK_NUMBER), rng), rng), number_answer(len(pictures))
    return [Turn("user", arrange(rng, text, pictures, _LABELS)), Turn("assistant", (answer,))]


def _follow_up(
    rng: Random, pictures: list[Picture], next_picture: NextPicture, mix: Mix
) -> tuple[list[Picture], Dialogue]:
    """A later question about the pictures sent last, a new picture, or thanks; returns the pictures sent last
    from then on."""
    kind = rng.random()
    if kind < 0.25:
        picture = next_picture()
        return [picture], _turns_about_one(rng, picture, mix)
    if kind < 0.35:
        text, answer = expand(rng.choice(THANK), rng), THANKS
    elif kind < 0.5:
        text, answer = expand(rng.choice(_DESCRIBE), rng), describe(pictures)
    elif len(pictures) == 1:
        text, answer = question(rng, pictures[0])
    else:
        text, answer = _place_question(rng, pictures)
    return pictures, [Turn("user", (vary(text, rng),)), Turn("assistant", (answer,))]


def _text_turns(rng: Random) -> Dialogue:
    turns: Dialogue = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text, answer = _text_exchange(rng)
        turns += [Turn("user", (text,)), Turn("assistant", (answer,))]
    return turns


def _text_exchange(rng: Random) -> tuple[str, str]:
    asked = (_DESCRIBE, _ASK_COLOUR, _ASK_SHAPE, _ASK_BACKGROUND, _DESCRIBE_CLIP)
    return small_talk(rng, asked, greeting=GREETING, identity=IDENTITY, nothing=NO_PICTURE)


def _part(item: str | Medium) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if isinstance(item, Clip):
        return {"type": "video", "video": item.frames}
    return {"type": "image", "image": item.image}
