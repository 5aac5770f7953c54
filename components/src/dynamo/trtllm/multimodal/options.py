"""`mm_processor_kwargs`: what a request says of how its media are prepared, held against what the model's
processor knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.trtllm.engines.port import MediaInput, ProcessorOption
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.kinds.registry import in_words

FIELD = "mm_processor_kwargs"
_SHOWN = 40


def options_by_kind(
    given: Mapping[str, Any], media: Mapping[str, MediaInput]
) -> dict[str, Mapping[str, Any]]:
    """The options of each kind of `media` among those `given`; a key that several kinds know is for all of
    them.

    Raises `ClientFault` for a key that no kind knows, and for a value of another type or outside its range.
    """
    known = {name: option for taken in media.values() for name, option in taken.options.items()}
    checked = {name: _checked(name, value, known) for name, value in given.items() if value is not None}
    return {
        kind: {name: checked[name] for name in sorted(checked) if name in taken.options}
        for kind, taken in media.items()
    }


def _checked(name: str, value: Any, known: Mapping[str, ProcessorOption], within: str = FIELD) -> Any:
    if name not in known:
        shown = name if len(name) <= _SHOWN and name.isidentifier() else "a key"
        raise ClientFault(f"{within}: {shown} is not known; {_known_words(known)}")
    option = known[name]
    if option.fields:
        if not isinstance(value, Mapping):
            raise ClientFault(f"{within}: {name} must be an object")
        return {
            inner: _checked(inner, each, option.fields, f"{within}: {name}")
            for inner, each in sorted(value.items())
        }
    return _number(f"{within}: {name}", value, option)


def _known_words(known: Mapping[str, ProcessorOption]) -> str:
    return f"this model knows {in_words(sorted(known))}" if known else "this model knows no such keys"


def _number(name: str, value: Any, option: ProcessorOption) -> float:
    kind = "a whole number" if option.whole else "a number"
    bounds = f"{kind} between {option.least:.15g} and {option.most:.15g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClientFault(f"{name} must be {bounds}")
    sound = option.least <= value <= option.most and not (option.whole and value % 1)
    if not sound:
        raise ClientFault(f"{name} must be {bounds}" + (f", not {value:.15g}" if abs(value) < 1e15 else ""))
    return int(value) if option.whole else float(value)
