"""The public names of the release."""

from tensorrt_llm._double.release import release
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import CompletionOutput, RequestOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi import llm_args
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import CapacitySchedulerPolicy, TorchLlmArgs
from tensorrt_llm.llmapi.mm_encoder import MultimodalEncoder
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

globals().update({name: getattr(llm_args, name) for name in release.nested})
if release.conversations:
    from tensorrt_llm.conversation_params import ConversationParams as ConversationParams
    from tensorrt_llm.disaggregated_params import DisaggScheduleStyle as DisaggScheduleStyle
if release.build_config:
    BuildConfig = TorchLlmArgs

__all__ = [
    "LLM",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "MultimodalEncoder",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "TorchLlmArgs",
    *release.nested,
    *(("ConversationParams", "DisaggScheduleStyle") if release.conversations else ()),
    *(("BuildConfig",) if release.build_config else ()),
]
