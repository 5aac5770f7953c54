"""From bytes to the picture that the model should see: RGB, upright, whatever the file holds.

The format is decided from the first bytes and only that format's reader of Pillow is used; the size is read from the header and
held against the limit before any pixel is decoded. Pure and blocking: call it in the media pool. `ClientFault` in fixed words.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
    features,
)

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.engines.port import DecodedImage
from dynamo.trtllm.errors import ClientFault, LimitFault

BROKEN = "the image is damaged or incomplete"
MAX_PROFILE_BYTES = 4 << 20

_READERS: dict[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": lambda stream: JpegImagePlugin.jpeg_factory(stream),
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}
if not features.check("avif"):
    del _READERS["AVIF"]
ACCEPTED = ", ".join(_READERS)

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (8, b"WEBP", "WebP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftyp", "MP4 video"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL \r\n\x87\n", "JPEG XL"),
    (4, b"jP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"%PDF-", "PDF"),
    (0, b"%!PS", "EPS"),
    (0, b"8BPS", "PSD"),
    (0, b"SIMPLE  =", "FITS"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM video"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"PK\3\4", "ZIP"),
    (8, b"WAVE", "WAV audio"),
    (8, b"AVI ", "AVI video"),
    (0, b"ID3", "MP3 audio"),
)

_UPRIGHT: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPING = frozenset(_UPRIGHT[orientation] for orientation in (5, 6, 7, 8))
_EXIF_ORIENTATION = 0x0112
_PILLOW_MODULES = r"PIL\."


@dataclass(frozen=True)
class ImageHeader:
    """What an image says about itself before it is decoded; sizes in pixels, of the upright image."""

    format: str
    width: int
    height: int


def digest_of(data: bytes) -> str:
    """The name of a content: SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def check_header(data: bytes, config: MediaConfig) -> ImageHeader:
    """Read format and size. Raises `ClientFault` for another type, a damaged header or more than `max_image_pixels`."""
    _silence_pillow()
    kind = _accepted_format(data)
    if kind == "WebP":
        _check_size(*_webp_size(data), config)
    with _open(kind, data) as image:
        width, height = image.size
        _check_size(width, height, config)
        if _turn_of(image) in _SWAPPING:
            width, height = height, width
    return ImageHeader(kind, width, height)


def decode(data: bytes, config: MediaConfig) -> Image.Image:
    """Decode `data` to an upright RGB image: alpha over white, 8 bits a channel, sRGB, the first frame of an animation."""
    header = check_header(data, config)
    _check_png_checksums(header, data)
    with _open(header.format, data) as image:
        _check_size(*image.size, config)
        try:
            image.load()
        except Exception as error:
            raise ClientFault(BROKEN) from error
        _check_size(*image.size, config)
        try:
            turn = _turn_of(image)
            rgb = _to_rgb(image)
            return rgb if turn is None else rgb.transpose(turn)
        except Exception as error:
            raise ClientFault(BROKEN) from error


def decode_image(data: bytes, config: MediaConfig) -> DecodedImage:
    """`decode`, with the digest of `data`."""
    return DecodedImage(digest_of(data), decode(data, config))


def sniff(data: bytes) -> str | None:
    """The type that the first bytes of `data` show, or None."""
    for offset, magic, name in _MAGIC:
        if data.startswith(magic, offset):
            return name
    start = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"<svg" in start and start.startswith(b"<"):
        return "SVG"
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if start.startswith(b"<?xml"):
        return "XML"
    with suppress(UnicodeDecodeError):
        text = data[:256].decode("ascii")
        if text and all(character.isprintable() or character.isspace() for character in text):
            return "text"
    return None


def _accepted_format(data: bytes) -> str:
    if not data:
        raise ClientFault("the image is empty")
    kind = sniff(data)
    if kind is None:
        raise ClientFault(f"not an image of a known type; accepted are {ACCEPTED}")
    if kind not in _READERS:
        raise ClientFault(f"the type {kind} is not accepted; accepted are {ACCEPTED}")
    return kind


def _check_size(width: int, height: int, config: MediaConfig) -> None:
    if width < 1 or height < 1:
        raise ClientFault(BROKEN)
    if width * height > config.max_image_pixels:
        raise LimitFault(
            f"{width} x {height} pixels exceed this worker's limit of {config.max_image_pixels / 1e6:g} million pixels"
        )


def _silence_pillow() -> None:
    """Keep Pillow's warnings about odd files out of the log. For the whole process, since a thread has no filter of its own."""
    # Adding a filter makes every module forget which warnings it has shown, so it is added only where it is not in front.
    if not warnings.filters or getattr(warnings.filters[0][3], "pattern", None) != _PILLOW_MODULES:
        warnings.filterwarnings("ignore", module=_PILLOW_MODULES)


def _open(kind: str, data: bytes) -> ImageFile.ImageFile:
    """Read the header with the one reader of `kind`; Pillow's own `open` would add its warnings about large images."""
    try:
        return _READERS[kind](io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise LimitFault("the image has more pixels than this worker takes") from error
    except Exception as error:
        raise ClientFault(BROKEN) from error


def _webp_size(data: bytes) -> tuple[int, int]:
    """The canvas from a WebP header (RFC 9649), since Pillow's reader allocates two of them before it tells the size."""
    chunk, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise ClientFault(BROKEN)
    if chunk == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if chunk == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise ClientFault(BROKEN)


def _check_png_checksums(header: ImageHeader, data: bytes) -> None:
    """Pillow skips the checksums of pixel data while it decodes."""
    if header.format != "PNG":
        return
    with _open("PNG", data) as image:
        try:
            image.verify()
        except Exception as error:
            raise ClientFault(BROKEN) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """`image` in RGB: depth scaled, palette resolved, colours brought to sRGB, transparency laid over white."""
    if image.mode.startswith("I"):
        return _scale_to_8_bits(image).convert("RGB")
    if image.has_transparency_data:
        return _over_white(image.convert("RGBA"))
    if image.mode in ("RGB", "CMYK"):
        image = _to_srgb(image)
    return image.convert("RGB")


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey to 8 bits, rounded; Pillow's own conversion clips at 255."""
    return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _to_srgb(image: Image.Image) -> Image.Image:
    """Apply the embedded colour profile; one that is broken, huge or of another colour model is ignored, as viewers do."""
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes) or not 0 < len(profile) <= MAX_PROFILE_BYTES:
        return image
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in ImageCms.getProfileDescription(source).lower():
            return image
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return image
    return converted or image


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    """What brings `image` upright by its EXIF; unreadable EXIF turns nothing."""
    if "exif" not in image.info:
        return None
    with suppress(Exception):
        orientation = image.getexif().get(_EXIF_ORIENTATION)
        return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return None
