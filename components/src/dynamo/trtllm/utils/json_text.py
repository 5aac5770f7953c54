"""JSON that a user wrote, on the command line or in a file: only what JSON itself allows."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """The value in `text`. Raises ValueError for anything else, also for NaN, a key named twice and a nesting without end."""
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
