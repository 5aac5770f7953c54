"""Clips drawn for the tests. Every frame carries its own number as bars,
so that a test reads which frame it got."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

BITS = 8
SIZE = (64, 48)
"""Width and height of a clip unless a test says otherwise."""

Frame = NDArray[np.uint8]


def numbered(number: int, size: tuple[int, int] = SIZE) -> Frame:
    """A frame `[height, width, 3]` whose eight bars are white where the bits of `number` are set.
    The highest bit is at the left; the lower half is red, so that a turned frame is seen.
    """
    width, height = size
    frame = np.zeros((height, width, 3), np.uint8)
    for bit in range(BITS):
        if number >> (BITS - 1 - bit) & 1:
            frame[: height // 2, bit * width // BITS : (bit + 1) * width // BITS] = 255
    frame[height // 2 :] = (200, 0, 0)
    return frame


def number_of(frame: Frame) -> int:
    """The number that `numbered` drew into an upright frame."""
    height, width = frame.shape[:2]
    row = frame[: height // 2].mean(axis=(0, 2))
    bars = [row[bit * width // BITS : (bit + 1) * width // BITS].mean() for bit in range(BITS)]
    return sum(int(bar > 128) << (BITS - 1 - bit) for bit, bar in enumerate(bars))


def is_upright(frame: Frame) -> bool:
    """True when the red half is at the bottom."""
    red = frame[..., 0].astype(int) - frame[..., 1]
    return bool(red[-frame.shape[0] // 3 :].mean() > 100 and red[: frame.shape[0] // 3].mean() < 40)


def clip(
    frames: int = 30,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    size: tuple[int, int] = SIZE,
    rate: int = 30,
    pixels: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    muxing: Mapping[str, str] | None = None,
    when: Callable[[int], int] = lambda number: number,
    draw: Callable[[int], Frame] | None = None,
    sound_s: float = 0.0,
    adjust: Callable[[Any], None] = lambda frame: None,
) -> bytes:
    """An encoded clip. `when` gives a frame's time in units of `1 / rate`;
    `draw` gives RGB or RGBA pixels."""
    options = dict(options or {}) or ({"preset": "ultrafast", "bf": "2"} if codec == "libx264" else {})
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"clip.{container}"
        with av.open(str(path), "w", format=container, options=dict(muxing or {})) as output:
            video = output.add_stream(codec, rate=rate, options=options)
            video.width, video.height, video.pix_fmt = *size, pixels
            video.thread_count = 1
            sound = (
                output.add_stream("libopus" if container in ("webm", "matroska") else "aac", rate=48000)
                if sound_s
                else None
            )
            for number in range(frames):
                picture = draw(number) if draw else numbered(number, size)
                kind = "rgba" if picture.shape[2] == 4 else "rgb24"
                frame = av.VideoFrame.from_ndarray(picture, format=kind)
                frame.pts, frame.time_base = when(number), Fraction(1, rate)
                adjust(frame)
                output.mux(video.encode(frame))
            output.mux(video.encode(None))
            if sound is not None:
                _hum(output, sound, sound_s)
        return path.read_bytes()


def _hum(output: Any, stream: Any, seconds: float) -> None:
    for start in range(0, int(48000 * seconds), 960):
        wave = np.sin(np.arange(start, start + 960) / 20).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(np.stack([wave, wave]), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def sound_only(container: str = "mp4", *, cover: bool = False) -> bytes:
    """A second of sound in a container of clips; `cover` puts a picture beside it, as music shops do."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"sound.{container}"
        with av.open(str(path), "w", format=container) as output:
            sound = output.add_stream("libopus" if container == "webm" else "aac", rate=48000)
            if cover:
                picture = output.add_stream("mjpeg", rate=1)
                picture.width, picture.height, picture.pix_fmt = 32, 32, "yuvj420p"
                picture.disposition = av.stream.Disposition.attached_pic
            _hum(output, sound, 1.0)
            if cover:
                frame = av.VideoFrame.from_ndarray(numbered(1, (32, 32)), format="rgb24").reformat(
                    format="yuvj420p"
                )
                output.mux(picture.encode(frame))
                output.mux(picture.encode(None))
        return path.read_bytes()


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 clip whose display matrix is `a, b, c, d` (whole numbers),
    as a phone writes that was held otherwise."""
    at = data.index(b"tkhd") + 4 + 4 + 4 * 5 + 8 + 8
    a, b, c, d = (value << 16 for value in matrix)
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


def trimmed(data: bytes, ticks: int) -> bytes:
    """An MP4 clip whose edit list begins `ticks` (of the track's time) later than its media."""
    at = data.index(b"elst") + 4 + 8 + 4
    (start,) = struct.unpack(">i", data[at : at + 4])
    return data[:at] + struct.pack(">i", start + ticks) + data[at + 4 :]


def without_beginning(data: bytes, keyframe: int) -> bytes:
    """An MP4 clip cut at its `keyframe`-th keyframe without decoding,
    so that frames before it in time come after it."""
    with tempfile.TemporaryDirectory() as directory:
        before, after = Path(directory) / "before.mp4", Path(directory) / "after.mp4"
        before.write_bytes(data)
        with av.open(str(before)) as source, av.open(str(after), "w") as output:
            stream = output.add_stream_from_template(source.streams.video[0])
            seen = -1
            for packet in source.demux(source.streams.video[0]):
                if packet.dts is None:
                    continue
                seen += bool(packet.is_keyframe)
                if seen >= keyframe:
                    packet.stream = stream
                    output.mux(packet)
        return after.read_bytes()


def growing(frames: int = 10) -> bytes:
    """A WebM clip whose second half has larger frames, as a shared window that was resized."""
    halves = [
        clip(frames, container="webm", codec="libvpx", size=size, options=_QUICK)
        for size in ((64, 48), (96, 64))
    ]
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{number}.webm" for number in range(2)]
        for path, half in zip(paths, halves, strict=True):
            path.write_bytes(half)
        joined = Path(directory) / "joined.webm"
        with av.open(str(joined), "w") as output:
            stream = None
            for number, path in enumerate(paths):
                with av.open(str(path)) as source:
                    if stream is None:
                        stream = output.add_stream_from_template(source.streams.video[0])
                    for packet in source.demux(source.streams.video[0]):
                        if packet.dts is not None:
                            packet.pts = packet.dts = packet.pts + number * frames * 1000 // 30
                            packet.stream = stream
                            output.mux(packet)
        return joined.read_bytes()


_QUICK = {"deadline": "realtime", "cpu-used": "8"}
