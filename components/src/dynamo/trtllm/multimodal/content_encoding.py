"""Undoing the content encodings of an HTTP body (RFC 9110, 8.4), within the byte limit at every step.

We ask for none, and hosts that store compressed files send them all the same, some compressed twice. zstd and
brotli are undone where this Python has the libraries for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.blocking import run_blocking

MAX_ENCODINGS = 4
"""Encodings of one body, one over the other."""
_UNCHANGED = frozenset({"identity", "none", "binary", "utf-8", "aws-chunked"})
"""Names of no encoding, the last four as hosts misuse the header: stores keep there what an upload said."""
_ZSTD_WINDOW_BYTES = 1 << 27
_NAMED_CHARACTERS = 20
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS


class FetchError(ClientFault):
    """A download failed, by the fault of the URL or of the host behind it."""


@dataclass(frozen=True)
class Body:
    """A body as it came over the wire, and the values of its `Content-Encoding` headers."""

    data: bytes = field(repr=False)
    encodings: Sequence[str] = ()


def larger_than(max_bytes: int) -> str:
    """The message for a download over the limit."""
    return f"larger than this worker's limit of {max_bytes / (1 << 20):g} MiB"


async def inflate(body: Body, max_bytes: int) -> bytes:
    """The content of `body`. Raises `FetchError` for an encoding that is unknown or damaged, and over
    `max_bytes`.
    """
    names = [name for value in body.encodings for part in value.split(",") if (name := part.strip().lower())]
    steps = [name for name in names if name not in _UNCHANGED]
    if not steps:
        return body.data
    if len(steps) > MAX_ENCODINGS:
        raise FetchError("the media host compresses it too many times over")
    unknown = next((name for name in steps if name not in _INFLATERS), None)
    if unknown is not None:
        raise FetchError(
            f"the media host sends it in the content encoding {_shown(unknown)}, which is not accepted"
        )
    return await run_blocking(_inflate_all, body.data, steps, max_bytes)


def _shown(name: str) -> str:
    plain = all(character.isascii() and (character.isalnum() or character in "-_.") for character in name)
    return f"'{name[:_NAMED_CHARACTERS]}'" if plain else "of an unknown name"


def _inflate_all(data: bytes, steps: Sequence[str], max_bytes: int) -> bytes:
    for name in reversed(steps):  # the last one named was applied last
        try:
            data = _INFLATERS[name](data, max_bytes + 1)
        except FetchError:
            raise
        except Exception as error:
            raise FetchError(f"the media host sends it in a damaged content encoding '{name}'") from error
        if len(data) > max_bytes:
            raise FetchError(larger_than(max_bytes))
    return data


def _gunzip(data: bytes, limit: int) -> bytes:
    """All members of a gzip file (RFC 1952); what follows the last one and is no member is ignored, as gzip
    does.
    """
    pieces: list[bytes] = []
    while limit > 0 and (not pieces or data.startswith(b"\x1f\x8b")):
        piece, data = _run_zlib(data, limit, _GZIP_OR_ZLIB)
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def _undeflate(data: bytes, limit: int) -> bytes:
    """A zlib stream (RFC 1950), or bare deflate (RFC 1951), which some hosts call by the same name."""
    try:
        return _run_zlib(data, limit, _GZIP_OR_ZLIB)[0]
    except zlib.error:
        return _run_zlib(data, limit, _RAW_DEFLATE)[0]


def _run_zlib(data: bytes, limit: int, window_bits: int) -> tuple[bytes, bytes]:
    """At most `limit` bytes, and what follows the stream. Raises `zlib.error`, also for a stream that ends
    too early.
    """
    stream = zlib.decompressobj(window_bits)
    out = stream.decompress(data, limit)
    if not stream.eof and len(out) < limit:
        raise zlib.error("the stream ends too early")
    return out, stream.unused_data


def _unzstd(data: bytes, limit: int) -> bytes:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    with decompressor.stream_reader(data, read_across_frames=True) as reader:
        out = bytes(reader.read(limit))
    if not out:
        raise ValueError("the stream ends too early")  # a later end shows in the image
    return out


def _unbrotli(data: bytes, limit: int) -> bytes:
    import brotli

    stream = brotli.Decompressor()
    out: list[bytes] = [stream.process(data, output_buffer_limit=limit)]
    while not stream.is_finished() and not stream.can_accept_more_data() and sum(map(len, out)) < limit:
        out.append(stream.process(b"", output_buffer_limit=limit))
    if not stream.is_finished() and sum(map(len, out)) < limit:
        raise ValueError("the stream ends too early")
    return b"".join(out)


def _optional() -> dict[str, Callable[[bytes, int], bytes]]:
    """The encodings whose library is installed, in a release that can stop at a limit."""
    found: dict[str, Callable[[bytes, int], bytes]] = {}
    for name, undo, probe in (
        ("zstd", _unzstd, b"\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00x"),
        ("br", _unbrotli, b"\x06"),
    ):
        try:
            undo(probe, 1)
        except Exception:
            continue
        found[name] = undo
    return found


_INFLATERS: dict[str, Any] = {"gzip": _gunzip, "x-gzip": _gunzip, "deflate": _undeflate, **_optional()}
