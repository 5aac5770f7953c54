"""What every format's walk yields, and what its walks share."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dynamo.trtllm.errors import LimitFault

MAX_PIECES = 65_536
"""Chunks, segments or strips of one file. Usual writers make pieces of 8 KiB and more."""
MAX_PROFILE_BYTES = 4 << 20
"""A larger colour profile is ignored; those of printing presses have up to 3 MiB."""

_ORIENTATION = 0x0112
_SHORT = 3


class Damaged(ValueError):
    """The file does not hold the image that it claims to hold."""


@dataclass(frozen=True)
class Scan:
    """The first image of a file. Sizes in pixels, of what is stored, before it is turned upright.

    `essentials` gives the file anew, of the pixels alone; it raises `Damaged` and `LimitFault`. `profile`
    gives the ICC profile. `place` is where the stored image lies on a white canvas of `width` x `height`,
    when it does not fill it.
    """

    width: int
    height: int
    essentials: Callable[[], bytes] = field(repr=False)
    profile: Callable[[], bytes | None] = field(default=lambda: None, repr=False)
    orientation: int = 1
    """As in EXIF, 1 to 8; other values turn nothing."""
    place: tuple[int, int] | None = None
    model: Literal["grey", "colour"] | None = None
    """What the file stores where the reader may give another kind of pixels: a profile is made for one of
    them.
    """
    inverted: bool = False
    """Grey whose zero is white, where the reader does not say so."""


class Steps:
    """Counts the steps of one walk through a file, and ends it at `MAX_PIECES`."""

    def __init__(self) -> None:
        self._left = MAX_PIECES

    def take(self) -> None:
        """Raise `LimitFault` when the file has too many pieces."""
        self._left -= 1
        if self._left < 0:
            raise LimitFault("the image file is made of more pieces than this worker takes")


def exif_orientation(block: bytes) -> int:
    """The orientation in an EXIF block, which is a TIFF header and directories (CIPA DC-008); 1 where it is
    not readable.
    """
    block = block.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (count,) = struct.unpack_from(order + "H", block, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, values, value = struct.unpack_from(order + "HHIH", block, at)
            if tag == _ORIENTATION:
                return int(value) if (kind, values) == (_SHORT, 1) else 1
    except struct.error:
        pass
    return 1
