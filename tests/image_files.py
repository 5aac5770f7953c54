"""Image files as bytes: what Pillow writes, and the chunks of a PNG that is written by hand."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file that Pillow writes for `image` in the format `kind`."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_chunk(name: bytes, body: bytes) -> bytes:
    """One chunk of a PNG: length, name, body and checksum."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
