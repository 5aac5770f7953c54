"""Media loaders (inputs/utils.py). Workers fetch media themselves, so the double decodes files only."""

from __future__ import annotations

import asyncio
from typing import Any


def load_image(image: Any, format: str = "pt", device: str = "cpu") -> Any:
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.open(image)
    return picture.convert("RGB")


async def async_load_image(image: Any, format: str = "pt", device: str = "cpu") -> Any:
    return await asyncio.to_thread(load_image, image, format, device)


async def async_load_video(video: str, num_frames: int = 10, **_: Any) -> Any:
    """The real one needs OpenCV, which rc29 does not install."""
    raise ImportError("OpenCV is required to load a video: pip install opencv-python-headless")
