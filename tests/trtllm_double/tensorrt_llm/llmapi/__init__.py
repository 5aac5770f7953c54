"""The public names of the recorded release."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.mm_encoder import MultimodalEncoder
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

__all__ = [
    "LLM",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "MultimodalEncoder",
    "RequestError",
    "SamplingParams",
    "SchedulingParams",
]
