"""Continuous batching: which requests compute in the next step, what they hold, and what each step gives to
them.

A request waits, in order of arrival, until KV cache blocks are free for its whole length; then its prompt
is computed, in chunks that fit the step's budget, then it joins the batch that is decoded in one forward
per step. It leaves between two steps. Blocks are set aside for prompt and longest output at once, so a
running request never runs out of them. The rows of the batch are padded to the longest, and the padding
counts: what is used is what the memory holds.
"""

from __future__ import annotations

import time
from collections import abc, deque
from typing import Any

import torch

from dynamo.trtllm.core import Step
from dynamo.trtllm.engines.port import EngineState, Prefilled
from dynamo.trtllm.engines.transformers.batch import Batch
from dynamo.trtllm.engines.transformers.interleave import Interleave
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.engines.transformers.prompts import Prompts
from dynamo.trtllm.engines.transformers.runner import Chunk, ModelRunner
from dynamo.trtllm.engines.transformers.sampling import Sampled, sample_apart
from dynamo.trtllm.engines.transformers.sequence import Phase, Sequence, Stage
from dynamo.trtllm.engines.transformers.state import pack_state
from dynamo.trtllm.errors import EngineDead, EngineFault, WorkerError


class Scheduler:
    """All sequences of the engine. Owned by the engine's thread; `events` are taken by the worker after
    each phase.
    """

    def __init__(
        self,
        runner: ModelRunner,
        batch: Batch,
        options: EngineOptions,
        total_blocks: int,
        interleave: Interleave | None = None,
    ) -> None:
        self._runner = runner
        self._batch = batch
        self.interleave = interleave
        """Lets decoding come between the layers of long passes, where it takes no time of the engine's
        thread.
        """
        self._options = options
        self._waiting: deque[Sequence] = deque()
        self._prompts = Prompts(runner, options, interleave)
        self.events: list[tuple[Any, Any]] = []
        self.total_blocks = total_blocks
        self.generated_tokens = 0
        self.prompt_tokens = 0

    @property
    def active(self) -> int:
        return len(self._batch.sequences) + len(self._prompts.sequences)

    @property
    def used_blocks(self) -> int:
        """Blocks that are set aside, padding included. Safe to read from another thread."""
        return _blocks((*self._prompts.sequences, *self._batch.sequences))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._batch.sequences or self._prompts.sequences or self._waiting)

    @property
    def running(self) -> bool:
        """Whether there are requests to decode for."""
        return bool(self._batch.sequences)

    @property
    def prefilling(self) -> bool:
        """Whether prompts were admitted that are not computed yet."""
        return bool(self._prompts.sequences)

    def sequences(self) -> list[Sequence]:
        return [*self._waiting, *self._prompts.sequences, *self._batch.sequences]

    def record_ahead(self) -> bool:
        """While there is no work: do a part of what later steps would otherwise wait for. False: nothing is
        left.
        """
        return self._batch.record_ahead()

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget `sequence` and free what it holds. Does nothing when it is finished."""
        if sequence.phase is Phase.RUNNING:
            self._leave(sequence)
        elif sequence.phase is Phase.PREFILLING:
            self._prompts.sequences.remove(sequence)
            self._free(sequence)
        elif sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
            self._free(sequence)

    def prefill_step(self) -> None:
        """Admit who fits, then compute at most one batch of prompts or one chunk of a long one.

        `finish_prefill` hands on what came of it; on a GPU it may still be computing.
        """
        self._admit()
        for sequence, error in self._prompts.compute():
            self._fail(sequence, error)

    @property
    def completes_prompts(self) -> bool:
        """Whether `finish_prefill` has first tokens to choose, for which it waits for the device."""
        return self._prompts.completed

    def finish_prefill(self) -> None:
        """Choose the first tokens of the prompts that `prefill_step` completed."""
        for chunks, logits in self._prompts.take_computed():
            self._account(chunks, logits)

    def decode_step(self) -> None:
        """Hand on what the batch chose for its requests. An exception leaves it unusable: the engine is
        dead.
        """
        if not self._batch.sequences:
            return
        for sequence, token, logprobs, error in self._batch.step():
            if sequence.phase is Phase.FINISHED:
                continue
            if error is not None:
                self._report(sequence, error)
                self._leave(sequence, spoilt=True)
                continue
            self.generated_tokens += 1
            step = sequence.take(token, logprobs)
            self.events.append((sequence.sink, step))
            if step.finish is not None:
                self._leave(sequence)

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            rows = len(self._batch.sequences) + sum(
                s.stage is not Stage.PREFILL for s in self._prompts.sequences
            )
            if sequence.stage is not Stage.PREFILL and rows >= self._options.max_batch_size:
                return
            if _blocks((sequence, *self._prompts.sequences, *self._batch.sequences)) > self.total_blocks:
                return
            self._waiting.popleft()
            sequence.admitted_s = time.perf_counter()
            try:
                if sequence.stage is Stage.DECODE:
                    self._attach(sequence)
                else:
                    self._runner.prepare(sequence)
                    self._prompts.sequences.append(sequence)
                    sequence.phase = Phase.PREFILLING
            except Exception as error:
                self._fail(sequence, error)

    def _attach(self, sequence: Sequence) -> None:
        """Take over a request whose context stage ran elsewhere."""
        given = (sequence.last_token,) if sequence.output else ()
        sequence.choice.begin((*sequence.prompt_ids, *given), self._runner.vocabulary, self._runner.device)
        if sequence.choice.grammar is not None and given:
            sequence.choice.grammar.take(sequence.last_token)
        self._join(sequence)

    def _account(self, chunks: list[Chunk], logits: torch.Tensor) -> None:
        self.prompt_tokens += sum(c.stop - c.start for c in chunks)
        rows = [
            row
            for row, c in enumerate(chunks)
            if c.stop == len(c.sequence.prompt_ids) and self._begin(c.sequence)
        ]
        if not rows:
            return
        sequences = [chunks[row].sequence for row in rows]
        finite = torch.isfinite(logits[rows]).all(-1).tolist()
        tokens, logprobs, failed = self._sample(logits[rows], sequences)
        for at, (sequence, token) in enumerate(zip(sequences, tokens.tolist(), strict=True)):
            if at in failed or not finite[at]:
                self._fail(sequence, failed.get(at) or ArithmeticError("logits are not finite"))
                continue
            self.generated_tokens += 1
            try:
                self._first_token(sequence, sequence.take(token, logprobs[at] if logprobs else None))
            except Exception as error:  # out of memory, for its state or its row of the batch
                self._fail(sequence, error)

    def _begin(self, sequence: Sequence) -> bool:
        """The prompt is computed: get ready to choose tokens. False: that failed, and the request with it."""
        self._prompts.sequences.remove(sequence)
        try:
            sequence.choice.begin(sequence.prompt_ids, self._runner.vocabulary, self._runner.device)
        except Exception as error:
            self._fail(sequence, error)
            return False
        return True

    def _first_token(self, sequence: Sequence, step: Step) -> None:
        if sequence.stage is Stage.PREFILL:
            state = None if step.finish and not sequence.keeps_state else self._state(sequence)
            self.events.append((sequence.sink, Prefilled(step, sequence.prompt_ids, state)))
            self._free(sequence)
            return
        self.events.append((sequence.sink, step))
        if step.finish is not None:
            self._free(sequence)
            return
        self._join(sequence)

    def _state(self, sequence: Sequence) -> EngineState:
        assert sequence.keys is not None
        assert sequence.values is not None
        return pack_state(sequence.keys, sequence.values, sequence.rope_delta, sequence.choice.seed)

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
        return sample_apart(logits, [s.choice for s in sequences], [s.output for s in sequences])

    def _join(self, sequence: Sequence) -> None:
        self._batch.join(sequence)
        sequence.phase = Phase.RUNNING

    def _leave(self, sequence: Sequence, spoilt: bool = False) -> None:
        self._batch.leave(sequence, spoilt)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        sequence.phase = Phase.FINISHED
        sequence.release()

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._report(sequence, error)
        self._free(sequence)

    def _report(self, sequence: Sequence, error: Exception) -> None:
        lost = device_is_lost(error)
        fault = error if isinstance(error, WorkerError) else EngineFault("the engine failed on this request")
        if lost:
            fault = EngineDead("the engine's device is lost")
        if fault is not error:
            fault.__cause__ = error
        self.events.append((sequence.sink, fault))
        if lost:
            raise error


def device_is_lost(error: Exception) -> bool:
    """Whether the accelerator answers nothing after `error`,
    so that no other request can be served either."""
    if not isinstance(error, torch.AcceleratorError):
        return False
    try:
        torch.accelerator.synchronize()
    except Exception:
        return True
    return False


def _blocks(sequences: abc.Collection[Sequence]) -> int:
    """KV cache blocks of `sequences`: the batch's rows, each as long as the longest, and those of prefill
    alone.
    """
    batch = [s.blocks for s in sequences if s.stage is not Stage.PREFILL]
    return len(batch) * max(batch, default=0) + sum(s.blocks for s in sequences if s.stage is Stage.PREFILL)
