"""The arguments class of the recorded release."""

from __future__ import annotations

from tensorrt_llm._double.script import release
from tensorrt_llm._double.signatures import arguments_class

TorchLlmArgs = arguments_class(release)
