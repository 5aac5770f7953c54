"""What stands for an item of media in a prompt: the ids that a model's configuration and processor name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class MediaTokens(Protocol):
    """What the engine must know of every kind."""

    @property
    def feature(self) -> int:
        """What stands for one row of features."""


@dataclass(frozen=True)
class ImageTokens:
    """The ids that stand for an image in a prompt, as a model's configuration and processor name them."""

    placeholder: int
    """What the chat template writes once per image."""
    feature: int
    """What stands for one row of features."""
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    row_end: int | None = None
    """Follows every row of features but the last, which `end` follows."""
    merge: int = 1
    """Patches per side that become one row of features."""
    patch: int = 1
    """Pixels per side of a patch."""


@dataclass(frozen=True)
class VideoTokens:
    """The ids that stand for a video in a prompt, and how its frames become rows of features."""

    feature: int
    """What the chat template writes once per video, and what stands for one row of features."""
    merge: int
    """Patches per side that become one row of features."""
    together: int
    """Frames that become one row of features: a temporal patch."""
    begin: int
    end: int
    """Around the rows of a temporal patch, where times are written."""
    write: Callable[[str], Sequence[int]] | None = None
    """Ids of a text; given where the time of each temporal patch stands before it in the prompt."""
    paced: bool = False
    """Positions follow the seconds between temporal patches, `second_per_grid_ts`."""

    @property
    def around(self) -> int:
        """The fewest ids of a temporal patch beside its rows."""
        return 0 if self.write is None else 3

    def expand(self, grid: Sequence[int], times_s: Sequence[float]) -> tuple[int, ...]:
        """What the placeholder becomes: rows by `grid` (temporal patches, height and width in patches)."""
        rows = (self.feature,) * (grid[1] * grid[2] // self.merge**2)
        if self.write is None:
            return rows * grid[0]
        ids: list[int] = []
        for time_s in times_s:
            ids += [*self.write(f"<{time_s:.1f} seconds>"), self.begin, *rows, self.end]
        return tuple(ids)


@dataclass(frozen=True)
class AudioTokens:
    """The id that stands for a sound in a prompt."""

    feature: int
    """What the chat template writes once per sound, and what stands for one row of features."""

    @staticmethod
    def positions(frames: int) -> int:
        """Places in the audio encoder of a spectrogram of `frames`:
        its second convolution has a stride of 2."""
        return (frames - 1) // 2 + 1

    def rows(self, frames: int) -> int:
        """Rows of features of a spectrogram of `frames`, by the formula of `Qwen2AudioProcessor`:
        the mean of two places each. Below 1 for a sound that is too short to be heard.
        """
        return (self.positions(frames) - 2) // 2 + 1
