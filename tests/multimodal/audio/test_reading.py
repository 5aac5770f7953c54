"""Sounds of every kind that is taken, odd and broken ones: the right samples, or a refusal in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynamo.trtllm.config import AudioLimits
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.audio.reading import read_audio
from media.clips import clip, sound_only
from media.sounds import Samples, encoded, tone, wav

LIMITS = AudioLimits()
RATE = 16000


def read(data: bytes, rate: int = RATE, **limits: Any) -> Samples:
    sound = read_audio(data, rate, replace(LIMITS, **limits))
    assert (sound.samples.dtype, sound.samples.ndim, sound.rate) == (np.float32, 1, rate)
    assert not sound.samples.flags.writeable
    return sound.samples.astype(np.float64)


def refusal(data: bytes, **limits: Any) -> str:
    with pytest.raises(ClientFault) as caught:
        read(data, **limits)
    return caught.value.message


def hertz_of(samples: Samples, rate: int = RATE) -> float:
    """The loudest frequency."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


def level_of(samples: Samples) -> float:
    """Amplitude of a sine, from the middle half."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    return float(np.sqrt(2 * np.mean(middle**2)))


@pytest.mark.parametrize(
    ("bits", "floating"), [(8, False), (16, False), (24, False), (32, False), (32, True), (64, True)]
)
def test_samples_of_a_wav_file_come_through_as_they_are(bits: int, floating: bool) -> None:
    wave = tone(0.5)
    found = read(wav(wave, bits=bits, floating=floating))
    assert found.shape == wave.shape
    assert np.abs(found - wave).max() < 2.0 ** -(min(bits, 24) - 2)


@pytest.mark.parametrize(
    "made",
    [
        {"container": "flac", "codec": "flac"},
        {"container": "mp3", "codec": "libmp3lame"},
        {"container": "mp3", "codec": "libmp3lame", "tags": {"title": "a tone"}},
        {"container": "ogg", "codec": "libopus"},
        {"container": "ogg", "codec": "vorbis", "layout": "stereo"},
        {"container": "wav", "codec": "pcm_alaw", "rate": 8000},
        {"container": "wav", "codec": "pcm_mulaw", "rate": 8000},
        {"container": "wav", "codec": "adpcm_ima_wav"},
        {"container": "wav", "codec": "pcm_s16le", "options": {"rf64": "always"}},
    ],
    ids=str,
)
def test_every_kind_of_file_gives_the_tone_that_was_put_into_it(made: dict[str, Any]) -> None:
    rate = made.setdefault("rate", 48000)
    wave = tone(1.0, rate=rate)
    found = read(encoded(np.stack([wave, wave]) if made.get("layout") == "stereo" else wave, **made))
    assert hertz_of(found) == pytest.approx(440, abs=2)
    assert level_of(found) == pytest.approx(0.5, rel=0.05)
    assert len(found) / RATE == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("source", [8000, 11025, 16000, 22050, 32000, 44100, 48000, 96000, 192000])
@pytest.mark.parametrize("rate", [16000, 24000])
def test_any_rate_is_brought_to_the_models(source: int, rate: int) -> None:
    found = read(wav(tone(0.5, rate=source), rate=source), rate)
    assert len(found) == pytest.approx(0.5 * rate, abs=2)
    assert hertz_of(found, rate) == pytest.approx(440, abs=3)
    assert level_of(found) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("channels", range(1, 9))
def test_channels_are_mixed_by_their_mean(channels: int) -> None:
    wave = np.stack([tone(0.3) * (number + 1) / channels for number in range(channels)])
    found = read(wav(wave))
    assert np.abs(found - wave.mean(axis=0)).max() < 2e-4


def test_channels_that_cancel_out_are_silence() -> None:
    assert np.abs(read(wav(np.stack([tone(0.3), -tone(0.3)])))).max() < 1e-4


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF], ids=["0", "2**32 - 1"])
def test_a_recording_that_did_not_know_its_length_is_read_to_its_end(size: int) -> None:
    assert len(read(wav(tone(0.4), size=size))) == int(0.4 * RATE)


def test_the_same_sound_has_another_name_at_another_rate() -> None:
    data = wav(tone(0.1))
    names = {read_audio(data, rate, LIMITS).digest for rate in (16000, 16000, 24000)}
    assert len(names) == 2


def test_what_a_clipped_float_file_overshoots_stays() -> None:
    assert np.abs(read(wav(tone(0.2, level=1.5), bits=32, floating=True))).max() == pytest.approx(
        1.5, rel=0.01
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the sound is empty"),
        (
            b"hello, this is a text",
            "the type text is not accepted as a sound; accepted are WAV, FLAC, MP3, Ogg (Vorbis, Opus)",
        ),
        (
            bytes(range(128, 192)),
            "not a sound of a known type; accepted are WAV, FLAC, MP3, Ogg (Vorbis, Opus)",
        ),
        (
            b"\x89PNG\r\n\x1a\n" + bytes(40),
            "the type PNG is not accepted as a sound; accepted are WAV, FLAC, MP3, Ogg (Vorbis, Opus)",
        ),
        (b"RIFF\x04\x00\x00\x00WAVE", "the sound is damaged or incomplete"),
        (wav(np.zeros(0)), "the file holds no sound"),
        (b"fLaC" + bytes(40), "the sound is damaged or incomplete"),
        (b"OggS" + bytes(60), "the sound is damaged or incomplete"),
        (b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10), "the sound is damaged or incomplete"),
    ],
    ids=["empty", "text", "bytes", "png", "bare wav", "no samples", "bare flac", "bare ogg", "bare tag"],
)
def test_what_is_no_sound_is_named(data: bytes, words: str) -> None:
    assert refusal(data) == words


def test_a_container_of_clips_is_none_of_the_kinds_taken() -> None:
    for data in (clip(4), sound_only(), sound_only("webm")):
        assert refusal(data).endswith(
            "is not accepted as a sound; accepted are WAV, FLAC, MP3, Ogg (Vorbis, Opus)"
        )


def test_samples_that_are_no_numbers_are_refused() -> None:
    wave = tone(0.2)
    wave[100] = np.nan
    assert refusal(wav(wave, bits=32, floating=True)) == "the sound holds samples that are no numbers"


@pytest.mark.parametrize("loudest", [1e10, 3e38])
def test_samples_whose_spectrum_no_model_can_be_given_are_refused(loudest: float) -> None:
    wave = tone(0.2)
    wave[100] = loudest
    words = "the sound holds samples far beyond full scale, which is 1"
    assert refusal(wav(wave, bits=32, floating=True)) == words


def test_a_file_of_floats_on_the_scale_of_whole_numbers_is_read() -> None:
    found = read(wav(tone(0.2) * 2**31, bits=32, floating=True))
    assert level_of(found) == pytest.approx(2**30, rel=0.01)


@pytest.mark.parametrize(
    ("made", "rate"),
    [
        ({"container": "flac", "codec": "flac"}, 48000),
        ({"container": "mp3", "codec": "libmp3lame"}, 48000),
        ({"container": "ogg", "codec": "libopus"}, 48000),
    ],
    ids=["flac", "mp3", "ogg"],
)
def test_a_sound_that_ends_early_is_refused_and_never_answered_in_part(
    made: dict[str, Any], rate: int
) -> None:
    data = encoded(tone(2.0, rate=rate), rate=rate, **made)
    for part in (0.9, 0.5, 0.2):
        words = refusal(data[: int(len(data) * part)])
        assert "cut short" in words or "ends after" in words or "damaged" in words


def test_a_wav_file_that_ends_early_is_cut_short() -> None:
    data = wav(tone(1.0))
    for end in (len(data) - 1, len(data) // 2, 60):
        assert refusal(data[:end]) == "the sound is cut short: the file ends before it says it does"


def test_damage_in_the_middle_is_named_by_its_second() -> None:
    data = bytearray(encoded(tone(4.0, rate=48000), container="flac", codec="flac"))
    data[len(data) // 2 : len(data) // 2 + 2000] = bytes(2000)
    assert refusal(bytes(data)).startswith(("the sound is damaged at ", "the sound ends after "))


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (wav(tone(2.0)), {"max_duration_s": 1.0}, "the sound takes 2.0 s; this worker takes at most 1 s"),
        (
            wav(np.zeros((6, 800))),
            {"max_channels": 2},
            "the sound has 6 channels; this worker takes at most 2",
        ),
    ],
    ids=["duration", "channels"],
)
def test_a_limit_is_said_with_both_numbers(data: bytes, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(LimitFault) as caught:
        read(data, **limits)
    assert caught.value.message == words


@pytest.mark.parametrize(
    ("container", "codec"), [("ogg", "libopus"), ("mp3", "libmp3lame"), ("flac", "flac")]
)
def test_a_sound_of_just_the_longest_duration_is_taken_whole(container: str, codec: str) -> None:
    data = encoded(tone(2.0, rate=48000), container=container, codec=codec)
    assert len(read(data, max_duration_s=2.0)) == 2 * RATE


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_sound_that_hides_its_length_is_stopped_at_the_limit(size: int) -> None:
    with pytest.raises(LimitFault, match=r"this worker takes at most 0\.5 s"):
        read(wav(tone(3.0), size=size), max_duration_s=0.5)


@pytest.mark.parametrize("rate", [1, 999, 800_000])
def test_a_rate_that_no_recorder_has_is_refused(rate: int) -> None:
    assert "samples a second" in refusal(wav(np.zeros(500), rate=rate))


@pytest.mark.parametrize(
    "data",
    [
        wav(tone(0.2)),
        encoded(tone(0.3, rate=48000), container="flac", codec="flac"),
        encoded(tone(0.3, rate=48000), container="mp3", codec="libmp3lame"),
        encoded(tone(0.3, rate=48000), container="ogg", codec="libopus"),
    ],
    ids=["wav", "flac", "mp3", "ogg"],
)
def test_changed_bytes_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        changed = bytearray(data)
        for at in rng.integers(0, min(len(data), 400), int(rng.integers(1, 10))):
            changed[at] = int(rng.integers(256))
        try:
            samples = read(bytes(changed), max_duration_s=5.0)
        except (
            ClientFault,
            MemoryError,
        ):  # a size that was changed; the process that reads turns it into words
            continue
        assert 0 < len(samples) <= 5 * RATE
        assert np.isfinite(samples).all()
