"""What a file given as a sound is, by its bytes, and whether it ends where it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.sniff import sniff

ACCEPTED = "WAV, FLAC, MP3, Ogg (Vorbis, Opus)"
_ID3_HEADER_BYTES = 10
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""What a writer that could not go back has left in a WAV file's sizes."""
_PAGE_HEADER_BYTES = 27
_MP3_INFO_WITHIN = 64
_MPEG1_RATES = (44100, 48000, 32000)
_MP3_PADDING = 4 * 1152
"""Samples at both ends that an encoder adds and a decoder leaves out, generously."""


@dataclass(frozen=True)
class Kind:
    """One kind of sound file: its name, FFmpeg's demuxer for it, and the decoders that may see it."""

    name: str
    demuxer: str
    codecs: frozenset[str]


_PCM = frozenset(
    f"pcm_{name}" for name in ("u8", "s16le", "s24le", "s32le", "f32le", "f64le", "s16be", "s24be", "s32be")
)
_WAV = Kind("WAV", "wav", _PCM | {"pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav"})
_FLAC = Kind("FLAC", "flac", frozenset({"flac"}))
_MP3 = Kind("MP3", "mp3", frozenset({"mp3", "mp3float"}))
_OGG = Kind("Ogg", "ogg", frozenset({"vorbis", "opus", "libopus", "flac"}))


def kind_of(data: bytes) -> Kind:
    """The kind of `data`. Raises `ClientFault` for another kind of file, by name where it is known."""
    if not data:
        raise ClientFault("the sound is empty")
    body = data[_id3_bytes(data) :]
    if body[8:12] == b"WAVE":
        return _WAV
    if body.startswith(b"fLaC"):
        return _FLAC
    if body.startswith(b"OggS"):
        return _OGG
    if body is not data or _is_mp3_frame(body):
        return _MP3
    kind = sniff(data)
    if kind is None:
        raise ClientFault(f"not a sound of a known type; accepted are {ACCEPTED}")
    raise ClientFault(f"the type {kind} is not accepted as a sound; accepted are {ACCEPTED}")


def is_cut_short(data: bytes, kind: Kind) -> bool:
    """True when the file says that it is longer than it is:
    a WAV file's samples, or the last page of an Ogg."""
    if kind is _WAV:
        return _end_of_wave(data) > len(data)
    if kind is _OGG:
        return _end_of_last_page(data) > len(data)
    return False


def promised_s(data: bytes, kind: Kind, duration_s: float | None) -> float | None:
    """How long the sound is by the file's own word, or None. `duration_s` is what FFmpeg makes of it,
    which for an MP3 file may be a guess from its bit rate: there the count of frames is taken that
    its first frame may hold.
    """
    if kind is not _MP3:
        return duration_s
    body = data[_id3_bytes(data) :]
    at = max(body.find(mark, 0, _MP3_INFO_WITHIN) for mark in (b"Xing", b"Info"))
    if at < 0 or not _is_mp3_frame(body) or not body[at + 7] & 1:
        return None
    version = body[1] >> 3 & 3  # 3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5, each with half the rate of the one before
    rate = _MPEG1_RATES[body[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    frames = int.from_bytes(body[at + 8 : at + 12], "big")
    return max(0.0, (frames * (1152 if version == 3 else 576) - _MP3_PADDING) / rate)


def _end_of_wave(data: bytes) -> int:
    """Where the chunk of samples ends (RIFF, "Multimedia Programming Interface", 1991);
    0 where it is not said."""
    order: Literal["big", "little"] = "big" if data.startswith(b"RIFX") else "little"
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], order)
        if data[at : at + 4] == b"data":
            return 0 if size in _UNKNOWN_SIZES else at + 8 + size
        at += 8 + size + size % 2
    return 0


def _end_of_last_page(data: bytes) -> int:
    """Where the last page ends (RFC 3533, section 6)."""
    at = data.rfind(b"OggS")
    if at + _PAGE_HEADER_BYTES > len(data):
        return at + _PAGE_HEADER_BYTES
    lacing = data[at + _PAGE_HEADER_BYTES :][: data[at + _PAGE_HEADER_BYTES - 1]]
    return at + _PAGE_HEADER_BYTES + data[at + _PAGE_HEADER_BYTES - 1] + sum(lacing)


def _id3_bytes(data: bytes) -> int:
    """Length of the ID3v2 tag at the front (id3.org, 2.4.0, section 3.1), 0 without one."""
    if not data.startswith(b"ID3") or len(data) < _ID3_HEADER_BYTES:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return _ID3_HEADER_BYTES + size


def _is_mp3_frame(data: bytes) -> bool:
    """True for the header of a frame of layer III (ISO/IEC 11172-3, 2.4.2.3)."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE6 != 0xE2:
        return False
    return data[1] & 0x18 != 0x08 and data[2] & 0xF0 not in (0, 0xF0) and data[2] & 0x0C != 0x0C
