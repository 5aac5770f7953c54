"""Prompt forms (inputs/data.py): text, token ids, or a dictionary with either."""

from __future__ import annotations

from typing import Any


def prompt_inputs(inputs: Any) -> dict[str, Any]:
    """A dictionary with `prompt` or `prompt_token_ids`. Raises `TypeError` for anything else, `AssertionError` for neither."""
    if isinstance(inputs, str):
        return {"prompt": inputs}
    if isinstance(inputs, list):
        assert not inputs or isinstance(inputs[0], int), "token ids must be integers"
        return {"prompt_token_ids": inputs}
    if isinstance(inputs, dict):
        assert inputs.get("prompt") is not None or inputs.get("prompt_token_ids") is not None, "either a prompt or its token ids"
        return inputs
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
