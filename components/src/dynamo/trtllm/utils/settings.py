"""What the user said, flag by flag, on the command line and in the environment, before any rule is applied.

Turns two sources into one `Setting` for each flag, with its level and the name under which the user gave it, so that every
sentence can name exactly what to change.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NoReturn

from dynamo.trtllm.config import (
    DEFAULT_ENGINE_ARGS,
    EngineConfig,
    EngineKind,
    MediaConfig,
    ModelConfig,
    PeerConfig,
    Role,
    RuntimeConfig,
    TransferConfig,
    WorkerConfig,
)
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.flags import ENVIRONMENT_PREFIX, FLAGS, GROUPS, OTHER_VARIABLES, SWITCH, UNSUPPORTED, Flag
from dynamo.trtllm.utils.layers import find_value

LAYERS: Mapping[str, type[Any]] = {
    "worker": WorkerConfig,
    "runtime": RuntimeConfig,
    "model": ModelConfig,
    "media": MediaConfig,
    "engine": EngineConfig,
    "peers": PeerConfig,
    "transfer": TransferConfig,
}


class Level(IntEnum):
    """How strongly a value was said; the higher one wins."""

    PLAIN = 0
    """A variable of the guide's launch scripts, shared by all roles of a deployment."""
    VARIABLE = 1
    COMMAND_LINE = 2


@dataclass(frozen=True)
class Said:
    """One flag as the user wrote it; `name` is the spelling or the variable."""

    flag: Flag
    text: str
    name: str
    level: Level


@dataclass(frozen=True)
class Setting:
    """One flag's converted value, and where it came from."""

    value: Any
    name: str
    level: Level


class _Record(argparse.Action):
    """Keeps every spelling and text of a flag in the order given."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: Flag, **options: Any) -> None:
        self.flag = flag
        super().__init__(option_strings, dest, **options)

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        spelling = str(option_string)
        text = ("false" if spelling.startswith("--no-") else "true") if self.flag.kind is SWITCH else str(values)
        given: list[Said] = getattr(namespace, "given", [])
        namespace.given = [*given, Said(self.flag, text, spelling, Level.COMMAND_LINE)]


_CLIENTS = """What clients can send: /v1/chat/completions, /v1/completions and /v1/responses; /v1/messages (Anthropic) when the
frontend runs with DYN_ENABLE_ANTHROPIC_API=true, pictures in base64. Dynamo's frontend refuses tools: [] and stop: [], and fields
that it does not know (verbosity, safety_identifier) unless it runs with DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS=true; it drops
logit_bias and suffix. echo is refused. The portable engine (--engine transformers) refuses response_format other than text and a
tool_choice that forces a tool."""


class _Help(argparse.HelpFormatter):
    """Wraps each line of a help text by itself, so that Dynamo's two-line texts stay two lines."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.splitlines() for part in textwrap.wrap(line, width)]


class Parser(argparse.ArgumentParser):
    """Raises `StartupError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message.removeprefix('argument ')} (--help lists every flag)")


def default_of(flag: Flag) -> Any:
    """The default of the field or engine argument that `flag` lands in; None where another place decides."""
    if flag.engine_arg is not None:
        return find_value(DEFAULT_ENGINE_ARGS, flag.engine_arg)
    if flag.lands is None:
        return None
    layer, _, name = flag.lands.partition(".")
    return next(entry.default for entry in fields(LAYERS[layer]) if entry.name == name)


def build_parser() -> Parser:
    """A parser of the worker's own flags alone; Dynamo's runtime group is added by the caller."""
    parser = Parser(
        prog="python -m dynamo.trtllm",
        usage="%(prog)s [--FLAG VALUE]...",
        description="Dynamo worker for TensorRT-LLM: aggregated, prefill, decode or encode. --override-engine-args beats the "
        "command line, which beats the environment, which beats the file of --extra-engine-args, which beats the defaults.",
        epilog=_CLIENTS,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="store_true", help="Print the version and where the package was loaded from, and end."
    )
    for title, flags in GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    switch = flag.kind is SWITCH
    spellings = [*flag.spellings, *(f"--no-{spelling[2:]}" for spelling in flag.spellings if switch)]
    options: dict[str, Any] = {"nargs": 0} if switch else {"metavar": flag.kind.metavar}
    group.add_argument(
        *spellings, action=_Record, flag=flag, dest="given", default=argparse.SUPPRESS, help=_help_of(flag), **options
    )


def _help_of(flag: Flag) -> str:
    default = default_of(flag)
    facts = []
    if flag.variables:
        facts.append("env var: " + ", ".join([*flag.variables, *([flag.plain] if flag.plain else [])]))
    if default is not None or flag.name == "--torch-threads":
        facts.append(f"default: {flag.kind.show(default)}")
    return "\n".join([flag.help, *([" | ".join(facts)] if facts else [])]).replace("%", "%%")


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise `StartupError` for the first argument that no flag took. `known` are all spellings there are."""
    if not unknown:
        return
    flag = unknown[0].partition("=")[0]
    if not flag.startswith("--"):
        raise StartupError(f"the argument {flag!r} belongs to no flag: remove it, or write the flag before it")
    positive = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag
    reason = UNSUPPORTED.get(positive) or (UNSUPPORTED["--router-mode"] if positive.startswith("--router-") else None)
    if reason is not None:
        raise StartupError(f"{flag} is a flag of Dynamo's own component that this worker does not have: {reason}")
    near = difflib.get_close_matches(flag, known, n=1)
    advice = f"did you mean {near[0]}?" if near else "--help lists every flag"
    raise StartupError(f"{flag} is not a flag of this worker: {advice}")


def read_command_line(given: Sequence[Said]) -> dict[str, Said]:
    """The last text of each flag. An empty text counts as not given, which is how scripts pass an unset variable on.

    Raises `StartupError` when two spellings of one flag, or its positive and `--no-` form, say different things.
    """
    said: dict[str, Said] = {}
    for entry in given:
        if not entry.text.strip():
            continue
        before = said.get(entry.flag.name)
        if before is not None and before.name != entry.name and before.text != entry.text:
            raise StartupError(f"{before.name} and {entry.name} contradict each other: keep one of them")
        said[entry.flag.name] = entry
    return said


def read_environment(environment: Mapping[str, str]) -> dict[str, Said]:
    """The first variable of each flag that is set and not empty; the plain one only when no other is."""
    said: dict[str, Said] = {}
    for flag in FLAGS.values():
        names = [(name, Level.VARIABLE) for name in flag.variables] + ([(flag.plain, Level.PLAIN)] if flag.plain else [])
        for name, level in names:
            if environment.get(name, "").strip():
                said[flag.name] = Said(flag, environment[name], name, level)
                break
    return said


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that no flag reads, most likely misspelled."""
    known = OTHER_VARIABLES.union(*(flag.variables for flag in FLAGS.values()))
    return sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)


def convert(said: Said) -> Setting:
    """Turn the text into the flag's value; `StartupError` names what was wanted."""
    try:
        return Setting(said.flag.kind.convert(said.text), said.name, said.level)
    except ValueError as error:
        shown = said.text if len(said.text) <= 80 else said.text[:77] + "..."
        raise StartupError(f"{said.name} must be {said.flag.kind.wanted}, not {shown!r}") from error


_ARTICLES = {
    Role.AGGREGATED: "an aggregated",
    Role.PREFILL: "a prefill",
    Role.DECODE: "a decode",
    Role.ENCODE: "an encode",
}


def a_role(role: Role) -> str:
    """`an aggregated worker`, for sentences."""
    return f"{_ARTICLES[role]} worker"


def keep_useful(said: Mapping[str, Said], role: Role, engine: EngineKind) -> tuple[dict[str, Said], list[str]]:
    """Drop what this role or engine has no use for, with a note; silently for a plain variable, which all roles share.

    One command line often goes to every role of a deployment, so only a flag for another engine ends the start: raises
    `StartupError` for one of the command line. Returns what is left, and the notes.
    """
    kept: dict[str, Said] = {}
    notes: list[str] = []
    for name, entry in said.items():
        flag = entry.flag
        if flag.roles is not None and role not in flag.roles:
            useless_to = f"{a_role(role)} has no use for {entry.name}"
        elif flag.engines is not None and engine not in flag.engines:
            wanted = " or ".join(sorted(kind.value for kind in flag.engines))
            useless_to = f"--engine {engine.value} has no use for {entry.name}, which is for --engine {wanted}"
            if entry.level is Level.COMMAND_LINE:
                raise StartupError(f"{useless_to}: remove it")
        else:
            kept[name] = entry
            continue
        if entry.level is not Level.PLAIN:
            notes.append(f"{useless_to}, so it is ignored")
    return kept, notes


def stronger(first: Setting | None, second: Setting | None) -> Setting | None:
    """Of two settings of the same thing, the one said more strongly; `StartupError` when equally strong ones differ."""
    if first is None or second is None:
        return first or second
    if first.level == second.level and first.value != second.value:
        raise StartupError(f"{first.name} and {second.name} contradict each other: keep one of them")
    return first if first.level >= second.level else second
