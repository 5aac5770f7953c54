"""GIF (89a): the first frame alone, as an image of its own; where it does not fill the screen, `Scan.place`
says where it lies.
"""

from __future__ import annotations

import struct
from functools import partial

from dynamo.trtllm.multimodal.formats.scan import MAX_PROFILE_BYTES, Damaged, Scan, Steps

_EXTENSION, _FRAME, _CONTROL, _APPLICATION = 0x21, 0x2C, 0xF9, 0xFF
_HEADER_BYTES = 13
_FRAME_BYTES = 10
_PROFILE_NAME = b"ICCRGBG1012"


class _Walk:
    """What precedes the first frame of a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._steps = Steps()
        self.tables_end = _HEADER_BYTES + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
        self.control = b""
        self.profile: bytes | None = None
        self.frame = self._find_frame()

    def _find_frame(self) -> int:
        """Where the first image descriptor begins. Raises `Damaged` when there is none."""
        at = self.tables_end
        while at + _FRAME_BYTES < len(self._data):
            self._steps.take()
            if self._data[at] == _FRAME:
                return at
            if self._data[at] == _EXTENSION:
                at = self._extension(at)
            elif self._data[at] == 0:
                at += 1  # an empty block too many, which readers pass over
            else:
                break
        raise Damaged("no frame")

    def _extension(self, at: int) -> int:
        """Note what counts of the extension at `at`, and give where it ends."""
        label, start = self._data[at + 1], at + 2
        blocks, end = self._blocks(start)
        if label == _CONTROL and len(blocks[0]) == 4:
            self.control = self._data[at:start] + b"\x04" + blocks[0] + b"\0"
        if label == _APPLICATION and blocks[0] == _PROFILE_NAME:
            self.profile = b"".join(blocks[1:])
        return end

    def _blocks(self, at: int) -> tuple[list[bytes], int]:
        blocks: list[bytes] = []
        while at < len(self._data) and self._data[at]:
            self._steps.take()
            blocks.append(self._data[at + 1 : at + 1 + self._data[at]])
            at += 1 + self._data[at]
        return blocks or [b""], at + 1


def scan(data: bytes) -> Scan:
    """Raises `Damaged` without a frame, `LimitFault` for too many blocks before it."""
    if len(data) < _HEADER_BYTES:
        raise Damaged("no screen")
    screen_width, screen_height = struct.unpack_from("<HH", data, 6)
    walk = _Walk(data)
    left, top, width, height = struct.unpack_from("<HHHH", data, walk.frame + 1)
    if not width or not height:
        raise Damaged("an empty frame")
    # A frame that reaches out of its screen makes the screen larger, as most viewers have it.
    screen = max(screen_width, left + width), max(screen_height, top + height)
    profile = walk.profile if walk.profile and len(walk.profile) <= MAX_PROFILE_BYTES else None
    return Scan(
        *screen,
        essentials=partial(_essentials, data, walk, (width, height)),
        profile=lambda: profile,
        model="colour",
        place=None if screen == (width, height) else (left, top),
    )


def _essentials(data: bytes, walk: _Walk, size: tuple[int, int]) -> bytes:
    """The file with a screen of the frame's size, the frame at its corner, and no extension but the frame's
    own.
    """
    screen = struct.pack("<HH", *size)
    head = data[:6] + screen + data[10:_HEADER_BYTES] + data[_HEADER_BYTES : walk.tables_end]
    return b"".join((head, walk.control, b",\0\0\0\0", screen, data[walk.frame + 9 :]))
