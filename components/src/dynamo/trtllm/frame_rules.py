"""Which frames of a clip a model is shown. The rules are those of Transformers' video processors (5.24), so
that a model sees the frames that it was trained and measured with: `Qwen2VLVideoProcessor.sample_frames` and
`Qwen3VLVideoProcessor.sample_frames`.

Arithmetic only, so that it runs beside the decoder and for any engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from dynamo.trtllm.errors import ClientFault

_ASKS_FOR_MORE = "the video has {total} frames, and num_frames asks for {asked}"


class Spread(str, Enum):
    """How the chosen frames lie in the clip."""

    FROM_START = "from_start"
    """At equal steps from the first frame, as many as fill whole temporal patches (Qwen2-VL, Qwen2.5-VL)."""
    TO_BOTH_ENDS = "to_both_ends"
    """At equal steps, the first and the last frame among them (Qwen3-VL)."""


@dataclass(frozen=True, kw_only=True)
class FrameRule:
    """A model's choice of frames. `fps` and `num_frames` exclude each other;
    without both every frame is taken, up to `max_frames` where the model's rule says so.
    """

    spread: Spread
    fps: float | None = None
    """Frames a second to choose."""
    num_frames: int | None = None
    min_frames: int = 4
    """Holds for `fps` alone, like `max_frames`."""
    max_frames: int = 768
    temporal_patch_size: int = 2
    """Frames that the model takes together; `Spread.FROM_START` chooses a multiple of it."""

    def asked(
        self,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        min_frames: int | None = None,
        max_frames: int | None = None,
    ) -> FrameRule:
        """This rule with what a request says. Raises `ClientFault` for values that no clip can meet."""
        if fps is not None and num_frames is not None:
            raise ClientFault("fps and num_frames exclude each other; give one of them")
        if fps is not None and not (math.isfinite(fps) and fps > 0):
            raise ClientFault("fps must be a number above 0")
        counts = {"num_frames": num_frames, "min_frames": min_frames, "max_frames": max_frames}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ClientFault(f"{name} must be at least 1")
        rule = replace(
            self, min_frames=min_frames or self.min_frames, max_frames=max_frames or self.max_frames
        )
        if num_frames is not None or fps is not None:
            rule = replace(rule, fps=fps, num_frames=num_frames)
        if rule.min_frames > rule.max_frames:
            raise ClientFault(
                f"min_frames is {rule.min_frames}, above max_frames, which is {rule.max_frames}"
            )
        return rule

    def choose(self, total: int, source_fps: float) -> tuple[int, ...]:
        """Indices, from 0 and ascending, of the frames to show of a clip of `total` frames at `source_fps`.

        Raises `ClientFault` when `num_frames` asks for more frames than there are.
        """
        if self.spread is Spread.FROM_START:
            return self._from_start(total, source_fps)
        return self._to_both_ends(total, source_fps)

    def _from_start(self, total: int, source_fps: float) -> tuple[int, ...]:
        patch = self.temporal_patch_size
        if self.num_frames is not None:
            count = max(round(self.num_frames / patch) * patch, 1)
            if count > total:
                raise ClientFault(_ASKS_FOR_MORE.format(total=total, asked=self.num_frames))
        elif self.fps is not None:
            most = math.floor(min(self.max_frames, total) / patch) * patch
            wanted = min(max(total / source_fps * self.fps, self.min_frames), most, total)
            count = math.floor(wanted / patch) * patch
        else:
            count = total
        if count < 1:  # Fewer frames than one patch: all of them, and the processor repeats the last.
            count = total
        step = total / count
        # Transformers steps in double precision, rounds to single and cuts.
        # Where that yields one index more, it lies beyond the last frame.
        found = (int(np.float32(number * step)) for number in range(math.ceil(total / step)))
        return tuple(index for index in found if index < total)

    def _to_both_ends(self, total: int, source_fps: float) -> tuple[int, ...]:
        if self.num_frames is not None:
            count = self.num_frames
            if count > total:
                raise ClientFault(_ASKS_FOR_MORE.format(total=total, asked=count))
        elif self.fps is not None:
            wanted = int(total / source_fps * self.fps)
            count = min(max(wanted, self.min_frames), self.max_frames, total)
        else:
            count = min(max(total, self.min_frames), self.max_frames, total)
        return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())


QWEN2_VL = FrameRule(spread=Spread.FROM_START, fps=2.0)
"""Also Qwen2.5-VL. The processor names no rate; 2 frames a second is what the models are published with."""
QWEN3_VL = FrameRule(spread=Spread.TO_BOTH_ENDS, fps=2.0)
