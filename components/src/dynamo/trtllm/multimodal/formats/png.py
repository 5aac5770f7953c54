"""PNG (W3C PNG, third edition): IHDR, PLTE, tRNS and IDAT make the pixels; everything else is left behind.

The checksums of these four are verified here. An animation (APNG) gives the image that viewers without
animation show.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from dynamo.trtllm.multimodal.formats.scan import MAX_PROFILE_BYTES, Damaged, Scan, Steps, exif_orientation

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ESSENTIAL = re.compile(rb"PLTE|tRNS|IDAT|IEND|iCCP|eXIf")
_NAME = re.compile(rb"[A-Za-z]{4}")
_GREY_TYPES = (0, 4)
_TRANSPARENCY_BYTES = {0: 2, 2: 6}
"""Length of a tRNS chunk by colour type; for palettes (3) it is one byte per entry."""


class _Chunk(NamedTuple):
    name: bytes
    start: int
    length: int


def scan(data: bytes) -> Scan:
    """Raises `Damaged` without a header or an end, `LimitFault` for too many chunks."""
    chunks = list(_chunks(data))
    if not chunks or chunks[0].name != b"IHDR" or chunks[0].length != 13 or chunks[-1].name != b"IEND":
        raise Damaged("no whole PNG")
    width, height = struct.unpack_from(">II", data, chunks[0].start)
    exif = _find(data, chunks, b"eXIf")
    return Scan(
        width,
        height,
        essentials=partial(_essentials, data, chunks),
        profile=partial(_profile, data, chunks),
        orientation=exif_orientation(exif) if exif else 1,
        model="grey" if data[chunks[0].start + 9] in _GREY_TYPES else "colour",
    )


def _chunks(data: bytes) -> Iterator[_Chunk]:
    """The chunks up to IEND; where a length leads astray, the next essential chunk with a right checksum goes
    on.
    """
    steps = Steps()
    at = len(SIGNATURE)
    while at + 12 <= len(data):
        steps.take()
        chunk = _Chunk(data[at + 4 : at + 8], at + 8, int.from_bytes(data[at : at + 4], "big"))
        after = chunk.start + chunk.length + 4
        if _leads_on(data, chunk, after):
            yield chunk
            if chunk.name == b"IEND":
                return
            at = after
            continue
        found = _resume(data, at + 8, steps)
        if found is None or chunk.name in (b"IHDR", b"IDAT", b"PLTE"):
            raise Damaged("a chunk's length leads astray")
        at = found


def _leads_on(data: bytes, chunk: _Chunk, after: int) -> bool:
    if chunk.name == b"IEND":
        return True
    return after + 12 <= len(data) and _NAME.fullmatch(data, after + 4, after + 8) is not None


def _resume(data: bytes, start: int, steps: Steps) -> int | None:
    """Where the next whole essential chunk after `start` begins; None also when looking takes too long."""
    left = 2 * len(data)  # bytes that are worth a checksum
    for found in _ESSENTIAL.finditer(data, start):
        steps.take()
        at = found.start() - 4
        chunk = _Chunk(found[0], at + 8, int.from_bytes(data[at : at + 4], "big"))
        if at < start or chunk.start + chunk.length + 4 > len(data):
            continue
        left -= chunk.length
        if left < 0:
            return None
        if _is_whole(data, chunk):
            return at
    return None


def _is_whole(data: bytes, chunk: _Chunk) -> bool:
    end = chunk.start + chunk.length
    return zlib.crc32(memoryview(data)[chunk.start - 4 : end]) == int.from_bytes(data[end : end + 4], "big")


def _find(data: bytes, chunks: list[_Chunk], name: bytes) -> bytes | None:
    """The first whole chunk called `name`; one with a wrong checksum counts as absent."""
    for chunk in chunks:
        if chunk.name == name and _is_whole(data, chunk):
            return data[chunk.start : chunk.start + chunk.length]
    return None


def _essentials(data: bytes, chunks: list[_Chunk]) -> bytes:
    header = _find(data, chunks[:1], b"IHDR")
    pixels = [chunk for chunk in chunks if chunk.name == b"IDAT"]
    if header is None or not pixels or not all(_is_whole(data, chunk) for chunk in pixels):
        raise Damaged("a checksum is wrong")
    color_type = header[9]
    parts = [SIGNATURE, _written(b"IHDR", header)]
    palette = _find(data, chunks, b"PLTE")
    if palette is not None and len(palette) % 3 == 0:
        parts.append(_written(b"PLTE", palette))
    clear = _find(data, chunks, b"tRNS")
    if clear is not None and (color_type == 3 or len(clear) == _TRANSPARENCY_BYTES.get(color_type)):
        parts.append(_written(b"tRNS", clear))
    view = memoryview(data)
    joined = b"".join(view[chunk.start : chunk.start + chunk.length] for chunk in pixels)
    return b"".join([*parts, _written(b"IDAT", joined), _written(b"IEND", b"")])


def _written(name: bytes, body: bytes) -> bytes:
    return b"".join(
        (len(body).to_bytes(4, "big"), name, body, zlib.crc32(body, zlib.crc32(name)).to_bytes(4, "big"))
    )


def _profile(data: bytes, chunks: list[_Chunk]) -> bytes | None:
    """The iCCP chunk: a name, a zero, the method 0, and the profile as a zlib stream, inflated up to the
    limit alone.
    """
    body = _find(data, chunks, b"iCCP")
    if body is None:
        return None
    _, zero, rest = body.partition(b"\0")
    if not zero or rest[:1] != b"\0":
        return None
    with suppress(zlib.error):
        stream = zlib.decompressobj()
        profile = stream.decompress(rest[1:], MAX_PROFILE_BYTES + 1)
        return profile if stream.eof and len(profile) <= MAX_PROFILE_BYTES else None
    return None
