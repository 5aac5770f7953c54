"""JPEG (ITU T.81): what follows the image's own tables is kept; application segments and comments are left
behind.

The passes over the image ("scans") are counted before any is decoded: a progressive file may repeat a pass
in a few bytes for each, and every pass visits every block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.formats.scan import MAX_PROFILE_BYTES, Damaged, Scan, Steps, exif_orientation

MAX_SCANS = 200
"""Passes of one file. Encoders make one, three, or ten to twenty of them."""
MAX_VISITS = 2_000_000_000
"""Samples visited in all passes together: thirty passes over 64 million pixels, in the order of four seconds.
"""

TOO_MANY_PASSES = "the JPEG goes over its pixels more often than this worker does"

_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_NOT_READ = frozenset({0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF})
"""Frames in steps of size, and lossless ones with arithmetic coding: libjpeg reads none of them."""
_SOI, _EOI, _SOS, _COM, _APP0, _APP1, _APP2, _APP14 = 0xD8, 0xD9, 0xDA, 0xFE, 0xE0, 0xE1, 0xE2, 0xEE
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length."""
_MARKER = re.compile(rb"\xff+([\x01-\xfe])")
_AFTER_PASS = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""The end of a pass's data, in which 0xff is followed by zero or a restart marker. Begins with one byte,
which is looked for ten times faster than a repeated one; of several before a marker the last one is found.
"""
_PROFILE_MARK = b"ICC_PROFILE\0"
_ADOBE_BYTES = 12


class _Segment(NamedTuple):
    marker: int
    start: int
    """Of the body, after the length."""
    end: int


@dataclass(frozen=True)
class _Frame:
    """The size, and for each component its horizontal and vertical sampling."""

    width: int
    height: int
    sampling: dict[int, tuple[int, int]]

    def samples(self, component: int) -> int:
        """Samples of one component, in whole blocks of 8 x 8."""
        across, down = self.sampling.get(component, (1, 1))
        most_across = max(each[0] for each in self.sampling.values())
        most_down = max(each[1] for each in self.sampling.values())
        columns = -(-self.width * across // (8 * most_across))
        rows = -(-self.height * down // (8 * most_down))
        return columns * rows * 64


def scan(data: bytes) -> Scan:
    """Raises `Damaged` without a frame, `ClientFault` for a coding that is not read, and `LimitFault` for too
    many segments. The passes are counted by `essentials`.
    """
    segments = list(_header(data))
    frame = _frame(data, segments)
    exif = (data[each.start : each.end] for each in segments if each.marker == _APP1)
    orientation = next((exif_orientation(block) for block in exif if block.startswith(b"Exif\0\0")), 1)
    return Scan(
        frame.width,
        frame.height,
        essentials=partial(_essentials, data, segments, frame),
        profile=partial(_profile, data, segments),
        orientation=orientation,
    )


def count_visits(data: bytes) -> int:
    """Samples that all passes visit in `data`, which may lack its tables, as in a TIFF. Raises as `scan`, and
    for too many passes.
    """
    segments = list(_header(data))
    if not segments or segments[-1].marker != _SOS:
        raise Damaged("no pass over the image")
    return _walk_passes(data, segments[-1], _frame(data, segments))[1]


def _header(data: bytes) -> Iterator[_Segment]:
    """The segments up to the first SOS, that one included; where a length leads astray, the next marker goes
    on.
    """
    steps = Steps()
    at = 2
    while found := _MARKER.search(data, at):
        steps.take()
        marker, start = found[1][0], found.end()
        if marker in _ALONE:
            at = start
            continue
        if marker == _EOI:
            return
        length = int.from_bytes(data[start : start + 2], "big")
        segment = _Segment(marker, start + 2, start + max(length, 2))
        if segment.end > len(data) or length < 2:
            if not _is_metadata(marker):
                raise Damaged("a segment's length leads out of the file")
            at = start
            continue
        yield segment
        if marker == _SOS:
            return
        at = segment.end


def _is_metadata(marker: int) -> bool:
    return _APP0 <= marker <= 0xEF or marker == _COM


def _frame(data: bytes, segments: list[_Segment]) -> _Frame:
    for segment in segments:
        if segment.marker in _FRAMES:
            body = data[segment.start : segment.end]
            if len(body) < 6 or len(body) < 6 + 3 * body[5] or not body[5]:
                break
            depth, height, width, count = struct.unpack_from(">BHHB", body)
            if depth != 8 or segment.marker in _NOT_READ:
                raise ClientFault(
                    "this kind of JPEG is not read; save it with 8 bits a channel, baseline or progressive"
                )
            parts = (body[6 + 3 * index : 9 + 3 * index] for index in range(count))
            return _Frame(width, height, {part[0]: (part[1] >> 4 or 1, part[1] & 15 or 1) for part in parts})
    raise Damaged("no frame header")


def _essentials(data: bytes, segments: list[_Segment], frame: _Frame) -> bytes:
    if not segments or segments[-1].marker != _SOS:
        raise Damaged("no pass over the image")
    pieces = [b"\xff\xd8"]
    for segment in segments[:-1]:
        body = data[segment.start : segment.end]
        if segment.marker == _APP14 and body.startswith(b"Adobe") and len(body) >= _ADOBE_BYTES:
            body = body[:_ADOBE_BYTES]
        elif _is_metadata(segment.marker):
            continue
        pieces.append(b"\xff%c%b%b" % (segment.marker, (len(body) + 2).to_bytes(2, "big"), body))
    first = segments[-1].start - 4
    return b"".join([*pieces, data[first : _walk_passes(data, segments[-1], frame)[0]]])


def _walk_passes(data: bytes, first: _Segment, frame: _Frame) -> tuple[int, int]:
    """Where the image ends, and the samples visited until then. Raises `LimitFault` for more passes than
    are allowed.
    """
    steps = Steps()
    passes, visits, segment = 0, 0, first
    while True:
        steps.take()
        if segment.marker == _SOS:
            passes += 1
            visits += _visits(data, segment, frame)
            if passes > MAX_SCANS or visits > MAX_VISITS:
                raise LimitFault(TOO_MANY_PASSES)
        found = _AFTER_PASS.search(data, segment.end)
        if found is None:
            return len(data), visits
        marker, start = found[1][0], found.end()
        if marker in (_EOI, _SOI):
            return start, visits
        if marker in _ALONE:
            segment = _Segment(marker, start, start)
            continue
        length = max(2, int.from_bytes(data[start : start + 2], "big"))
        segment = _Segment(marker, start + 2, min(start + length, len(data)))


def _visits(data: bytes, segment: _Segment, frame: _Frame) -> int:
    """Samples of the components that a pass names."""
    if segment.end <= segment.start:
        return 0
    count = data[segment.start]
    return sum(map(frame.samples, data[segment.start + 1 : segment.end : 2][:count]))


def _profile(data: bytes, segments: list[_Segment]) -> bytes | None:
    """The profile of APP2 segments, each with its number and their count (ICC.1, annex B); None unless all
    are there.
    """
    pieces: dict[int, bytes] = {}
    counts: set[int] = set()
    for segment in segments:
        if segment.marker == _APP2 and data.startswith(_PROFILE_MARK, segment.start, segment.end):
            at = segment.start + len(_PROFILE_MARK)
            if segment.end - at < 2:
                return None
            pieces.setdefault(data[at], data[at + 2 : segment.end])
            counts.add(data[at + 1])
    if len(counts) != 1 or set(pieces) != set(range(1, counts.pop() + 1)):
        return None
    if sum(map(len, pieces.values())) > MAX_PROFILE_BYTES:
        return None
    return b"".join(pieces[number] for number in sorted(pieces))
