"""What the trainings of the two demo models do not share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from . import artifacts, batches, dialogues, evaluation, forward
from .audio import artifacts as audio_artifacts
from .audio import batches as audio_batches
from .audio import dialogues as audio_dialogues
from .audio import evaluation as audio_evaluation
from .audio.sounds import draw_sound
from .evaluation import Score
from .forward import Losses
from .pictures import draw

_TOKENIZER_DIALOGUES = 20_000


class Recipe(ABC):
    """One model: its files, its data, its loss and its scores."""

    max_weights_bytes: int

    @abstractmethod
    def new_tokenizer(self, seed: int) -> Tokenizer:
        """A tokenizer trained on the texts of the dialogues."""

    @abstractmethod
    def write_artifacts(self, directory: Path, tokenizer: Tokenizer) -> None:
        """Writes every file of the model directory except `model.safetensors` and the model card."""

    @abstractmethod
    def new_model(self, directory: Path, start: Path | None) -> Any:
        """A model of `directory`'s configuration in float32, with the weights in `start` if that is given."""

    @abstractmethod
    def batches(
        self, tokenizer: Tokenizer, rows: int, steps: int, seed: int, progress: Synchronized[float]
    ) -> torch.utils.data.Dataset[Any]:
        """`steps` batches of `rows` dialogues; `progress` (0..1) is set by the training loop."""

    @abstractmethod
    def losses(self, model: Any, batch: Any) -> Losses:
        """The loss over one of the batches."""

    @abstractmethod
    def published_name(self, name: str) -> str | None:
        """What the published checkpoints of this architecture call a tensor; None: it is not in them."""

    @abstractmethod
    def scores(self, directory: Path, device: str, n: int, seed: int) -> dict[str, Score]:
        """The scores of the model in `directory`, `n` cases of each kind."""


class _Pictures(Recipe):
    max_weights_bytes = artifacts.MAX_WEIGHTS_BYTES

    def new_tokenizer(self, seed: int) -> Tokenizer:
        return artifacts.train_tokenizer(self._texts(Random(seed)))

    def _texts(self, rng: Random) -> Iterator[str]:
        for _ in range(_TOKENIZER_DIALOGUES):
            drawn = dialogues.draw_dialogue(rng, lambda: draw(rng.getrandbits(60), (8, 8)), dialogues.Mix())
            yield from (item for turn in drawn for item in turn.content if isinstance(item, str))

    def write_artifacts(self, directory: Path, tokenizer: Tokenizer) -> None:
        artifacts.write_artifacts(directory, tokenizer)

    def new_model(self, directory: Path, start: Path | None) -> Any:
        from transformers import Qwen2VLForConditionalGeneration

        return _model(Qwen2VLForConditionalGeneration, directory, start)

    def batches(
        self, tokenizer: Tokenizer, rows: int, steps: int, seed: int, progress: Synchronized[float]
    ) -> torch.utils.data.Dataset[Any]:
        return batches.DialogueBatches(tokenizer, rows, steps, seed, progress)

    def losses(self, model: Any, batch: Any) -> Losses:
        return forward.losses(model, batch)

    def published_name(self, name: str) -> str | None:
        """The head is tied to the embeddings."""
        if name == "lm_head.weight":
            return None
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")

    def scores(self, directory: Path, device: str, n: int, seed: int) -> dict[str, Score]:
        return evaluation.evaluate(*evaluation.load(directory, device), n=n, seed=seed)


class _Audio(Recipe):
    max_weights_bytes = audio_artifacts.MAX_WEIGHTS_BYTES

    def new_tokenizer(self, seed: int) -> Tokenizer:
        return artifacts.train_tokenizer(self._texts(Random(seed)), audio_artifacts.SPECIAL_TOKENS)

    def _texts(self, rng: Random) -> Iterator[str]:
        sounds = [draw_sound(seed, 8000) for seed in range(200)]
        for _ in range(_TOKENIZER_DIALOGUES):
            drawn = audio_dialogues.draw_dialogue(rng, lambda: rng.choice(sounds), audio_dialogues.Mix())
            yield from (item for turn in drawn for item in turn.content if isinstance(item, str))

    def write_artifacts(self, directory: Path, tokenizer: Tokenizer) -> None:
        audio_artifacts.write_artifacts(directory, tokenizer)

    def new_model(self, directory: Path, start: Path | None) -> Any:
        """Its positions are Whisper's sinusoids, which are not trained."""
        from transformers import Qwen2AudioForConditionalGeneration
        from transformers.models.whisper.modeling_whisper import sinusoids

        model = _model(Qwen2AudioForConditionalGeneration, directory, start)
        positions = model.model.audio_tower.embed_positions.weight
        positions.data.copy_(sinusoids(*positions.shape))
        return model

    def batches(
        self, tokenizer: Tokenizer, rows: int, steps: int, seed: int, progress: Synchronized[float]
    ) -> torch.utils.data.Dataset[Any]:
        return audio_batches.DialogueBatches(tokenizer, rows, steps, seed, progress)

    def losses(self, model: Any, batch: Any) -> Losses:
        return audio_batches.losses(model, batch)

    def published_name(self, name: str) -> str | None:
        if name == "lm_head.weight":
            return "language_model.lm_head.weight"
        name = name.removeprefix("model.")
        return name.replace("language_model.", "language_model.model.", 1)

    def scores(self, directory: Path, device: str, n: int, seed: int) -> dict[str, Score]:
        return audio_evaluation.evaluate(*audio_evaluation.load(directory, device), n=n, seed=seed)


PICTURES: Recipe = _Pictures()
AUDIO: Recipe = _Audio()


def recipe_of(directory: Path) -> Recipe:
    """The recipe of the model in `directory`, by its configuration."""
    kind = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    return AUDIO if kind == "qwen2_audio" else PICTURES


def _model(architecture: Any, directory: Path, start: Path | None) -> Any:
    from transformers import AutoConfig

    if start is not None:
        return architecture.from_pretrained(start, dtype=torch.float32, local_files_only=True)
    return architecture(AutoConfig.from_pretrained(directory, local_files_only=True))
