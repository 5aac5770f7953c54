"""How the calls of two workers into one library differ, argument by argument,
and the table that explains each difference.

The table stands in README.md beside this file. A difference without a row fails the test,
and so does a row whose difference is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("README.md")
ABSENT = "not given"
_VOLATILE = re.compile(r"(disagg_request_id|ctx_request_id|ctx_info_endpoint|\.model)$")
"""Values that no two runs share: a run's ids and folders."""

Call = Mapping[str, Any]


class Difference(NamedTuple):
    """One argument that the two workers give differently.
    `ours` and `theirs` are short forms of the values."""

    role: str
    occasion: str
    """`start`, `text` or `pictures`: what the call is about."""
    argument: str
    ours: str
    theirs: str


def differences(role: str, occasion: str, ours: Sequence[Call], theirs: Sequence[Call]) -> set[Difference]:
    """What differs between the calls that a role's two workers made for the same request (or at start)."""
    mine, other = _by_name(ours), _by_name(theirs)
    found: set[Difference] = set()
    for name in sorted({*mine, *other}):
        here, there = mine.get(name, []), other.get(name, [])
        if not here or not there:
            found.add(Difference(role, occasion, name, _called(here), _called(there)))
        elif len(here) != len(there):
            found.add(Difference(role, occasion, name, f"{len(here)} calls", f"{len(there)} calls"))
        for one, two in zip(here, there, strict=False):
            found |= set(_compared(role, occasion, name, one, two))
    return found


def _called(calls: Sequence[Any]) -> str:
    return "called" if calls else "not called"


def _by_name(calls: Sequence[Call]) -> dict[str, list[Any]]:
    """Arguments by method. What `preprocess` got is what the following
    `generate_async` is about, so it stands there."""
    found: dict[str, list[Any]] = {}
    prepared: Any = None
    for call in calls:
        name, given = call["call"], dict(call["given"])
        if name == "LLM.preprocess":
            prepared = given["inputs"]
        elif name == "LLM.generate_async" and prepared is not None:
            given["inputs"], prepared = prepared, None
        found.setdefault(name, []).append({} if name == "LLM.preprocess" else given)
    return found


def _compared(role: str, occasion: str, name: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    here, there = dict(_leaves(name, ours)), dict(_leaves(name, theirs))
    for path in sorted({*here, *there}):
        if here.get(path, ABSENT) != there.get(path, ABSENT):
            one, two = (_short(path, found[path]) if path in found else ABSENT for found in (here, there))
            if one != two or not _VOLATILE.search(path):
                yield Difference(role, occasion, path, one, two)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}", each)
    else:
        yield path, value


def _short(path: str, value: Any) -> str:
    """A form that fits a table's cell and is the same in each run."""
    if _VOLATILE.search(path) and value is not None:
        return "a value of this run"
    if isinstance(value, list) and len(value) > 4 and all(isinstance(each, int) for each in value):
        return "token ids" if "ids" in path else "numbers"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{type(value).__name__} of {len(value)}"


def explained() -> dict[Difference, str]:
    """Rows of the table in README.md: differences and the reason of each.
    A row may name several roles and occasions."""
    rows: dict[Difference, str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 5 or cells[0] in ("who, when", "---"):
            continue
        places, argument, ours, theirs, reason = (cell.strip("`") for cell in cells)
        for place in places.split("; "):
            roles, _, occasions = place.partition(": ")
            for role in roles.split(", "):
                for occasion in occasions.split(", "):
                    rows[Difference(role, occasion, argument, ours, theirs)] = reason
    return rows


def as_rows(found: set[Difference]) -> str:
    """Table rows for `found`, roles of one occasion joined, the reason left to be written."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for each in sorted(found):
        rows.setdefault(each[2:], {}).setdefault(each.occasion, []).append(each.role)
    return "\n".join(
        f"| {_places(occasions)} | `{argument}` | `{ours}` | `{theirs}` |  |"
        for (argument, ours, theirs), occasions in sorted(rows.items())
    )


def _places(occasions: Mapping[str, Sequence[str]]) -> str:
    by_roles: dict[str, list[str]] = {}
    for occasion, roles in occasions.items():
        by_roles.setdefault(", ".join(roles), []).append(occasion)
    return "; ".join(f"{roles}: {', '.join(names)}" for roles, names in by_roles.items())
