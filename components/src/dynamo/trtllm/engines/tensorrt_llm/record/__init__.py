"""What is known of TensorRT-LLM's LLM API, release by release, as data with its sources.

The preflight check, the reader of the library's source and the GPU suite read this record; the adapter
itself asks the installed library and uses the record only for what a library cannot be asked (models,
behaviours). Nothing here imports TensorRT-LLM. Names, defaults and choices are what the reader
(`dynamo.trtllm.engines.tensorrt_llm.source`) finds in a source tree; a behaviour has a source of its own.
`README.md` tells which was read where.
"""

from __future__ import annotations

from dynamo.trtllm.engines.tensorrt_llm.record.models import MODELS, TEXT_ONLY, ModelFacts, find_model_facts
from dynamo.trtllm.engines.tensorrt_llm.record.nearest import (
    PAIRED_WITH_DYNAMO,
    nearest_release,
    release_record,
)
from dynamo.trtllm.engines.tensorrt_llm.record.release import MADE, REQUIRED, UNSAID, Release
from dynamo.trtllm.engines.tensorrt_llm.record.releases import RECORD
from dynamo.trtllm.engines.tensorrt_llm.record.sources import SOURCES
from dynamo.trtllm.engines.tensorrt_llm.record.videos import VIDEO_PLACEHOLDER, VideoFacts

__all__ = [
    "MADE",
    "MODELS",
    "PAIRED_WITH_DYNAMO",
    "RECORD",
    "REQUIRED",
    "SOURCES",
    "TEXT_ONLY",
    "UNSAID",
    "VIDEO_PLACEHOLDER",
    "ModelFacts",
    "Release",
    "VideoFacts",
    "find_model_facts",
    "nearest_release",
    "release_record",
]
