"""The library's input package: prompt forms and input processors."""

from tensorrt_llm.inputs.data import TextPrompt, TokensPrompt, prompt_inputs
from tensorrt_llm.inputs.multimodal import DisaggPrefillMultimodalInputs, MultimodalParams
from tensorrt_llm.inputs.multimodal_data import VideoData
from tensorrt_llm.inputs.registry import (
    BaseMultimodalInputProcessor,
    DefaultInputProcessor,
    create_input_processor,
    create_input_processor_with_hash,
)
from tensorrt_llm.inputs.utils import async_load_image, async_load_video, load_image

__all__ = [
    "BaseMultimodalInputProcessor",
    "DefaultInputProcessor",
    "DisaggPrefillMultimodalInputs",
    "MultimodalParams",
    "TextPrompt",
    "TokensPrompt",
    "VideoData",
    "async_load_image",
    "async_load_video",
    "create_input_processor",
    "create_input_processor_with_hash",
    "load_image",
    "prompt_inputs",
]
