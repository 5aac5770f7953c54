"""Kinds of values that a user writes: as text in a flag or a variable, or as a plain value in YAML and JSON.

Each kind says once what it takes, and how a sentence names it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

MEBIBYTE = 1 << 20
LARGEST = 2**31 - 1
"""Counts become signed 32-bit numbers in the engines."""
LARGEST_BYTES = 2**63 - 1
LONGEST_S = 1e9
"""Thirty years: beyond any wait, and within what clocks and timers take."""
TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})

Value = TypeVar("Value", covariant=True)
Member = TypeVar("Member", bound=Enum)


@dataclass(frozen=True)
class Kind(Generic[Value]):
    """One kind of value. `wanted` completes 'must be ...'; `show` writes a value as a user would.

    `parse` makes a value of a text, `accepts` says whether a value, of a text or of YAML, is of this kind.
    """

    wanted: str
    parse: Callable[[str], Value]
    accepts: Callable[[Any], bool] = lambda _: True
    metavar: str = "VALUE"
    show: Callable[[Any], str] = str
    nullable: bool = True
    """Among engine arguments: no value at all is a value too, and means something."""

    def convert(self, text: str) -> Value:
        """The value that `text` says. Raises ValueError when it is of another kind."""
        try:
            value = self.parse(text)
        except (
            OverflowError,
            OSError,
            RuntimeError,
        ):  # endless numbers; paths too long, or of a user that nobody is
            raise ValueError from None
        if not self.accepts(value):
            raise ValueError
        return value


def parse_json(text: str) -> Any:
    """The value in a text. Raises ValueError for what is not JSON,
    as NaN, a key named twice, endless nesting."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key is named twice")
    return content


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that 64 bits hold."""
    if type(value) is int:
        return abs(value) <= LARGEST_BYTES
    return type(value) is float and math.isfinite(value)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value consists of what JSON has: texts, finite numbers, truth values, lists and mappings."""
    if depth > 50:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item, depth + 1) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, (str, bool)) or is_number(value)


def whole(least: int, most: int = LARGEST) -> Kind[int]:
    """Whole numbers within bounds."""

    def accepts(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return Kind(f"a whole number of at least {least}", int, accepts, metavar="N")


def choice(*words: str) -> Kind[str]:
    """One of several words."""
    return Kind(one_of(words), str, lambda value: value in words, metavar=_braces(words))


def member(members: type[Member], aliases: Mapping[str, str] | None = None) -> Kind[Member]:
    """A member of an enumeration by its value, or by an alias of that."""
    spelled = aliases or {}
    words = [str(each.value) for each in members] + list(spelled)

    def parse(text: str) -> Member:
        return members(spelled.get(text, text))

    return Kind(one_of(words), parse, metavar=_braces(words), show=lambda each: str(each.value))


def one_of(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _braces(words: Sequence[str]) -> str:
    return "{" + ",".join(words) + "}"


def _up_to(most: float, unit: int = 1) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and value > 0 and value * unit <= most


def _mebibytes(text: str) -> int:
    return int(float(text) * MEBIBYTE)


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError
    return word in TRUE_WORDS


def _endpoint(text: str) -> str:
    return text if text.startswith("dyn://") else f"dyn://{text}"


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _directory(text: str) -> Path:
    path = _path(text)
    if not path.is_dir():
        raise ValueError
    return path.resolve()


def _model_path(text: str) -> str:
    Path(
        text
    ).is_dir()  # raises OSError for a name that is too long, or behind a directory that may not be searched
    return text


def _json_object(text: str) -> Mapping[str, Any]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _counts(text: str) -> Mapping[str, int]:
    """`image=16,video=1`, or the same as a JSON object, each count a number or `{"count": N}`."""
    if text.lstrip().startswith("{"):
        given = {name: _count_of(value) for name, value in _json_object(text).items()}
    else:
        pairs = [each.partition("=") for each in text.replace(" ", "").split(",") if each]
        given = _object([(name, int(count)) for name, _, count in pairs])
    return given


def _count_of(value: Any) -> Any:
    return value["count"] if isinstance(value, Mapping) and set(value) == {"count"} else value


def _are_counts(value: Any) -> bool:
    return bool(value) and all(
        name and type(count) is int and 0 <= count <= LARGEST for name, count in value.items()
    )


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(each.lower().rstrip(".") for each in text.replace(",", " ").split())


def _served_names(text: str) -> tuple[str, ...]:
    from dynamo.common.configuration.utils import split_served_model_names

    text.encode()  # raises ValueError for bytes of a command line that are no text
    return tuple(split_served_model_names(text))


COUNT = whole(1)
GPUS = replace(COUNT, nullable=False)
NUMBER = Kind("a number of at least 0", float, lambda value: is_number(value) and value >= 0)
FRACTION = Kind("a fraction above 0 and at most 1", float, _up_to(1), metavar="FRACTION")
SECONDS = Kind("a number of seconds above 0", float, _up_to(LONGEST_S), metavar="SECONDS")
MEBIBYTES = Kind(
    "a size in MB above 0",
    _mebibytes,
    _up_to(LARGEST_BYTES),
    metavar="MB",
    show=lambda size: f"{size / MEBIBYTE:g}",
)
MEBIBYTES_OR_NONE = replace(
    MEBIBYTES, wanted="a size in MB, or 0 to turn it off", accepts=lambda size: 0 <= size <= LARGEST_BYTES
)
GIGABYTES = Kind("a size in GB above 0", float, _up_to(LARGEST_BYTES, 1024 * MEBIBYTE), metavar="GB")
TRUTH = Kind(
    "true or false",
    _truth,
    lambda value: isinstance(value, bool),
    metavar="{true,false}",
    show=lambda on: str(on).lower(),
    nullable=False,
)
SWITCH = replace(TRUTH, metavar="")
"""Takes no value on the command line and has a `--no-` form; in the environment it is a truth value."""
TEXT = Kind("a text", str)
NAMES = Kind("one or more names", _served_names, metavar="NAME", show=", ".join)
ENDPOINT = Kind(
    "an endpoint of the form dyn://namespace.component.endpoint",
    _endpoint,
    lambda value: re.fullmatch(r"dyn://[^\s./]+\.[^\s./]+\.[^\s./]+", value) is not None,
    metavar="ENDPOINT",
)
DIRECTORY = Kind("a directory that exists", _directory, metavar="DIRECTORY")
COUNTS = Kind(
    "counts such as image=16,video=1, or a JSON object of them",
    _counts,
    _are_counts,
    metavar="KIND=N,...",
    show=lambda counts: ",".join(f"{name}={count}" for name, count in counts.items()),
)
HOSTS = Kind(
    "names of hosts without scheme, port and path, with a comma between two",
    _hosts,
    lambda hosts: (
        bool(hosts) and all(re.fullmatch(r"(\*?\.)?[^\s/:@?#*\[\]]+|\[[0-9a-f:.]+\]", each) for each in hosts)
    ),
    metavar="HOST,...",
    show=",".join,
)
FILE = Kind("a file", _path, metavar="FILE")
MODEL_PATH = Kind("a directory that can be looked into, a Hugging Face name, demo or demo-audio", _model_path)
JSON_OBJECT = Kind("a JSON object", _json_object, metavar="JSON")
DEVICE = Kind(
    "auto, cpu, cuda or cuda:N",
    str,
    lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None,
    metavar="{auto,cpu,cuda,cuda:N}",
)
DTYPES = choice("auto", "float16", "bfloat16", "float32")
