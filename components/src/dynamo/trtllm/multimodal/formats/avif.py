"""AVIF (AV1 Image File Format): read by its library, after its EXIF was renamed away.

Orientation is a property of the image there, beside EXIF, which the format says to ignore.
"""

from __future__ import annotations

from functools import partial
from io import BytesIO

from PIL import AvifImagePlugin

from dynamo.trtllm.multimodal.formats.scan import MAX_PROFILE_BYTES, Damaged, Scan, Steps

_ORIENTATION = 0x0112
_INDEXES = (b"meta", b"moov")
"""Boxes that say what the file holds; the pixels are in others."""


def scan(data: bytes) -> Scan:
    """Raises `Damaged` when the library finds no image, `LimitFault` for too many boxes."""
    stripped = _without_exif(data)
    try:
        with AvifImagePlugin.AvifImageFile(BytesIO(stripped)) as image:
            orientation = image.getexif().get(_ORIENTATION, 1)
            profile = image.info.get("icc_profile")
            width, height = image.size
    except Exception as error:
        raise Damaged("no AVIF image") from error
    return Scan(
        width,
        height,
        essentials=lambda: stripped,
        profile=partial(_bounded, profile),
        orientation=orientation if isinstance(orientation, int) else 1,
    )


def _bounded(profile: object) -> bytes | None:
    return profile if isinstance(profile, bytes) and len(profile) <= MAX_PROFILE_BYTES else None


def _without_exif(data: bytes) -> bytes:
    steps = Steps()
    at = 0
    pieces: list[bytes] = []
    while at + 8 <= len(data):
        steps.take()
        length = int.from_bytes(data[at : at + 4], "big")
        if length == 1:
            length = int.from_bytes(data[at + 8 : at + 16], "big")
        end = len(data) if length == 0 else min(len(data), at + max(8, length))
        box = data[at:end]
        pieces.append(box.replace(b"Exif", b"skip") if box[4:8] in _INDEXES else box)
        at = end
    return b"".join([*pieces, data[at:]])
