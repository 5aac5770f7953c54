"""Drawn clips of one shape that moves, or stands still, and the words that describe them.

As in `pictures.py`, everything is a function of a seed. A clip is one shape of one colour on a background of
another colour; the shape moves to one of four sides, never faster than the clip's end allows, or stands
still. Its way is `MIN_WAY` or more of the room that it has on that axis, with a drift across of at most
`MAX_DRIFT` of the room on the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from .pictures import COLOURS, MAX_TILT_DEG, SHAPES, degraded, jittered, shape_mask, with_article

Frames = npt.NDArray[np.uint8]
"""RGB, [frames, height, width, 3]."""

DIRECTIONS = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
"""What a shape may do beside standing still, as the answers say it."""
MIN_SIDE = 96
MAX_SIDE = 320
MIN_EXTENT = 0.25
MAX_EXTENT = 0.5
MIN_WAY = 0.6
MAX_DRIFT = 0.12
STILL = 0.2
"""The share of clips in which nothing moves."""
FRAMES_PER_S = 12
_TEXT_ROOM = 28


@dataclass(frozen=True)
class Clip:
    """One clip and what is seen in it. `motion` is one of `DIRECTIONS`, None where nothing moves."""

    frames: Frames
    shape: str
    colour: str
    background: str
    motion: str | None

    @property
    def caption(self) -> str:
        """For instance `a red circle moves to the left.`; of a still clip what one would say of its
        picture."""
        if self.motion is None:
            return f"{with_article(self.colour)} {self.shape} on {with_article(self.background)} background."
        return f"{with_article(self.colour)} {self.shape} moves {DIRECTIONS[self.motion]}."


def draw_clip(seed: int, size: tuple[int, int] | None = None, frames: int = 3 * FRAMES_PER_S) -> Clip:
    """Draws the clip of `seed`; `size` is (width, height) in pixels, drawn from the seed if it is left out.

    With fewer `frames` it is the same clip as a rule shows it that takes so many frames evenly.
    """
    rng = Random(seed)
    shape = rng.choice(SHAPES)
    colour, background = rng.sample(sorted(COLOURS), 2)
    motion = None if rng.random() < STILL else rng.choice(sorted(DIRECTIONS))
    own_size = (rng.randint(MIN_SIDE, MAX_SIDE), rng.randint(MIN_SIDE, MAX_SIDE))
    width, height = size or own_size
    extent = max(2, round(min(width, height) * rng.uniform(MIN_EXTENT, MAX_EXTENT)))
    mask = shape_mask(shape, extent, rng.uniform(-MAX_TILT_DEG, MAX_TILT_DEG))
    empty = Image.new("RGB", (width, height), jittered(COLOURS[background], rng))
    fill = jittered(COLOURS[colour], rng)
    drawn = []
    for left, top in _corners(motion, (width - extent, height - extent), frames, rng):
        image = empty.copy()
        image.paste(fill, (left, top, left + extent, top + extent), mask)
        drawn.append(np.asarray(image))
    return Clip(np.stack(drawn), shape, colour, background, motion)


def _corners(motion: str | None, room: tuple[int, int], frames: int, rng: Random) -> list[tuple[int, int]]:
    """Where the shape's upper left corner is in every frame, each within `room`."""
    along = 0 if motion in ("left", "right") else 1
    ways = [0.0, 0.0]
    if motion is not None:
        ways[along] = rng.uniform(MIN_WAY, 1.0) * (-1 if motion in ("left", "up") else 1)
        ways[1 - along] = rng.uniform(-MAX_DRIFT, MAX_DRIFT)
    pace = 2.0 ** rng.uniform(-0.5, 0.5)
    starts = [rng.uniform(max(0.0, -way), min(1.0, 1.0 - way)) for way in ways]
    times = [(frame / frames) ** pace for frame in range(frames)]
    places = [[start + way * time for start, way in zip(starts, ways, strict=True)] for time in times]
    return [(round(x * room[0]), round(y * room[1])) for x, y in places]


def degrade_clip(clip: Clip, rng: Random) -> Clip:
    """The same clip with slight noise and with the losses of compression, alike in all frames."""
    amplitude, quality = rng.randint(2, 12), rng.randint(70, 95)
    frames = [np.asarray(degraded(Image.fromarray(frame), amplitude, quality, rng)) for frame in clip.frames]
    return Clip(np.stack(frames), clip.shape, clip.colour, clip.background, clip.motion)


def write_mp4(clip: Clip, path: Path, frames_per_s: int = FRAMES_PER_S) -> None:
    """Writes the clip as MP4 (H.264, 4:2:0); an odd last row or column of pixels is left out. Needs PyAV."""
    import av

    height, width = (side // 2 * 2 for side in clip.frames.shape[1:3])
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=frames_per_s)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in clip.frames[:, :height, :width]:
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24"))
            )
        container.mux(stream.encode())


def read_frames(path: Path, frames_per_s: float = 2.0, least: int = 4, most: int = 8) -> Frames:
    """Frames of a video file, as evenly as the demo model gets them.
    Needs PyAV, and memory for the whole video."""
    import av

    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate or FRAMES_PER_S)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    wanted = min(max(int(len(frames) / rate * frames_per_s), least), most, len(frames))
    return np.stack([frames[place * len(frames) // wanted] for place in range(wanted)])


def film_strip(frames: Frames, text: str = "", height: int = 112, gap: int = 4) -> Image.Image:
    """The frames side by side, scaled to `height` pixels, white between them, and `text` below them."""
    width = max(1, round(frames.shape[2] * height / frames.shape[1]))
    strip = Image.new(
        "RGB", (len(frames) * (width + gap) - gap, height + (_TEXT_ROOM if text else 0)), "white"
    )
    for place, frame in enumerate(frames):
        strip.paste(Image.fromarray(frame).resize((width, height)), (place * (width + gap), 0))
    if text:
        ImageDraw.Draw(strip).text((gap, height + gap), text, "black", font=ImageFont.load_default(size=16))
    return strip
