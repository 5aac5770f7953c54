"""BMP, by its info headers of 12 to 124 bytes (Windows 2 to 5, OS/2)."""

from __future__ import annotations

import struct

from dynamo.trtllm.errors import LimitFault
from dynamo.trtllm.multimodal.formats.scan import MAX_PROFILE_BYTES, Damaged, Scan

MAX_RUN_LENGTH_BYTES = 8 << 20
"""Run-length encoded pixels are decoded two bytes at a time."""

_FILE_HEADER_BYTES = 14
_V5_BYTES = 124
_RUN_LENGTHS = (1, 2)
_EMBEDDED_PROFILE = int.from_bytes(b"MBED", "big")


def scan(data: bytes) -> Scan:
    """Raises `Damaged` without a size, `LimitFault` for run-length encoded pixels of more than
    `MAX_RUN_LENGTH_BYTES`.
    """
    try:
        (header,) = struct.unpack_from("<I", data, _FILE_HEADER_BYTES)
        if header == 12:
            width, height = struct.unpack_from("<HH", data, 18)
        else:
            width, height = struct.unpack_from("<ii", data, 18)
            (compression,) = struct.unpack_from("<I", data, 30)
            if compression in _RUN_LENGTHS and len(data) > MAX_RUN_LENGTH_BYTES:
                raise LimitFault(
                    f"a run-length encoded BMP may have {MAX_RUN_LENGTH_BYTES >> 20} MiB at most"
                )
        profile = _profile(data) if header == _V5_BYTES else None
    except struct.error as error:
        raise Damaged("no header") from error
    return Scan(max(width, 0), abs(height), essentials=lambda: data, profile=lambda: profile, model="colour")


def _profile(data: bytes) -> bytes | None:
    """The profile that a Windows 5 header refers to, by its distance from the header."""
    (space,) = struct.unpack_from("<I", data, _FILE_HEADER_BYTES + 56)
    offset, length = struct.unpack_from("<II", data, _FILE_HEADER_BYTES + 112)
    start = _FILE_HEADER_BYTES + offset
    if space != _EMBEDDED_PROFILE or not 0 < length <= MAX_PROFILE_BYTES or start + length > len(data):
        return None
    return data[start : start + length]
