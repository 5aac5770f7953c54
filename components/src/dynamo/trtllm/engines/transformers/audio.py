"""Sounds: from samples to features in batches, by the audio tower of Qwen2-Audio,
and how many tokens a sound takes.

The samples were resampled before (`multimodal.kinds.audio`). As in `encoder.py`, `preprocess` and `tokens_of`
may run in any thread and touch no weights; `encode` belongs to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.masking_utils import create_bidirectional_mask

from dynamo.trtllm.audio_rule import AudioRule
from dynamo.trtllm.core import DecodedAudio, DecodedMedia, EncodedMedia
from dynamo.trtllm.engines.port import MediaInput
from dynamo.trtllm.engines.transformers.encoder import TowerInputs
from dynamo.trtllm.engines.transformers.loading import LoadedModel, unsupported
from dynamo.trtllm.engines.transformers.tokens import AudioTokens
from dynamo.trtllm.errors import ClientFault, LimitFault


class AudioEncoder:
    """The audio side of one model. Raises `StartupError` where its files do not belong together."""

    def __init__(self, loaded: LoadedModel) -> None:
        audio = loaded.tokens["audio"]
        assert isinstance(audio, AudioTokens)
        self._loaded, self._audio = loaded, audio
        self._extractor = loaded.processor.feature_extractor
        self._tower = loaded.model.base_model.audio_tower
        self._projector = loaded.model.base_model.multi_modal_projector
        config = self._tower.config
        made = (self._extractor.feature_size, audio.positions(self._extractor.nb_max_frames))
        if made != (config.num_mel_bins, config.max_source_positions):
            raise unsupported(
                loaded.architecture,
                "its feature extractor makes other spectrograms than its audio encoder takes",
            )

    def input(self, context_length: int) -> MediaInput:
        """How the engine takes sounds, in prompts of at most `context_length` tokens."""
        rate = self._extractor.sampling_rate
        rule = AudioRule(rate=rate, max_duration_s=self._extractor.n_samples / rate)
        return MediaInput(placeholder_id=self._audio.feature, rule=rule, encodes=True, takes_encoded=True)

    def preprocess(self, item: DecodedMedia) -> TowerInputs:
        """The spectrogram, filled up with silence to the length that the model takes.

        Raises `ClientFault` for a sound too short to be heard,
        and `LimitFault` for one of which the end would be lost.
        """
        if not isinstance(item, DecodedAudio):
            raise ClientFault(f"this model takes no {item.kind}")
        rows = self._rows_of(len(item.samples))
        if rows < 1:
            raise ClientFault(
                f"the sound is too short: this model hears sounds from {self._shortest_s():.3f} s on"
            )
        if len(item.samples) > self._extractor.n_samples:
            longest_s = self._extractor.n_samples / self._extractor.sampling_rate
            raise LimitFault(
                f"the sound takes {item.duration_s:.1f} s; this model hears at most {longest_s:g} s"
            )
        output = self._extractor(
            [item.samples],
            sampling_rate=item.rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        tensors = {"input_features": output["input_features"], "heard": output["attention_mask"]}
        return TowerInputs(item.digest, tensors, token_ids=(self._audio.feature,) * rows)

    def encode(self, sounds: Sequence[TowerInputs]) -> list[EncodedMedia]:
        """Features of `sounds` in one pass through the audio tower."""
        features = torch.cat([sound.tensors["input_features"] for sound in sounds])
        frames = torch.cat([sound.tensors["heard"] for sound in sounds]).sum(-1)
        hidden = self._tower(
            features.to(self._loaded.device, self._loaded.dtype), attention_mask=self._mask(frames)
        ).last_hidden_state
        levels = self._projector(hidden)
        return [
            EncodedMedia(
                "audio",
                sound.digest,
                {"features": rows[: len(sound.token_ids)].contiguous()},
                sound.token_ids,
            )
            for sound, rows in zip(sounds, levels, strict=True)
        ]

    def _mask(self, frames: torch.Tensor) -> Any:
        """Hides the silence that spectrograms were filled up with,
        as `Qwen2AudioModel.forward` does (Transformers 5.24)."""
        device, config = self._loaded.device, self._tower.config
        heard = torch.tensor([self._audio.positions(count) for count in frames.tolist()], device=device)
        positions = torch.arange(config.max_source_positions, device=device)
        return create_bidirectional_mask(
            config=config,
            inputs_embeds=torch.zeros(
                len(frames), len(positions), 1, dtype=self._loaded.dtype, device=device
            ),
            attention_mask=(positions < heard[:, None]).long(),
        )

    def tokens_of(self, sizes: tuple[int, ...], options: Mapping[str, Any]) -> int | None:
        """Length of the expansion of (samples,), or None for more or fewer than the model hears."""
        rows = self._rows_of(sizes[0])
        return rows if rows > 0 and sizes[0] <= self._extractor.n_samples else None

    def _rows_of(self, samples: int) -> int:
        """The extractor makes a frame of every `hop_length` samples, and of what is left."""
        frames = min(-(-samples // self._extractor.hop_length), self._extractor.nb_max_frames)
        return self._audio.rows(frames)

    def _shortest_s(self) -> float:
        frames = next(count for count in range(1, 100) if self._audio.rows(count) > 0)
        samples: int = (frames - 1) * self._extractor.hop_length + 1
        return samples / int(self._extractor.sampling_rate)
