"""A strict double of TensorRT-LLM's public API, as far as its source was read. None of its code is here.

Put the folder above this one on `PYTHONPATH` to give it to a worker process. `tests/trtllm_double/README.md`
says what it plays.
"""

from tensorrt_llm._double.script import script
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi import LLM, MultimodalEncoder, SamplingParams
from tensorrt_llm.version import __version__

__all__ = ["LLM", "DisaggregatedParams", "MultimodalEncoder", "SamplingParams", "__version__", "script"]
