"""Engine arguments from several sources, merged key by key, with the source of each.

Knows nested mappings, and nothing of files, flags, roles or which arguments an engine has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.values import parse_json

DOTTED_PREFIX = "--trtllm."


class Layer(NamedTuple):
    """One source of engine arguments. Every value in `args` came from `origin`."""

    origin: str
    args: Mapping[str, Any]


def merge_layers(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Deep-merge `layers`, the weakest first: a layer changes only the keys it names.

    A mapping is merged into a mapping; anything else, None included, replaces what was there. Returns the
    arguments and, for each dotted name of a value that is not a filled mapping, the origin of the layer that
    had the last word.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge_into(merged, layer.args, origins, layer.origin, ())
    return merged, origins


def _merge_into(
    target: dict[str, Any],
    source: Mapping[str, Any],
    origins: dict[str, str],
    origin: str,
    path: tuple[str, ...],
) -> None:
    for key, value in source.items():
        if not isinstance(key, str):
            raise StartupError(f"{origin}: the key {key!r} must be a text")
        here = (*path, key)
        if isinstance(value, Mapping) and value:
            if not isinstance(target.get(key), dict):
                target[key] = {}
                _forget(origins, here)
            origins.pop(".".join(here), None)
            _merge_into(target[key], value, origins, origin, here)
        elif isinstance(value, Mapping) and isinstance(target.get(key), dict):
            continue
        else:
            target[key] = copy.deepcopy(value)
            _forget(origins, here)
            origins[".".join(here)] = origin


def _forget(origins: dict[str, str], path: tuple[str, ...]) -> None:
    dotted = ".".join(path)
    for name in [name for name in origins if name == dotted or name.startswith(dotted + ".")]:
        del origins[name]


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    *groups, key = dotted.split(".")
    tree: dict[str, Any] = {key: value}
    for group in reversed(groups):
        tree = {group: tree}
    return tree


def find_value(args: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted name, or None where there is none."""
    value: Any = args
    for key in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def leaves(args: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything that is not a filled mapping."""
    for key, value in args.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def origin_of(origins: Mapping[str, str], dotted: str) -> str:
    """Where the argument came from; for a mapping, where the first of what it holds did."""
    inner = (origin for name, origin in origins.items() if name.startswith(dotted + "."))
    return origins.get(dotted) or next(inner, "default")


def without(args: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    """`args` without the value at a dotted name of one or two parts."""
    key, _, name = dotted.partition(".")
    inner = args.get(key)
    if name and isinstance(inner, Mapping):
        return {**args, key: {each: value for each, value in inner.items() if each != name}}
    return {each: value for each, value in args.items() if each != dotted}


def split_dotted(arguments: Sequence[str]) -> tuple[list[str], list[Layer]]:
    """Take `--trtllm.GROUP.KEY VALUE` pairs out of a command line: the rest, and one layer for each pair."""
    rest: list[str] = []
    layers: list[Layer] = []
    pending = iter(arguments)
    for argument in pending:
        if not argument.startswith(DOTTED_PREFIX):
            rest.append(argument)
            continue
        flag, assigned, text = argument.partition("=")
        if not assigned:
            text = next(pending, "--")
        if not assigned and text.startswith("--"):
            raise StartupError(f"{flag} needs a value: write {flag} VALUE")
        dotted = flag.removeprefix(DOTTED_PREFIX)
        if not all(dotted.split(".")):
            raise StartupError(f"{flag} names no engine argument: write --trtllm.GROUP.KEY VALUE")
        layers.append(Layer(flag, nested(dotted, _scalar(text))))
    return rest, layers


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return parse_json(text)
    except ValueError:
        return text
