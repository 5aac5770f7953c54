"""Drawn pictures of one shape each, and the words that describe them.

Everything here is a function of a seed (`random.Random`) and of Pillow's rasteriser; nothing knows about
models or tensors.

A picture is one shape of one colour on a background of another colour. Its sides are drawn independently from
`MIN_SIDE`..`MAX_SIDE` pixels. The shape lies fully inside, in a circle whose diameter is
`MIN_EXTENT`..`MAX_EXTENT` of the shorter side, anywhere in the picture, tilted by at most `MAX_TILT_DEG`
degrees. Colours are the CSS colours of the same names, each channel off by at most `JITTER` levels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from PIL import Image, ImageChops, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "orange": (255, 165, 0),
    "purple": (128, 0, 128),
    "pink": (255, 192, 203),
    "cyan": (0, 255, 255),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")

MIN_SIDE = 56
MAX_SIDE = 448
MIN_EXTENT = 0.35
MAX_EXTENT = 0.9
MAX_TILT_DEG = 12.0
JITTER = 16
MIN_RESIZED_SIDE = 40
MAX_SQUEEZE = 2.0
FILTERS = tuple(Image.Resampling)
FIRST_TRAINING_SEED = 1_000_000_000
"""Seeds below this one are held out: training never draws them."""

_SUPERSAMPLING = 3
_CROSS_HALF_ARM = 0.3
_STAR_INNER_RADIUS = 0.42


@dataclass(frozen=True)
class Picture:
    """One picture (`image`: RGB) and what is on it, in the words of `SHAPES` and `COLOURS`."""

    image: Image.Image
    shape: str
    colour: str
    background: str

    @property
    def caption(self) -> str:
        """The whole description, for instance `a red circle on a blue background.`"""
        return f"{with_article(self.colour)} {self.shape} on {with_article(self.background)} background."


def with_article(noun: str) -> str:
    """`noun` after the indefinite article that its first letter asks for."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


class Captioned(Protocol):
    """What can be described: a picture, or a clip."""

    @property
    def caption(self) -> str: ...


def describe(pictures: Sequence[Captioned]) -> str:
    """The answer to a request for a description: the captions in the order of the pictures, joined by one
    space."""
    return " ".join(picture.caption for picture in pictures)


def draw(seed: int, size: tuple[int, int] | None = None) -> Picture:
    """Draws the picture of `seed`; `size` is (width, height) in pixels, drawn from the seed if it is left
    out."""
    rng = Random(seed)
    shape = rng.choice(SHAPES)
    colour, background = rng.sample(sorted(COLOURS), 2)
    own_size = (rng.randint(MIN_SIDE, MAX_SIDE), rng.randint(MIN_SIDE, MAX_SIDE))
    width, height = size or own_size
    extent = max(2, round(min(width, height) * rng.uniform(MIN_EXTENT, MAX_EXTENT)))
    corner = (rng.randint(0, width - extent), rng.randint(0, height - extent))
    mask = shape_mask(shape, extent, rng.uniform(-MAX_TILT_DEG, MAX_TILT_DEG))
    image = Image.new("RGB", (width, height), jittered(COLOURS[background], rng))
    image.paste(jittered(COLOURS[colour], rng), (*corner, corner[0] + extent, corner[1] + extent), mask)
    return Picture(image, shape, colour, background)


def degrade(picture: Picture, rng: Random) -> Picture:
    """The same picture as a camera or a chat program would hand it on: slight noise, then JPEG of quality 85
    to 95."""
    image = degraded(picture.image, rng.randint(2, 12), rng.randint(85, 95), rng)
    return Picture(image, picture.shape, picture.colour, picture.background)


def degraded(image: Image.Image, amplitude: int, quality: int, rng: Random) -> Image.Image:
    """`image` with noise of up to `amplitude` levels, as a JPEG of `quality` shows it."""
    noise = Image.frombytes("RGB", image.size, rng.randbytes(image.width * image.height * 3))
    noise = noise.point([level * (2 * amplitude + 1) // 256 for level in range(256)] * 3)
    noisy = ImageChops.add(image, noise, scale=1.0, offset=-amplitude)
    buffer = io.BytesIO()
    noisy.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def resize(picture: Picture, rng: Random) -> Picture:
    """The same picture as other programs scale it: to any size, by any of Pillow's filters.

    The shorter side keeps `MIN_RESIZED_SIDE` pixels, the longer one at most `MAX_SIDE` where both can be;
    width and height are scaled apart by a factor of at most `MAX_SQUEEZE`. Half of the results are small:
    below twice the least side.
    """
    width, height = picture.image.size
    squeeze = MAX_SQUEEZE ** rng.uniform(-0.5, 0.5)
    width, height = width * squeeze, height / squeeze
    least = MIN_RESIZED_SIDE / min(width, height)
    most = max(least, MAX_SIDE / max(width, height))
    scale = rng.uniform(least, min(most, 2 * least) if rng.random() < 0.5 else most)
    size = max(MIN_RESIZED_SIDE, round(width * scale)), max(MIN_RESIZED_SIDE, round(height * scale))
    image = picture.image.resize(size, rng.choice(FILTERS))
    return Picture(image, picture.shape, picture.colour, picture.background)


def jittered(rgb: tuple[int, int, int], rng: Random) -> tuple[int, int, int]:
    """The colour with each channel off by at most `JITTER` levels."""
    red, green, blue = (min(255, max(0, level + rng.randint(-JITTER, JITTER))) for level in rgb)
    return red, green, blue


def shape_mask(shape: str, extent: int, tilt_deg: float) -> Image.Image:
    """An anti-aliased `extent` x `extent` coverage mask (mode L) of `shape` in its circumscribed circle."""
    side = extent * _SUPERSAMPLING
    mask = Image.new("L", (side, side), 0)
    canvas = ImageDraw.Draw(mask)
    if shape == "circle":
        canvas.ellipse((0, 0, side - 1, side - 1), fill=255)
    else:
        canvas.polygon(
            [_on_canvas(radius, angle + tilt_deg, side) for radius, angle in _outline(shape)], fill=255
        )
    return mask.reduce(_SUPERSAMPLING)


def _on_canvas(radius: float, angle_deg: float, side: int) -> tuple[float, float]:
    """The pixel of a polar point of the unit circle; 0 degrees points up, and angles grow clockwise."""
    half = (side - 1) / 2
    angle = math.radians(angle_deg)
    return half + half * radius * math.sin(angle), half - half * radius * math.cos(angle)


def _outline(shape: str) -> list[tuple[float, float]]:
    """The corners of `shape` as (radius, degrees from upright) in the unit circle, in drawing order."""
    if shape == "triangle":
        return [(1.0, angle) for angle in (0.0, 120.0, 240.0)]
    if shape == "square":
        return [(1.0, angle) for angle in (45.0, 135.0, 225.0, 315.0)]
    if shape == "star":
        return [(1.0 if tip % 2 == 0 else _STAR_INNER_RADIUS, tip * 36.0) for tip in range(10)]
    if shape == "cross":
        half_angle = math.degrees(math.asin(_CROSS_HALF_ARM))
        notch = _CROSS_HALF_ARM * math.sqrt(2)
        arms = (0.0, 90.0, 180.0, 270.0)
        return [
            point
            for arm in arms
            for point in ((1.0, arm - half_angle), (1.0, arm + half_angle), (notch, arm + 45.0))
        ]
    raise ValueError(f"no such shape: {shape}")
