"""How people word what they ask, whatever it is about: turns, greetings, careless spelling, texts among
media.

A template holds alternatives in square brackets (`expand`). Everything is drawn from a `random.Random` that
the caller hands in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

M = TypeVar("M")
"""What stands between the texts of a dialogue: pictures and clips, or sounds."""

THANKS = "you are welcome."
ORDINALS = ("first", "second", "third", "fourth", "fifth")
NUMBERS = ("no", "one", "two", "three", "four", "five")

GREET = (
    "[Hello|Hi|Hey|Hello there|Hi there|Hallo][.|!||,][| how are you?| model!| friend.]",
    "[Good morning|Good evening|Good day|Greetings][.|!||,][| how are you?| model!| friend.]",
    "[How are you|How do you do|What's up|How is it going|Are you there][?| today?]",
    "[Say|Please say] hello[.|!||, please.]",
    "[Hello|Hi], [who is there?|can you hear me?|nice to meet you.|anybody home?]",
    "[test|ping|testing]",
)
ASK_IDENTITY = (
    "[Who|What] are you?",
    "What is your name?",
    "[What|Which] model [are you|is this]?",
    "What can you do[?| for me?]",
    "[Can you help me|Help]?",
    "[Tell me about|Introduce] yourself.",
)
THANK = (
    "[Thanks|Thank you|Thank you very much|Great, thanks|Ok, thank you|Many thanks][.|!|]",
    "[Goodbye|Bye|See you|Good night][.|!|]",
)
_LEAD_INS = ("", "", "", "", "Hello. ", "Hi! ", "Please: ", "Question: ", "Now, ", "Ok. ", "Look. ")
_ADDITIONS = (
    *("",) * 8,
    " Answer in one word.",
    " Be brief.",
    " Please.",
    " Thanks.",
    " Answer in one short sentence.",
    " Thank you!",
)
_COMMON = (
    "a about after again all also always an and any are as ask at away back be because been before best "
    "better big book bring but by call came can car city cold come could country day did dinner do dog door "
    "down each eat end even every eyes far fast father few find first fish five food for found friend from "
    "game garden gave get give glass go good got great green had hand happy hard has have he head hear help "
    "her here high him his home hot house how i if in into is it its joke just keep kind know large last "
    "late left less let letter light like line list little long look made make man many may me mean men "
    "mind money month moon more most mother mountain move much music must my name near need never new next "
    "night no not nothing now number of off often old on once one only open or other our out over own page "
    "paper part people place play please poem point president put question quick rain read red right river "
    "road room round run said same saw say school sea second see seen send shall she ship short show side "
    "sing sister sky sleep slow small so some song soon star start stop story street such sun table take "
    "talk tell ten than that the their them then there these they thing think this three time to today "
    "together too town train tree try two under until up us use very walk wall want war was water way we "
    "weather week well went were what when where which white who why will wind window winter with word work "
    "world would write year yes you young your paris python code sum translate"
)
_WORDS = _COMMON.split()


@dataclass(frozen=True)
class Turn(Generic[M]):
    """One message: `role` is `system`, `user` or `assistant`; `content` holds texts and media in order."""

    role: str
    content: tuple[str | M, ...]


def expand(template: str, rng: Random) -> str:
    """Replaces every `[a|b|c]` in `template` (innermost first) by one of its alternatives."""
    while "[" in template:
        template = re.sub(r"\[([^\[\]]*)\]", lambda choice: rng.choice(choice[1].split("|")), template)
    return template


def vary(text: str, rng: Random) -> str:
    """`text` as careless people write it: other capitals, other or no final punctuation, a typing mistake,
    stray blanks."""
    style = rng.random()
    if style < 0.3:
        text = text.lower()
    elif style < 0.38:
        text = text.upper()
    elif style < 0.42:
        text = text.title()
    if rng.random() < 0.2:
        text = text.rstrip(".?!") + rng.choice(("", "", ".", "?", "!", "??", "..."))
    if len(text) > 8 and rng.random() < 0.06:
        place = rng.randrange(len(text) - 1)
        text = text[:place] + rng.choice((text[place + 1], "", text[place] * 2)) + text[place + 1 :]
    if rng.random() < 0.1:
        text = rng.choice((f" {text}", f"{text} ", f"{text}\n", f"\n{text}", f"{text}\n\n"))
    return text


def wild_text(rng: Random) -> str:
    """Text about nothing that the model knows: common words, sometimes letters, digits or other alphabets at
    random."""
    count = rng.choice((1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 8, 8, 12, 12, 20, 20, 40, 40, 120))
    if rng.random() < 0.75:
        words = [rng.choice(_WORDS) for _ in range(count)]
        return vary(" ".join(words).capitalize() + rng.choice((".", "?", "!", "")), rng)
    alphabet = rng.choice(
        (
            "abcdefghijklmnopqrstuvwxyz",
            "0123456789+-*/=",
            "äöüéèñçß",
            "абвгдежзик",
            "图片红色圆形你好",
            "{}[]<>:;,_#@",
        )
    )
    return " ".join(
        "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 8))) for _ in range(min(count, 12))
    )


def said(rng: Random, text: str) -> str:
    """A request as people put it, at times with other words before or after it."""
    if rng.random() < 0.02:
        text = rng.choice(
            (f"{wild_text(rng)} {text}", f"{wild_text(rng)}\n\n{text}", f"{text} {wild_text(rng)}")
        )
    return vary(rng.choice(_LEAD_INS) + text + rng.choice(_ADDITIONS), rng)


def exchange(content: tuple[str | M, ...], answer: str) -> list[Turn[M]]:
    """What a user says, and the answer."""
    return [Turn("user", content), Turn("assistant", (answer,))]


def arrange(rng: Random, text: str, media: Sequence[M], labels: Sequence[str]) -> tuple[str | M, ...]:
    """`text` before or after the media, or the media with one of `labels` before or after each; empty texts
    are left out."""
    style = rng.random()
    if style < 0.4:
        items: list[str | M] = [*media, text]
    elif style < 0.65:
        items = [text, *media]
    else:
        template, after = rng.choice(labels), rng.random() < 0.15
        capital = rng.random() < 0.5
        items = []
        for place, medium in enumerate(media):
            label = _label(rng, template, place)
            label = label.capitalize() if capital else label
            items += [medium, label] if after else [label, medium]
        end = rng.choice(("", "\n", " "))
        items = [*items, end + text] if rng.random() < 0.5 else [text + end, *items]
    return tuple(item for item in items if item != "")


def _label(rng: Random, template: str, place: int) -> str:
    """A text that goes with the medium at `place` (from 0)."""
    return template.format(
        number=place + 1, ordinal=ORDINALS[place], letter="abcde"[place], word=rng.choice(_WORDS)
    )


def small_talk(
    rng: Random, asked: Sequence[Sequence[str]], *, greeting: str, identity: str, nothing: str
) -> tuple[str, str]:
    """A text without media, and its answer: `greeting`, `identity` and thanks to what calls for them,
    `nothing` to anything else. Among that are the phrases of `asked`, which would be asked about media.
    """
    kind = rng.random()
    if kind < 0.35:
        return vary(expand(rng.choice(GREET), rng), rng), greeting
    if kind < 0.5:
        return vary(expand(rng.choice(ASK_IDENTITY), rng), rng), identity
    if kind < 0.6:
        return vary(expand(rng.choice(THANK), rng), rng), THANKS
    if kind < 0.8:
        return wild_text(rng), nothing
    return said(rng, expand(rng.choice(rng.choice(asked)), rng)), nothing
