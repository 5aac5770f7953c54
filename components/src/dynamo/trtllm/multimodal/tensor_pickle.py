"""Reading the pickle inside a file of `torch.save` without running any of it.

PyTorch's own `weights_only=True` runs no foreign code, but it calls constructors that a small file can use to
allocate any amount of memory, resizes storages that are too short for their tensor, and builds sparse,
quantized, meta and wrapped tensors. Here the opcodes are interpreted by a table: the result is made of plain
values and `TensorRecord`s, which only describe a tensor, and what is not in the tables is refused. Pure
Python; knows neither torch nor the archive around the pickle.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_PICKLE_BYTES = 4 << 20
MAX_OPCODES = 200_000
MAX_DEPTH = 16
MAX_DIMENSIONS = 8
_INT64 = 1 << 63


class RefusedPickle(Exception):
    """The pickle holds something other than plain values and plain tensors, or is damaged.
    The text is for the log."""


@dataclass(frozen=True)
class StorageRecord:
    """A storage in the archive: `key` names its member,
    `storage_type` its elements (such as `FloatStorage`)."""

    key: str
    storage_type: str


@dataclass(frozen=True)
class TensorRecord:
    """A strided tensor, as described by the file;
    offset, size and stride count elements, and are not negative."""

    storage: StorageRecord
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Name:
    """A global that the pickle mentions; never looked up."""

    path: str


Plain: TypeAlias = "dict[str, Plain] | list[Plain] | int | float | str | bool | TensorRecord | None"

_MARK = object()


def read_tensor_pickle(data: bytes) -> Plain:
    """The value that `data` describes, tuples as lists. Raises `RefusedPickle`."""
    if len(data) > MAX_PICKLE_BYTES:
        raise RefusedPickle("the pickle is too long")
    try:
        value = _Machine().run(data)
    except RefusedPickle:
        raise
    except Exception as error:
        raise RefusedPickle("the pickle is damaged") from error
    return _Copier().copy(value, 0)


def _rebuild_tensor(*arguments: Any) -> TensorRecord:
    """`torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    storage, offset, size, stride, _requires_grad, _hooks, *metadata = arguments
    if not isinstance(storage, StorageRecord) or any(metadata):
        raise RefusedPickle("a tensor with metadata or without a storage")
    numbers = (offset, *size, *stride)
    if not all(type(number) is int and 0 <= number < _INT64 for number in numbers):
        raise RefusedPickle("a tensor whose layout is not made of natural numbers")
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
        raise RefusedPickle("a tensor whose size and stride do not fit")
    return TensorRecord(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(*arguments: Any) -> TensorRecord:
    """`torch._utils._rebuild_parameter(tensor, requires_grad, hooks)`: the tensor alone."""
    tensor = arguments[0]
    if not isinstance(tensor, TensorRecord) or len(arguments) > 3:
        raise RefusedPickle("a parameter without a tensor")
    return tensor


def _ordered_dict(*arguments: Any) -> dict[Any, Any]:
    if any(arguments):
        raise RefusedPickle("a dictionary with arguments")
    return {}


def _size(*arguments: Any) -> tuple[Any, ...]:
    (size,) = arguments
    return tuple(size)


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "collections OrderedDict": _ordered_dict,
    "torch Size": _size,
}
_STORAGE_TYPES = frozenset(
    f"torch {kind}Storage"
    for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})


class _Machine:
    """The stack machine of a pickle, for the opcodes that `torch.save`
    writes for tensors and plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise RefusedPickle("the pickle has too many opcodes")
            self._step(opcode.name, argument)
        (result,) = self._stack
        return result

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name not in _IGNORED:
            operation = _OPERATIONS.get(name)
            if operation is None:
                raise RefusedPickle(f"opcode {name}")
            operation(self, argument)

    def _mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, path: str) -> None:
        if path not in _CALLS and path not in _STORAGE_TYPES:
            raise RefusedPickle(f"global {path[:100]}")
        self._stack.append(_Name(path))

    def _persistent_id(self, _: Any) -> None:
        kind, storage_type, key, location, count = self._stack.pop()
        known = kind == "storage" and isinstance(storage_type, _Name) and storage_type.path in _STORAGE_TYPES
        if not known or not isinstance(key, str) or not isinstance(location, str) or type(count) is not int:
            raise RefusedPickle("a persistent id that names no storage")
        self._stack.append(StorageRecord(key, storage_type.path.removeprefix("torch ")))

    def _reduce(self, _: Any) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or name.path not in _CALLS or not isinstance(arguments, tuple):
            raise RefusedPickle("a call of something else")
        self._stack.append(_CALLS[name.path](*arguments))

    def _append(self, _: Any) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise RefusedPickle("an item for something that is no list")
        self._stack[-1].extend(items)

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self, _: Any) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        if (
            type(self._stack[-1]) is not dict
            or len(items) % 2
            or not all(type(key) is str for key in items[::2])
        ):
            raise RefusedPickle("a key that is no string, or for something that is no dictionary")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _since_mark(self) -> list[Any]:
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "TUPLE": _Machine._tuple,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "BINPERSID": _Machine._persistent_id,
    "REDUCE": _Machine._reduce,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items,
}


class _Copier:
    """Copies a result into plain values. What the memo shares is counted at each place,
    so that sharing cannot multiply."""

    def __init__(self) -> None:
        self._nodes = 0

    def copy(self, value: Any, depth: int) -> Plain:
        self._nodes += 1
        if self._nodes > MAX_OPCODES or depth > MAX_DEPTH:
            raise RefusedPickle("too deep, too large or endless")
        if type(value) is dict:
            return {_text(key): self.copy(item, depth + 1) for key, item in value.items()}
        if type(value) in (list, tuple):
            return [self.copy(item, depth + 1) for item in value]
        if type(value) is str:
            return _text(value)
        if type(value) is int and not -_INT64 <= value < _INT64:
            raise RefusedPickle("an integer of more than 64 bits")
        if value is None or type(value) in (int, float, bool, TensorRecord):
            plain: Plain = value
            return plain
        raise RefusedPickle(f"a value of type {type(value).__name__}")


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RefusedPickle("a string that is no text") from error
    return value
