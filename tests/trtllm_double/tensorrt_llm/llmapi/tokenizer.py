"""Tokenizers (llmapi/tokenizer.py): the library wraps those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorrt_llm._double.model import Model, Tokenizer

TokenizerBase = Tokenizer


def tokenizer_factory(obj: str | Path | Any = None, **_: Any) -> Tokenizer | None:
    """The tokenizer of a model directory; one that is made already stays as it is."""
    if obj is None or isinstance(obj, Tokenizer):
        return obj
    return Model(str(obj)).tokenizer
