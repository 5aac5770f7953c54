"""From bytes to the image that the model should see: RGB, upright, whatever the file holds.

The format is decided from the first bytes. `formats` reads what the file says about itself, and hands only
the bytes that the pixels need to that format's one reader of Pillow; size and work are held against the
limits before any pixel is decoded. Pure and blocking: `size_of` is cheap, `decode` belongs into a
process of its own (`decoders`). `ClientFault` in fixed words.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedImage
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.colours import as_model, invert_16_bits, to_rgb
from dynamo.trtllm.multimodal.formats import avif, bmp, gif, jpeg, png, tiff, webp
from dynamo.trtllm.multimodal.formats.scan import Scan
from dynamo.trtllm.multimodal.sniff import sniff

BROKEN = "the image is damaged or incomplete"


@dataclass(frozen=True)
class _Format:
    """How one type of file is read: by our walk, then by Pillow's reader for the type."""

    scan: Callable[[bytes], Scan]
    open: Callable[[io.BytesIO], ImageFile.ImageFile]


_FORMATS: dict[str, _Format] = {
    "JPEG": _Format(jpeg.scan, JpegImagePlugin.JpegImageFile),
    "PNG": _Format(png.scan, PngImagePlugin.PngImageFile),
    "WebP": _Format(webp.scan, WebPImagePlugin.WebPImageFile),
    "GIF": _Format(gif.scan, GifImagePlugin.GifImageFile),
    "BMP": _Format(bmp.scan, BmpImagePlugin.BmpImageFile),
    "TIFF": _Format(tiff.scan, TiffImagePlugin.TiffImageFile),
    "AVIF": _Format(avif.scan, AvifImagePlugin.AvifImageFile),
}
if not features.check("avif"):
    del _FORMATS["AVIF"]
ACCEPTED = ", ".join(_FORMATS)

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
_PILLOW_MODULES = r"PIL\."


def digest_of(data: bytes) -> str:
    """The name of a content: SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def size_of(data: bytes, config: MediaConfig) -> tuple[int, int]:
    """Width and height in pixels of the upright image, read from its header.

    Raises `ClientFault` for another type or a damaged header, and `LimitFault` for more than
    `max_image_pixels`.
    """
    scan = _scan(data, config)[1]
    swapped = _UPRIGHT.get(scan.orientation) in _SWAPPING
    return (scan.height, scan.width) if swapped else (scan.width, scan.height)


def decode(data: bytes, config: MediaConfig) -> Image.Image:
    """Decode `data` to an upright RGB image: alpha over white, 8 bits a channel, sRGB, the first frame or
    page.
    """
    kind, scan = _scan(data, config)
    with _damage_named(), _open(kind, scan.essentials()) as image:
        _check_size(*image.size, config)
        image.load()
        rgb = _placed(_rgb_of(image, kind, scan), scan)
    turn = _UPRIGHT.get(scan.orientation)
    return rgb if turn is None else rgb.transpose(turn)


def decode_image(data: bytes, config: MediaConfig) -> DecodedImage:
    """`decode`, with the digest of `data`."""
    return DecodedImage(digest_of(data), decode(data, config))


def _scan(data: bytes, config: MediaConfig) -> tuple[str, Scan]:
    _silence_pillow()
    kind = _accepted_format(data)
    with _damage_named():
        scan = _FORMATS[kind].scan(data)
    _check_size(scan.width, scan.height, config)
    return kind, scan


@contextmanager
def _damage_named() -> Iterator[None]:
    """Whatever a library says about a file becomes our own words; faults that are worded already pass."""
    try:
        yield
    except (ClientFault, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise LimitFault("the image has more pixels than this worker takes") from error
    except Exception as error:
        raise ClientFault(BROKEN) from error


def _accepted_format(data: bytes) -> str:
    if not data:
        raise ClientFault("the image is empty")
    kind = sniff(data)
    if kind is None:
        raise ClientFault(f"not an image of a known type; accepted are {ACCEPTED}")
    if kind not in _FORMATS:
        raise ClientFault(f"the type {kind} is not accepted; accepted are {ACCEPTED}")
    return kind


def _check_size(width: int, height: int, config: MediaConfig) -> None:
    if width < 1 or height < 1:
        raise ClientFault(BROKEN)
    if width * height > config.max_image_pixels:
        raise LimitFault(
            f"{width} x {height} pixels exceed this worker's limit "
            f"of {config.max_image_pixels / 1e6:g} million pixels"
        )


def _silence_pillow() -> None:
    """Keep Pillow's warnings about odd files out of the log. For the whole process, since a thread has no
    filter of its own.
    """
    # Adding a filter makes every module forget which warnings it has shown, so it is added only where it is
    # not in front.
    if not warnings.filters or getattr(warnings.filters[0][3], "pattern", None) != _PILLOW_MODULES:
        warnings.filterwarnings("ignore", module=_PILLOW_MODULES)


def _open(kind: str, essentials: bytes) -> ImageFile.ImageFile:
    """Read the header with the one reader of `kind`; Pillow's own `open` would add its warnings about large
    images.
    """
    try:
        return _FORMATS[kind].open(io.BytesIO(essentials))
    except SyntaxError as error:
        if kind == "TIFF":
            raise ClientFault(
                "this kind of TIFF is not read; save it as grey, RGB or CMYK, or as PNG"
            ) from error
        raise
    except OSError as error:
        if kind == "BMP" and "nsupported" in str(error):  # a depth, compression or order of colours
            raise ClientFault("this kind of BMP is not read; save it with 24 bits, or as PNG") from error
        raise


def _rgb_of(image: Image.Image, kind: str, scan: Scan) -> Image.Image:
    if scan.inverted:
        image = invert_16_bits(image)
    if kind == "BMP" and image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        image = image.convert("RGB")  # Windows' clipboard leaves the alpha of an opaque image at zero
    return to_rgb(as_model(image, scan.model), scan.profile())


def _placed(rgb: Image.Image, scan: Scan) -> Image.Image:
    """`rgb` where it lies on its white screen."""
    if scan.place is None:
        return rgb
    screen = Image.new("RGB", (scan.width, scan.height), "white")
    screen.paste(rgb, scan.place)
    return screen
