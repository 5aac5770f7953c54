"""What an input processor makes of media (inputs/multimodal.py), as far as the double's engine needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MultimodalParams:
    """Embeddings of a prompt's images, in order, the names of their contents, and the mRoPE handles that go
    with them."""

    features: list[Any] = field(default_factory=list)
    embedding_handles: list[dict[str, Any]] | None = None
    hashes: list[str] | None = None
    """64 hexadecimal digits or the caller's own name per image; None: hashing is off."""
    mrope: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
    grids: list[tuple[int, int, int]] | None = None

    @property
    def multimodal_hashes(self) -> list[str] | None:
        return self.hashes


@dataclass
class DisaggPrefillMultimodalInputs:
    """The prompt with its placeholders expanded to what the embedding handles hold."""

    prompt_token_ids: list[int]
    multimodal_lengths: list[int]
