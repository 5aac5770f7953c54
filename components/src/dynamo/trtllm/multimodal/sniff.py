"""Naming a file's type by its first bytes."""

from __future__ import annotations

from contextlib import suppress

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


_ANY_HEIF = (b"mif1", b"msf1", b"miaf")
_FTYP_BYTES = 256


def sniff(data: bytes) -> str | None:
    """The type that the first bytes of `data` show, or None."""
    if data[4:8] == b"ftyp" and data[8:12] in _ANY_HEIF and _brands(data) & {b"avif", b"avis"}:
        return "AVIF"
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


def _brands(data: bytes) -> set[bytes]:
    """The brands that a file of boxes is compatible with (ISO/IEC 14496-12, 4.3)."""
    end = min(int.from_bytes(data[:4], "big"), len(data), _FTYP_BYTES)
    return {data[at : at + 4] for at in range(16, end - 3, 4)}
