"""Metadata that no pixel needs never refuses an image, whatever is wrong with it, and is never inflated
without bound.
"""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.decode import decode, size_of

CONFIG = MediaConfig(max_image_pixels=1_000_000)
SIZE = (40, 24)


def picture() -> Image.Image:
    """Red, with a blue left upper quarter."""
    image = Image.new("RGB", SIZE, (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 20, 12))
    return image


def encoded(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    (image or picture()).save(stream, kind, **options)
    return stream.getvalue()


def chunk(name: bytes, body: bytes, *, length: int | None = None, checksum: int | None = None) -> bytes:
    """A PNG chunk; `length` and `checksum` tell lies."""
    told = len(body) if length is None else length
    return (
        struct.pack(">I", told)
        + name
        + body
        + struct.pack(">I", zlib.crc32(name + body) if checksum is None else checksum)
    )


def riff_chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def in_png(*chunks: bytes) -> bytes:
    plain = encoded("PNG")
    return plain[:33] + b"".join(chunks) + plain[33:]


def in_jpeg(*segments: bytes) -> bytes:
    plain = encoded("JPEG", quality=95, subsampling=0)
    return plain[:2] + b"".join(segments) + plain[2:]


def segment(marker: int, body: bytes, *, length: int | None = None) -> bytes:
    return b"\xff%c" % marker + struct.pack(">H", len(body) + 2 if length is None else length) + body


def in_webp(*chunks: bytes, flags: int) -> bytes:
    still = encoded("WebP", lossless=True)[12:]
    canvas = b"".join((size - 1).to_bytes(3, "little") for size in SIZE)
    body = riff_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + canvas) + chunks[0] + still + b"".join(chunks[1:])
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def in_gif(*extensions: bytes) -> bytes:
    plain = encoded("GIF")
    start = 13 + (3 << (plain[10] & 7) + 1)
    return plain[:start] + b"".join(extensions) + plain[start:]


def sub_blocks(body: bytes) -> bytes:
    pieces = [body[at : at + 255] for at in range(0, len(body), 255)]
    return b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\0"


def in_tiff(*entries: tuple[int, int, int, int]) -> bytes:
    """A TIFF with further entries: tag, type, count and value."""
    plain = encoded("TIFF")
    (count,) = struct.unpack_from("<H", plain, 8)
    old = [plain[10 + 12 * at : 22 + 12 * at] for at in range(count)]
    all_entries = sorted(
        old + [struct.pack("<HHII", *entry) for entry in entries], key=lambda raw: raw[:2][::-1]
    )
    directory = struct.pack("<H", len(all_entries)) + b"".join(all_entries) + b"\0\0\0\0"
    return plain[:4] + struct.pack("<I", len(plain)) + plain[8:] + directory


MANY = b"x" * 1_100_000
def in_avif(exif: bytes) -> bytes:
    """An AVIF whose EXIF, as long as it should be, is exchanged for `exif`."""
    fitting = b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 0x9286, 7, len(exif) - 26, 26) + bytes(4)
    fitting = fitting.ljust(len(exif), b"\x07")
    plain = encoded("AVIF", quality=95, exif=fitting)
    assert fitting in plain
    return plain.replace(fitting, exif)


DEFLATED = zlib.compress(MANY)
EXIF_BOMB = (
    b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 65_535) + struct.pack("<HHII", 0x9286, 7, 60_000, 0) * 4000
)

DISLIKED: dict[str, Callable[[], bytes]] = {
    "png: text that inflates to a megabyte": lambda: in_png(chunk(b"zTXt", b"workflow\0\0" + DEFLATED)),
    "png: international text likewise": lambda: in_png(chunk(b"iTXt", b"w\0\1\0\0\0" + DEFLATED)),
    "png: many such texts": lambda: in_png(*[chunk(b"zTXt", b"w\0\0" + DEFLATED)] * 80),
    "png: long plain text": lambda: in_png(chunk(b"tEXt", b"w\0" + MANY)),
    "png: a profile that inflates to 64 MB": lambda: in_png(
        chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(64 << 20), 1))
    ),
    "png: a profile of no known method": lambda: in_png(chunk(b"iCCP", b"p\0\7" + MANY)),
    "png: a profile without its name's end": lambda: in_png(chunk(b"iCCP", b"pppp")),
    "png: a wrong checksum": lambda: in_png(chunk(b"tIME", bytes(7), checksum=7)),
    "png: a wrong checksum of an unknown chunk": lambda: in_png(chunk(b"vpAg", b"ok", checksum=0)),
    "png: a wrong checksum of the profile": lambda: in_png(chunk(b"iCCP", b"p\0\0" + DEFLATED, checksum=0)),
    "png: chunks too short for their kind": lambda: in_png(
        *(
            chunk(name, b"\1")
            for name in (b"gAMA", b"cHRM", b"pHYs", b"tIME", b"sRGB", b"acTL", b"iTXt", b"eXIf")
        )
    ),
    "png: a length that is too large": lambda: in_png(chunk(b"tEXt", b"a\0b", length=9)),
    "png: a length that leads out of the file": lambda: in_png(chunk(b"tEXt", b"a\0b", length=2**31 - 1)),
    "png: transparency of a wrong length": lambda: in_png(chunk(b"tRNS", b"\0")),
    "png: transparency with a wrong checksum": lambda: in_png(
        chunk(b"tRNS", bytes((0, 255, 0, 0, 0, 0)), checksum=0)
    ),
    "png: animation control that lies": lambda: in_png(chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
    "jpeg: EXIF that refers to itself": lambda: in_jpeg(segment(0xE1, EXIF_BOMB[:65_000])),
    "jpeg: broken EXIF": lambda: in_jpeg(segment(0xE1, b"Exif\0\0MM\0*\xff\xff\xff\xff")),
    "jpeg: broken image index": lambda: in_jpeg(segment(0xE2, b"MPF\0II*\0\xff\xff\xff\xff" + bytes(90))),
    "jpeg: thousand segments of XMP": lambda: in_jpeg(
        *[segment(0xE1, b"http://ns.adobe.com/xmp/" + MANY[:60_000])] * 200
    ),
    "jpeg: profile pieces that are not all there": lambda: in_jpeg(
        segment(0xE2, b"ICC_PROFILE\0\3\7" + MANY[:60_000])
    ),
    "jpeg: a piece too short for its number": lambda: in_jpeg(segment(0xE2, b"ICC_PROFILE\0")),
    "jpeg: broken Photoshop resources": lambda: in_jpeg(
        segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\x0b\xff")
    ),
    "jpeg: an Adobe segment too short": lambda: in_jpeg(segment(0xEE, b"Adobe")),
    "jpeg: a segment without a length": lambda: in_jpeg(b"\xff\xe5\0\0"),
    "jpeg: a comment that ends too early": lambda: in_jpeg(segment(0xFE, b"hello", length=4)),
    "webp: broken EXIF and XMP": lambda: in_webp(
        b"", riff_chunk(b"EXIF", b"II*\0\xff\xff"), riff_chunk(b"XMP ", MANY), flags=12
    ),
    "webp: EXIF that refers to itself": lambda: in_webp(b"", riff_chunk(b"EXIF", EXIF_BOMB), flags=8),
    "webp: a large profile": lambda: in_webp(riff_chunk(b"ICCP", MANY * 5), flags=32),
    "webp: chunks that its header denies": lambda: in_webp(
        riff_chunk(b"ICCP", b"x"), riff_chunk(b"EXIF", b"x"), flags=0
    ),
    "webp: chunks that its header promises": lambda: in_webp(b"", flags=0x2C),
    "gif: a long comment": lambda: in_gif(b"!\xfe" + sub_blocks(MANY)),
    "gif: application data": lambda: in_gif(
        b"!\xff" + sub_blocks(b"XMP DataXMP" + MANY), b"!\xff" + sub_blocks(b"NETSCAPE2.0")
    ),
    "gif: an empty extension": lambda: in_gif(b"!\xf9\0", b"!\x01\0"),
    "avif: EXIF that refers to itself": lambda: in_avif(EXIF_BOMB[6:]),
    "avif: long XMP": lambda: encoded("AVIF", quality=95, xmp=MANY),
    "tiff: entries that point nowhere": lambda: in_tiff(
        (700, 1, 1 << 30, 1 << 31), (34665, 4, 1, 0xFFFFFFFF)
    ),
    "tiff: an orientation of a wrong type": lambda: in_tiff((274, 2, 9, 0)),
    "tiff: a large profile": lambda: in_tiff((34675, 7, 1 << 30, 8)),
}


@pytest.mark.parametrize("name", DISLIKED)
def test_an_image_is_taken_whatever_its_metadata_holds(name: str) -> None:
    data = DISLIKED[name]()
    assert size_of(data, CONFIG) == SIZE
    image = decode(data, CONFIG)
    for at, colour in (((4, 4), (0, 0, 255)), ((36, 4), (255, 0, 0)), ((4, 20), (255, 0, 0))):
        found = image.getpixel(at)
        assert isinstance(found, tuple)
        assert max(abs(a - b) for a, b in zip(found, colour, strict=True)) <= 8, (at, found)


@pytest.mark.parametrize(
    "name",
    [
        "png: many such texts",
        "png: a profile that inflates to 64 MB",
        "jpeg: EXIF that refers to itself",
        "webp: EXIF that refers to itself",
        "avif: EXIF that refers to itself",
    ],
)
def test_metadata_is_not_inflated_without_bound(name: str) -> None:
    data = DISLIKED[name]()
    tracemalloc.start()
    try:
        decode(data, CONFIG)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * len(data) + (12 << 20)


def test_a_directory_of_thousands_of_entries_over_the_same_bytes_is_not_read() -> None:
    data = in_tiff(*((40_000 + at, 7, 900, 0) for at in range(3000)))
    tracemalloc.start()
    try:
        assert decode(data, CONFIG).size == SIZE
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 << 20


@pytest.mark.parametrize(
    "data",
    [
        in_png(*[chunk(b"tEXt", b"")] * 70_000),
        in_jpeg(*[segment(0xFE, b"")] * 70_000),
        in_gif(b"!\xfe" + b"\1a" * 70_000 + b"\0"),
        in_webp(riff_chunk(b"junk", b"") * 70_000, flags=0),
        in_tiff(*((50_000, 1, 1, 0) for _ in range(5000))),
    ],
    ids=["png", "jpeg", "gif", "webp", "tiff"],
)
def test_a_file_in_too_many_pieces_is_refused_before_it_is_decoded(data: bytes) -> None:
    with pytest.raises(
        LimitFault,
        match=r"^the (image file is made of more pieces|TIFF has more entries) than this worker takes$",
    ):
        size_of(data, CONFIG)


@pytest.mark.parametrize("name", [b"IHDR", b"IDAT"])
def test_a_wrong_checksum_of_what_the_pixels_need_is_damage(name: bytes) -> None:
    data = bytearray(in_png(chunk(b"tIME", bytes(7), checksum=7)))
    place = data.index(name)
    data[place + 4 + int.from_bytes(data[place - 4 : place], "big")] ^= 1
    with pytest.raises(ClientFault, match="the image is damaged or incomplete"):
        decode(bytes(data), CONFIG)
