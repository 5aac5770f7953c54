"""What a request is made of (executor/request.py), as far as callers see it."""

from __future__ import annotations

from typing import Any

DEFAULT_REQUEST_PRIORITY = 0.5


class GenerationRequest:
    """Token ids become a list of Python integers; anything that is no sequence of them is refused."""

    def __init__(self, prompt_token_ids: Any, sampling_params: Any, **_: Any) -> None:
        ids = prompt_token_ids.tolist() if hasattr(prompt_token_ids, "tolist") else prompt_token_ids
        if not isinstance(ids, list):
            raise TypeError(f"token ids of type {type(prompt_token_ids).__name__}")
        assert all(isinstance(token, int) and not isinstance(token, bool) for token in ids), (
            "token ids must be integers"
        )
        self.prompt_token_ids: list[int] = list(ids)
        self.sampling_params = sampling_params
