"""What the user said, flag by flag, on the command line and in the environment, before any rule is applied.

Each value keeps the name under which it was given, so that every sentence can name exactly what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.flag import ENVIRONMENT_PREFIX, Flag, flags_of
from dynamo.trtllm.roles import EngineKind, Role, a_role
from dynamo.trtllm.utils.flags import FLAGS, OTHER_VARIABLES
from dynamo.trtllm.values import TRUTH

Layer = TypeVar("Layer")


class Level(IntEnum):
    """How strongly a value was said; the higher one wins."""

    SHARED = 0
    """A variable of the guide's launch scripts, shared by all roles of a deployment."""
    VARIABLE = 1
    COMMAND_LINE = 2


@dataclass(frozen=True)
class Given:
    """One flag as the user wrote it; `name` is the spelling or the variable."""

    flag: Flag[Any]
    text: str
    name: str
    level: Level


@dataclass(frozen=True)
class Setting:
    """One flag's converted value, and where it came from."""

    value: Any
    name: str
    level: Level


Settings = Mapping[str, Setting]
"""By the name of the flag."""


def read_command_line(given: Sequence[Given]) -> dict[str, Given]:
    """The last text of each flag. An empty one counts as not given: so scripts pass an unset variable on.

    Raises `StartupError` when two spellings of one flag, or it and its `--no-` form, say different things.
    """
    last: dict[str, Given] = {}
    for each in given:
        if not each.text.strip():
            continue
        before = last.get(each.flag.name)
        if before is not None and before.name != each.name and before.text != each.text:
            raise StartupError(f"{before.name} and {each.name} contradict each other: keep one of them")
        last[each.flag.name] = each
    return last


def read_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """The first variable of each flag that is set and not empty; the shared one only when no other is."""
    given: dict[str, Given] = {}
    for flag in FLAGS.values():
        names = [(name, Level.VARIABLE) for name in flag.variables]
        names += [(flag.shared, Level.SHARED)] if flag.shared else []
        for name, level in names:
            if environment.get(name, "").strip():
                given[flag.name] = Given(flag, environment[name], name, level)
                break
    return given


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that no flag reads, most likely misspelled."""
    known = OTHER_VARIABLES.union(*(flag.variables for flag in FLAGS.values()))
    return sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)


def truth_of(environment: Mapping[str, str], variable: str, default: bool = False) -> bool:
    """A variable that has no flag. Raises `StartupError` when it is neither true nor false."""
    text = environment.get(variable, "").strip().lower()
    try:
        return TRUTH.convert(text) if text else default
    except ValueError:
        raise StartupError(f"{variable} must be {TRUTH.wanted}, not {text!r}") from None


def convert(given: Given) -> Setting:
    """Turn the text into the flag's value; `StartupError` names what was wanted."""
    try:
        return Setting(given.flag.kind.convert(given.text), given.name, given.level)
    except ValueError as error:
        shown = given.text if len(given.text) <= 80 else given.text[:77] + "..."
        raise StartupError(f"{given.name} must be {given.flag.kind.wanted}, not {shown!r}") from error


def value_of(given: Mapping[str, Given], layer: type[Any], field: str) -> Any:
    """What was said of the flag that fills a field, else the field's default."""
    flag = flags_of(layer)[field]
    return convert(given[flag.name]).value if flag.name in given else flag.default


def fields_of(layer: type[Any], settings: Settings) -> dict[str, Any]:
    """Field -> value, for each flag of `layer` that was said."""
    return {
        field: settings[flag.name].value for field, flag in flags_of(layer).items() if flag.name in settings
    }


def fill(layer: type[Layer], settings: Settings, **others: Any) -> Layer:
    """A layer from what was said of its flags; `others` are fields that do not follow from one flag alone."""
    return layer(**{**fields_of(layer, settings), **others})


def keep_useful(
    given: Mapping[str, Given], role: Role, engine: EngineKind
) -> tuple[dict[str, Given], list[str]]:
    """Drop what this role or engine has no use for, with a note; silently for a variable that roles share.

    One command line often goes to every role of a deployment, so only a flag for another engine ends the
    start: raises `StartupError` for one of the command line. Returns what is left, and the notes.
    """
    kept: dict[str, Given] = {}
    notes: list[str] = []
    for name, each in given.items():
        flag = each.flag
        if flag.roles is not None and role not in flag.roles:
            useless_to = f"{a_role(role)} has no use for {each.name}"
        elif flag.engines is not None and engine not in flag.engines:
            wanted = " or ".join(sorted(kind.value for kind in flag.engines))
            useless_to = f"--engine {engine.value} has no use for {each.name}, which is for --engine {wanted}"
            if each.level is Level.COMMAND_LINE:
                raise StartupError(f"{useless_to}: remove it")
        else:
            kept[name] = each
            continue
        if each.level is not Level.SHARED:
            notes.append(f"{useless_to}, so it is ignored")
    return kept, notes


def stronger(first: Setting | None, second: Setting | None) -> Setting | None:
    """Of two settings of one thing, the stronger; `StartupError` when equally strong ones differ."""
    if first is None or second is None:
        return first or second
    if first.level == second.level and first.value != second.value:
        raise StartupError(f"{first.name} and {second.name} contradict each other: keep one of them")
    return first if first.level >= second.level else second
