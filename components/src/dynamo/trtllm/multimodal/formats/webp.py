"""WebP (RFC 9649): the first frame's bitstream, its alpha and the canvas are kept, and the other chunks left
behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from dynamo.trtllm.multimodal.formats.scan import MAX_PROFILE_BYTES, Damaged, Scan, Steps, exif_orientation

_STILL = (b"ALPH", b"VP8 ", b"VP8L")
_METADATA_FLAGS = 0x20 | 0x08 | 0x04
"""ICC profile, EXIF and XMP, in the flags of VP8X."""
_ANIMATED = 0x02


class _Chunk(NamedTuple):
    name: bytes
    body: memoryview


def scan(data: bytes) -> Scan:
    """Raises `Damaged` without a bitstream, `LimitFault` for too many chunks."""
    chunks = list(_chunks(data))
    if not chunks:
        raise Damaged("no chunk")
    width, height = _size(chunks[0])
    exif = _find(chunks, b"EXIF")
    return Scan(
        width,
        height,
        essentials=partial(_essentials, chunks),
        profile=partial(_profile, chunks),
        orientation=exif_orientation(exif) if exif else 1,
    )


def _chunks(data: bytes) -> Iterator[_Chunk]:
    steps = Steps()
    view = memoryview(data)
    at = 12
    while at + 8 <= len(data):
        steps.take()
        length = int.from_bytes(view[at + 4 : at + 8], "little")
        yield _Chunk(bytes(view[at : at + 4]), view[at + 8 : at + 8 + length])
        at += 8 + length + length % 2


def _size(chunk: _Chunk) -> tuple[int, int]:
    body = bytes(chunk.body[:10])
    if chunk.name == b"VP8X" and len(body) == 10:
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if chunk.name == b"VP8L" and body[:1] == b"\x2f":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk.name == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise Damaged("no size")


def _find(chunks: list[_Chunk], name: bytes) -> bytes | None:
    return next((bytes(chunk.body) for chunk in chunks if chunk.name == name), None)


def _essentials(chunks: list[_Chunk]) -> bytes:
    first = chunks[0]
    if first.name != b"VP8X":
        return _written([first])
    flags = first.body[0] & ~_METADATA_FLAGS
    kept = [_Chunk(b"VP8X", memoryview(bytes([flags]) + first.body[1:10]))]
    for name in (b"ANIM", b"ANMF") if flags & _ANIMATED else _STILL:
        kept += [chunk for chunk in chunks if chunk.name == name][:1]
    return _written(kept)


def _written(chunks: list[_Chunk]) -> bytes:
    pieces: list[bytes | memoryview] = [b"WEBP"]
    for name, body in chunks:
        pieces += [name, len(body).to_bytes(4, "little"), body, b"\0" * (len(body) % 2)]
    return b"".join([b"RIFF", sum(map(len, pieces)).to_bytes(4, "little"), *pieces])


def _profile(chunks: list[_Chunk]) -> bytes | None:
    profile = _find(chunks, b"ICCP")
    return profile if profile is not None and len(profile) <= MAX_PROFILE_BYTES else None
