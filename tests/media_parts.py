"""Tiny images and embedding files as media parts, and engines to load them with."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dynamo.trtllm.config import EngineConfig, EngineKind, MediaConfig, Modality
from dynamo.trtllm.core import DecodedImage, EncodedMedia, TokenBudget
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.engines.port import EngineInfo
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal.parts import MediaPart

PLACEHOLDER = 9
IMAGE_TOKENS = 4
HIDDEN = 8
ROOMY = TokenBudget(1, 1 << 20)


def png_url(shade: int, size: int = 2) -> str:
    """A data URL of a grey image; equal shades and sizes are equal images."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (shade, shade, shade)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def write_embeddings(directory: Path, name: str, rows: int, value: float = 1.0) -> str:
    """The `file://` URL of a new embedding file of `rows` x `HIDDEN`."""
    torch.save(torch.full((rows, HIDDEN), value), directory / name)
    return f"file://{directory / name}"


def parts(*urls: Any) -> list[MediaPart]:
    return [MediaPart(at + 1, "image", url) for at, url in enumerate(urls)]


def named(
    uuid: str, url: str = "", tenant: str | None = None, position: int = 1, **options: Any
) -> MediaPart:
    """An image that is known by `uuid`; without a URL by that alone."""
    return MediaPart(position, "image", url, uuid, tenant, options)


class GatedEngine(DoubleEngine):
    """The double with images; `encode` waits for `gate` when there is one,
    and `encoded` holds the digests it was given."""

    def __init__(self, **script: Any) -> None:
        given = {"placeholder_ids": {"image": PLACEHOLDER}, "media_tokens": IMAGE_TOKENS, **script}
        super().__init__(EngineConfig(kind=EngineKind.DOUBLE, double_script=given))
        self.gate: asyncio.Event | None = None
        self.encoding = asyncio.Event()
        self.encoded: list[str] = []

    async def encode(self, images: Sequence[DecodedImage]) -> list[EncodedMedia]:
        self.encoded += [image.digest for image in images]
        self.encoding.set()
        if self.gate is not None:
            await self.gate.wait()
        return await super().encode(images)


def taking_images(info: EngineInfo, **changes: Any) -> EngineInfo:
    """`info` of an engine that takes images in another way (`MediaInput`)."""
    return replace(info, media={**info.media, "image": replace(info.media["image"], **changes)})


async def started(engine: DoubleEngine) -> tuple[DoubleEngine, EngineInfo]:
    return engine, await engine.start()


async def loader_over(
    engine: DoubleEngine,
    modality: Modality = Modality.MULTIMODAL,
    info: EngineInfo | None = None,
    fetcher: Fetcher | None = None,
    **config: Any,
) -> MediaLoader:
    return MediaLoader(engine, info or await engine.start(), MediaConfig(**config), modality, fetcher)
