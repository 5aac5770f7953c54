"""Training batches of the audio model: dialogues about sounds as token ids and spectra, made on worker
processes.

The spectra are Transformers' own (`WhisperFeatureExtractor`), and the forward pass is the model's own; what
is done here is what `Qwen2AudioProcessor` does, for many dialogues at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.sharedctypes import Synchronized
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from ..artifacts import END_OF_TEXT, TURN_END, TURN_START, token_id
from ..batches import IGNORED, Ids, answer_labels
from ..forward import Losses
from ..phrasing import Turn
from ..pictures import FIRST_TRAINING_SEED
from .artifacts import AUDIO, AUDIO_END, AUDIO_START, CHUNK_S, MEL_BINS
from .dialogues import Dialogue, Mix, draw_dialogue
from .sounds import FORMATS, MODEL_RATE, Samples, Sound, band_limited, draw_sound, heard, reread

_RESAMPLED, _CODED, _BAND_LIMITED = 0.35, 0.25, 0.2
"""The shares of training sounds drawn at another rate, sent through a file of some format (where there is
PyAV), and left without high frequencies."""


class Batch(NamedTuple):
    """One training step's input: B dialogues of S tokens, padded on the right, and their N sounds in
    order."""

    ids: torch.Tensor
    """int64 [B, S]"""
    mask: torch.Tensor
    """int64 [B, S]: 1 where there is a token."""
    labels: torch.Tensor
    """int64 [B, S]: `IGNORED` where nothing is trained."""
    spectra: torch.Tensor
    """float32 [N, mel bins, frames]"""
    spectra_mask: torch.Tensor
    """int64 [N, frames]: 1 where there is sound."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(*(each.to(device, non_blocking=True) for each in self))


@dataclass(frozen=True)
class Example:
    """One encoded dialogue: S token ids, their labels (`IGNORED` where nothing is trained), its sounds as
    heard."""

    ids: Ids
    labels: Ids
    sounds: list[Samples]


def render(dialogue: Dialogue) -> str:
    """The dialogue as the chat template renders it, one placeholder per sound."""
    count, text = 0, ""
    for turn in dialogue:
        text += f"{TURN_START}{turn.role}\n"
        for item in turn.content:
            if isinstance(item, str):
                text += item
            else:
                count += 1
                text += f"Audio {count}: {AUDIO_START}{AUDIO}{AUDIO_END}\n"
        text += f"{TURN_END}\n"
    return text


def tokens_of(samples: int) -> int:
    """How many tokens a sound of so many samples takes (`Qwen2AudioProcessor`): one for 40 milliseconds."""
    frames = -(-min(samples, CHUNK_S * MODEL_RATE) // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


class Encoder:
    """Turns dialogues into examples for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._audio = token_id(tokenizer, AUDIO)
        self._end = token_id(tokenizer, TURN_END)
        self._answer_start = tokenizer.encode(f"{TURN_START}assistant\n").ids

    def encode(self, dialogue: Dialogue) -> Example:
        """Token ids with placeholders expanded, labels on every answer and the end of its turn, and the
        sounds."""
        sounds = [heard(item) for turn in dialogue for item in turn.content if not isinstance(item, str)]
        ids = np.array(self._tokenizer.encode(render(dialogue)).ids, np.int64)
        counts = np.ones(len(ids), np.int64)
        counts[ids == self._audio] = [tokens_of(len(samples)) for samples in sounds]
        labels = np.repeat(answer_labels(ids, self._answer_start, self._end), counts)
        return Example(np.repeat(ids, counts), labels, sounds)


class Collator:
    """Pads texts on the right, and computes the spectra of all sounds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import WhisperFeatureExtractor

        make: Any = WhisperFeatureExtractor
        self._pad = token_id(tokenizer, END_OF_TEXT)
        self._extractor = make(feature_size=MEL_BINS, chunk_length=CHUNK_S)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """The batch of `examples`, at least one of which holds a sound."""
        length = max(len(example.ids) for example in examples)
        ids = np.full((len(examples), length), self._pad, np.int64)
        labels = np.full((len(examples), length), IGNORED, np.int64)
        mask = np.zeros((len(examples), length), np.int64)
        for row, example in enumerate(examples):
            there = slice(len(example.ids))
            ids[row, there], labels[row, there], mask[row, there] = example.ids, example.labels, 1
        sounds = [samples for example in examples for samples in example.sounds]
        spectra = self._extractor(
            sounds, sampling_rate=MODEL_RATE, return_attention_mask=True, return_tensors="pt"
        )
        return Batch(
            ids=torch.from_numpy(ids),
            mask=torch.from_numpy(mask),
            labels=torch.from_numpy(labels),
            spectra=spectra["input_features"],
            spectra_mask=spectra["attention_mask"].long(),
        )


def losses(model: Any, batch: Batch) -> Losses:
    """Runs `model` (a `Qwen2AudioForConditionalGeneration`) over `batch`."""
    hidden = model.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        input_features=batch.spectra,
        feature_attention_mask=batch.spectra_mask,
        use_cache=False,
    ).last_hidden_state
    targets = batch.labels[:, 1:].flatten()
    trained = (targets != IGNORED).nonzero()[:, 0]
    scores = model.lm_head(hidden[:, :-1].flatten(0, 1)[trained]).float()
    targets = targets[trained]
    return Losses(F.cross_entropy(scores, targets), (scores.argmax(-1) == targets).float().mean())


def mix_at(progress: float) -> Mix:
    """The curriculum of dialogues: one sound and one turn first, all kinds from a quarter of the training
    on."""
    ramp = min(1.0, max(0.0, (progress - 0.1) / 0.15))
    return Mix(several_sounds=0.2 * ramp, several_turns=0.12 * ramp, wild_text=0.06 * ramp)


def training_sound(rng: Random) -> Sound:
    """A sound of a seed that is not held out, as it may come from a file."""
    seed = rng.randrange(FIRST_TRAINING_SEED, 1 << 62)
    sound = draw_sound(seed, None if rng.random() < _RESAMPLED else MODEL_RATE)
    way = rng.random()
    if way < _CODED and find_spec("av"):
        return reread(sound, rng.choice(FORMATS))
    if way < _CODED + _BAND_LIMITED:
        limited = band_limited(heard(sound), rng.uniform(3500, 8000))
        return Sound(limited[None], MODEL_RATE, sound.beeps, sound.pitch, sound.slide)
    return sound


class DialogueBatches(torch.utils.data.Dataset[Batch]):
    """Batch `i` of a training of `steps` batches of `rows` dialogues; `progress` (0..1) is set by the
    training loop."""

    def __init__(
        self, tokenizer: Tokenizer, rows: int, steps: int, seed: int, progress: Synchronized[float]
    ) -> None:
        self._encoder, self._collator = Encoder(tokenizer), Collator(tokenizer)
        self._rows, self._steps, self._seed, self._progress = rows, steps, seed, progress

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        rng = Random(f"{self._seed}/{step}")
        mix = mix_at(self._progress.value)
        dialogues = [draw_dialogue(rng, lambda: training_sound(rng), mix) for _ in range(self._rows)]
        if not any(isinstance(item, Sound) for turns in dialogues for turn in turns for item in turn.content):
            sound = training_sound(rng)
            dialogues[0] = [Turn("user", (sound,)), Turn("assistant", (sound.caption,))]
        return self._collator.collate([self._encoder.encode(dialogue) for dialogue in dialogues])
