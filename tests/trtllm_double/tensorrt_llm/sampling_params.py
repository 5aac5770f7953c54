"""`SamplingParams` and `GuidedDecodingParams` of the recorded release."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from tensorrt_llm._double.script import release

GuidedDecodingParams: Any = make_dataclass(
    "GuidedDecodingParams", [(name, Any, field(default=default)) for name, default in release.guided.items()], kw_only=True
)


def _post_init(self: Any) -> None:
    if self.pad_id is None:
        self.pad_id = self.end_id
    self.best_of = self.best_of or self.n
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError("require 0 <= top_p <= 1")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError("require top_k >= 0")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError("require temperature >= 0")
    if self.guided_decoding is not None:
        given = [n for n in release.guided if getattr(self.guided_decoding, n)]
        if len(given) != 1:
            raise ValueError("guided decoding needs exactly one grammar")


SamplingParams: Any = make_dataclass(
    "SamplingParams",
    [(name, Any, field(default=default)) for name, default in release.sampling.items()],
    namespace={"__post_init__": _post_init},
    kw_only=True,
)
