"""What a worker can be: its role in a topology, the engine it wraps, and what its requests may hold."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """What this process does in its topology (`--disaggregation-mode`).

    Whoever needs to know what a role does asks one of the properties; only `request_handlers.handlers`
    compares roles, to build the role's handler, besides tables that hold one entry for each.
    """

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    @property
    def prefills(self) -> bool:
        """Computes prompts and the first token; loads a prompt's media, or asks an encode worker for them."""
        return self in (Role.AGGREGATED, Role.PREFILL)

    @property
    def decodes(self) -> bool:
        """Computes answers: Dynamo's frontend sends clients' requests here, and streams what comes back."""
        return self in (Role.AGGREGATED, Role.DECODE)

    @property
    def runs_language_model(self) -> bool:
        """Has a text model and a KV cache; False for the role that only turns media into embeddings."""
        return self.prefills or self.decodes

    @property
    def reads_media(self) -> bool:
        """Fetches and decodes media."""
        return self.prefills or not self.decodes

    @property
    def other_half(self) -> Role | None:
        """The role that KV caches go to or come from; None where they stay, or where there are none."""
        return {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(self)

    @property
    def moves_kv_caches(self) -> bool:
        """A request's KV cache leaves this worker, or comes from another one."""
        return self.other_half is not None

    @property
    def asks_prefill_workers(self) -> bool:
        """Asks a prefill worker by itself, for a request whose KV cache is lost or was never made."""
        return self.other_half is Role.PREFILL


class Modality(str, Enum):
    """What a request may hold besides text (`--modality`)."""

    TEXT = "text"
    MULTIMODAL = "multimodal"


_NO_TENSORRT_LLM = (
    "TensorRT-LLM is not installed here: run `pip install 'dynamo-trtllm[trtllm]'` on a machine "
    "with an NVIDIA GPU, use NVIDIA's image, or choose the portable engine with `--engine transformers`"
)
_NO_TRANSFORMERS = (
    "the portable engine needs Python 3.11 or later and Transformers 5.24 to 5.39: "
    "run `pip install 'dynamo-trtllm[portable]'`"
)


class EngineKind(str, Enum):
    """Which adapter serves the model (`--engine`): the registry of engines.

    Another engine is a module with an `Engine` and a line here: its name, its class below
    `dynamo.trtllm.engines`, the library without which it cannot start (None: it needs none), and what to say
    where that is missing. Nothing is imported before an engine is chosen.
    """

    adapter: str
    library: str | None
    missing: str

    def __new__(
        cls, name: str, adapter: str = "", library: str | None = None, missing: str = ""
    ) -> EngineKind:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.adapter, kind.library, kind.missing = adapter, library, missing
        return kind

    TENSORRT_LLM = "tensorrt_llm", "tensorrt_llm.engine:TensorRTLLMEngine", "tensorrt_llm", _NO_TENSORRT_LLM
    TRANSFORMERS = "transformers", "transformers.engine:TransformersEngine", "transformers", _NO_TRANSFORMERS
    DOUBLE = "double", "double:DoubleEngine"


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


WITH_ENCODER = frozenset(role for role in Role if role.prefills)
"""Roles that may ask an encode worker."""
WITH_MEDIA = frozenset(role for role in Role if role.reads_media)
WITH_KV_CACHE = frozenset(role for role in Role if role.runs_language_model)
