"""`DisaggregatedParams` of the recorded release: slots and keywords only, so a field that it lacks cannot be set."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from tensorrt_llm._double.script import release

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


def _post_init(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in REQUEST_TYPES:
            raise ValueError(f"unknown request type {self.request_type}")
    handles, hashes = self.multimodal_embedding_handles, self.multimodal_hashes
    if handles is not None and hashes is not None:
        assert len(handles) == len(hashes), "one hash for each handle"
        assert all(len(h) == 8 and all(isinstance(n, int) for n in h) for h in hashes), "a hash is eight numbers"


DisaggregatedParams: Any = make_dataclass(
    "DisaggregatedParams",
    [(name, Any, field(default=None)) for name in release.disaggregated],
    namespace={"__post_init__": _post_init},
    kw_only=True,
    slots=True,
)
