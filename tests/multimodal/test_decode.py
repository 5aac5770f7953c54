"""Decoding: whatever a file holds becomes an upright RGB image, or a refusal in fixed words."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image, ImageCms

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.blocking import run_blocking
from dynamo.trtllm.multimodal.decode import BROKEN, decode, decode_image, size_of
from image_files import encoded, png_chunk

CONFIG = MediaConfig(max_image_pixels=1_000_000)
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
Color = tuple[int, int, int]


def png(
    width: int, height: int, *, depth: int = 8, color: int = 0, rows: bytes = b"", extra: bytes = b""
) -> bytes:
    """A PNG written by hand: `rows` are the raw scan lines, each with its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = (
        png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + body


def pixel(data: bytes, x: int = 0, y: int = 0) -> Color:
    image = decode(data, CONFIG)
    assert image.mode == "RGB"
    value = image.getpixel((x, y))
    assert isinstance(value, tuple)
    red, green, blue = value
    return red, green, blue


def assert_close(actual: Color, expected: Color, tolerance: int) -> None:
    assert max(abs(a - e) for a, e in zip(actual, expected, strict=True)) <= tolerance, (actual, expected)


def message_of(data: bytes, config: MediaConfig = CONFIG) -> str:
    with pytest.raises(ClientFault) as caught:
        decode(data, config)
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("GIF", {}, 0),
        ("WebP", {"lossless": True}, 0),
        ("WebP", {"quality": 90}, 8),
        ("JPEG", {"quality": 95}, 8),
        ("JPEG", {"quality": 95, "progressive": True}, 8),
        ("AVIF", {"quality": 95}, 8),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("TIFF", {"compression": "tiff_adobe_deflate"}, 0),
        ("TIFF", {"compression": "packbits"}, 0),
        ("TIFF", {"compression": "jpeg", "quality": 95}, 8),
        ("TIFF", {"big_tiff": True}, 0),
    ],
)
def test_each_accepted_format_gives_its_size_and_colours(
    kind: str, options: dict[str, Any], tolerance: int
) -> None:
    image = Image.new("RGB", (48, 32), RED)
    image.paste(BLUE, (24, 0, 48, 32))
    data = encoded(image, kind, **options)
    assert size_of(data, CONFIG) == (48, 32)
    assert decode(data, CONFIG).size == (48, 32)
    assert_close(pixel(data, 8, 16), RED, tolerance)
    assert_close(pixel(data, 40, 16), BLUE, tolerance)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_whose_markers_have_fill_bytes_before_them_is_the_same_picture(progressive: bool) -> None:
    picture = Image.effect_noise((64, 48), 60).convert("RGB")
    data = encoded(picture, "JPEG", progressive=progressive)
    filled = data
    for marker in (b"\xff\xc4", b"\xff\xda", b"\xff\xd9"):
        filled = filled.replace(marker, b"\xff\xff" + marker)
    assert len(filled) > len(data) + 6
    assert decode(filled, MediaConfig()).tobytes() == decode(data, MediaConfig()).tobytes()


def test_the_digest_is_of_the_bytes() -> None:
    data = encoded(Image.new("RGB", (2, 2), RED), "PNG")
    assert decode_image(data, CONFIG).digest == hashlib.sha256(data).hexdigest()


class TestColourModels:
    """Each kind of pixel becomes the colour that a viewer shows."""

    def test_alpha_is_laid_over_white(self) -> None:
        assert pixel(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG")) == WHITE
        assert pixel(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG")) == (127, 127, 127)
        assert pixel(encoded(Image.new("RGBA", (2, 2), (0, 0, 255, 255)), "WebP", lossless=True)) == BLUE
        assert pixel(encoded(Image.new("LA", (2, 2), (0, 0)), "PNG")) == WHITE
        assert pixel(encoded(Image.new("LA", (2, 2), (40, 255)), "PNG")) == (40, 40, 40)

    def test_a_palette_is_resolved_with_its_transparency(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([255, 0, 0, 0, 255, 0])
        image.putpixel((1, 0), 1)
        assert pixel(encoded(image, "PNG")) == RED
        assert pixel(encoded(image, "PNG"), 1) == GREEN
        for kind in ("PNG", "GIF"):
            transparent = encoded(image, kind, transparency=0)
            assert pixel(transparent) == WHITE
            assert pixel(transparent, 1) == GREEN
        assert pixel(encoded(image, "PNG", transparency=b"\x80\xff")) == (255, 127, 127)

    def test_a_transparent_colour_of_a_png_is_laid_over_white(self) -> None:
        assert pixel(encoded(Image.new("RGB", (2, 2), RED), "PNG", transparency=RED)) == WHITE
        assert pixel(encoded(Image.new("L", (2, 2), 9), "PNG", transparency=9)) == WHITE

    def test_grey_of_1_2_4_8_and_16_bits_spans_black_to_white(self) -> None:
        for depth in (1, 2, 4, 8, 16):
            pair = {1: b"\x40", 2: b"\x30", 4: b"\x0f", 8: b"\x00\xff", 16: b"\x00\x00\xff\xff"}[depth]
            data = png(2, 1, depth=depth, rows=b"\0" + pair)
            assert pixel(data) == BLACK
            assert pixel(data, 1) == WHITE

    def test_16_bit_grey_is_scaled_and_rounded(self) -> None:
        for value, grey in ((0x8000, 128), (0x0100, 1), (0x4080, 64), (0xFEFE, 254)):
            assert pixel(png(1, 1, depth=16, rows=b"\0" + struct.pack(">H", value))) == (grey, grey, grey)

    def test_16_bit_colour_and_grey_with_alpha_keep_their_high_bytes(self) -> None:
        assert pixel(png(1, 1, depth=16, color=2, rows=b"\0" + struct.pack(">HHH", 0xFFFF, 0x8080, 0))) == (
            255,
            128,
            0,
        )
        assert pixel(png(1, 1, depth=16, color=4, rows=b"\0" + struct.pack(">HH", 0, 0))) == WHITE
        assert (
            pixel(png(1, 1, depth=16, color=6, rows=b"\0" + struct.pack(">HHHH", 0, 0, 0xFFFF, 0xFFFF)))
            == BLUE
        )

    def test_grey_jpeg_is_grey(self) -> None:
        assert_close(pixel(encoded(Image.new("L", (16, 16), 90), "JPEG")), (90, 90, 90), 2)

    @pytest.mark.parametrize(
        ("ink", "color"),
        [((0, 255, 255, 0), RED), ((255, 255, 0, 0), BLUE), ((0, 0, 0, 0), WHITE), ((0, 0, 0, 255), BLACK)],
    )
    def test_cmyk_jpeg_is_not_inverted_with_adobes_mark_or_without(
        self, ink: tuple[int, ...], color: Color
    ) -> None:
        adobe = encoded(Image.new("CMYK", (16, 16), ink), "JPEG", quality=95)
        assert b"Adobe" in adobe
        assert_close(pixel(adobe), color, 8)

    def test_ycck_jpeg_is_not_inverted(self) -> None:
        # Adobe stores ink inverted, and YCCK is YCbCr of the stored samples' complement: red ink (0, 255,
        # 255, 0) is stored as (255, 0, 0, 255), whose complement is cyan. Pillow inverts what it saves, so it
        # is handed the complement once more.
        cyan = Image.new("RGB", (1, 1), (0, 255, 255)).convert("YCbCr").getpixel((0, 0))
        assert isinstance(cyan, tuple)
        stored = Image.new("CMYK", (16, 16), tuple(255 - value for value in (*cyan, 255)))
        data = bytearray(encoded(stored, "JPEG", quality=100, subsampling=0))
        transform = data.index(b"Adobe") + 11
        assert data[transform] == 0
        data[transform] = 2
        assert_close(pixel(bytes(data)), RED, 8)

    def test_an_embedded_profile_is_applied_and_a_broken_one_ignored(self) -> None:
        image = Image.new("RGB", (2, 2), (200, 100, 50))
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        assert pixel(encoded(image, "PNG", icc_profile=srgb)) == (200, 100, 50)
        swapped = (
            srgb.replace(b"rXYZ", b"tmp!")
            .replace(b"bXYZ", b"rXYZ")
            .replace(b"tmp!", b"bXYZ")
            .replace(b"sRGB", b"test")
        )
        swapped = swapped.replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))
        assert_close(pixel(encoded(image, "PNG", icc_profile=swapped)), (50, 100, 200), 3)
        for broken in (b"x", srgb[:200], bytes(128)):
            assert pixel(encoded(image, "PNG", icc_profile=broken)) == (200, 100, 50)


class TestOrientation:
    """EXIF orientation brings images upright; the header tells the upright size."""

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "TIFF", "AVIF"])
    @pytest.mark.parametrize(
        ("orientation", "size", "red_at"),
        [
            (1, (64, 32), (8, 8)),
            (2, (64, 32), (56, 8)),
            (3, (64, 32), (56, 24)),
            (4, (64, 32), (8, 24)),
            (5, (32, 64), (8, 8)),
            (6, (32, 64), (24, 8)),
            (7, (32, 64), (24, 56)),
            (8, (32, 64), (8, 56)),
            (99, (64, 32), (8, 8)),
        ],
    )
    def test_all_orientations(
        self, kind: str, orientation: int, size: tuple[int, int], red_at: tuple[int, int]
    ) -> None:
        image = Image.new("RGB", (64, 32), BLUE)
        image.paste(RED, (0, 0, 16, 16))
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(image, kind, exif=exif.tobytes())
        assert size_of(data, CONFIG) == size
        assert decode(data, CONFIG).size == size
        assert_close(pixel(data, *red_at), RED, 40)

    def test_broken_exif_turns_nothing(self) -> None:
        data = encoded(Image.new("RGB", (64, 32), RED), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
        assert decode(data, CONFIG).size == (64, 32)


@pytest.mark.parametrize("kind", ["GIF", "WebP", "PNG", "TIFF", "AVIF"])
def test_an_animation_gives_its_first_frame_and_a_document_its_first_page(kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), color) for color in (RED, GREEN, BLUE)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    assert_close(pixel(data), RED, 10)


class TestRefusals:
    """What cannot be decoded, in words that hold nothing of the library or the machine."""

    @pytest.mark.parametrize(
        ("data", "name"),
        [
            (b'<?xml version="1.0"?>\n<svg xmlns="x"/>', "SVG"),
            (b"\xef\xbb\xbf <svg></svg>", "SVG"),
            (b"%PDF-1.7 ...", "PDF"),
            (b"<!DOCTYPE html><html>", "HTML"),
            (b"<HTML>", "HTML"),
            (b"hello", "text"),
            (b"\0\0\0\x18ftypmp42\0\0", "MP4 video"),
            (b"\0\0\0\x18ftypheic\0\0", "HEIC"),
            (b"\xff\x0a\0\0", "JPEG XL"),
            (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
            (b"\0\0\1\0\1\0", "ICO"),
            (b"8BPS\0\1", "PSD"),
            (b"%!PS-Adobe-3.0 EPSF-3.0", "EPS"),
            (b"SIMPLE  =                    T", "FITS"),
            (b"\x1f\x8b\x08\0", "gzip"),
        ],
    )
    def test_another_type_is_named_together_with_the_accepted_ones(self, data: bytes, name: str) -> None:
        words = f"the type {name} is not accepted; accepted are JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF"
        assert message_of(data) == words

    @pytest.mark.parametrize(
        "data", [b"\0", b"\0\0\0\0\0\x04" * 50, bytes(range(128, 148)), bytes(18) + b"TRUEVISION-XFILE"]
    )
    def test_an_unknown_type_is_refused(self, data: bytes) -> None:
        assert message_of(data).startswith("not an image of a known type; accepted are JPEG")

    def test_an_empty_file_is_refused(self) -> None:
        assert message_of(b"") == "the image is empty"

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "AVIF"])
    def test_a_cut_file_is_damaged_wherever_it_is_cut(self, kind: str) -> None:
        image = Image.effect_noise((64, 64), 80).convert("RGB")
        data = encoded(image, kind)
        for length in (16, 40, len(data) // 2, len(data) - 128):
            assert message_of(data[:length]) == BROKEN

    def test_a_png_with_a_wrong_checksum_is_damaged(self) -> None:
        data = bytearray(encoded(Image.effect_noise((64, 64), 80), "PNG"))
        for chunk in (b"IHDR", b"IDAT"):
            place = data.index(chunk)
            length = int.from_bytes(data[place - 4 : place], "big")
            data[place + 4 + length] ^= 1
            assert message_of(bytes(data)) == BROKEN
            data[place + 4 + length] ^= 1

    def test_a_size_of_zero_is_damaged(self) -> None:
        for width, height in ((0, 5), (5, 0)):
            assert message_of(png(width, height, rows=b"\0")) == BROKEN

    @pytest.mark.parametrize(
        ("data", "size"),
        [
            (png(19_000, 19_000), "19000 x 19000"),
            (png(64_250, 64_250), "64250 x 64250"),
            (png(2**31 - 1, 2**31 - 1), "2147483647 x 2147483647"),
            (png(1001, 1000), "1001 x 1000"),
            (b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;", "65535 x 65535"),
            (b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0", "16384 x 16384"),
            (
                b"BM"
                + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 1, 1, 0, 0),
                "30000 x 30000",
            ),
        ],
        ids=["png", "png-huge", "png-largest", "just-over", "gif", "webp", "bmp"],
    )
    def test_too_many_pixels_are_refused_from_the_header(self, data: bytes, size: str) -> None:
        words = f"{size} pixels exceed this worker's limit of 1 million pixels"
        for read in (size_of, decode):
            with pytest.raises(LimitFault) as caught:
                read(data, CONFIG)
            assert caught.value.message == words

    def test_a_large_jpeg_is_refused_from_its_header(self) -> None:
        data = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
        place = data.index(b"\xff\xc0") + 5
        data[place : place + 4] = struct.pack(">HH", 65_000, 65_000)
        assert (
            message_of(bytes(data)) == "65000 x 65000 pixels exceed this worker's limit of 1 million pixels"
        )

    def test_a_gif_frame_that_reaches_out_of_its_screen_counts_whole(self) -> None:
        data = b"GIF89a\1\0\1\0\0\0\0,\0\0\0\0\xd0\x07\xd0\x07\0\2\2D\1\0;"
        assert message_of(data) == "2000 x 2000 pixels exceed this worker's limit of 1 million pixels"
        vast = data.replace(b"\xd0\x07\xd0\x07", b"\xff\xff\xff\xff")
        assert message_of(vast) == "65535 x 65535 pixels exceed this worker's limit of 1 million pixels"

    def test_an_operator_may_allow_more_than_pillow_would_warn_about(self) -> None:
        data = png(20_000, 20_000)
        assert size_of(data, MediaConfig(max_image_pixels=400_000_000)) == (20_000, 20_000)

    def test_exactly_the_limit_is_decoded(self) -> None:
        data = encoded(Image.new("1", (1000, 1000)), "PNG")
        assert decode(data, CONFIG).size == (1000, 1000)


def _mutate(data: bytes, chance: random.Random) -> bytes:
    """`data` with some bytes changed, a piece cut out, doubled, or the end missing."""
    mutant = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        mutant[chance.randrange(len(mutant))] = chance.choice((0, 255, 128, chance.randrange(256)))
    start = chance.randrange(len(mutant))
    piece = slice(start, start + chance.randrange(1, 64))
    change: Callable[[], bytes] = chance.choice(
        (
            lambda: bytes(mutant),
            lambda: bytes(mutant),
            lambda: bytes(mutant[:start] + mutant[piece] * 3 + mutant[start:]),
            lambda: bytes(mutant[:start] + mutant[piece.stop :]),
            lambda: bytes(mutant[:start]),
        )
    )
    return change()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "AVIF"])
def test_every_mutant_is_an_rgb_image_or_a_refusal_in_our_words(kind: str) -> None:
    chance = random.Random(f"mutants of {kind}")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = Image.effect_noise((40, 30), 60)
    image = (
        Image.merge("RGBA", (noise, noise, noise, noise))
        if kind in ("PNG", "WebP", "AVIF")
        else noise.convert("RGB")
    )
    options = {"exif": exif.tobytes()} if kind in ("PNG", "WebP", "JPEG", "TIFF") else {}
    seed = encoded(image, kind, **options)
    refusals: set[str] = set()
    decoded = 0
    for _ in range(500):
        try:
            assert decode(_mutate(seed, chance), CONFIG).mode == "RGB"
            decoded += 1
        except ClientFault as fault:
            refusals.add(fault.message)
    assert BROKEN in refusals
    assert decoded + len(refusals) > 1
    ours = (
        BROKEN,
        "the image is empty",
        "the image has more pixels",
        "not an image of a known type;",
        "the type ",
    )
    ours = (*ours, "the compression ", "a TIFF's samples must", "this kind of ", "the TIFF has ")
    assert all(words.startswith(ours) or "pixels exceed this worker's limit" in words for words in refusals)


@pytest.mark.asyncio
async def test_decoding_runs_beside_the_event_loop() -> None:
    data = encoded(Image.new("RGB", (4, 4), RED), "PNG")
    image = await run_blocking(decode, data, config=CONFIG)
    assert image.getpixel((0, 0)) == RED
    with pytest.raises(ClientFault, match="the image is empty"):
        await run_blocking(decode, b"", CONFIG)
