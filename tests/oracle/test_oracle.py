"""Dynamo's own component as oracle: it is known to work with TensorRT-LLM 1.3.0rc29, so what serves it
is a fair double, and where our calls into the library differ from its calls there has to be a reason
(the table in README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.compare import Difference, as_rows, differences, explained
from oracle.deployments import REQUESTS, Seen, model_directory, observe
from processes.topologies import TOPOLOGIES

COMPARED = ("agg", "disagg", "epd_disagg")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("qwen2.5-vl"))


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Seen]:
    """Both components in each topology: what was answered, and the calls into the library."""
    return {
        (which, topology): observe(which, topology, model, tmp_path_factory.mktemp(f"{which}-{topology}"))
        for topology in COMPARED
        for which in ("ours", "theirs")
    }


@pytest.mark.parametrize("topology", COMPARED)
@pytest.mark.parametrize("which", ["ours", "theirs"])
def test_the_double_serves_both_components(
    seen: dict[tuple[str, str], Seen], which: str, topology: str
) -> None:
    answers = seen[which, topology].answers
    assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(REQUESTS, 200)
    assert all(answer.text for answer in answers.values())


def occasion_of(request: str) -> str:
    if not request:
        return "start"
    return "pictures" if "picture" in request else "text"


def found(seen: dict[tuple[str, str], Seen]) -> set[Difference]:
    all_of_them: set[Difference] = set()
    for topology in COMPARED:
        ours, theirs = seen["ours", topology].calls, seen["theirs", topology].calls
        for request, roles in ours.items():
            for role in TOPOLOGIES[topology]:
                label = "prefill after encode" if role == "prefill" and topology == "epd_disagg" else role
                all_of_them |= differences(label, occasion_of(request), roles[role], theirs[request][role])
    return all_of_them


def test_every_difference_between_the_calls_has_a_reason(seen: dict[tuple[str, str], Seen]) -> None:
    known = explained()
    new = found(seen) - set(known)
    assert not new, f"differences without a reason in tests/oracle/README.md:\n{as_rows(new)}"
    assert all(known.values()), "a row of tests/oracle/README.md has no reason"


def test_every_row_of_the_table_is_still_a_difference(seen: dict[tuple[str, str], Seen]) -> None:
    gone = set(explained()) - found(seen)
    assert not gone, f"rows of tests/oracle/README.md that are no difference any more:\n{as_rows(gone)}"
