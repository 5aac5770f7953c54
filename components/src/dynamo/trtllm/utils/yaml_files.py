"""Engine configurations as YAML files: read within limits, so that no file prints megabytes or keeps the
worker busy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode
from yaml.constructor import ConstructorError

from dynamo.trtllm.errors import StartupError

MAX_FILE_BYTES = 256 << 10
MAX_VALUES = 20_000
"""Values in a file once its aliases are written out; a text counts once for every 16 characters."""
_TEXT_PER_VALUE = 16
_PIPES_OF_A_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""What `<(command)` gives."""
_INT, _MERGE, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "merge", "timestamp"))


class _Loader(yaml.SafeLoader):
    """Leaves as text what YAML 1.1 reads as a number that nobody meant: `1:30` (90), `010` (8), and dates."""

    def flatten_mapping(self, node: MappingNode) -> None:
        """Writes `<<` out: a mapping's own keys win, then the first of several that are merged, as YAML says.

        PyYAML's own, in 6.0.4, loses what a merged mapping overrides in the one that it merges itself.
        """
        own = [pair for pair in node.value if pair[0].tag != _MERGE]
        merged = [pair for pair in node.value if pair[0].tag == _MERGE]
        if not merged:
            return
        sources = [
            each
            for _, value in merged
            for each in (value.value if isinstance(value, SequenceNode) else [value])
        ]
        known = {_name(key) for key, _ in own}
        taken: list[tuple[Node, Node]] = []
        for source in sources:
            if not isinstance(source, MappingNode):
                raise ConstructorError(None, None, "only mappings can be merged", source.start_mark)
            self.flatten_mapping(source)
            taken += [pair for pair in source.value if _name(pair[0]) not in known]
            known |= {_name(key) for key, _ in source.value}
        node.value = [*taken, *own]


def _name(key: Node) -> tuple[str, str] | int:
    """What makes two keys of a mapping the same."""
    return (key.tag, key.value) if isinstance(key, ScalarNode) else id(key)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in (_INT, _TIMESTAMP)]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_WHOLE_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
_Loader.add_implicit_resolver(_INT, _WHOLE_NUMBER, list("-+0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises `StartupError` when the file cannot be read, is no YAML, holds no mapping, names a key twice, or
    is too large.
    """
    content = _load(_read_text(path), path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"the engine configuration {path.name} must hold a mapping of engine arguments")
    return content


def _read_text(path: Path) -> str:
    try:
        if path.is_fifo() and not str(path).startswith(_PIPES_OF_A_SHELL):
            raise StartupError(
                f"the engine configuration {path} is a pipe that may never end: give the path of a YAML file"
            )
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise StartupError(
                f"the engine configuration {path.name} is larger than {MAX_FILE_BYTES >> 10} KiB: "
                "give a file of engine arguments"
            )
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise StartupError(
            f"the engine configuration {path} does not exist: give the path of a YAML file"
        ) from None
    except (OSError, ValueError) as error:
        raise StartupError(
            f"the engine configuration {path} cannot be read: give the path of a YAML file"
        ) from error


def _load(text: str, path: Path) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Sizes(path.name).of(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise StartupError(f"the engine configuration {path.name} is not YAML{where}: correct it") from error
    except RecursionError as error:
        raise StartupError(
            f"the engine configuration {path.name} is nested too deeply: correct it"
        ) from error
    except (ValueError, LookupError, OverflowError, TypeError, AttributeError) as error:
        raise StartupError(
            f"the engine configuration {path.name} holds a value that YAML cannot read: correct it"
        ) from error


class _Sizes:
    """How many values each node of a file stands for; refuses what is too many, contains itself or names a
    key twice."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._known: dict[int, int | None] = {}

    def of(self, node: Node) -> int:
        key = id(node)
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._count(node)
        size = self._known[key]
        if size is None:
            line = node.start_mark.line + 1
            raise StartupError(f"{self._file} holds a value that contains itself, at line {line}: correct it")
        if size > MAX_VALUES:
            many = f"more than {MAX_VALUES:,} values once its aliases are written out"
            raise StartupError(f"{self._file} stands for {many}: shorten it")
        return size

    def _count(self, node: Node) -> int:
        if isinstance(node, MappingNode):
            self._refuse_twice(node)
            return 1 + sum(self.of(key) + self.of(value) for key, value in node.value)
        if isinstance(node, SequenceNode):
            return 1 + sum(self.of(item) for item in node.value)
        return 1 + len(node.value) // _TEXT_PER_VALUE

    def _refuse_twice(self, node: MappingNode) -> None:
        seen: set[tuple[str, str] | int] = set()
        for key, _ in node.value:
            if _name(key) in seen:
                advice = "write <<: [*ONE, *OTHER]" if key.tag == _MERGE else "keep one of them"
                line = node.start_mark.line + 1
                raise StartupError(
                    f"{self._file} names the key {key.value} twice in the mapping at line {line}: {advice}"
                )
            seen.add(_name(key))
