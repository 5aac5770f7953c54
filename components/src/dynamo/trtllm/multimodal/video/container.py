"""What a file given as a clip is, by its bytes, and whether it ends where it says.

ISO base media files (MP4, MOV: ISO/IEC 14496-12) are boxes; WebM and Matroska files are EBML elements
(RFC 8794, RFC 9559). Only the outermost of them are looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.sniff import sniff

ISO_MEDIA = "mov,mp4,m4a,3gp,3g2,mj2"
MATROSKA = "matroska,webm"
"""Names of FFmpeg's demuxers."""
ACCEPTED = "MP4, MOV, WebM"
_IMAGES = frozenset({"JPEG", "PNG", "WebP", "GIF", "AVIF", "HEIC", "BMP", "TIFF", "JPEG XL", "JPEG 2000"})
_ISO_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_EBML = b"\x1aE\xdf\xa3"
_SEGMENT = b"\x18S\x80g"
_MAX_BOXES = 1 << 16


def demuxer_of(data: bytes) -> str:
    """The demuxer for `data`. Raises `ClientFault` for another kind of file, by name where it is known."""
    if not data:
        raise ClientFault("the video is empty")
    kind = sniff(data)
    if kind in _IMAGES:
        raise ClientFault(f"this is an image ({kind}), not a video; send it as image_url")
    if data.startswith(_EBML):
        return MATROSKA
    if data[4:8] in _ISO_FIRST_BOXES:
        return ISO_MEDIA
    if kind is None:
        raise ClientFault(f"not a video of a known type; accepted are {ACCEPTED}")
    raise ClientFault(f"the type {kind} is not accepted as a video; accepted are {ACCEPTED}")


def is_cut_short(data: bytes, demuxer: str) -> bool:
    """True when the file says that it is longer than it is."""
    ends = _box_ends(data) if demuxer == ISO_MEDIA else _element_ends(data)
    return any(end > len(data) for end in ends)


def _box_ends(data: bytes) -> Iterator[int]:
    at = 0
    for _ in range(_MAX_BOXES):
        if at + 8 > len(data):
            return
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:  # 0 is "up to the end"; the others are no boxes
            return
        at += size
        yield at


def _element_ends(data: bytes) -> Iterator[int]:
    at = 4
    for _ in range(2):
        size, width = _element_size(data, at)
        if size is None:
            return
        at += width + size
        yield at
        if data[at : at + 4] != _SEGMENT:
            return
        at += 4


def _element_size(data: bytes, at: int) -> tuple[int | None, int]:
    """An element's size and the bytes that say it; None where it is left open, as in a live recording."""
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length()
    if width > 8:
        return None, 0
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), width
