"""What is particular to one format, and the work that a file may ask for."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from PIL import Image

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.decode import decode, size_of
from image_files import encoded

CONFIG = MediaConfig()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
Color = tuple[int, int, int]


def pixel(data: bytes, x: int = 0, y: int = 0) -> tuple[int, ...]:
    image = decode(data, CONFIG)
    assert image.mode == "RGB"
    found = image.getpixel((x, y))
    assert isinstance(found, tuple)
    return tuple(int(part) for part in found)


def message_of(data: bytes) -> str:
    with pytest.raises(ClientFault) as caught:
        decode(data, CONFIG)
    return caught.value.message


def bitmap(
    header: int, alphas: tuple[int, int], *, masks: tuple[int, int, int, int], compression: int = 3
) -> bytes:
    """A 32-bit BMP of two pixels, red and blue, with the alphas given, stored as blue, green, red, alpha."""
    info = struct.pack("<IiiHHIIiiII", header, 2, 1, 1, 32, compression, 8, 0, 0, 0, 0)
    info = (
        (info + struct.pack("<IIII", *masks)).ljust(header, b"\0")
        if header > 40
        else info + struct.pack("<III", *masks[:3])
    )
    pixels = bytes((0, 0, 255, alphas[0], 255, 0, 0, alphas[1]))
    return b"BM" + struct.pack("<IHHI", 14 + len(info) + 8, 0, 0, 14 + len(info)) + info + pixels


BGRA = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)


class TestBitmaps:
    """Bitmaps of 32 bits, as Windows' clipboard makes them."""

    @pytest.mark.parametrize("header", [56, 108, 124])
    def test_alpha_that_is_zero_everywhere_means_opaque(self, header: int) -> None:
        data = bitmap(header, (0, 0), masks=BGRA)
        assert (pixel(data), pixel(data, 1)) == (RED, BLUE)

    @pytest.mark.parametrize("header", [56, 108, 124])
    def test_alpha_that_is_set_anywhere_counts(self, header: int) -> None:
        data = bitmap(header, (0, 255), masks=BGRA)
        assert (pixel(data), pixel(data, 1)) == (WHITE, BLUE)

    def test_a_fourth_byte_that_is_no_alpha_does_not_count(self) -> None:
        for data in (
            bitmap(40, (0, 9), masks=(0xFF0000, 0xFF00, 0xFF, 0)),
            bitmap(108, (0, 9), masks=(0xFF0000, 0xFF00, 0xFF, 0)),
            bitmap(108, (0, 9), masks=(0, 0, 0, 0), compression=0),
        ):
            assert (pixel(data), pixel(data, 1)) == (RED, BLUE)

    def test_a_png_that_is_clear_everywhere_is_white(self) -> None:
        assert pixel(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG")) == WHITE


def gif(
    screen: tuple[int, int], box: tuple[int, int, int, int], *, clear: bool = False, local: bool = False
) -> bytes:
    """A GIF with one red frame at `box` (left, top, width, height), whose background is the blue entry 0 of
    the screen's palette.
    """
    left, top, width, height = box
    frame = Image.new("P", (width, height), 1)
    frame.putpalette([*BLUE, *RED])
    plain = encoded(frame, "GIF", optimize=False)
    bits = plain[10] & 7
    tables_end = 13 + (3 << bits + 1)
    at = plain.index(b",", tables_end)
    table = (bytes((*BLUE, *RED))).ljust(3 << bits + 1, b"\0")
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80 | bits, 0, 0) + table
    control = b"!\xf9\4\1\0\0\1\0" if clear else b""
    flags, local_table = (
        (0x80 | bits, bytes((*BLUE, *GREEN)).ljust(3 << bits + 1, b"\0")) if local else (0, b"")
    )
    return (
        head
        + control
        + b","
        + struct.pack("<HHHHB", left, top, width, height, flags)
        + local_table
        + plain[at + 10 :]
    )


class TestFramesOfAGif:
    """Screens that the first frame does not cover."""

    def test_the_rest_of_the_screen_is_white(self) -> None:
        data = gif((20, 10), (4, 2, 8, 4))
        assert size_of(data, CONFIG) == (20, 10)
        assert decode(data, CONFIG).size == (20, 10)
        inside, outside = [(4, 2), (11, 5)], [(0, 0), (3, 2), (12, 5), (4, 6), (19, 9)]
        assert {pixel(data, *at) for at in inside} == {RED}
        assert {pixel(data, *at) for at in outside} == {WHITE}

    def test_a_frame_with_a_palette_of_its_own_and_one_that_is_clear_keep_their_place(self) -> None:
        local = gif((20, 10), (0, 5, 20, 5), local=True)
        assert (pixel(local, 0, 4), pixel(local, 0, 5)) == (WHITE, GREEN)
        assert pixel(gif((20, 10), (4, 2, 8, 4), clear=True), 5, 3) == WHITE

    def test_a_frame_that_reaches_out_enlarges_the_screen(self) -> None:
        data = gif((4, 4), (2, 2, 8, 4))
        assert size_of(data, CONFIG) == (10, 6)
        assert (pixel(data, 9, 5), pixel(data, 0, 5), pixel(data, 9, 1)) == (RED, WHITE, WHITE)

    def test_later_frames_do_not_count(self) -> None:
        frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:] * 50, duration=1)
        assert pixel(data, 8, 8) == RED


def halves(mode: str, left: Any, right: Any) -> Image.Image:
    image = Image.new(mode, (64, 32), left)
    image.paste(right, (32, 0, 64, 32))
    return image


def raw_tiff(
    entries: dict[int, tuple[int, ...]], pixels: bytes, *, order: str = "<", big: bool = False
) -> bytes:
    """A TIFF written by hand: the pixels in one strip or tile, unless `entries` say otherwise. All numbers
    are LONG.
    """
    start = 16 if big else 8
    entries = {273: (start,), 279: (len(pixels),), **entries}
    directory, values = b"", b""
    at = start + len(pixels)
    entry_bytes, count_bytes, inline = (20, 8, 8) if big else (12, 2, 4)
    after = at + count_bytes + entry_bytes * len(entries) + inline
    for tag, numbers in sorted(entries.items()):
        body = struct.pack(f"{order}{len(numbers)}I", *numbers)
        place = body.ljust(inline, b"\0")
        if len(body) > inline:
            place = struct.pack(order + ("Q" if big else "I"), after + len(values))
            values += body
        directory += struct.pack(order + ("HHQ" if big else "HHI"), tag, 4, len(numbers)) + place
    mark = {
        ("<", False): b"II*\0",
        (">", False): b"MM\0*",
        ("<", True): b"II+\0\x08\0\0\0",
        (">", True): b"MM\0+\0\x08\0\0",
    }
    head = mark[order, big] + struct.pack(order + ("Q" if big else "I"), at)
    count = struct.pack(order + ("Q" if big else "H"), len(entries))
    return head + pixels + count + directory + bytes(inline) + values


def grey_tiff(
    bits: int, pixels: bytes, *, zero_is_white: bool = False, order: str = "<", **options: Any
) -> bytes:
    entries = {
        256: (2,),
        257: (1,),
        258: (bits,),
        259: (1,),
        262: (0 if zero_is_white else 1,),
        277: (1,),
        278: (1,),
    }
    return raw_tiff(entries, pixels, order=order, **options)


class TestTiff:
    """The first page, in the usual compressions, orders and kinds of pixels."""

    @pytest.mark.parametrize(
        "compression", [None, "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits"]
    )
    @pytest.mark.parametrize(
        ("left", "right", "mode"),
        [
            (RED, BLUE, "RGB"),
            ((255, 0, 0, 255), (0, 0, 255, 255), "RGBA"),
            ((0, 255, 255, 0), (255, 255, 0, 0), "CMYK"),
        ],
    )
    def test_colour_in_each_compression(
        self, compression: str | None, left: Any, right: Any, mode: str
    ) -> None:
        data = encoded(halves(mode, left, right), "TIFF", compression=compression)
        assert (pixel(data, 8, 8), pixel(data, 40, 8)) == (RED, BLUE)

    @pytest.mark.parametrize("compression", ["group3", "group4"])
    def test_a_fax_is_black_on_white(self, compression: str) -> None:
        data = encoded(halves("1", 0, 255), "TIFF", compression=compression)
        assert (pixel(data, 8, 8), pixel(data, 40, 8)) == ((0, 0, 0), WHITE)

    def test_a_palette_and_transparency_are_resolved(self) -> None:
        image = halves("P", 0, 1)
        image.putpalette([*RED, *BLUE])
        assert (pixel(encoded(image, "TIFF"), 8, 8), pixel(encoded(image, "TIFF"), 40, 8)) == (RED, BLUE)
        assert pixel(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "TIFF")) == (127, 127, 127)
        assert pixel(encoded(Image.new("LA", (2, 2), (0, 0)), "TIFF")) == WHITE

    @pytest.mark.parametrize("order", ["<", ">"])
    @pytest.mark.parametrize("zero_is_white", [False, True])
    def test_16_bit_grey_spans_black_to_white_in_both_orders(self, order: str, zero_is_white: bool) -> None:
        for value, grey in ((0, 0), (0x8000, 128), (0xFFFF, 255)):
            data = grey_tiff(
                16, struct.pack(order + "HH", value, 0), zero_is_white=zero_is_white, order=order
            )
            expected = 255 - grey if zero_is_white else grey
            assert pixel(data) == (expected,) * 3

    @pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate"])
    def test_16_bit_grey_is_read_compressed(self, compression: str | None) -> None:
        data = encoded(Image.new("I;16", (8, 8), 0x8000), "TIFF", compression=compression)
        assert pixel(data) == (128, 128, 128)

    @pytest.mark.parametrize("big", [False, True])
    @pytest.mark.parametrize("order", ["<", ">"])
    def test_8_bit_grey_is_read_in_classic_and_big_files(self, big: bool, order: str) -> None:
        data = grey_tiff(8, b"\x20\xe0", order=order, big=big)
        assert (pixel(data), pixel(data, 1)) == ((32, 32, 32), (224, 224, 224))
        inverted = grey_tiff(8, b"\x20\xe0", zero_is_white=True, order=order, big=big)
        assert (pixel(inverted), pixel(inverted, 1)) == ((223, 223, 223), (31, 31, 31))

    def test_tiles_are_put_together(self) -> None:
        tiles = [bytes(colour) * 256 for colour in (RED, GREEN, BLUE, WHITE)]
        places = tuple(8 + 768 * at for at in range(4))
        entries = {256: (20,), 257: (20,), 258: (8, 8, 8), 259: (1,), 262: (2,), 277: (3,)}
        tiled = {**entries, 322: (16,), 323: (16,), 324: places, 325: (768,) * 4}
        data = raw_tiff(tiled, b"".join(tiles))
        assert [pixel(data, *at) for at in ((0, 0), (19, 0), (0, 19), (19, 19))] == [RED, GREEN, BLUE, WHITE]

    def test_planes_and_many_strips_are_put_together(self) -> None:
        entries = {
            256: (2,),
            257: (2,),
            258: (8, 8, 8),
            259: (1,),
            262: (2,),
            277: (3,),
            278: (1,),
            284: (2,),
        }
        planes = bytes((255, 255, 0, 0)) + bytes(4) + bytes((0, 0, 255, 255))
        data = raw_tiff({**entries, 273: tuple(range(8, 20, 2)), 279: (2,) * 6}, planes)
        assert (pixel(data), pixel(data, 0, 1)) == (RED, BLUE)

    def test_lab_and_jpeg_inside_have_the_colours_of_a_viewer(self) -> None:
        found = pixel(encoded(Image.new("LAB", (4, 4), (136, 208, 195)), "TIFF"))
        assert max(abs(a - b) for a, b in zip(found, RED, strict=True)) <= 12
        for mode, left in (("RGB", RED), ("L", 76)):
            found = pixel(encoded(halves(mode, left, left), "TIFF", compression="jpeg", quality=95), 8, 8)
            assert (
                max(abs(a - b) for a, b in zip(found, RED if mode == "RGB" else (76,) * 3, strict=True)) <= 8
            )

    def test_the_first_page_of_several_counts(self) -> None:
        pages = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
        for compression in (None, "tiff_lzw"):
            data = encoded(
                pages[0], "TIFF", save_all=True, append_images=pages[1:] * 20, compression=compression
            )
            assert pixel(data) == RED

    @pytest.mark.parametrize(
        ("entries", "words"),
        [
            (
                {259: (50_000,)},
                "the compression 50000 of this TIFF is not accepted; use LZW, deflate or none",
            ),
            ({259: (6,)}, "the compression 6 of this TIFF is not accepted; use LZW, deflate or none"),
            ({258: (12,)}, "a TIFF's samples must be whole numbers of 1, 2, 4, 8 or 16 bits"),
            ({258: (32,)}, "a TIFF's samples must be whole numbers of 1, 2, 4, 8 or 16 bits"),
            ({339: (3,)}, "a TIFF's samples must be whole numbers of 1, 2, 4, 8 or 16 bits"),
            ({262: (32_803,)}, "this kind of TIFF is not read; save it as grey, RGB or CMYK, or as PNG"),
            (
                {256: (100_000,), 257: (100_000,)},
                "100000 x 100000 pixels exceed this worker's limit of 64 million pixels",
            ),
            ({256: (0,)}, "the image is damaged or incomplete"),
            ({278: (0,)}, "the image is damaged or incomplete"),
            ({273: (4_000_000_000,)}, "the image is damaged or incomplete"),
            (
                {322: (1 << 20,), 323: (1 << 20,), 324: (8,), 325: (2,)},
                "the tiles of the TIFF are much larger than its image",
            ),
            (
                {322: (1,), 323: (1,), 256: (4000,), 257: (4000,)},
                "the TIFF has more strips or tiles than this worker takes",
            ),
            (
                {256: (1,), 257: (9_000_000,), 278: (1,)},
                "the TIFF has more strips or tiles than this worker takes",
            ),
        ],
    )
    def test_what_is_not_read_is_refused_in_words(
        self, entries: dict[int, tuple[int, ...]], words: str
    ) -> None:
        plain = {256: (2,), 257: (1,), 258: (8,), 259: (1,), 262: (1,), 277: (1,), 278: (1,)}
        assert message_of(raw_tiff({**plain, **entries}, b"\x20\xe0")) == words

    def test_strips_that_lie_over_each_other_are_refused(self) -> None:
        pixels = bytes(1 << 16)
        entries = {256: (64,), 257: (1024,), 258: (8,), 259: (5,), 262: (1,), 277: (1,), 278: (1,)}
        data = raw_tiff({**entries, 273: (8,) * 1024, 279: (len(pixels),) * 1024}, pixels)
        assert message_of(data) == "the strips of the TIFF lie over each other"


def passes_of(data: bytes) -> list[int]:
    """Where the passes of a progressive JPEG begin."""
    return [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"]


def repeated(data: bytes, times: int) -> bytes:
    """`data` with its last pass repeated."""
    last = passes_of(data)[-1]
    return data[:last] + data[last:-2] * times + data[-2:]


TOO_MANY = "the JPEG goes over its pixels more often than this worker does"


class TestPassesOfAJpeg:
    """Progressive files may go over all pixels again and again."""

    def test_the_usual_number_of_passes_is_decoded(self) -> None:
        data = encoded(halves("RGB", RED, BLUE), "JPEG", progressive=True, quality=95)
        assert 6 <= len(passes_of(data)) <= 12
        for times in (1, 5, 100):
            found = pixel(repeated(data, times), 8, 8)
            assert max(abs(a - b) for a, b in zip(found, RED, strict=True)) <= 8

    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    def test_a_pass_repeated_thousands_of_times_is_refused_before_it_is_decoded(self, mode: str) -> None:
        image = Image.effect_noise((64, 64), 60).convert(mode)
        data = repeated(encoded(image, "JPEG", progressive=True), 4000)
        with pytest.raises(LimitFault, match=TOO_MANY):
            decode(data, CONFIG)

    def test_passes_of_a_file_without_progression_count_as_well(self) -> None:
        data = encoded(Image.new("RGB", (64, 64), RED), "JPEG")
        assert message_of(repeated(data, 4000)) == TOO_MANY

    def test_fewer_passes_over_many_pixels_are_refused(self) -> None:
        data = bytearray(repeated(encoded(Image.new("L", (16, 16)), "JPEG", progressive=True), 150))
        size = data.index(b"\xff\xc2") + 5
        data[size : size + 4] = struct.pack(">HH", 8000, 8000)
        assert message_of(bytes(data)) == TOO_MANY

    def test_what_follows_the_image_does_not_count(self) -> None:
        image = encoded(halves("RGB", RED, BLUE), "JPEG", quality=95)
        found = pixel(image + image * 300, 8, 8)
        assert max(abs(a - b) for a, b in zip(found, RED, strict=True)) <= 8

    def test_passes_inside_a_tiff_count_as_well(self) -> None:
        stream = repeated(encoded(Image.new("L", (64, 64)), "JPEG", progressive=True), 4000)
        entries = {256: (64,), 257: (64,), 258: (8,), 259: (7,), 262: (1,), 277: (1,), 278: (64,)}
        assert message_of(raw_tiff(entries, stream)) == TOO_MANY


def test_run_lengths_of_a_large_bitmap_are_refused_before_they_are_decoded() -> None:
    info = struct.pack("<IiiHHIIiiII", 40, 8000, 8000, 1, 8, 1, 0, 0, 0, 256, 0) + bytes(1024)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(info)) + info + b"\1\0" * (5 << 20)
    assert message_of(data) == "a run-length encoded BMP may have 8 MiB at most"
    small = bytearray(encoded(Image.new("P", (4, 1), 1), "BMP"))
    small[30:34] = struct.pack("<I", 1)
    start = int.from_bytes(small[10:14], "little")
    assert decode(bytes(small[:start]) + b"\4\1\0\1", CONFIG).size == (4, 1)


class TestKindsThatAreNotRead:
    """A valid file of a kind that no reader here takes is not called damaged."""

    @pytest.mark.parametrize(
        ("marker", "depth"), [(0xC1, 12), (0xC0, 16), (0xC5, 8), (0xC7, 8), (0xCB, 8), (0xCF, 8)], ids=hex
    )
    def test_a_jpeg_of_another_depth_or_coding_is_named(self, marker: int, depth: int) -> None:
        data = bytearray(encoded(Image.new("RGB", (16, 16), RED), "JPEG"))
        at = data.index(b"\xff\xc0")
        data[at + 1], data[at + 4] = marker, depth
        words = "this kind of JPEG is not read; save it with 8 bits a channel, baseline or progressive"
        assert message_of(bytes(data)) == words

    @pytest.mark.parametrize("masks", [(0xFF, 0xFF00, 0xFF0000, 0), (0x3FF00000, 0xFFC00, 0x3FF, 0)])
    def test_a_bitmap_with_colours_in_another_order_is_named(self, masks: tuple[int, int, int, int]) -> None:
        words = "this kind of BMP is not read; save it with 24 bits, or as PNG"
        assert message_of(bitmap(40, (0, 0), masks=masks)) == words

    @pytest.mark.parametrize("brand", [b"mif1", b"miaf"])
    def test_an_avif_that_calls_itself_any_heif_is_read_by_its_brands(self, brand: bytes) -> None:
        data = bytearray(encoded(Image.new("RGB", (16, 16), RED), "AVIF", quality=100, subsampling="4:4:4"))
        data[8:12] = brand
        assert size_of(bytes(data), CONFIG) == (16, 16)
        assert max(abs(a - b) for a, b in zip(pixel(bytes(data)), RED, strict=True)) < 4
