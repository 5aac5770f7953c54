"""Image files as other writers than Pillow make them, byte by byte: valid ones that few readers are tried
with, and ones whose coding is refused in words. Importing this adds them to `GOOD` and `BAD` of `images`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from PIL import Image, ImageCms

from cases.images import BAD, chunk, good, picture, png, saved

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Column and row where each pass of an interlaced PNG begins, and its steps (PNG specification, 8.2)."""


def pixels(image: Image.Image) -> list[tuple[int, int, int]]:
    flat = image.convert("RGB").tobytes()
    return [(flat[at], flat[at + 1], flat[at + 2]) for at in range(0, len(flat), 3)]


def of_palette(colors: int = 16) -> tuple[Image.Image, list[tuple[int, int, int]]]:
    """The image in a few colours (it has few anyhow), and these."""
    image = picture().quantize(colors, dither=Image.Dither.NONE)
    flat = (image.getpalette() or [])[: 3 * colors]
    flat += [0] * (3 * colors - len(flat))
    return image, [(flat[at], flat[at + 1], flat[at + 2]) for at in range(0, len(flat), 3)]


def packed(values: Sequence[int], bits: int) -> bytes:
    """A row of numbers of `bits` each, the first in the highest bits of its byte."""
    text = "".join(f"{value:0{bits}b}" for value in values)
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big") if text else b""


# PNG


def png_of(
    rows: Iterable[bytes],
    size: tuple[int, int],
    depth: int,
    kind: int,
    before: bytes = b"",
    *,
    interlaced: bool = False,
) -> bytes:
    header = struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, int(interlaced))
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return PNG_SIGNATURE + chunk(b"IHDR", header) + before + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _rgb_rows(image: Image.Image) -> list[bytes]:
    data, across = image.convert("RGB").tobytes(), 3 * image.width
    return [data[at : at + across] for at in range(0, len(data), across)]


@good("interlaced png")
def _interlaced() -> bytes:
    image = picture()
    rows = []
    for left, top, across, down in ADAM7:
        for y in range(top, image.height, down):
            rows.append(b"".join(bytes(image.getpixel((x, y))) for x in range(left, image.width, across)))  # type: ignore[arg-type]
    return png_of(rows, image.size, 8, 2, interlaced=True)


@good("png of 16 bits a channel")
def _png_16() -> bytes:
    return png_of(
        [bytes(b for part in row for b in (part, part)) for row in _rgb_rows(picture())],
        picture().size,
        16,
        2,
    )


@good("png of 16 bits with alpha")
def _png_16_alpha() -> bytes:
    rows = [
        b"".join(
            bytes(b for part in row[at : at + 3] for b in (part, part)) + b"\xff\xff"
            for at in range(0, len(row), 3)
        )
        for row in _rgb_rows(picture())
    ]
    return png_of(rows, picture().size, 16, 6)


@good("png with a palette of 4 bits")
def _png_4() -> bytes:
    image, colors = of_palette()
    data = image.tobytes()
    rows = [packed(data[at : at + image.width], 4) for at in range(0, len(data), image.width)]
    return png_of(rows, image.size, 4, 3, chunk(b"PLTE", bytes(part for color in colors for part in color)))


@good("png in one-byte data chunks")
def _png_pieces() -> bytes:
    data = png()
    at = data.index(b"IDAT")
    length = int.from_bytes(data[at - 4 : at], "big")
    body = data[at + 4 : at + 4 + length]
    pieces = b"".join(chunk(b"IDAT", body[i : i + 1]) for i in range(len(body)))
    return data[: at - 4] + pieces + data[at + 8 + length :]


@good("png with empty data chunks")
def _png_empty_pieces() -> bytes:
    data = png()
    at = data.index(b"IDAT") - 4
    return data[:at] + chunk(b"IDAT", b"") + data[at:-12] + chunk(b"IDAT", b"") + data[-12:]


@good("png with every ancillary chunk")
def _png_ancillary() -> bytes:
    extra = b"".join(
        (
            chunk(b"cHRM", struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)),
            chunk(b"gAMA", struct.pack(">I", 45455)),
            chunk(b"sBIT", b"\x08\x08\x08"),
            chunk(b"sRGB", b"\0"),
            chunk(b"bKGD", bytes(6)),
            chunk(b"pHYs", struct.pack(">IIB", 2835, 2835, 1)),
            chunk(b"tIME", struct.pack(">HBBBBB", 2024, 2, 30, 23, 59, 60)),
            chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta/>"),
            chunk(b"zTXt", b"broken\0\0not deflate"),
            chunk(b"prVt", b"private"),
            chunk(b"vpAg", b""),
        )
    )
    data = png()
    return data[:33] + extra + data[33:]


@good("png with a colour key nobody uses")
def _png_key() -> bytes:
    return png_of(_rgb_rows(picture()), picture().size, 8, 2, chunk(b"tRNS", struct.pack(">3H", 1, 2, 3)))


@good("apng whose default image is no frame")
def _apng_still() -> bytes:
    """Viewers without animation show IDAT; the frames that follow are blank."""
    data = png()
    width, height = picture().size
    control = struct.pack(">IIIIIHHBB", 0, width, height, 0, 0, 1, 10, 0, 0)
    frame = zlib.compress(b"".join(b"\0" + b"\xff" * 3 * width for _ in range(height)))
    tail = chunk(b"fcTL", control) + chunk(b"fdAT", struct.pack(">I", 1) + frame)
    return data[:33] + chunk(b"acTL", struct.pack(">II", 1, 0)) + data[33:-12] + tail + data[-12:]


@good("png with a cut exif")
def _png_cut_exif() -> bytes:
    data = png()
    return data[:33] + chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff") + data[33:]


@good("png with a palette beside its colours")
def _png_suggested() -> bytes:
    return png_of(_rgb_rows(picture()), picture().size, 8, 2, chunk(b"PLTE", bytes(range(192))))


# JPEG


def jpeg(**options: object) -> bytes:
    return saved(picture(), "JPEG", **{"quality": 95, **options})


@good("jpeg with restart markers")
def _jpeg_restarts() -> bytes:
    return jpeg(restart_marker_rows=1)


@good("jpeg with a restart after each block")
def _jpeg_restart_blocks() -> bytes:
    return jpeg(restart_marker_blocks=1, progressive=True)


@good("jpeg with fill bytes before its markers")
def _jpeg_fill() -> bytes:
    data = jpeg()
    return data[:2] + b"\xff\xff\xff" + data[2:-2] + b"\xff\xff" + data[-2:]


@good("jpeg with a cut app segment")
def _jpeg_cut_exif() -> bytes:
    data = jpeg()
    return data[:2] + b"\xff\xe1\x00\x0aExif\0\0MM" + data[2:]


@good("jpeg of adobe in cmyk")
def _jpeg_adobe() -> bytes:
    """Adobe stores the inks inverted, and says so by its APP14 (transform 0)."""
    return jpeg_of_mode("CMYK")


def jpeg_of_mode(mode: str) -> bytes:
    return saved(picture().convert(mode), "JPEG", quality=95)


@good("jpeg in rgb without a transform")
def _jpeg_rgb() -> bytes:
    return jpeg(keep_rgb=True)


@good("jpeg followed by a second image")
def _jpeg_second() -> bytes:
    return jpeg() + saved(Image.new("RGB", (64, 64), "black"), "JPEG")


@good("jpeg with a thumbnail in its exif")
def _jpeg_thumbnail() -> bytes:
    thumbnail = saved(Image.new("RGB", (16, 16), "white"), "JPEG")
    entries = struct.pack(">HHHIIHHII", 2, 0x0201, 4, 1, 44, 0x0202, 4, 1, len(thumbnail)) + bytes(4)
    first = struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, 1, 0, 8 + 2 + 12 + 4)
    block = b"Exif\0\0MM\0*\0\0\0\x08" + first + entries + thumbnail
    data = jpeg()
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + data[2:]


@good("jpeg with a profile of two parts")
def _jpeg_profile() -> bytes:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    half = len(profile) // 2
    data = jpeg()
    parts = b""
    for number, part in ((2, profile[half:]), (1, profile[:half])):
        body = b"ICC_PROFILE\0" + bytes((number, 2)) + part
        parts += b"\xff\xe2" + struct.pack(">H", len(body) + 2) + body
    return data[:20] + parts + data[20:]


@good("multi image object")
def _mpo() -> bytes:
    return saved(
        picture(), "MPO", quality=95, save_all=True, append_images=[Image.new("RGB", (64, 64), "white")]
    )


def jpeg_of_frame(marker: int, precision: int = 8) -> bytes:
    """A JPEG whose frame says another coding or depth."""
    data = bytearray(jpeg())
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = marker, precision
    return bytes(data)


BAD["jpeg of 12 bits"] = lambda: jpeg_of_frame(0xC1, 12)
BAD["jpeg without loss"] = lambda: jpeg_of_frame(0xC3)
BAD["jpeg in steps of size"] = lambda: jpeg_of_frame(0xC5)
BAD["jpeg of no height"] = lambda: (lambda data, at: data[: at + 5] + b"\0\0" + data[at + 7 :])(
    jpeg(), jpeg().index(b"\xff\xc0")
)


# GIF


def gif_image(
    indices: bytes, width: int, *, bits: int, place: tuple[int, int] = (0, 0), interlaced: bool = False
) -> bytes:
    """An image descriptor and its pixels, LZW without any compression:
    a clear code before the table can grow."""
    height = len(indices) // width
    if interlaced:
        order = [y for start, step in ((0, 8), (4, 8), (2, 4), (1, 2)) for y in range(start, height, step)]
        indices = b"".join(indices[y * width : (y + 1) * width] for y in order)
    clear, width_of_codes = 1 << bits, bits + 1
    codes: list[int] = []
    for at in range(0, len(indices), clear - 2):
        codes += [clear, *indices[at : at + clear - 2]]
    codes.append(clear + 1)
    number = sum(code << (width_of_codes * at) for at, code in enumerate(codes))
    data = number.to_bytes(-(-len(codes) * width_of_codes // 8), "little")
    blocks = b"".join(
        bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255)
    )
    flags = 0x40 if interlaced else 0
    return b"," + struct.pack("<HHHHBB", *place, width, height, flags, bits) + blocks + b"\0"


def gif_of(
    screen: tuple[int, int], colors: Sequence[tuple[int, int, int]], body: bytes, *, background: int = 0
) -> bytes:
    size = len(colors).bit_length() - 2
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0xF0 | size, background, 0)
    return head + bytes(part for color in colors for part in color) + body + b";"


@good("interlaced gif")
def _gif_interlaced() -> bytes:
    image, colors = of_palette()
    return gif_of(image.size, colors, gif_image(image.tobytes(), image.width, bits=4, interlaced=True))


@good("gif of 1987 with a small screen")
def _gif_87() -> bytes:
    image, colors = of_palette()
    data = gif_of((1, 1), colors, gif_image(image.tobytes(), image.width, bits=4))
    return b"GIF87a" + data[6:]


@good("gif with comments and programs before its frame")
def _gif_extensions() -> bytes:
    image, colors = of_palette()
    loop, xmp = b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00", b"!\xff\x0bXMP DataXMP\x05<x/> \x00"
    extra = b"!\xfe\x05hello\x00" + loop + xmp + b"!\x01\x0c" + bytes(13) + b"!\xf9\x04\x00\x0a\x00\x00\x00"
    return gif_of(image.size, colors, extra + gif_image(image.tobytes(), image.width, bits=4))


@good("gif with colours of its frame alone")
def _gif_local() -> bytes:
    image, colors = of_palette()
    frame = bytearray(gif_image(image.tobytes(), image.width, bits=4))
    frame[9] |= 0x80 | 3
    table = bytes(part for color in colors for part in color)
    head = b"GIF89a" + struct.pack("<HHBBB", *image.size, 0x70, 0, 0)
    return head + bytes(frame[:10]) + table + bytes(frame[10:]) + b";"


@good("gif without its last byte")
def _gif_no_end() -> bytes:
    return _gif_interlaced()[:-1]


# BMP


def bmp_of(
    rows: Sequence[bytes],
    size: tuple[int, int],
    bits: int,
    table: bytes = b"",
    *,
    header: int = 40,
    compression: int = 0,
    top_down: bool = False,
    raw: bytes | None = None,
    extra: bytes = b"",
) -> bytes:
    """Rows from the top; they are turned round unless `top_down`. `raw` replaces them."""
    ordered = rows if top_down else list(reversed(rows))
    body = b"".join(row + bytes(-len(row) % 4) for row in ordered) if raw is None else raw
    width, height = size
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack(
            "<IiiHHII", header, width, -height if top_down else height, 1, bits, compression, len(body)
        )
        info = (info + bytes(8) + struct.pack("<II", 0, 0)).ljust(header, b"\0")
    start = 14 + len(info) + len(extra) + len(table)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + info + extra + table + body


def _bgr_rows(image: Image.Image) -> list[bytes]:
    return [
        bytes(row[at + part] for at in range(0, len(row), 3) for part in (2, 1, 0))
        for row in _rgb_rows(image)
    ]


def _indexed(bits: int) -> tuple[list[bytes], Image.Image, bytes, bytes]:
    """Rows of palette indices, and the palette in three and in four bytes an entry."""
    image, colors = of_palette(min(1 << bits, 16))
    data = image.tobytes()
    rows = [packed(data[at : at + image.width], bits) for at in range(0, len(data), image.width)]
    colors += [(0, 0, 0)] * ((1 << bits) - len(colors))
    three = bytes(part for red, green, blue in colors for part in (blue, green, red))
    four = b"".join(bytes((blue, green, red, 0)) for red, green, blue in colors)
    return rows, image, three, four


@good("bmp of os/2")
def _bmp_os2() -> bytes:
    return bmp_of(_bgr_rows(picture()), picture().size, 24, header=12)


@good("bmp of os/2 with a palette")
def _bmp_os2_palette() -> bytes:
    rows, image, three, _ = _indexed(8)
    return bmp_of(rows, image.size, 8, three, header=12)


@good("bmp of os/2 in its second version")
def _bmp_os2_2() -> bytes:
    return bmp_of(_bgr_rows(picture()), picture().size, 24, header=64)


@good("bmp of 4 bits")
def _bmp_4() -> bytes:
    rows, image, _, four = _indexed(4)
    return bmp_of(rows, image.size, 4, four)


@good("bmp from top to bottom")
def _bmp_down() -> bytes:
    return bmp_of(_bgr_rows(picture()), picture().size, 24, top_down=True)


def _rows_of_16(word: Callable[[int, int, int], int]) -> list[bytes]:
    image = picture()
    colors = pixels(image)
    packed_colors = b"".join(struct.pack("<H", word(*color)) for color in colors)
    return [packed_colors[at : at + 2 * image.width] for at in range(0, len(packed_colors), 2 * image.width)]


@good("bmp of 16 bits")
def _bmp_16() -> bytes:
    return bmp_of(_rows_of_16(lambda r, g, b: r >> 3 << 10 | g >> 3 << 5 | b >> 3), picture().size, 16)


@good("bmp of 16 bits with masks of 5, 6 and 5")
def _bmp_565() -> bytes:
    rows = _rows_of_16(lambda r, g, b: r >> 3 << 11 | g >> 2 << 5 | b >> 3)
    return bmp_of(rows, picture().size, 16, compression=3, extra=struct.pack("<III", 0xF800, 0x07E0, 0x001F))


@good("bmp of 32 bits without masks")
def _bmp_32() -> bytes:
    rows = [
        b"".join(row[at : at + 3] + b"\0" for at in range(0, len(row), 3)) for row in _bgr_rows(picture())
    ]
    return bmp_of(rows, picture().size, 32)


def _bmp_rgbx() -> bytes:
    rows = [
        b"".join(row[at : at + 3] + b"\0" for at in range(0, len(row), 3)) for row in _rgb_rows(picture())
    ]
    return bmp_of(rows, picture().size, 32, compression=3, extra=struct.pack("<III", 0xFF, 0xFF00, 0xFF0000))


BAD["bmp of 32 bits with red first"] = _bmp_rgbx


@good("bmp of 32 bits with alpha in its last version")
def _bmp_v5() -> bytes:
    rows = [
        b"".join(row[at : at + 3] + b"\xff" for at in range(0, len(row), 3)) for row in _bgr_rows(picture())
    ]
    data = bytearray(bmp_of(rows, picture().size, 32, header=124, compression=3))
    struct.pack_into("<IIII", data, 14 + 40, 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    return bytes(data)


def _runs_of_8(image: Image.Image) -> bytes:
    data, out = image.tobytes(), bytearray()
    for y in range(image.height - 1, -1, -1):
        row = data[y * image.width : (y + 1) * image.width]
        at = 0
        while at < len(row):
            end = at
            while end < len(row) and row[end] == row[at] and end - at < 255:
                end += 1
            out += bytes((end - at, row[at]))
            at = end
        out += b"\0\0"
    return bytes(out) + b"\0\1"


@good("bmp in runs of 8 bits")
def _bmp_rle8() -> bytes:
    _, image, _, four = _indexed(8)
    return bmp_of([], image.size, 8, four, compression=1, raw=_runs_of_8(image))


@good("bmp in runs of 4 bits")
def _bmp_rle4() -> bytes:
    _, image, _, four = _indexed(4)
    runs = bytearray(_runs_of_8(image))
    for at in range(0, len(runs), 2):
        runs[at + 1] = runs[at + 1] * 17 if runs[at] else runs[at + 1]
    return bmp_of([], image.size, 4, four, compression=2, raw=bytes(runs))


@good("bmp with absolute runs")
def _bmp_absolute() -> bytes:
    _, image, _, four = _indexed(8)
    data, out = image.tobytes(), bytearray()
    for y in range(image.height - 1, -1, -1):
        row = data[y * image.width : (y + 1) * image.width]
        for part in (row[at : at + 60] for at in range(0, len(row), 60)):
            out += bytes((0, len(part))) + part + bytes(len(part) % 2)
        out += b"\0\0"
    return bmp_of([], image.size, 8, four, compression=1, raw=bytes(out) + b"\0\1")


@good("bmp with a length of zero in its header")
def _bmp_no_length() -> bytes:
    data = bytearray(saved(picture(), "BMP"))
    data[2:6] = data[34:38] = bytes(4)
    return bytes(data)


# TIFF


class Entry(NamedTuple):
    """One entry of a directory: tag, field type, values."""

    tag: int
    form: int
    values: Sequence[int]


def tiff_of(body: bytes, entries: Sequence[Entry], order: str = "<", *, big: bool = False) -> bytes:
    """Pixels behind the header, then one directory (TIFF 6.0, or BigTIFF).
    Strip offsets count from the first pixel."""
    letters = {1: "B", 3: "H", 4: "I", 5: "I"}
    head = 16 if big else 8
    start = head + len(body) + len(body) % 2
    count = len(entries)
    size = 8 + 20 * count + 8 if big else 2 + 12 * count + 4
    pointer, inline = ("Q", 8) if big else ("I", 4)
    directory, longer = struct.pack(order + ("Q" if big else "H"), count), b""
    for tag, form, values in sorted(entries):
        if tag in (273, 324):
            values = [head + value for value in values]
        data = struct.pack(f"{order}{len(values)}{letters[form]}", *values)
        number = len(values) // 2 if form == 5 else len(values)
        directory += struct.pack(order + ("HHQ" if big else "HHI"), tag, form, number)
        if len(data) <= inline:
            directory += data.ljust(inline, b"\0")
        else:
            directory += struct.pack(order + pointer, start + size + len(longer))
            longer += data + bytes(len(data) % 2)
    mark = b"II" if order == "<" else b"MM"
    version = struct.pack(order + "HHHQ", 43, 8, 0, start) if big else struct.pack(order + "HI", 42, start)
    return mark + version + body + bytes(len(body) % 2) + directory + bytes(8 if big else 4) + longer


def rgb_entries(
    size: tuple[int, int], offsets: Sequence[int], lengths: Sequence[int], rows: int, *extra: Entry
) -> list[Entry]:
    given = {entry.tag for entry in extra}
    usual = (
        Entry(256, 3, [size[0]]), Entry(257, 3, [size[1]]), Entry(258, 3, [8, 8, 8]),
        Entry(259, 3, [1]), Entry(262, 3, [2]), Entry(273, 4, list(offsets)), Entry(277, 3, [3]),
        Entry(278, 3, [rows]), Entry(279, 4, list(lengths)),
    )  # fmt: skip
    return [*(entry for entry in usual if entry.tag not in given), *extra]


def one_strip(body: bytes, *extra: Entry, order: str = "<", big: bool = False) -> bytes:
    size = picture().size
    return tiff_of(body, rgb_entries(size, [0], [len(body)], size[1], *extra), order, big=big)


def raw_pixels() -> bytes:
    return picture().tobytes()


@good("tiff of a big-endian machine")
def _tiff_big_endian() -> bytes:
    return one_strip(raw_pixels(), order=">")


@good("tiff over four gigabytes in form")
def _big_tiff() -> bytes:
    return one_strip(raw_pixels(), big=True)


@good("tiff of one row a strip")
def _tiff_rows() -> bytes:
    (width, height), body = picture().size, raw_pixels()
    offsets = [3 * width * y for y in range(height)]
    return tiff_of(body, rgb_entries((width, height), offsets, [3 * width] * height, 1))


@good("tiff in planes")
def _tiff_planes() -> bytes:
    image = picture()
    body = b"".join(band.tobytes() for band in image.split())
    area = image.width * image.height
    entries = rgb_entries(image.size, [0, area, 2 * area], [area] * 3, image.height, Entry(284, 3, [2]))
    return tiff_of(body, entries)


@good("tiff in tiles")
def _tiff_tiles() -> bytes:
    image, side = picture(), 32
    tiles = [image.crop((x, y, x + side, y + side)).tobytes()
             for y in range(0, image.height, side) for x in range(0, image.width, side)]  # fmt: skip
    entries = [entry for entry in rgb_entries(image.size, [0], [0], 1) if entry.tag not in (273, 278, 279)]
    offsets = [at * len(tiles[0]) for at in range(len(tiles))]
    entries += [
        Entry(322, 3, [side]),
        Entry(323, 3, [side]),
        Entry(324, 4, offsets),
        Entry(325, 4, [len(tiles[0])] * len(tiles)),
    ]
    return tiff_of(b"".join(tiles), entries)


@good("tiff with a predictor")
def _tiff_predictor() -> bytes:
    rows = [
        bytes((row[at] - (row[at - 3] if at >= 3 else 0)) & 255 for at in range(len(row)))
        for row in _rgb_rows(picture())
    ]
    return one_strip(zlib.compress(b"".join(rows)), Entry(259, 3, [8]), Entry(317, 3, [2]))


@good("tiff of 16 bits a channel")
def _tiff_16() -> bytes:
    return one_strip(bytes(b for part in raw_pixels() for b in (part, part)), Entry(258, 3, [16, 16, 16]))


@good("tiff with alpha")
def _tiff_alpha() -> bytes:
    body = picture().convert("RGBA").tobytes()
    return one_strip(body, Entry(258, 3, [8] * 4), Entry(277, 3, [4]), Entry(338, 3, [2]))


@good("tiff with alpha that is multiplied in")
def _tiff_alpha_in() -> bytes:
    body = picture().convert("RGBA").tobytes()
    return one_strip(body, Entry(258, 3, [8] * 4), Entry(277, 3, [4]), Entry(338, 3, [1]))


@good("tiff with a fourth sample of no meaning")
def _tiff_extra() -> bytes:
    body = b"".join(bytes(color) + b"\0" for color in pixels(picture()))
    return one_strip(body, Entry(258, 3, [8] * 4), Entry(277, 3, [4]), Entry(338, 3, [0]))


@good("tiff with a palette")
def _tiff_palette() -> bytes:
    image, colors = of_palette()
    colors += [(0, 0, 0)] * (256 - len(colors))
    table = [color[part] * 257 for part in range(3) for color in colors]
    return one_strip(
        image.tobytes(), Entry(258, 3, [8]), Entry(262, 3, [3]), Entry(277, 3, [1]), Entry(320, 3, table)
    )


@good("tiff with a palette of 4 bits")
def _tiff_palette_4() -> bytes:
    image, colors = of_palette()
    data = image.tobytes()
    body = b"".join(packed(data[at : at + image.width], 4) for at in range(0, len(data), image.width))
    table = [color[part] * 257 for part in range(3) for color in colors]
    return one_strip(body, Entry(258, 3, [4]), Entry(262, 3, [3]), Entry(277, 3, [1]), Entry(320, 3, table))


@good("tiff with jpeg inside")
def _tiff_jpeg() -> bytes:
    return saved(picture(), "TIFF", compression="jpeg", quality=95)


@good("tiff in ycbcr without compression")
def _tiff_ycbcr() -> bytes:
    return one_strip(picture().convert("YCbCr").tobytes(), Entry(262, 3, [6]), Entry(530, 3, [1, 1]))


@good("tiff in packed bits")
def _tiff_packbits() -> bytes:
    return saved(picture(), "TIFF", compression="packbits")


@good("tiff that lacks the number of rows")
def _tiff_no_rows() -> bytes:
    body, size = raw_pixels(), picture().size
    return tiff_of(body, [entry for entry in rgb_entries(size, [0], [len(body)], 0) if entry.tag != 278])


@good("tiff turned by its orientation")
def _tiff_turned() -> bytes:
    image = picture().transpose(Image.Transpose.ROTATE_90)
    body = image.tobytes()
    return tiff_of(body, rgb_entries(image.size, [0], [len(body)], image.height, Entry(274, 3, [6])))


@good("tiff with metadata of strange kinds")
def _tiff_metadata() -> bytes:
    return one_strip(
        raw_pixels(),
        Entry(282, 5, [72, 0]),
        Entry(305, 1, list(b"writer\0")),
        Entry(34665, 4, [999_999]),
        Entry(65000, 4, [1, 2, 3]),
    )


def _float_tiff() -> bytes:
    body = struct.pack(f"<{3 * 64 * 64}f", *([0.5] * (3 * 64 * 64)))
    return tiff_of(
        body, rgb_entries((64, 64), [0], [len(body)], 64, Entry(258, 3, [32] * 3), Entry(339, 3, [3] * 3))
    )


BAD["tiff of floating numbers"] = _float_tiff
BAD["tiff with a wavelet inside"] = lambda: one_strip(raw_pixels(), Entry(259, 3, [34712]))
BAD["tiff with jpeg of the old kind"] = lambda: one_strip(raw_pixels(), Entry(259, 3, [6]))


# WebP, AVIF and what is not read


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_frame() -> bytes:
    """The bitstream chunk of a lossless file, whole."""
    return saved(picture(), "WEBP", lossless=True)[12:]


def _canvas(flags: int, size: tuple[int, int]) -> tuple[bytes, bytes]:
    return b"VP8X", bytes((flags, 0, 0, 0)) + b"".join((side - 1).to_bytes(3, "little") for side in size)


@good("webp with metadata of every kind")
def _webp_metadata() -> bytes:
    frame = webp_frame()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return riff(
        _canvas(0x2C, picture().size),
        (b"ICCP", profile),
        (frame[:4], frame[8:]),
        (b"EXIF", b"Exif\0\0II*\0"),
        (b"XMP ", b"<x/>"),
        (b"zzzz", b"odd"),
    )


@good("animated webp of one frame")
def _webp_animated() -> bytes:
    size = picture().size
    place = (
        bytes(6)
        + b"".join((side - 1).to_bytes(3, "little") for side in size)
        + (100).to_bytes(3, "little")
        + b"\0"
    )
    return riff(_canvas(0x02, size), (b"ANIM", bytes(6)), (b"ANMF", place + webp_frame()))


@good("webp with a wrong length of the file")
def _webp_length() -> bytes:
    data = bytearray(saved(picture(), "WEBP", lossless=True))
    struct.pack_into("<I", data, 4, 0)
    return bytes(data)


@good("webp with bytes behind it")
def _webp_tail() -> bytes:
    return saved(picture(), "WEBP", lossless=True) + b"trailing bytes"


@good("avif")
def _avif() -> bytes:
    return saved(picture(), "AVIF", quality=95, subsampling="4:4:4")


@good("avif whose first brand is that of all heif")
def _avif_mif1() -> bytes:
    data = bytearray(_avif())
    data[8:12] = b"mif1"
    return bytes(data)


@good("animated avif")
def _avif_animated() -> bytes:
    blank = Image.new("RGB", picture().size, "white")
    return saved(
        picture(), "AVIF", quality=95, subsampling="4:4:4", save_all=True, append_images=[blank], duration=100
    )


def _box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


NOT_READ: dict[str, Callable[[], bytes]] = {
    "icon": lambda: saved(picture(), "ICO"),
    "cursor": lambda: b"\0\0\2\0\1\0" + saved(picture(), "ICO")[6:],
    "heic": lambda: _box(b"ftyp", b"heic\0\0\0\0mif1heic") + _box(b"meta", bytes(60)),
    "heic that is called mif1": lambda: _box(b"ftyp", b"mif1\0\0\0\0mif1heic") + _box(b"meta", bytes(60)),
    "jpeg xl": lambda: b"\xff\x0a" + bytes(60),
    "jpeg 2000": lambda: saved(picture(), "JPEG2000"),
    "targa": lambda: saved(picture(), "TGA"),
    "windows metafile": lambda: b"\xd7\xcd\xc6\x9a" + bytes(60),
    "photoshop of large size": lambda: b"8BPS\0\2" + bytes(60),
    "radiance": lambda: b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 1 +X 1\n" + bytes(4),
    "portable pixmap": lambda: saved(picture(), "PPM"),
    "direct draw surface": lambda: saved(picture(), "DDS"),
    "quick time": lambda: _box(b"ftyp", b"qt  \0\0\0\0qt  ") + bytes(60),
    "iphone png": lambda: PNG_SIGNATURE + chunk(b"CgBI", b"\x50\0\x20\x06") + png()[8:],
}
BAD.update(NOT_READ)
