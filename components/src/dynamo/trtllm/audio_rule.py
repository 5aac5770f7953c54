"""What of a sound a model hears. Imports nothing of ours,
so that it stands beside the decoder and for any engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AudioRule:
    """How a model hears: `rate` samples a second, and no sound of more than `max_duration_s`,
    of which it would hear the beginning alone.
    """

    rate: int
    max_duration_s: float
