"""The synthesised sounds, their files, their picture, and what is said about them."""

from __future__ import annotations

import io
import wave
from collections import Counter
from random import Random

import numpy as np
import pytest

from dynamo.trtllm.demo.audio import dialogues
from dynamo.trtllm.demo.audio.dialogues import Mix, draw_dialogue
from dynamo.trtllm.demo.audio.sounds import (
    FORMATS,
    MAX_BEEPS,
    MAX_S,
    MIN_S,
    MODEL_RATE,
    PITCHES,
    RATES,
    SLIDES,
    Samples,
    Sound,
    band_limited,
    draw_sound,
    heard,
    reread,
    sound_file,
)
from dynamo.trtllm.demo.audio.waveform import waveform

BLOCK = 160


def loudness(samples: Samples) -> Samples:
    """The root mean square of every ten milliseconds, as a share of the loudest."""
    blocks = samples[: len(samples) // BLOCK * BLOCK].reshape(-1, BLOCK)
    levels: Samples = np.sqrt((blocks**2).mean(axis=1))
    return levels / levels.max()


def parts(samples: Samples) -> list[Samples]:
    """The stretches that are louder than half of the loudest."""
    loud = np.flatnonzero(np.diff(np.pad(loudness(samples) > 0.5, 1).astype(int)))
    return [samples[start * BLOCK : end * BLOCK] for start, end in loud.reshape(-1, 2)]


def main_hz(samples: Samples) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * MODEL_RATE / len(samples))


def test_a_seed_always_makes_the_same_sound_whatever_its_rate() -> None:
    assert np.array_equal(draw_sound(5).samples, draw_sound(5).samples)
    for seed in range(20):
        one, other = draw_sound(seed, 16000), draw_sound(seed, 48000)
        assert one.caption == other.caption
        assert abs(one.samples.shape[1] / 16000 - other.samples.shape[1] / 48000) < 1e-3


def test_every_number_pitch_direction_rate_and_channel_count_is_drawn_within_the_limits() -> None:
    sounds = [draw_sound(seed) for seed in range(300)]
    captions = Counter(sound.caption for sound in sounds)
    assert len(captions) == MAX_BEEPS * len(PITCHES) + len(SLIDES) + 1
    assert {"one low beep.", "five high beeps.", "a tone that falls.", "silence."} <= captions.keys()
    assert {sound.rate for sound in sounds} == set(RATES)
    assert {len(sound.samples) for sound in sounds} == {1, 2}
    lengths = [sound.samples.shape[1] / sound.rate for sound in sounds]
    assert MIN_S <= min(lengths) <= max(lengths) <= MAX_S
    assert max(float(np.abs(sound.samples).max()) for sound in sounds) <= 1


@pytest.mark.parametrize("seed", range(40))
def test_what_the_caption_says_is_what_can_be_measured(seed: int) -> None:
    sound = draw_sound(seed)
    samples = heard(sound)
    if sound.pitch is not None:
        found = parts(samples)
        assert len(found) == sound.beeps
        low, high = PITCHES[sound.pitch]
        assert all(0.95 * low < main_hz(part) < 1.05 * high for part in found)
    elif sound.slide is not None:
        (tone,) = parts(samples)
        fifth = len(tone) // 5
        rises = main_hz(tone[-fifth:]) > 1.2 * main_hz(tone[:fifth])
        falls = main_hz(tone[:fifth]) > 1.2 * main_hz(tone[-fifth:])
        assert (rises, falls) == (sound.slide == "rises", sound.slide == "falls")
    else:
        assert np.abs(samples).max() < 0.05


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("seed", [3, 8, 11])
def test_a_file_holds_the_sound_as_a_worker_hears_it(suffix: str, seed: int) -> None:
    sound = draw_sound(seed)
    read, expected = reread(sound, suffix), heard(sound)
    assert (read.rate, len(read.samples), read.caption) == (MODEL_RATE, 1, sound.caption)
    both = min(read.samples.shape[1], len(expected))
    assert both > len(expected) - 0.01 * MODEL_RATE
    levels = [loudness(samples[:both]) for samples in (read.samples[0], expected)]
    assert np.corrcoef(*levels)[0, 1] > 0.98


def test_a_wav_file_needs_no_library_and_keeps_rate_and_channels() -> None:
    sound = draw_sound(next(seed for seed in range(99) if draw_sound(seed).samples.shape[0] == 2), 22050)
    with wave.open(io.BytesIO(sound_file(sound, ".wav"))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (22050, 2, 2)
        assert file.getnframes() == sound.samples.shape[1]


def test_frequencies_above_a_limit_can_be_taken_away() -> None:
    at_s = np.arange(8000, dtype=np.float32) / MODEL_RATE
    low, high = (np.sin(2 * np.pi * hz * at_s) for hz in (500, 6000))
    middle = slice(500, -500)
    assert np.abs(band_limited(low + high, 3500)[middle] - low[middle]).max() < 0.05


def test_a_picture_shows_the_waveform_above_the_spectrum_and_the_text_below() -> None:
    at_s = np.arange(2 * MODEL_RATE, dtype=np.float32) / MODEL_RATE
    samples = np.where(at_s < 1, np.sin(2 * np.pi * 3000 * at_s), 0).astype(np.float32)
    image = waveform(samples, "one high beep.")
    pixels = np.asarray(image.convert("L"))
    assert image.size == (640, 120 + 4 + 120 + 28)
    wave_form, spectrum = pixels[:120], pixels[124:244]
    assert (wave_form[:, 20:300] < 128).mean() > 0.8
    assert (wave_form[:, 340:] < 128).mean() < 0.05
    assert abs(int(spectrum[:, 20:300].mean(axis=1).argmin()) - 30) <= 2  # 3000 of 4000 Hz, from below
    assert pixels[244:].min() < 80
    assert waveform(samples).size == (640, 244)


def test_dialogues_about_sounds_end_with_what_is_heard() -> None:
    rng, said = Random(4), Counter[str]()
    sounds = [draw_sound(seed, 8000) for seed in range(60)]
    for _ in range(300):
        dialogue = draw_dialogue(rng, lambda: rng.choice(sounds), Mix(several_turns=0))
        media = [item for turn in dialogue for item in turn.content if isinstance(item, Sound)]
        (answer,) = dialogue[-1].content
        if not media:
            kinds = {dialogues.GREETING, dialogues.IDENTITY, dialogues.NO_SOUND, dialogues.THANKS}
            said["none"] += answer in kinds
        elif answer == " ".join(item.caption for item in media):
            said["several" if len(media) > 1 else "one"] += 1
        else:
            answers = [dialogues.count_answer, dialogues.slide_answer, dialogues.pitch_answer]
            said[next(each.__name__ for each in answers if each(media[0]) == answer)] += 1
    assert said.total() == 300
    assert said.keys() == {"none", "several", "one", "count_answer", "slide_answer", "pitch_answer"}


def test_answers_are_in_the_number_of_the_beeps() -> None:
    silence = np.zeros((1, 8000), np.float32)
    one, three = (Sound(silence, 8000, count, "low") for count in (1, 3))
    tone, nothing = Sound(silence, 8000, slide="falls"), Sound(silence, 8000)
    asked = (dialogues.count_answer, dialogues.slide_answer, dialogues.pitch_answer)
    assert [[answer(sound) for answer in asked] for sound in (one, three, tone, nothing)] == [
        ["one beep.", "it neither rises nor falls.", "it is low."],
        ["three beeps.", "it neither rises nor falls.", "they are low."],
        ["no beeps.", "it falls.", "it falls."],
        ["no beeps.", "it neither rises nor falls.", "silence."],
    ]
