"""A picture of a sound: its waveform, below it its spectrum over time, and a line of text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from .sounds import MODEL_RATE, Samples

WIDTH = 640
WAVE_HEIGHT = 120
SPECTRUM_HEIGHT = 120
HIGHEST_HZ = 4000
_GAP = 4
_TEXT_ROOM = 28
_WINDOW = 512
_RANGE_DB = 60.0
_INK = (38, 70, 140)


def waveform(samples: Samples, text: str = "", rate: int = MODEL_RATE) -> Image.Image:
    """The sound [samples] as an image: the waveform scaled to its peak, the spectrum from 0 to `HIGHEST_HZ`
    with loud parts dark, time from left to right in both, and `text` below them."""
    height = WAVE_HEIGHT + _GAP + SPECTRUM_HEIGHT
    image = Image.new("RGB", (WIDTH, height + (_TEXT_ROOM if text else 0)), "white")
    canvas = ImageDraw.Draw(image)
    middle, peak = WAVE_HEIGHT / 2, max(float(np.abs(samples).max()), 1e-4)
    for column, part in enumerate(np.array_split(samples, WIDTH)):
        if len(part):
            top, bottom = (middle - float(level) / peak * (middle - 1) for level in (part.max(), part.min()))
            canvas.line((column, top, column, bottom), _INK)
    image.paste(
        Image.fromarray(_spectrum(samples, rate)).resize((WIDTH, SPECTRUM_HEIGHT)), (0, WAVE_HEIGHT + _GAP)
    )
    if text:
        canvas.text((_GAP, height + _GAP), text, "black", font=ImageFont.load_default(size=16))
    return image


def _spectrum(samples: Samples, rate: int) -> npt.NDArray[np.uint8]:
    """uint8 [frequencies, times], the highest frequency first; black is the loudest part, white is
    `_RANGE_DB` below it."""
    padded = np.pad(samples, _WINDOW // 2)
    starts = np.linspace(0, len(padded) - _WINDOW, WIDTH // 2).astype(int)
    windows = padded[starts[:, None] + np.arange(_WINDOW)] * np.hanning(_WINDOW)
    kept = round(HIGHEST_HZ * _WINDOW / rate)
    level_db = 20 * np.log10(np.abs(np.fft.rfft(windows))[:, :kept] + 1e-6)
    share = np.clip((level_db - level_db.max() + _RANGE_DB) / _RANGE_DB, 0, 1)
    levels: npt.NDArray[np.uint8] = (255 - 255 * share.T[::-1]).astype(np.uint8)
    return levels
