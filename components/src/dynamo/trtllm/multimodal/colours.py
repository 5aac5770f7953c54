"""From any kind of pixels to RGB: depth scaled, palette resolved, colours brought to sRGB, and then
transparency laid over white.

The colour profile counts in every kind of pixels that it is made for; one that is broken or made for another
kind is ignored, as viewers do. Pure and blocking.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

from PIL import Image, ImageChops, ImageCms, ImageMath

_PROFILE_SPACES = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK", "LAB": "Lab "}
"""The colour space that a profile must be made for, by Pillow's mode (ICC.1, 7.2.6)."""
_IMAGE_CLASSES = frozenset({"mntr", "scnr", "prtr", "spac"})
"""Profiles of a device or space; links, abstract profiles and named colours describe no image."""
_PROFILE_ERRORS = (ImageCms.PyCMSError, OSError, ValueError, TypeError)
_SAME = 1
"""A profile that moves no colour by more than so many of 255 steps is sRGB by another name."""


def to_rgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """`image` in RGB over white. Raises `ValueError` and `OSError` for pixels of a kind no image has."""
    image, alpha = _split_alpha(_usual(image))
    transform = _transform(profile, image.mode) if profile else None
    rgb = _in_rgb(image) if transform is None else ImageCms.applyTransform(image, transform) or _in_rgb(image)
    if alpha is None:
        return rgb
    white = Image.new("RGB", rgb.size, "white")
    white.paste(rgb, mask=alpha)
    return white


def as_model(image: Image.Image, model: str | None) -> Image.Image:
    """`image` in the colour model that its file stores: Pillow gives some grey as RGB, and some palettes as
    grey.
    """
    if model == "grey" and image.mode in ("RGB", "RGBA"):
        return image.convert("LA" if image.mode == "RGBA" else "L")
    if model == "colour" and image.mode in ("1", "L"):
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    return image


def invert_16_bits(image: Image.Image) -> Image.Image:
    """16-bit grey whose zero is white, as grey whose zero is black, in 8 bits."""
    return ImageChops.invert(_scale_to_8_bits(image))


def _usual(image: Image.Image) -> Image.Image:
    """`image` in one of L, LA, RGB, RGBA, CMYK and LAB."""
    if image.mode.startswith("I"):
        return _grey_of_16_bits(image)
    if image.mode in ("P", "PA"):
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    if image.mode == "1":
        image = image.convert("L") if "transparency" not in image.info else image.convert("LA")
    if image.mode in ("L", "RGB") and "transparency" in image.info:
        return image.convert(f"{image.mode}A")
    other = {"La": "LA", "RGBa": "RGBA", "YCbCr": "RGB", "RGBX": "RGB"}.get(image.mode)
    if other is not None:
        return image.convert(other)
    if image.mode in ("L", "LA", "RGB", "RGBA", "CMYK", "LAB"):
        return image
    raise ValueError("no kind of pixels that an image has")


def _grey_of_16_bits(image: Image.Image) -> Image.Image:
    grey = _scale_to_8_bits(image)
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return grey
    visible = ImageMath.lambda_eval(lambda given: (given["grey"] != key) * 255, grey=image.convert("I"))
    alpha = visible.convert("L")
    grey.putalpha(alpha)
    return grey


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey to 8 bits, rounded; Pillow's own conversion clips at 255."""
    return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    if image.mode in ("LA", "RGBA"):
        return image.convert(image.mode[:-1]), image.getchannel("A")
    return image, None


def _in_rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


@lru_cache(maxsize=4)
def _transform(profile: bytes, mode: str) -> Any:
    """The way from `profile` to sRGB for pixels of `mode`; None where it does not fit, is broken, or changes
    nothing.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if (
            source.profile.xcolor_space != _PROFILE_SPACES[mode]
            or source.profile.device_class not in _IMAGE_CLASSES
        ):
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
        return None if mode in ("L", "RGB") and _changes_nothing(transform, mode) else transform
    except _PROFILE_ERRORS:
        return None


def _changes_nothing(transform: Any, mode: str) -> bool:
    """Try a ramp of greys, or a cube of colours."""
    if mode == "L":
        sample = Image.frombytes("L", (256, 1), bytes(range(256)))
    else:
        steps = range(0, 256, 17)
        sample = Image.frombytes(
            "RGB", (4096, 1), bytes(part for r in steps for g in steps for b in steps for part in (r, g, b))
        )
    changed = ImageCms.applyTransform(sample, transform)
    if changed is None:
        return True
    extrema = ImageChops.difference(sample.convert("RGB"), changed).getextrema()
    return all(isinstance(band, tuple) and band[1] <= _SAME for band in extrema)
