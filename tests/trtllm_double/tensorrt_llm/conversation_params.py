"""`ConversationParams` (tensorrt_llm/conversation_params.py, after 1.3.0rc20): which conversation a request
belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from tensorrt_llm._double.release import release

if not release.conversations:
    raise ModuleNotFoundError(
        "No module named 'tensorrt_llm.conversation_params'", name="tensorrt_llm.conversation_params"
    )


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    conversation_id: str | None = None
