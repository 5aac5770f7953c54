"""Secrets are left out of what is printed to be sent to somebody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"token(?!s|izer|_)|secret|passw|credential|(api|access|private|hmac)_?key|(^|_)auth($|_)", re.IGNORECASE
)
"""Names of secrets. `max_tokens`, `tokenizer` and `tokens_per_block` are none."""
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_KNOWN_FORM = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|nvapi-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,})"
)


def mask(value: Any, name: str = "") -> Any:
    """`value` without secrets: those under a name that says so, credentials in URLs, and keys of a form
    that is known."""
    if isinstance(value, Mapping):
        return {key: mask(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(inner, name) for inner in value]
    if value is not None and not isinstance(value, (bool, int, float)) and _SECRET_NAME.search(name):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """A text without credentials in URLs and keys of a form that is known."""
    return _KNOWN_FORM.sub(MASK, _IN_URL.sub(f"{MASK}@", text))
