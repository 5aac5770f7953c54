"""Sounds synthesised for the tests."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]


def tone(seconds: float, *, hertz: float = 440.0, rate: int = 16000, level: float = 0.5) -> Samples:
    """A sine `[samples]` within `level`."""
    return level * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def wav(
    channels: Samples, *, rate: int = 16000, bits: int = 16, floating: bool = False, size: int | None = None
) -> bytes:
    """A WAV file of `[samples]` or `[channels, samples]` within -1 and 1;
    `size` is what it declares of its data."""
    wave = np.atleast_2d(channels)
    if floating:
        body = wave.T.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        body = (wave.T * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.ascontiguousarray((wave.T * (2 ** (bits - 1) - 1)).astype("<i4"))
        body = whole.view(np.uint8).reshape(*whole.shape, 4)[..., : bits // 8].tobytes()
    count = len(wave)
    step = count * bits // 8
    declared = len(body) if size is None else size
    form = struct.pack("<HHIIHH", 3 if floating else 1, count, rate, rate * step, step, bits)
    chunks = (
        b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", declared) + body
    )
    return b"RIFF" + struct.pack("<I", min(4 + len(chunks) + declared, 0xFFFFFFFF)) + chunks


def encoded(
    channels: Samples,
    *,
    container: str,
    codec: str,
    rate: int = 48000,
    layout: str = "mono",
    tags: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """`[samples]` or `[channels, samples]` as a file of `container` by FFmpeg's encoder `codec`."""
    wave = np.atleast_2d(channels).astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"sound.{container}"
        with av.open(str(path), "w", format=container, options=dict(options or {})) as output:
            stream = output.add_stream(codec, rate=rate, layout=layout, options={"strict": "experimental"})
            output.metadata.update(dict(tags or {}))
            convert = av.AudioResampler(
                format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 1024
            )
            frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=layout)
            frame.sample_rate = rate
            for each in [*convert.resample(frame), *convert.resample(None)]:
                output.mux(stream.encode(each))
            output.mux(stream.encode(None))
        return path.read_bytes()
