"""What a rule is, and how a tree is judged by it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dynamo.trtllm.engines.tensorrt_llm.record import RECORD
from dynamo.trtllm.engines.tensorrt_llm.source.tree import SourceTree


class Outcome(str, Enum):
    """What a tree says of a rule."""

    HOLDS = "holds"
    """As the record has it for this release, or the record says nothing of this release."""
    OTHER = "other form"
    """Not the form that the record has for this release, but one that the adapter takes."""
    BROKEN = "BROKEN"
    NOT_FOUND = "not found"
    """The file or definition is not in the tree: nothing was shown, neither way."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that the adapter relies on.

    `look` reads the tree and returns the form it found in a few words, None where there is nothing to look
    at. A form in `accepted` is one that the adapter can deal with; `expected` has the form of each release
    as far as it was read.
    """

    name: str
    relies: str
    """What the adapter relies on."""
    file: str
    """Where in the package `tensorrt_llm` it is seen."""
    seen: str
    """How it is seen in the source."""
    breaks: str
    """What a user meets when it is not so."""
    accepted: Collection[str]
    look: Callable[[SourceTree], str | None]
    expected: Mapping[str, str] = field(default_factory=dict)
    source: str = "inferred"
    """Keys of `SOURCES` for `expected`."""


@dataclass(frozen=True)
class Verdict:
    """A rule and what the tree says of it; `form` is None where nothing was found."""

    rule: Rule
    outcome: Outcome
    form: str | None
    expected: str | None


def judge(rule: Rule, tree: SourceTree, release: str) -> Verdict:
    """Judge `tree` by `rule`, against what the record has for `release`."""
    form, expected = rule.look(tree), rule.expected.get(release)
    if form is None:
        outcome = Outcome.NOT_FOUND
    elif form not in rule.accepted:
        outcome = Outcome.BROKEN
    else:
        outcome = Outcome.HOLDS if expected in (None, form) else Outcome.OTHER
    return Verdict(rule, outcome, form, expected)


def in_all(form: str) -> dict[str, str]:
    """`form` in every recorded release."""
    return dict.fromkeys(RECORD, form)


def since_13(before: str, after: str) -> dict[str, str]:
    """`before` in 1.2.1, `after` in the releases since 1.3."""
    return {release: before if release == "1.2.1" else after for release in in_all(after)}


COMPLETE = "all of them"


def lacking(wanted: Collection[str], found: Collection[str]) -> str:
    """The form of a rule that wants all of several names."""
    missing = [name for name in wanted if name not in found]
    return f"without {', '.join(missing)}" if missing else COMPLETE
