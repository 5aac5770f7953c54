"""From the bytes of a sound to the samples that a model should hear: one channel at the model's rate.

Channels are mixed by their mean, as the loaders do that speech models were trained with:
swresample's own mix of two channels would be 3 dB louder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.trtllm.config import AudioLimits
from dynamo.trtllm.core import DecodedAudio
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.audio.container import Kind, is_cut_short, kind_of, promised_s
from dynamo.trtllm.multimodal.av_files import damage_named, opened

BROKEN = "the sound is damaged or incomplete"
_LENGTH_TOLERANCE_S = 0.05
_LOUDEST = float(1 << 31)
"""Some writers put whole numbers of 32 bits into a file of floats; a spectrum of much more is infinite."""
_MIN_RATE = 1000
_MAX_RATE = 768_000


def digest_of(data: bytes, rate: int) -> str:
    """The name of a sound at a rate: SHA-256, in hexadecimal."""
    return hashlib.sha256(hashlib.sha256(data).digest() + str(rate).encode()).hexdigest()


def read_audio(data: bytes, rate: int, limits: AudioLimits) -> DecodedAudio:
    """The sound `data` as float32 `[samples]`, `rate` of them a second.

    Raises `ClientFault`, and `LimitFault` for what exceeds `limits`.
    """
    kind = kind_of(data)
    if is_cut_short(data, kind):
        raise ClientFault("the sound is cut short: the file ends before it says it does")
    with damage_named(BROKEN), opened(data, kind.demuxer, kind.codecs) as container:
        stream = _sound_stream(container, kind)
        declared_s = float(stream.duration * stream.time_base) if stream.duration else None
        _check_length(declared_s or 0.0, limits, _LENGTH_TOLERANCE_S)  # Ogg counts Opus's delay, too
        pieces = list(_Mixer(rate, limits).pieces(_frames(container, stream)))
    samples = np.concatenate(pieces) if pieces else np.empty(0, np.float32)
    if not len(samples):
        raise ClientFault("the file holds no sound")
    if not np.isfinite(samples).all():
        raise ClientFault("the sound holds samples that are no numbers")
    if float(np.abs(samples).max()) > _LOUDEST:
        raise ClientFault("the sound holds samples far beyond full scale, which is 1")
    promised = promised_s(data, kind, declared_s)
    if promised and len(samples) / rate < promised - _LENGTH_TOLERANCE_S:
        raise ClientFault(
            f"the sound ends after {len(samples) / rate:.1f} s, "
            f"and the file declares at least {promised:.1f} s"
        )
    samples.flags.writeable = False
    return DecodedAudio(digest_of(data, rate), samples, rate)


def _sound_stream(container: Any, kind: Kind) -> Any:
    if not container.streams.audio:
        raise ClientFault("the file holds no sound")
    stream = container.streams.audio[0]
    if stream.codec_context is None or stream.codec_context.name not in kind.codecs:
        raise ClientFault(f"the {kind.name} file's codec is not one that this worker decodes")
    return stream


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames in order. Damage between two of them is a `ClientFault` that says where it is;
    what cannot be decoded before the first and after the last is left out, since cut recordings
    begin and end in mid-frame.
    """
    from av.error import FFmpegError

    damaged_at_s = None
    heard_s = 0.0
    codec = stream.codec_context
    codec.options = {"err_detect": "explode"}
    for packet in container.demux(stream):
        try:
            frames = codec.decode(packet if packet.size else None)
        except FFmpegError:
            damaged_at_s = damaged_at_s if heard_s == 0 or damaged_at_s is not None else heard_s
            continue
        for frame in frames:
            if damaged_at_s is not None:
                raise ClientFault(f"the sound is damaged at {damaged_at_s:.1f} s")
            heard_s += frame.samples / frame.sample_rate
            yield frame


class _Mixer:
    """Brings frames to one channel and one rate; a file whose format changes on the way is followed."""

    def __init__(self, rate: int, limits: AudioLimits) -> None:
        self._rate = rate
        self._limits = limits
        self._heard = 0

    def pieces(self, frames: Iterator[Any]) -> Iterator[NDArray[np.float32]]:
        """Samples, float32, piece by piece. Raises `LimitFault` for too many channels or too long a sound."""
        from av import AudioResampler

        resampler: Any = None
        form: tuple[object, ...] = ()
        for frame in frames:
            _check_form(frame, self._limits)
            frame.pts = None  # Gaps in the times would be filled with silence, or refused.
            if form != (frame.format.name, frame.layout.name, frame.sample_rate):
                if resampler is not None:
                    yield from self._mixed(resampler.resample(None))
                form = (frame.format.name, frame.layout.name, frame.sample_rate)
                # Packed: PyAV 18.1 writes past its memory when it copies a planar frame of eight channels.
                resampler = AudioResampler(format="flt", layout=frame.layout, rate=self._rate)
            yield from self._mixed(resampler.resample(frame))
        if resampler is not None:
            yield from self._mixed(resampler.resample(None))

    def _mixed(self, frames: list[Any]) -> Iterator[NDArray[np.float32]]:
        for frame in frames:
            packed = frame.to_ndarray().reshape(-1, frame.layout.nb_channels)
            mixed: NDArray[np.float32] = packed.mean(axis=1, dtype=np.float32)
            self._heard += len(mixed)
            _check_length(self._heard / self._rate, self._limits)
            yield mixed


def _check_form(frame: Any, limits: AudioLimits) -> None:
    channels = frame.layout.nb_channels
    if channels > limits.max_channels:
        raise LimitFault(
            f"the sound has {channels} channels; this worker takes at most {limits.max_channels}"
        )
    if not _MIN_RATE <= frame.sample_rate <= _MAX_RATE:
        raise ClientFault(
            f"the sound has {frame.sample_rate} samples a second; "
            f"this worker takes {_MIN_RATE} to {_MAX_RATE}"
        )


def _check_length(seconds: float, limits: AudioLimits, spare_s: float = 0.0) -> None:
    if seconds > limits.max_duration_s + spare_s:
        raise LimitFault(
            f"the sound takes {seconds:.1f} s; this worker takes at most {limits.max_duration_s:g} s"
        )
