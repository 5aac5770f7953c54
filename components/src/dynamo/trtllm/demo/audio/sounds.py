"""Synthesised sounds: some beeps, a tone that rises or falls, or silence, and the words that describe them.

As in `pictures.py`, everything is a function of a seed. A sound is one of

* one to five beeps of one pitch out of `PITCHES`, at least `MIN_GAP_S` apart,
* one tone that slides evenly up or down by a factor of at least `MIN_SLIDE`,
* silence, or noise so faint that one would call it so.

All lie within `MIN_S` to `MAX_S` seconds, at any of `RATES`, on one channel or two, loud or quiet, some with
overtones, most with noise at least `MIN_SNR_DB` below the peak. What is drawn for a seed does not depend on
the rate, noise apart.
"""

from __future__ import annotations

import io
import math
import wave
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from ..phrasing import NUMBERS

Samples = npt.NDArray[np.float32]
"""Within -1 and 1."""

PITCHES = {"low": (180.0, 380.0), "middle": (600.0, 1100.0), "high": (1700.0, 3200.0)}
"""The bands, in Hz, that beeps are drawn from."""
SLIDES = ("rises", "falls")
MAX_BEEPS = 5
MIN_S, MAX_S = 0.5, 4.0
MIN_BEEP_S, MAX_BEEP_S = 0.1, 0.4
MAX_LONE_BEEP_S = 3.5
MIN_GAP_S, MAX_GAP_S = 0.1, 0.4
MIN_SLIDE, MAX_SLIDE = 1.5, 4.0
SLIDE_HZ = (150.0, 3400.0)
MIN_SLIDE_S = 0.4
MIN_SNR_DB, MAX_SNR_DB = 20.0, 70.0
RATES = (8000, 16000, 22050, 44100, 48000)
FORMATS = (".wav", ".flac", ".mp3", ".ogg")
"""What `write_sound` writes: WAV and FLAC of 16 bits, MP3 and Ogg with Opus of 64 kbit/s."""
MODEL_RATE = 16000
"""Samples a second, as the model hears them."""
SLIDING, SILENT = 0.28, 0.04
"""The shares of tones and of silence."""

_PITCH_SPREAD = 0.02
_LENGTH_SPREAD = 0.15
_MAX_OVERTONE = 0.25
_MAX_OVERTONE_HZ = 3600.0
_ENCODERS = {".flac": "flac", ".mp3": "libmp3lame", ".ogg": "libopus"}
_OPUS_RATE = 48000
_BITS_PER_S = 64_000


@dataclass(frozen=True)
class Sound:
    """One sound, `[channels, samples]` at `rate` a second, and what is heard in it.

    `beeps` of `pitch` (0 and None where there are none), or a tone whose `slide` is one of `SLIDES`, or
    neither.
    """

    samples: Samples
    rate: int
    beeps: int = 0
    pitch: str | None = None
    slide: str | None = None

    @property
    def caption(self) -> str:
        """For instance `three high beeps.`, `a tone that rises.` or `silence.`"""
        if self.slide is not None:
            return f"a tone that {self.slide}."
        if self.pitch is not None:
            return f"{NUMBERS[self.beeps]} {self.pitch} beep{'' if self.beeps == 1 else 's'}."
        return "silence."


@dataclass(frozen=True)
class _Tone:
    """A tone from `start_s` for `length_s`, sliding from the first frequency to the second, in Hz."""

    start_s: float
    length_s: float
    first_hz: float
    last_hz: float


def draw_sound(seed: int, rate: int | None = None) -> Sound:
    """Synthesises the sound of `seed`; `rate` is drawn from the seed if it is left out."""
    rng = Random(seed)
    beeps, pitch, slide = 0, None, None
    kind = rng.random()
    if kind < SLIDING:
        slide = rng.choice(SLIDES)
        tones = [_sliding(slide, rng)]
    elif kind < SLIDING + SILENT:
        tones = []
    else:
        beeps, pitch = rng.randint(1, MAX_BEEPS), rng.choice(sorted(PITCHES))
        tones = _beeps(beeps, PITCHES[pitch], rng)
    own_rate = rng.choice(RATES)
    rate = rate or own_rate
    end_s = max((tone.start_s + tone.length_s for tone in tones), default=rng.uniform(0, MAX_S))
    length_s = min(MAX_S, max(MIN_S, end_s + rng.uniform(0.02, 0.6)))
    peak = 10 ** rng.uniform(-1.6, -0.05)
    mono = _render(tones, length_s, rate, rng) * np.float32(peak)
    gains = [1.0, rng.uniform(0.3, 1.0)] if rng.random() < 0.5 else [1.0]
    samples = np.stack([mono * np.float32(gain) for gain in gains])
    return Sound(_with_noise(samples, peak, bool(tones), rng), rate, beeps, pitch, slide)


def _beeps(count: int, band: tuple[float, float], rng: Random) -> list[_Tone]:
    longest = MAX_LONE_BEEP_S if count == 1 else MAX_BEEP_S
    usual_s = math.exp(rng.uniform(math.log(MIN_BEEP_S), math.log(longest)))
    hz = math.exp(rng.uniform(*map(math.log, band)))
    start_s = rng.uniform(0.0, 0.3)
    tones = []
    for _ in range(count):
        length_s = max(MIN_BEEP_S, usual_s * rng.uniform(1 - _LENGTH_SPREAD, 1))
        near_hz = hz * rng.uniform(1 - _PITCH_SPREAD, 1 + _PITCH_SPREAD)
        tones.append(_Tone(start_s, length_s, near_hz, near_hz))
        start_s += length_s + rng.uniform(MIN_GAP_S, MAX_GAP_S)
    return tones


def _sliding(slide: str, rng: Random) -> _Tone:
    lowest, highest = SLIDE_HZ
    factor = rng.uniform(MIN_SLIDE, MAX_SLIDE)
    low_hz = math.exp(rng.uniform(math.log(lowest), math.log(highest / factor)))
    ends = (low_hz, low_hz * factor)
    start_s = rng.uniform(0.0, 0.3)
    length_s = rng.uniform(MIN_SLIDE_S, MAX_S - start_s - 0.05)
    return _Tone(start_s, length_s, *(ends if slide == "rises" else ends[::-1]))


def _render(tones: list[_Tone], length_s: float, rate: int, rng: Random) -> Samples:
    """float32 [samples], the tones at a peak of 1 without noise."""
    samples = np.zeros(round(length_s * rate), np.float32)
    overtones = [rng.uniform(0, _MAX_OVERTONE) for _ in range(2)] if rng.random() < 0.5 else []
    for tone in tones:
        phase_at, ramp_s = rng.uniform(0, math.tau), rng.uniform(0.004, 0.02)
        start = round(tone.start_s * rate)
        count = min(round(tone.length_s * rate), len(samples) - start)
        at_s = np.arange(count, dtype=np.float32) / np.float32(rate)
        phase = phase_at + _turns(tone, at_s) * np.float32(math.tau)
        wave_form = np.sin(phase)
        total = 1.0
        for number, share in enumerate(overtones, 2):
            if number * max(tone.first_hz, tone.last_hz) < _MAX_OVERTONE_HZ:
                wave_form += np.float32(share) * np.sin(number * phase)
                total += share
        ramp = np.minimum(at_s, count / rate - at_s) / np.float32(ramp_s)
        samples[start : start + count] = wave_form * np.clip(ramp, 0, 1) / np.float32(total)
    return samples


def _turns(tone: _Tone, at_s: Samples) -> Samples:
    """How many periods have passed at the times `at_s`, modulo 1; the frequency grows by equal factors in
    equal times."""
    if tone.first_hz == tone.last_hz:
        turns = at_s.astype(np.float64) * tone.first_hz
    else:
        growth = math.log(tone.last_hz / tone.first_hz) / tone.length_s
        turns = tone.first_hz / growth * np.expm1(at_s.astype(np.float64) * growth)
    return (turns % 1.0).astype(np.float32)


def _with_noise(samples: Samples, peak: float, audible: bool, rng: Random) -> Samples:
    """White noise added in four of five sounds, the same on all channels; nothing exceeds 1."""
    noise = np.random.default_rng(rng.getrandbits(64))
    loudness = peak * 10 ** (-rng.uniform(MIN_SNR_DB if audible else 40.0, MAX_SNR_DB) / 20)
    if rng.random() < 0.8:
        samples = samples + np.float32(loudness) * noise.standard_normal(samples.shape[1], np.float32)
    return samples.clip(-1, 1)


def heard(sound: Sound, rate: int = MODEL_RATE) -> Samples:
    """float32 [samples]: the mean of the channels at `rate`, brought there in the frequency domain."""
    mono: Samples = sound.samples.mean(axis=0, dtype=np.float32)
    if sound.rate == rate:
        return mono
    count = round(len(mono) * rate / sound.rate)
    spectrum = np.fft.rfft(mono)
    kept = np.zeros(count // 2 + 1, spectrum.dtype)
    both = min(len(kept), len(spectrum))
    kept[:both] = spectrum[:both]
    return (np.fft.irfft(kept, count) * (count / len(mono))).astype(np.float32)


def band_limited(samples: Samples, highest_hz: float, rate: int = MODEL_RATE) -> Samples:
    """float32 [samples] without anything above `highest_hz`, as low rates and lossy coding leave it."""
    length = round(
        MAX_S * rate
    )  # A round number, whatever the sound's length: transforms of primes are slow.
    spectrum = np.fft.rfft(samples, length)
    spectrum[math.ceil(highest_hz * length / rate) :] = 0
    return np.fft.irfft(spectrum, length)[: len(samples)].astype(np.float32)


def write_sound(sound: Sound, path: Path) -> None:
    """Writes the sound in the format that the path's suffix names, one of `FORMATS`. All but WAV need
    PyAV."""
    path.write_bytes(sound_file(sound, path.suffix))


def sound_file(sound: Sound, suffix: str) -> bytes:
    """The bytes of the sound's file; see `write_sound`."""
    levels = np.ascontiguousarray(np.rint(sound.samples.T * 32767).astype("<i2"))
    buffer = io.BytesIO()
    if suffix == ".wav":
        with wave.open(buffer, "wb") as file:
            file.setparams((levels.shape[1], 2, sound.rate, len(levels), "NONE", ""))
            file.writeframes(levels.tobytes())
        return buffer.getvalue()
    import av

    layout = "stereo" if levels.shape[1] == 2 else "mono"
    rate = _OPUS_RATE if suffix == ".ogg" else sound.rate
    with av.open(buffer, "w", format=suffix[1:]) as container:
        stream: Any = container.add_stream(_ENCODERS[suffix], rate=rate, layout=layout)
        stream.bit_rate = _BITS_PER_S  # FFmpeg's own choice for MP3 at low rates is as little as 11 kbit/s.
        frame = av.AudioFrame.from_ndarray(levels.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate = sound.rate
        for packets in (stream.encode(frame), stream.encode(None)):
            container.mux(packets)
    return buffer.getvalue()


def reread(sound: Sound, suffix: str) -> Sound:
    """The sound as a worker hears it from a file of that format: one channel at `MODEL_RATE`. Needs PyAV."""
    from dynamo.trtllm.config import AudioLimits
    from dynamo.trtllm.multimodal.audio.reading import read_audio

    read = read_audio(sound_file(sound, suffix), MODEL_RATE, AudioLimits())
    return Sound(read.samples[None], MODEL_RATE, sound.beeps, sound.pitch, sound.slide)
