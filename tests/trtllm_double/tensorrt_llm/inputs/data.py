"""Prompt forms (inputs/data.py): text, token ids, or a dictionary with either."""

from __future__ import annotations

from typing import Any, TypedDict

from tensorrt_llm._double.release import release

_MEDIA: dict[str, Any] = {
    "multi_modal_data": dict[str, Any],
    "mm_processor_kwargs": dict[str, Any],
    **({"multi_modal_uuids": dict[str, list[Any]]} if release.uuids else {}),
}
TextPrompt = TypedDict(
    "TextPrompt", {"prompt": str, "query": str, **_MEDIA}, total=False  # type: ignore[misc]
)  # fmt: skip
TokensPrompt = TypedDict(  # type: ignore[misc]
    "TokensPrompt", {"prompt_token_ids": list[int], "query_token_ids": list[int], **_MEDIA}, total=False
)


def prompt_inputs(inputs: Any) -> dict[str, Any]:
    """A dictionary with `prompt` or `prompt_token_ids`. Raises `TypeError` for anything else,
    `AssertionError` for neither."""
    if isinstance(inputs, str):
        return {"prompt": inputs}
    if isinstance(inputs, list):
        assert not inputs or isinstance(inputs[0], int), "token ids must be integers"
        return {"prompt_token_ids": inputs}
    if isinstance(inputs, dict):
        assert inputs.get("prompt") is not None or inputs.get("prompt_token_ids") is not None, (
            "either a prompt or its token ids"
        )
        return inputs
    raise TypeError(f"inputs of type {type(inputs).__name__}")
