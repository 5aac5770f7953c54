"""Chooses the engine adapter; imports only the chosen one."""

from __future__ import annotations

from importlib.util import find_spec

from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.engines.port import Engine
from dynamo.trtllm.errors import StartupError


def require_installed(kind: EngineKind) -> None:
    """Raise `StartupError` when the engine's library is not there, before a model is fetched for it. Imports nothing of it."""
    if kind is EngineKind.TENSORRT_LLM and find_spec("tensorrt_llm") is None:
        from dynamo.trtllm.engines.tensorrt_llm.library import INSTALL_HINT

        raise StartupError(INSTALL_HINT)


def create_engine(config: EngineConfig) -> Engine:
    """The adapter that `config.kind` names, not started. Raises `StartupError` when its library is missing."""
    if config.kind is EngineKind.DOUBLE:
        from dynamo.trtllm.engines.double import DoubleEngine

        return DoubleEngine(config)
    if config.kind is EngineKind.TRANSFORMERS:
        try:
            from dynamo.trtllm.engines.transformers.engine import TransformersEngine
        except ImportError as error:
            raise StartupError(
                "the portable engine needs Python 3.11 or later and Transformers 5.24 to 5.39: "
                "run `pip install 'dynamo-trtllm[portable]'`"
            ) from error
        return TransformersEngine(config)
    from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine

    return TensorRTLLMEngine(config)
