"""TIFF 6.0 and BigTIFF: the first page alone, under a directory that is written anew.

Readers load every value that a directory points to, so one with thousands of entries over the same bytes
would fill the memory. Only the entries that the pixels need are read here, and only strips or tiles that the
image has room for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial

from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.formats import jpeg
from dynamo.trtllm.multimodal.formats.scan import MAX_PIECES, MAX_PROFILE_BYTES, Damaged, Scan

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION = 256, 257, 258, 259, 262, 274
_STRIP_OFFSETS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANAR = 273, 277, 278, 279, 284
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 322, 323, 324, 325
_EXTRA_SAMPLES, _SAMPLE_FORMAT, _JPEG_TABLES, _PROFILE = 338, 339, 347, 34675
_FILL_ORDER, _FAX3, _FAX4, _PREDICTOR, _COLOR_MAP, _SUBSAMPLING, _POSITIONING = (
    266,
    292,
    293,
    317,
    320,
    530,
    531,
)
_NUMBERS = frozenset(
    {
        _WIDTH,
        _HEIGHT,
        _BITS,
        _COMPRESSION,
        _PHOTOMETRIC,
        _ORIENTATION,
        _STRIP_OFFSETS,
        _SAMPLES,
        _ROWS,
        _STRIP_BYTES,
        _PLANAR,
    }
    | {_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES, _EXTRA_SAMPLES, _SAMPLE_FORMAT}
    | {_FILL_ORDER, _FAX3, _FAX4, _PREDICTOR, _COLOR_MAP, _SUBSAMPLING, _POSITIONING}
)
_BYTES = frozenset({_JPEG_TABLES, _PROFILE})
_OF_STRIPS = frozenset({_STRIP_OFFSETS, _STRIP_BYTES, _ROWS})
_OF_TILES = frozenset({_TILE_OFFSETS, _TILE_BYTES, _TILE_WIDTH, _TILE_HEIGHT})
_NOT_WRITTEN = frozenset({_ORIENTATION, _PROFILE})

_MAX_ENTRIES = 4096
_MAX_VALUES = 3 << 16
"""Of one entry: the colour map of a 16-bit palette has as many."""
_FORMS: dict[int, str] = {1: "B", 3: "H", 4: "I", 16: "Q"}
_RAW_FORMS = (1, 7)
_JPEG = 7
_COMPRESSIONS = frozenset({1, 2, 3, 4, 5, _JPEG, 8, 32773, 32946})
"""None, fax (three kinds), LZW, JPEG, deflate, PackBits, and deflate by its old number."""
_UNSIGNED = 1
_BIT_DEPTHS = frozenset({1, 2, 4, 8, 16})
_SPARE_BYTES = 1 << 20
_SPARE_PIXELS = 4 << 20


@dataclass(frozen=True)
class _Page:
    """The first directory: numbers and byte strings by tag."""

    order: str
    numbers: dict[int, tuple[int, ...]]
    strings: dict[int, bytes]

    def one(self, tag: int, default: int | None = None) -> int:
        values = self.numbers.get(tag, ())
        if values:
            return values[0]
        if default is None:
            raise Damaged("an entry is missing")
        return default


def scan(data: bytes) -> Scan:
    """Raises `Damaged`, and `ClientFault` for pixels of a kind that is not read or strips that the image
    has no room for.
    """
    try:
        page = _first_page(data)
    except struct.error as error:
        raise Damaged("no directory") from error
    width, height = page.one(_WIDTH), page.one(_HEIGHT)
    bits = page.numbers.get(_BITS, (1,))
    if page.one(_COMPRESSION, 1) not in _COMPRESSIONS:
        raise ClientFault(
            f"the compression {page.one(_COMPRESSION)} of this TIFF is not accepted; use LZW, deflate or none"
        )
    if not set(bits) <= _BIT_DEPTHS or set(page.numbers.get(_SAMPLE_FORMAT, (_UNSIGNED,))) != {_UNSIGNED}:
        raise ClientFault("a TIFF's samples must be whole numbers of 1, 2, 4, 8 or 16 bits")
    profile = page.strings.get(_PROFILE)
    return Scan(
        width,
        height,
        essentials=partial(_essentials, data, page),
        profile=lambda: profile,
        orientation=page.one(_ORIENTATION, 1),
        inverted=page.one(_PHOTOMETRIC, 0) == 0 and bits == (16,),
    )


def _first_page(data: bytes) -> _Page:
    order = "<" if data.startswith(b"II") else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    (at,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
    if count > _MAX_ENTRIES:
        raise LimitFault("the TIFF has more entries than this worker takes")
    at += 8 if big else 2
    page = _Page(order, {}, {})
    for _ in range(count):
        tag, form, values = struct.unpack_from(order + ("HHQ" if big else "HHI"), data, at)
        _read_entry(data, page, (tag, form, values), at + (12 if big else 8), 8 if big else 4)
        at += 20 if big else 12
    return page


def _read_entry(data: bytes, page: _Page, entry: tuple[int, int, int], at: int, inline: int) -> None:
    """Note the values of one entry. They lie at `at` when they fit into `inline` bytes, else where the number
    there points.
    """
    tag, form, count = entry
    if not (tag in _NUMBERS and form in _FORMS) and not (tag in _BYTES and form in _RAW_FORMS):
        return
    size = count * (struct.calcsize("<" + _FORMS[form]) if tag in _NUMBERS else 1)
    if count > _MAX_VALUES and tag in _NUMBERS:
        raise LimitFault("the TIFF has more strips or tiles than this worker takes")
    if size > inline:
        (at,) = struct.unpack_from(page.order + ("Q" if inline == 8 else "I"), data, at)
    if tag in _NUMBERS:
        page.numbers.setdefault(tag, struct.unpack_from(f"{page.order}{count}{_FORMS[form]}", data, at))
    elif size <= MAX_PROFILE_BYTES and at + size <= len(data):
        page.strings.setdefault(tag, data[at : at + size])


def _essentials(data: bytes, page: _Page) -> bytes:
    """The pixels where they were, under a classic header, and one directory at the end."""
    tiled = _TILE_OFFSETS in page.numbers or _TILE_WIDTH in page.numbers
    places = _inside(len(data), _tiles(page) if tiled else _strips(data, page))
    left_out = _NOT_WRITTEN | (_OF_STRIPS if tiled else _OF_TILES)
    numbers = {tag: values for tag, values in page.numbers.items() if tag not in left_out} | places
    if page.one(_PHOTOMETRIC, 0) == 0 and page.numbers.get(_BITS, (1,)) == (16,):
        numbers[_PHOTOMETRIC] = (1,)  # the reader takes no inverted 16 bits; `Scan.inverted` says so instead
    offsets = places[_TILE_OFFSETS if tiled else _STRIP_OFFSETS]
    lengths = places[_TILE_BYTES if tiled else _STRIP_BYTES]
    if sum(lengths) > 2 * len(data) + _SPARE_BYTES:
        raise LimitFault("the strips of the TIFF lie over each other")
    if page.one(_COMPRESSION, 1) == _JPEG:
        _check_passes(data, offsets, lengths)
    tables = {tag: text for tag, text in page.strings.items() if tag not in _NOT_WRITTEN}
    return _written(page.order, data, numbers, tables)


def _planes(page: _Page) -> int:
    return page.one(_SAMPLES, 1) if page.one(_PLANAR, 1) == 2 else 1


def _strips(data: bytes, page: _Page) -> dict[int, tuple[int, ...]]:
    height = page.one(_HEIGHT)
    rows = min(page.one(_ROWS, height), height)
    if rows < 1:
        raise Damaged("strips of no rows")
    count = -(-height // rows) * _planes(page)
    offsets = page.numbers.get(_STRIP_OFFSETS, ())
    lengths = page.numbers.get(_STRIP_BYTES, ())
    if not lengths and len(offsets) == 1:
        lengths = (max(0, len(data) - offsets[0]),)  # old writers leave the length of a single strip out
    return {_ROWS: (rows,), **_as_many(count, _STRIP_OFFSETS, offsets, _STRIP_BYTES, lengths)}


def _tiles(page: _Page) -> dict[int, tuple[int, ...]]:
    width, height, across, down = (page.one(tag) for tag in (_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT))
    if across < 1 or down < 1:
        raise Damaged("tiles of no size")
    count = -(-width // across) * -(-height // down)
    if count * across * down > 4 * width * height + _SPARE_PIXELS:
        raise LimitFault("the tiles of the TIFF are much larger than its image")
    offsets, lengths = page.numbers.get(_TILE_OFFSETS, ()), page.numbers.get(_TILE_BYTES, ())
    return _as_many(count * _planes(page), _TILE_OFFSETS, offsets, _TILE_BYTES, lengths)


def _as_many(
    count: int, offsets_tag: int, offsets: tuple[int, ...], lengths_tag: int, lengths: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    if count > MAX_PIECES:
        raise LimitFault("the TIFF has more strips or tiles than this worker takes")
    if len(offsets) < count or len(lengths) < count:
        raise Damaged("strips or tiles are missing")
    return {offsets_tag: offsets[:count], lengths_tag: lengths[:count]}


def _inside(size: int, places: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """`places` if they lie in the file's `size` bytes; what follows those is ours. Raises `Damaged`."""
    offsets, lengths = (places[tag] for tag in sorted(places) if tag != _ROWS)
    if any(offset + length > size for offset, length in zip(offsets, lengths, strict=True)):
        raise Damaged("a strip or tile leads out of the file")
    return places


def _check_passes(data: bytes, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    visits = 0
    for offset, length in zip(offsets, lengths, strict=True):
        visits += jpeg.count_visits(data[offset : offset + length])
        if visits > jpeg.MAX_VISITS:
            raise LimitFault(jpeg.TOO_MANY_PASSES)


def _written(
    order: str, data: bytes, numbers: dict[int, tuple[int, ...]], strings: dict[int, bytes]
) -> bytes:
    entries: list[tuple[int, int, int, bytes]] = []
    for tag, values in numbers.items():
        form = 3 if max(values, default=0) < 1 << 16 else 4
        if max(values, default=0) >= 1 << 32:
            raise Damaged("a value leads out of the file")
        entries.append((tag, form, len(values), struct.pack(f"{order}{len(values)}{_FORMS[form]}", *values)))
    entries += [(tag, 7, len(text), text) for tag, text in strings.items()]
    entries.sort()
    start = len(data) + len(data) % 2
    after = start + 2 + 12 * len(entries) + 4
    directory, longer = [struct.pack(order + "H", len(entries))], bytearray()
    for tag, form, count, body in entries:
        place = body.ljust(4, b"\0") if len(body) <= 4 else struct.pack(order + "I", after + len(longer))
        directory.append(struct.pack(order + "HHI", tag, form, count) + place)
        if len(body) > 4:
            longer += body + b"\0" * (len(body) % 2)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", start)
    padding = b"\0" * (start - len(data))
    return b"".join((head, data[8:], padding, *directory, b"\0\0\0\0", longer))
