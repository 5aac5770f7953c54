"""Engine arguments from several sources, merged key by key, with the source of each.

Knows nested mappings and files, and nothing of flags, roles or which arguments an engine has.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.trtllm.errors import StartupError

DOTTED_PREFIX = "--trtllm."


class Layer(NamedTuple):
    """One source of engine arguments. Every value in `args` came from `origin`."""

    origin: str
    args: Mapping[str, Any]


def merge_layers(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Deep-merge `layers`, the weakest first: a layer changes only the keys it names.

    A mapping is merged into a mapping; anything else, None included, replaces what was there. Returns the arguments and, for each
    dotted name of a value that is not a filled mapping, the origin of the layer that had the last word.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge_into(merged, layer.args, origins, layer.origin, ())
    return merged, origins


def _merge_into(
    target: dict[str, Any], source: Mapping[str, Any], origins: dict[str, str], origin: str, path: tuple[str, ...]
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


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises `StartupError` when the file cannot be read, is no YAML, holds no mapping, or names a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is named twice, where YAML's own loader would keep the last one silently."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                line = node.start_mark.line + 1
                raise StartupError(f"{path.name} names the key {twice} twice in the mapping at line {line}: keep one of them")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        raise StartupError(f"the engine configuration {path} does not exist: give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the engine configuration {path} cannot be read: give the path of a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise StartupError(f"the engine configuration {path.name} is not YAML{where}: correct it") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"the engine configuration {path.name} must hold a mapping of engine arguments")
    return content


def split_dotted(arguments: Sequence[str]) -> tuple[list[str], list[Layer]]:
    """Take the `--trtllm.GROUP.KEY VALUE` pairs out of a command line: the rest, and one layer for each pair."""
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
        return json.loads(text)
    except ValueError:
        return text
