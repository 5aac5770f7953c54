"""What the model computes in one step: a context batch or a decode batch.
Knows tensors and sequences, decides nothing."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

import torch

from dynamo.trtllm.engines.transformers.cache import BatchCache, PromptCache
from dynamo.trtllm.engines.transformers.loading import LoadedModel
from dynamo.trtllm.engines.transformers.positions import positions_with_images
from dynamo.trtllm.engines.transformers.sequence import ImageSpan, Sequence
from dynamo.trtllm.engines.transformers.tokens import ImageTokens
from dynamo.trtllm.engines.transformers.vision import moved

Masks = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Chunk:
    """Part of a prompt: `sequence.prompt_ids[start:stop]`. It never ends inside an image."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == len(self.sequence.prompt_ids)

    @property
    def images(self) -> list[ImageSpan]:
        return [span for span in self.sequence.images if self.start <= span.start < self.stop]


class ModelRunner:
    """Forward passes over the prompt caches and the batch cache. Owned by the engine's thread."""

    def __init__(self, loaded: LoadedModel, max_rows: int) -> None:
        self._loaded = loaded
        self._head = loaded.model.get_output_embeddings() if loaded.decoder is not None else None
        self._device = loaded.device
        self.shape = loaded.cache_shape
        self.vocabulary = loaded.logits
        """Tokens that can be chosen: the width of all logits."""
        self.batch = BatchCache(self.shape, max_rows)

    @property
    def device(self) -> torch.device:
        return self._device

    def prepare(self, sequence: Sequence) -> None:
        """Lay out a prompt's media: which tokens take features, which see one another, and the positions."""
        if not sequence.images:
            return
        family, length = self._loaded.family, len(sequence.prompt_ids)
        assert family is not None
        ids = torch.tensor(sequence.prompt_ids)
        spans, features = torch.full((length,), -1), torch.full((length,), -1)
        for number, span in enumerate(sequence.images):
            spans[span.start : span.stop] = number
            features[span.start : span.stop] = self._loaded.features[span.item.kind]
        is_feature = (spans >= 0) & (ids == features)
        sequence.feature_mask = moved(is_feature, self._device)
        if family.mutual:
            sequence.mutual = moved(spans.masked_fill(~is_feature, -1), self._device)
        if family.grid:
            self._place(sequence, ids, is_feature)

    def _place(self, sequence: Sequence, ids: torch.Tensor, is_feature: torch.Tensor) -> None:
        """Set the positions that the model itself gives to a prompt with media (M-RoPE)."""
        if all(span.item.kind == "image" for span in sequence.images):
            tokens = self._loaded.tokens["image"]
            assert isinstance(tokens, ImageTokens)
            images = [(span.start, span.item.extras["image_grid_thw"]) for span in sequence.images]
            positions = positions_with_images(len(ids), images, tokens.merge)
        else:
            positions = self._rope_index(sequence, ids, is_feature)
        # As `generate` goes on: behind the last token, even where a video's times lie further ahead.
        sequence.rope_delta = int(positions[:, -1].max()) + 1 - len(ids)
        sequence.positions = moved(positions, self._device)

    def _rope_index(self, sequence: Sequence, ids: torch.Tensor, is_feature: torch.Tensor) -> torch.Tensor:
        """[3, tokens] by the model's own method."""
        kinds, sizes = torch.zeros_like(ids), {}
        for number, kind in enumerate(("image", "video"), start=1):
            items = [span.item for span in sequence.images if span.item.kind == kind]
            if items:
                key = f"{kind}_grid_thw"
                sizes[key] = torch.tensor([item.extras[key] for item in items])
                kinds[is_feature & (ids == self._loaded.features[kind])] = number
        videos = [span.item for span in sequence.images if span.item.kind == "video"]
        paces = [item.extras["second_per_grid_ts"] for item in videos if "second_per_grid_ts" in item.extras]
        if paces:
            sizes["second_per_grid_ts"] = torch.tensor(paces)
        positions: torch.Tensor = self._loaded.model.base_model.get_rope_index(
            ids[None], kinds[None], **sizes
        )[0]
        return positions[:, 0]

    def prefill(self, chunks: abc.Sequence[Chunk]) -> torch.Tensor:
        """Compute `chunks` in one forward; several only if each is whole.
        Returns the logits [chunks, vocabulary] at their ends.

        A sequence whose prompt is complete holds its keys and values afterwards.
        """
        cache = self._prompt_cache(chunks)
        width = max(c.stop - c.start for c in chunks)
        ids = torch.zeros(len(chunks), width, dtype=torch.long)
        for row, chunk in enumerate(chunks):
            ids[row, : chunk.stop - chunk.start] = torch.tensor(
                chunk.sequence.prompt_ids[chunk.start : chunk.stop]
            )
        masks = cache.masks(width, self._mutual(chunks, cache.filled + width))
        embeds, extra = self._embed(moved(ids, self._device), chunks)
        last = [c.stop - c.start - 1 for c in chunks]
        logits = self._forward(embeds, self._positions(chunks, width), masks, cache, last, extra)
        cache.filled += width
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            sequence.computed = chunk.stop
            if chunk.stop == len(sequence.prompt_ids):
                sequence.keys, sequence.values = cache.row(row, chunk.stop)
                sequence.cache = sequence.positions = sequence.feature_mask = sequence.mutual = None
                sequence.images = ()
        return logits

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for every row of the batch; `tokens` and `positions` are [rows, 1].
        Returns logits [rows, vocabulary]."""
        masks = self.batch.begin_step()
        logits = self.next_logits(tokens, positions, masks, self.batch)
        self.batch.end_step()
        return logits

    def next_logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, masks: Masks, cache: Any
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] after one more token per row, `tokens` and `positions` being [rows, 1].

        Keys and values go into `cache`; `masks` are those of full and of sliding layers.
        """
        return self._forward(self._loaded.embed(tokens), positions, masks, cache, None, {})

    def _forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        masks: Masks,
        cache: Any,
        last: list[int] | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Logits at column `last[row]` of each row, or at the only column."""
        inputs = {
            "inputs_embeds": embeds,
            "position_ids": positions,
            "attention_mask": self._mask(masks),
            "cache": cache,
        }
        if self._loaded.decoder is not None:
            assert self._head is not None
            hidden = self._loaded.decoder(**inputs, **extra, use_cache=True).last_hidden_state
            picked = (
                hidden[:, -1]
                if last is None
                else torch.stack([hidden[row, at] for row, at in enumerate(last)])
            )
            logits: torch.Tensor = self._head(picked)
            return logits
        if last is None:
            return self._loaded.model(**inputs, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]
        columns = sorted(set(last))
        kept = torch.tensor(columns, device=self._device)
        logits = self._loaded.model(**inputs, use_cache=True, logits_to_keep=kept).logits
        return logits[list(range(len(last))), [columns.index(at) for at in last]]

    def _mask(self, masks: Masks) -> Any:
        full, sliding = masks
        if len(self._loaded.layer_types) > 1:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding if self.shape.sliding[0] else full

    def _prompt_cache(self, chunks: abc.Sequence[Chunk]) -> PromptCache:
        if len(chunks) > 1 or chunks[0].is_whole:
            return PromptCache(self.shape, len(chunks), max(len(c.sequence.prompt_ids) for c in chunks))
        sequence = chunks[0].sequence
        if sequence.cache is None:
            sequence.cache = PromptCache(self.shape, 1, len(sequence.prompt_ids))
        return sequence.cache  # type: ignore[no-any-return]

    def _embed(self, ids: torch.Tensor, chunks: abc.Sequence[Chunk]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Token embeddings with the images' features in their places, and what deeper layers add."""
        spans = [span for chunk in chunks for span in chunk.images]
        if not spans:
            return self._loaded.embed(ids), {}
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=self._device)
        for row, chunk in enumerate(chunks):
            if chunk.sequence.feature_mask is not None:
                mask[row, : chunk.stop - chunk.start] = chunk.sequence.feature_mask[chunk.start : chunk.stop]
        # Some models number the image token beyond their embedding table.
        embeds = self._loaded.embed(ids.masked_fill(mask, 0))
        embeds = embeds.masked_scatter(mask[..., None], self._features(spans, "features"))
        if not self._loaded.levels:
            return embeds, {}
        deeper = [self._features(spans, f"features.{level}") for level in range(1, self._loaded.levels + 1)]
        return embeds, {"visual_pos_masks": mask, "deepstack_visual_embeds": deeper}

    def _features(self, spans: abc.Sequence[ImageSpan], name: str) -> torch.Tensor:
        rows = [span.item.tensors[name].to(self._device, self._loaded.dtype) for span in spans]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def _positions(self, chunks: abc.Sequence[Chunk], width: int) -> torch.Tensor:
        """[rows, width], or [3, rows, width] when any prompt has images with positions of their own."""
        start = chunks[0].start
        plain = torch.arange(start, start + width, device=self._device)
        if all(c.sequence.positions is None for c in chunks):
            return plain.expand(len(chunks), -1)
        positions = plain.repeat(3, len(chunks), 1)
        for row, chunk in enumerate(chunks):
            if chunk.sequence.positions is not None:
                positions[:, row, : chunk.stop - chunk.start] = chunk.sequence.positions[
                    :, chunk.start : chunk.stop
                ]
        return positions

    def _mutual(self, chunks: abc.Sequence[Chunk], total: int) -> torch.Tensor | None:
        if all(c.sequence.mutual is None for c in chunks):
            return None
        blocks = torch.full((len(chunks), total), -1, device=self._device)
        for row, chunk in enumerate(chunks):
            if chunk.sequence.mutual is not None:
                blocks[row, : chunk.stop] = chunk.sequence.mutual[: chunk.stop]
        return blocks
