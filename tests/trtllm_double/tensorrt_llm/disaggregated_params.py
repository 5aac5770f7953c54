"""`DisaggregatedParams` of the release: slots and keywords only, so a field that it lacks cannot be set."""

from __future__ import annotations

import random
from dataclasses import field, make_dataclass
from enum import IntEnum
from typing import Any

from tensorrt_llm._double.release import release

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


class DisaggScheduleStyle(IntEnum):
    """Since 1.3: which side is scheduled first."""

    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


def _post_init(self: Any) -> None:
    """disaggregated_params.py, 1.2.1 and rc29: handles without hashes get random ones, so nothing is
    reused."""
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in REQUEST_TYPES:
            raise ValueError(f"request type {self.request_type} is none of {REQUEST_TYPES}")
    handles, hashes = self.multimodal_embedding_handles, self.multimodal_hashes
    if handles is None:
        return
    if hashes is None:
        assert len(handles) > 0, "at least one handle"
        words = [random.getrandbits(31) for _ in range(8)]
        self.multimodal_hashes = [list(words) for _ in handles]
        return
    assert len(handles) == len(hashes), "one hash for each handle"
    assert all(isinstance(h, list) and len(h) == 8 and all(isinstance(n, int) for n in h) for h in hashes), (
        "a hash is eight integers"
    )


DisaggregatedParams: Any = make_dataclass(
    "DisaggregatedParams",
    [(name, Any, field(default=None)) for name in release.disaggregated],
    namespace={"__post_init__": _post_init},
    kw_only=True,
    slots=True,
)
DisaggregatedParams.__module__ = __name__
