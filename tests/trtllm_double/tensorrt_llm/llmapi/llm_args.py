"""Argument classes of the release (llmapi/llm_args.py): pydantic, strict, with a class for each nested
configuration."""

from __future__ import annotations

from enum import Enum
from typing import Any

from tensorrt_llm._double.release import release
from tensorrt_llm._double.signatures import CapacitySchedulerPolicy, arguments_class, configuration_classes

_classes = configuration_classes(release)
TorchLlmArgs: Any = arguments_class(release, _classes)
BaseLlmArgs: Any = TorchLlmArgs
LlmArgs: Any = TorchLlmArgs
globals().update(_classes)


class LoadFormat(Enum):
    """How weights are read."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


TOKENIZER_ALIASES: dict[str, str] = {}
"""Short names of custom tokenizers."""
__all__ = [
    "TOKENIZER_ALIASES",
    "BaseLlmArgs",
    "CapacitySchedulerPolicy",
    "LlmArgs",
    "LoadFormat",
    "TorchLlmArgs",
    *_classes,
]
