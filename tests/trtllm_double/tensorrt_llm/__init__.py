"""A strict double of TensorRT-LLM's public API, as far as the record goes. None of its code is here.

Put the folder above this one on `PYTHONPATH` to give it to a worker process.
"""

from tensorrt_llm._double.script import release, script
from tensorrt_llm.llmapi import LLM, MultimodalEncoder, SamplingParams

__version__ = release.version
__all__ = ["LLM", "MultimodalEncoder", "SamplingParams", "__version__", "script"]
