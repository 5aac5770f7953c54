"""Writes down every call that a worker makes into TensorRT-LLM,
in a form that two workers can be compared by.

Used inside a worker's process (`run_worker.py`), over the double: each call becomes one line of JSON. Values
that say nothing about the call (an object's address, a tensor's numbers) are left out; values that a worker
leaves at the library's own default count as not given.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

METHODS = {
    "LLM": ("__init__", "preprocess", "generate_async", "get_stats_async", "get_kv_cache_events_async"),
    "MultimodalEncoder": ("__init__", "generate", "generate_async"),
}
"""Public methods of the library that a worker of either kind may call."""
_inside = threading.local()


def record_calls(path: Path) -> None:
    """From now on, calls of `METHODS` in this process are appended to the file `path`."""
    import tensorrt_llm

    for owner, names in METHODS.items():
        cls = getattr(tensorrt_llm, owner)
        for name in names:
            if hasattr(cls, name):
                setattr(cls, name, _recorded(cls, f"{owner}.{name}", getattr(cls, name), path))


def _recorded(cls: type, name: str, method: Callable[..., Any], path: Path) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What the library calls of itself is not the worker's call.
        outermost = type(self) is cls and not getattr(_inside, "library", False)
        if outermost:
            given = dict(signature.bind_partial(self, *args, **kwargs).arguments)
            given.pop(next(iter(signature.parameters)))
            given.update(given.pop("kwargs", {}))
            given = {key: each for key, each in given.items() if not _is_default(signature, key, each)}
            line = json.dumps({"call": name, "given": plain(given)}, sort_keys=True)
            with path.open("a", encoding="utf-8") as sink:
                sink.write(line + "\n")
            _inside.library = True
        try:
            return method(self, *args, **kwargs)
        finally:
            if outermost:
                _inside.library = False

    return call


def _is_default(signature: inspect.Signature, name: str, value: Any) -> bool:
    """True for what means the same as leaving the argument out."""
    parameter = signature.parameters.get(name)
    return value is None or (
        parameter is not None
        and parameter.default is not inspect.Parameter.empty
        and value == parameter.default
    )


def plain(value: Any) -> Any:
    """`value` as JSON: pictures, tensors and handles by what they are,
    objects by the fields that were set."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        if "storage_handle" in value or "method_key" in value:
            return f"<handle of {list(value.get('tensor_size') or ())}>"
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return _named(value)


def _named(value: Any) -> Any:
    kind = type(value).__name__
    if hasattr(value, "tobytes") and hasattr(value, "convert"):
        return f"<{kind} {value.mode} {value.size} {zlib.crc32(value.convert('RGB').tobytes()):08x}>"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{kind} {value.dtype} {list(value.shape)}>"
    if hasattr(value, "model_fields_set"):
        return {name: plain(getattr(value, name)) for name in sorted(value.model_fields_set)}
    return {name: plain(each) for name, each in _set_fields(value).items()}


def _set_fields(value: Any) -> dict[str, Any]:
    """Public attributes of `value` that are not what a fresh object of its type has."""
    fields = {
        name: each
        for name, each in _attributes(value).items()
        if not name.startswith("_") and not callable(each)
    }
    try:
        fresh = _attributes(type(value)())
    except TypeError:
        fresh = {}
    return {name: each for name, each in fields.items() if name not in fresh or fresh[name] != each}


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {"text": str(value)}))
