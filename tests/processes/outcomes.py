"""All of an answer that must not depend on the topology, and how two are held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from processes.cluster import Answer


@dataclass(frozen=True)
class Outcome:
    """All of an answer that must not depend on the topology."""

    status: int
    text: str
    finish: str | None
    usage: tuple[int, int]
    logprobs: tuple[tuple[int, float], ...]


def outcome(answer: Answer) -> Outcome:
    assert answer.status == 200, answer.body
    if answer.events:
        positions = [
            p
            for e in answer.events
            for c in e.get("choices", ())
            for p in ((c.get("logprobs") or {}).get("content") or ())
        ]
        words = answer.text
    else:
        choice = answer.body["choices"][0]
        positions = (choice.get("logprobs") or {}).get("content") or []
        words = choice["message"]["content"] or ""
    logprobs = tuple((p["token_id"], p["logprob"]) for p in positions)
    usage = answer.usage
    return Outcome(
        answer.status,
        words,
        answer.finish_reason,
        (usage["prompt_tokens"], usage["completion_tokens"]),
        logprobs,
    )


def require_the_same(ours: Sequence[Sequence[Outcome]], reference: Sequence[Sequence[Outcome]]) -> None:
    """Each request's outcomes, unary and streamed, in two topologies."""
    for number, (mine, others) in enumerate(zip(ours, reference, strict=True)):
        for one, other in zip(mine, others, strict=True):
            assert (one.text, one.finish, one.usage) == (other.text, other.finish, other.usage), number
            assert [i for i, _ in one.logprobs] == [i for i, _ in other.logprobs], number
            assert [p for _, p in one.logprobs] == pytest.approx([p for _, p in other.logprobs], abs=1e-4), (
                number
            )
