"""What a worker can be: its role in a topology, the engine it wraps, and what its requests may hold."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """What this process does in its topology (`--disaggregation-mode`)."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class Modality(str, Enum):
    """What a request may hold besides text (`--modality`)."""

    TEXT = "text"
    MULTIMODAL = "multimodal"


class EngineKind(str, Enum):
    """Which adapter serves the model (`--engine`)."""

    TENSORRT_LLM = "tensorrt_llm"
    TRANSFORMERS = "transformers"
    DOUBLE = "double"


_COMPONENTS = {
    Role.AGGREGATED: "tensorrt_llm",
    Role.DECODE: "tensorrt_llm",
    Role.PREFILL: "prefill",
    Role.ENCODE: "tensorrt_llm_encode",
}
_ARTICLES = {
    Role.AGGREGATED: "an aggregated",
    Role.PREFILL: "a prefill",
    Role.DECODE: "a decode",
    Role.ENCODE: "an encode",
}


def default_endpoint(role: Role, namespace: str) -> str:
    """Where a worker of `role` serves when `--endpoint` does not say otherwise."""
    return f"dyn://{namespace}.{_COMPONENTS[role]}.generate"


def a_role(role: Role) -> str:
    """`an aggregated worker`, for sentences."""
    return f"{_ARTICLES[role]} worker"
