"""The library's executor package, as far as callers import from it."""

from tensorrt_llm.executor.result import CompletionOutput, GenerationResult, IterationResult
from tensorrt_llm.executor.utils import RequestError

__all__ = ["CompletionOutput", "GenerationResult", "IterationResult", "RequestError"]
