"""Colours as a viewer shows them: the profile counts in every kind of pixels, before transparency is laid
over white.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image, ImageCms

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.multimodal.decode import decode
from image_files import png_chunk

CONFIG = MediaConfig(max_image_pixels=1_000_000)
Color = tuple[int, int, int]
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SWAPPED = SRGB.replace(b"rXYZ", b"tmp!").replace(b"bXYZ", b"rXYZ").replace(b"tmp!", b"bXYZ")
"""sRGB with red and blue exchanged, which still calls itself sRGB."""
STORED = (50, 100, 200)
SHOWN = (200, 100, 50)


def profile(
    space: bytes, tags: dict[bytes, bytes], *, kind: bytes = b"mntr", connection: bytes = b"XYZ "
) -> bytes:
    """An ICC profile of version 2 (ICC.1:2001)."""
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    white = struct.pack(">iii", 63190, 65536, 54061)
    header = struct.pack(
        ">I4sI4s4s4s12s4s",
        start + len(body),
        b"lcms",
        0x02100000,
        kind,
        space,
        connection,
        bytes(12),
        b"acsp",
    )
    return (header + bytes(28) + white).ljust(128, b"\0") + table + body


WHITE_POINT = b"XYZ \0\0\0\0" + struct.pack(">iii", 63190, 65536, 54061)
LINEAR_GREY = profile(b"GRAY", {b"wtpt": WHITE_POINT, b"kTRC": b"curv\0\0\0\0\0\0\0\0"})
"""Grey without a gamma curve: 55 of 255 is a fifth of the light, which sRGB writes as 128."""


def ink_profile() -> bytes:
    """A printing profile in which full cyan shows as red, black as black, and the other inks do not show."""
    white, red, black = bytes((255, 128, 128)), bytes((136, 208, 195)), bytes((0, 128, 128))
    grid = b"".join(black if corner & 1 else red if corner & 8 else white for corner in range(16))
    ramp = bytes(range(256))
    matrix = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    table = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + matrix + ramp * 4 + grid + ramp * 3
    return profile(b"CMYK", {b"wtpt": WHITE_POINT, b"A2B0": table}, kind=b"prtr", connection=b"Lab ")


def encoded(image: Image.Image, kind: str, icc: bytes | None, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, icc_profile=icc, **options)
    return stream.getvalue()


def plain(mode: str, color: Any) -> Image.Image:
    return Image.new(mode, (16, 16), color)


def palette(*colours: Color) -> Image.Image:
    image = Image.new("P", (16, 16))
    image.putpalette([part for colour in colours for part in colour])
    return image


def png_of(depth: int, color_type: int, pixel: bytes, icc: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of one pixel, written by hand."""

    header = struct.pack(">IIBBBBB", 1, 1, depth, color_type, 0, 0, 0)
    parts = [
        png_chunk(b"IHDR", header),
        png_chunk(b"iCCP", b"p\0\0" + zlib.compress(icc)),
        *(png_chunk(*each) for each in chunks),
    ]
    return (
        b"\x89PNG\r\n\x1a\n"
        + b"".join(parts)
        + png_chunk(b"IDAT", zlib.compress(b"\0" + pixel))
        + png_chunk(b"IEND", b"")
    )


def bmp_with_profile(icc: bytes) -> bytes:
    """A Windows 5 bitmap of one pixel with its profile behind it."""
    header = (
        struct.pack("<IiiHHIIiiII", 124, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0)
        + bytes(16)
        + b"DEBM"
        + bytes(36 + 12 + 4)
    )
    header += struct.pack("<III", 124 + 4, len(icc), 0)
    return (
        b"BM"
        + struct.pack("<IHHI", 142 + len(icc), 0, 0, 14 + 124)
        + header
        + bytes((*reversed(STORED), 0))
        + icc
    )


def gif_with_profile(icc: bytes) -> bytes:
    stream = io.BytesIO()
    palette(STORED, (0, 0, 0)).save(stream, "GIF")
    data = stream.getvalue()
    start = 13 + (3 << (data[10] & 7) + 1)
    blocks = b"".join(bytes([len(icc[at : at + 255])]) + icc[at : at + 255] for at in range(0, len(icc), 255))
    return data[:start] + b"!\xff\x0bICCRGBG1012" + blocks + b"\0" + data[start:]


HALF = tuple((255 + part) // 2 for part in SHOWN)
KINDS: dict[str, tuple[Callable[[], bytes], tuple[int, ...], int]] = {
    "png rgb": (lambda: encoded(plain("RGB", STORED), "PNG", SWAPPED), SHOWN, 3),
    "png rgba": (lambda: encoded(plain("RGBA", (*STORED, 255)), "PNG", SWAPPED), SHOWN, 3),
    "png rgba, half transparent": (lambda: encoded(plain("RGBA", (*STORED, 128)), "PNG", SWAPPED), HALF, 4),
    "png rgba, clear": (lambda: encoded(plain("RGBA", (*STORED, 0)), "PNG", SWAPPED), (255, 255, 255), 0),
    "png palette": (lambda: encoded(palette(STORED), "PNG", SWAPPED), SHOWN, 3),
    "png palette with alpha": (
        lambda: encoded(palette(STORED), "PNG", SWAPPED, transparency=b"\x80"),
        HALF,
        4,
    ),
    "png colour key": (
        lambda: encoded(plain("RGB", STORED), "PNG", SWAPPED, transparency=(1, 2, 3)),
        SHOWN,
        3,
    ),
    "png colour key, met": (
        lambda: encoded(plain("RGB", STORED), "PNG", SWAPPED, transparency=STORED),
        (255, 255, 255),
        0,
    ),
    "png rgb, 16 bits": (lambda: png_of(16, 2, bytes((50, 50, 100, 100, 200, 200)), SWAPPED), SHOWN, 3),
    "png rgba, 16 bits": (
        lambda: png_of(16, 6, bytes((50, 50, 100, 100, 200, 200, 255, 255)), SWAPPED),
        SHOWN,
        3,
    ),
    "png grey": (lambda: encoded(plain("L", 55), "PNG", LINEAR_GREY), (128, 128, 128), 2),
    "png grey with alpha": (lambda: encoded(plain("LA", (55, 255)), "PNG", LINEAR_GREY), (128, 128, 128), 2),
    "png grey, half transparent": (
        lambda: encoded(plain("LA", (55, 128)), "PNG", LINEAR_GREY),
        (191, 191, 191),
        2,
    ),
    "png grey, 16 bits": (lambda: png_of(16, 0, bytes((55, 55)), LINEAR_GREY), (128, 128, 128), 2),
    "png grey and alpha, 16 bits": (
        lambda: png_of(16, 4, bytes((55, 55, 128, 128)), LINEAR_GREY),
        (191, 191, 191),
        2,
    ),
    "png grey, 16 bits, key met": (
        lambda: png_of(16, 0, b"\x37\x37", LINEAR_GREY, (b"tRNS", b"\x37\x37")),
        (255, 255, 255),
        0,
    ),
    "png grey, 16 bits, key not met": (
        lambda: png_of(16, 0, b"\x37\x37", LINEAR_GREY, (b"tRNS", b"\x37\x38")),
        (128,) * 3,
        2,
    ),
    "png grey, 1 bit": (lambda: png_of(1, 0, b"\x80", LINEAR_GREY), (255, 255, 255), 0),
    "jpeg rgb": (lambda: encoded(plain("RGB", STORED), "JPEG", SWAPPED, quality=98), SHOWN, 5),
    "jpeg grey": (lambda: encoded(plain("L", 55), "JPEG", LINEAR_GREY, quality=98), (128, 128, 128), 5),
    "jpeg cmyk": (
        lambda: encoded(plain("CMYK", (255, 0, 0, 0)), "JPEG", ink_profile(), quality=98),
        (255, 0, 0),
        12,
    ),
    "jpeg profile in pieces": (
        lambda: encoded(plain("RGB", STORED), "JPEG", SWAPPED + bytes(150_000), quality=98),
        SHOWN,
        5,
    ),
    "webp rgb": (lambda: encoded(plain("RGB", STORED), "WebP", SWAPPED, lossless=True), SHOWN, 3),
    "webp rgba": (
        lambda: encoded(plain("RGBA", (*STORED, 128)), "WebP", SWAPPED, lossless=True, exact=True),
        HALF,
        4,
    ),
    "tiff rgb": (lambda: encoded(plain("RGB", STORED), "TIFF", SWAPPED), SHOWN, 3),
    "tiff rgba": (lambda: encoded(plain("RGBA", (*STORED, 128)), "TIFF", SWAPPED), HALF, 4),
    "tiff grey": (lambda: encoded(plain("L", 55), "TIFF", LINEAR_GREY), (128, 128, 128), 2),
    "tiff grey, 16 bits": (lambda: encoded(plain("I;16", 55 * 257), "TIFF", LINEAR_GREY), (128, 128, 128), 2),
    "tiff cmyk": (lambda: encoded(plain("CMYK", (255, 0, 0, 0)), "TIFF", ink_profile()), (255, 0, 0), 12),
    "avif rgb": (lambda: encoded(plain("RGB", STORED), "AVIF", SWAPPED, quality=98), SHOWN, 8),
    "avif rgba": (lambda: encoded(plain("RGBA", (*STORED, 128)), "AVIF", SWAPPED, quality=98), HALF, 8),
    "gif": (lambda: gif_with_profile(SWAPPED), SHOWN, 3),
    "bmp": (lambda: bmp_with_profile(SWAPPED), SHOWN, 3),
}


def shown(data: bytes) -> tuple[int, ...]:
    image = decode(data, CONFIG)
    assert image.mode == "RGB"
    found = image.getpixel((0, 0))
    assert isinstance(found, tuple)
    return tuple(int(part) for part in found)


def assert_close(found: tuple[int, ...], expected: tuple[int, ...], tolerance: int) -> None:
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= tolerance, (found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_the_profile_counts_in_every_kind_of_pixels(name: str) -> None:
    write, expected, tolerance = KINDS[name]
    assert_close(shown(write()), expected, tolerance)


@pytest.mark.parametrize(
    ("image", "icc", "expected"),
    [
        (plain("RGB", STORED), LINEAR_GREY, STORED),
        (plain("RGBA", (*STORED, 255)), ink_profile(), STORED),
        (plain("L", 55), SWAPPED, (55, 55, 55)),
        (plain("LA", (55, 255)), SWAPPED, (55, 55, 55)),
        (palette(STORED), LINEAR_GREY, STORED),
        (plain("RGB", STORED), SWAPPED[:300], STORED),
        (plain("RGBA", (*STORED, 255)), b"no profile", STORED),
        (plain("RGB", STORED), SWAPPED.replace(b"mntr", b"link"), STORED),
        (plain("RGB", STORED), SRGB, STORED),
    ],
    ids=[
        "grey-rgb",
        "ink-rgba",
        "rgb-grey",
        "rgb-grey-alpha",
        "grey-palette",
        "cut",
        "no profile",
        "link",
        "srgb",
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_profile_that_does_not_fit_is_ignored(
    image: Image.Image, icc: bytes, expected: Color, kind: str
) -> None:
    assert shown(encoded(image, kind, icc)) == expected


def test_a_cmyk_image_whose_profile_is_of_rgb_is_read_by_its_inks() -> None:
    assert_close(shown(encoded(plain("CMYK", (0, 255, 255, 0)), "JPEG", SWAPPED, quality=98)), (255, 0, 0), 8)


def test_a_profile_over_the_readers_own_limit_counts() -> None:
    assert_close(shown(encoded(plain("RGBA", (*STORED, 255)), "PNG", SWAPPED + bytes(2 << 20))), SHOWN, 3)
