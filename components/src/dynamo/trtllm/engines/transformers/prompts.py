"""Prompts that are being computed: which chunks go into the next pass,
and what becomes of a pass that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from dynamo.trtllm.engines.transformers.interleave import Interleave
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.engines.transformers.runner import Chunk, ModelRunner
from dynamo.trtllm.engines.transformers.sequence import Sequence

_MAX_ROWS = 32


class Prompts:
    """Admitted requests until their prompts are computed, in order of arrival.
    Owned by the engine's thread."""

    def __init__(self, runner: ModelRunner, options: EngineOptions, interleave: Interleave | None) -> None:
        self.sequences: list[Sequence] = []
        self._runner = runner
        self._options = options
        self._interleave = interleave
        self._computed: list[tuple[list[Chunk], torch.Tensor]] = []

    def compute(self) -> Iterator[tuple[Sequence, Exception]]:
        """Compute at most one batch of prompts or one chunk of a long one;
        yields those that failed, which are out then.

        `take_computed` hands on what came of it; on a GPU it may still be computing.
        """
        chunks = self._next_chunks()
        if not chunks:
            return
        try:
            with nullcontext() if self._interleave is None else self._interleave.block():
                logits = self._runner.prefill(chunks)
        except Exception as error:
            yield from self._compute_apart(chunks, error)
            return
        self._computed.append((chunks, logits))

    @property
    def completed(self) -> bool:
        """Whether among what `take_computed` will give is the end of a prompt."""
        return any(c.stop == len(c.sequence.prompt_ids) for chunks, _ in self._computed for c in chunks)

    def take_computed(self) -> list[tuple[list[Chunk], torch.Tensor]]:
        """Chunks that were computed since the last call, and the logits [chunks,
        vocabulary] behind the last token of each."""
        computed, self._computed = self._computed, []
        return computed

    def _compute_apart(self, chunks: list[Chunk], error: Exception) -> Iterator[tuple[Sequence, Exception]]:
        """Find the one request at fault for `error`: of several, each is tried alone."""
        if len(chunks) == 1:
            self.sequences.remove(chunks[0].sequence)
            yield chunks[0].sequence, error
            return
        for chunk in chunks:
            try:
                logits = self._runner.prefill([chunk])
            except Exception as own:
                yield from self._compute_apart([chunk], own)
            else:
                self._computed.append(([chunk], logits))

    def _next_chunks(self) -> list[Chunk]:
        if not self.sequences:
            return []
        budget = self._options.max_num_tokens
        first = self.sequences[0]
        length = len(first.prompt_ids)
        if self._options.chunked_prefill and (first.computed or length > budget):
            return [Chunk(first, first.computed, _chunk_end(first, budget))]
        chunks, width = [Chunk(first, 0, length)], length
        for sequence in self.sequences[1:_MAX_ROWS]:
            length = len(sequence.prompt_ids)
            width = max(width, length)
            if sequence.computed or width * (len(chunks) + 1) > budget:
                break
            chunks.append(Chunk(sequence, 0, length))
        return chunks


def _chunk_end(sequence: Sequence, budget: int) -> int:
    """Where the next chunk of at most `budget` tokens ends:
    never inside an image, whose tokens may see one another."""
    end = min(sequence.computed + budget, len(sequence.prompt_ids))
    for span in sequence.images:
        if span.start < end < span.stop:
            return span.start if span.start > sequence.computed else span.stop
    return end
