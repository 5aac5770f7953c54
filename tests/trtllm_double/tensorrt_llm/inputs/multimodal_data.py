"""`VideoData` (inputs/multimodal_data.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class VideoData:
    """Frames of a video and what is known of it. Raises `ValueError` without frames, `TypeError` without a
    dictionary."""

    frames: list[Any]
    metadata: dict[str, Any]
    audio: Any = None

    def __post_init__(self) -> None:
        if not self.frames:
            raise ValueError("frames must be a non-empty list")
        if not isinstance(self.metadata, dict):
            raise TypeError("metadata must be a dictionary")
