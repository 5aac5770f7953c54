"""Image files by name: the demo's image of seed 1 in every form that clients send,
and files that are no image.

`good` files all show the same image, so each has to be answered with its caption;
`bad` ones have to be refused.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image, ImageCms, PngImagePlugin

from dynamo.trtllm.demo.pictures import draw

SEED = 1
PNG_SIGNATURE_AND_HEADER_BYTES = 33

GOOD: dict[str, Callable[[], bytes]] = {}
BAD: dict[str, Callable[[], bytes]] = {}


def good(name: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def add(make: Callable[[], bytes]) -> Callable[[], bytes]:
        GOOD[name] = make
        return make

    return add


def bad(name: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def add(make: Callable[[], bytes]) -> Callable[[], bytes]:
        BAD[name] = make
        return make

    return add


def caption() -> str:
    """What all `good` files show."""
    return draw(SEED).caption


def picture(seed: int = SEED) -> Image.Image:
    return draw(seed).image


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def png() -> bytes:
    return saved(picture(), "PNG")


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk with its length and checksum (PNG specification, section 5.3)."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunk(extra: bytes) -> bytes:
    data = png()
    return data[:PNG_SIGNATURE_AND_HEADER_BYTES] + extra + data[PNG_SIGNATURE_AND_HEADER_BYTES:]


def _plain(name: str, kind: str, mode: str | None = None, **options: object) -> None:
    GOOD[name] = lambda: saved(picture().convert(mode) if mode else picture(), kind, **options)


_plain("png", "PNG")
_plain("png rgba", "PNG", "RGBA")
_plain("png palette", "PNG", "P")
_plain("png without compression", "PNG", compress_level=0)
_plain("jpeg", "JPEG", quality=95)
_plain("jpeg progressive", "JPEG", quality=95, progressive=True)
_plain("jpeg without subsampling", "JPEG", quality=95, subsampling=0)
_plain("jpeg cmyk", "JPEG", "CMYK", quality=95)
_plain("webp lossless", "WEBP", lossless=True)
_plain("webp lossy", "WEBP", quality=90)
_plain("webp rgba", "WEBP", "RGBA", lossless=True)
_plain("gif", "GIF")
_plain("bmp", "BMP")
_plain("tiff", "TIFF")
_plain("tiff lzw", "TIFF", compression="tiff_lzw")
_plain("tiff deflate", "TIFF", compression="tiff_adobe_deflate")
_plain("tiff cmyk", "TIFF", "CMYK")


@good("tiff of two pages")
def _tiff_pages() -> bytes:
    return saved(picture(), "TIFF", save_all=True, append_images=[Image.new("RGB", (60, 60), "white")])


@good("gif of two frames")
def _gif_frames() -> bytes:
    return saved(
        picture(),
        "GIF",
        save_all=True,
        append_images=[Image.new("RGB", picture().size, "white")],
        duration=100,
    )


@good("webp of two frames")
def _webp_frames() -> bytes:
    blank = Image.new("RGB", picture().size, "white")
    return saved(picture(), "WEBP", save_all=True, append_images=[blank], duration=100, lossless=True)


@good("apng")
def _apng() -> bytes:
    return saved(
        picture(),
        "PNG",
        save_all=True,
        append_images=[Image.new("RGB", picture().size, "white")],
        duration=100,
    )


@good("png with a large compressed text")
def _png_text() -> bytes:
    return with_chunk(chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"x" * 1_100_000)))


@good("png with international text")
def _png_itxt() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("prompt", "ein roter Kreis " * 100_000, zip=True)
    return saved(picture(), "PNG", pnginfo=info)


@good("png with a wrong checksum of a text")
def _png_crc() -> bytes:
    return with_chunk(chunk(b"tEXt", b"Comment\0hello")[:-1] + b"\0")


@good("png with a colour profile")
def _png_profile() -> bytes:
    return saved(
        picture(), "PNG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    )


@good("png with a colour profile that is no profile")
def _png_no_profile() -> bytes:
    return saved(picture(), "PNG", icc_profile=b"not a profile" * 40)


@good("png with more bytes after its end")
def _png_tail() -> bytes:
    return png() + b"trailing" * 100


@good("png with exif")
def _png_exif() -> bytes:
    exif = Image.Exif()
    exif[0x010E] = "an image"
    return saved(picture(), "PNG", exif=exif)


@good("jpeg turned by its orientation")
def _jpeg_turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise for showing
    return saved(picture().transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif)


@good("jpeg with a long comment")
def _jpeg_comment() -> bytes:
    return saved(picture(), "JPEG", quality=95, comment=b"x" * 60_000)


@good("jpeg with xmp")
def _jpeg_xmp() -> bytes:
    data = saved(picture(), "JPEG", quality=95)
    packet = b"http://ns.adobe.com/xap/1.0/\0" + b"<x:xmpmeta/>" * 1000
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(packet) + 2) + packet + data[2:]


@good("bmp of 32 bits with no alpha at all")
def _bmp_alpha() -> bytes:
    """Windows' clipboard: a V4 header with an alpha mask, and zero in every alpha byte."""
    image = picture()
    width, height = image.size
    rows = b"".join(
        b"".join(bytes((b, g, r, 0)) for r, g, b in (image.getpixel((x, y)) for x in range(width)))  # type: ignore[misc]
        for y in range(height - 1, -1, -1)
    )
    masks = struct.pack("<IIII", 0x00FF0000, 0x0000FF00, 0x000000FF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, width, height, 1, 32, 3, len(rows), 2835, 2835, 0, 0)
    header += masks + b"BGRs" + bytes(36) + bytes(12)
    return b"BM" + struct.pack("<IHHI", 14 + len(header) + len(rows), 0, 0, 14 + len(header)) + header + rows


@bad("empty")
def _empty() -> bytes:
    return b""


@bad("one byte")
def _byte() -> bytes:
    return b"\x89"


@bad("noise")
def _noise() -> bytes:
    return bytes(range(256)) * 4


@bad("text")
def _text() -> bytes:
    return b"this is no image, and says so"


@bad("html page")
def _html() -> bytes:
    return b"<!doctype html><html><body>not found</body></html>"


@bad("svg")
def _svg() -> bytes:
    return b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"><circle r="9"/></svg>'


@bad("pdf")
def _pdf() -> bytes:
    return b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\ntrailer\n<<>>\n%%EOF"


@bad("zip")
def _zip() -> bytes:
    return b"PK\x03\x04" + bytes(60)


@bad("mp4")
def _mp4() -> bytes:
    return struct.pack(">I", 24) + b"ftypisom" + bytes(200)


@bad("wav")
def _wav() -> bytes:
    return b"RIFF" + struct.pack("<I", 200) + b"WAVEfmt " + bytes(192)


@bad("eps")
def _eps() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"


@bad("photoshop")
def _psd() -> bytes:
    return b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 64, 64, 8, 3) + bytes(40)


@bad("half a png")
def _cut_png() -> bytes:
    return png()[: len(png()) // 2]


@bad("only a png header")
def _png_header() -> bytes:
    return png()[:PNG_SIGNATURE_AND_HEADER_BYTES]


@bad("half a jpeg")
def _cut_jpeg() -> bytes:
    data = saved(picture(), "JPEG", quality=95)
    return data[: len(data) // 2]


@bad("half a webp")
def _cut_webp() -> bytes:
    data = saved(picture(), "WEBP", lossless=True)
    return data[: len(data) // 2]


@bad("png that claims to be vast")
def _vast() -> bytes:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


@bad("png over the limit of pixels")
def _pixels() -> bytes:
    return saved(Image.new("1", (9000, 8000)), "PNG")


@bad("png with a wrong checksum of its pixels")
def _pixels_crc() -> bytes:
    data = bytearray(png())
    at = data.index(b"IDAT")
    length = struct.unpack(">I", data[at - 4 : at])[0]
    data[at + 4 + length] ^= 0xFF
    return bytes(data)


@bad("git lfs pointer")
def _pointer() -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
