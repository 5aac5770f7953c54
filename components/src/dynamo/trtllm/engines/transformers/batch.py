"""The running requests: they join, a step gives each a token, they leave.

What the scheduler asks of a batch, and the eager one, kernel after kernel; `graphs` has the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from dynamo.trtllm.core import StepLogprobs
from dynamo.trtllm.engines.transformers.runner import ModelRunner
from dynamo.trtllm.engines.transformers.sampling import sample_apart
from dynamo.trtllm.engines.transformers.sequence import Sequence


class Chosen(NamedTuple):
    """What a step chose for one request; `error` says why it could choose nothing."""

    sequence: Sequence
    token: int
    logprobs: StepLogprobs | None
    error: Exception | None = None


class Batch(Protocol):
    """Owned by the engine's thread. `sequences` are the requests in it; the `row` of each is its index."""

    sequences: list[Sequence]

    def join(self, sequence: Sequence) -> None:
        """Take in `sequence` with the keys and values that it holds. An exception leaves all as it was."""

    def leave(self, sequence: Sequence, spoilt: bool = False) -> None:
        """Free the row of `sequence`; `spoilt` says that its keys and values may not be finite."""

    def step(self) -> list[Chosen]:
        """Tokens for requests that are in the batch, or were when their step began.

        An exception leaves the batch unusable.
        """

    def record_ahead(self) -> bool:
        """While no request is running: do a part of what later steps would otherwise wait for. False:
        nothing is left.
        """


class EagerBatch:
    """Decodes kernel after kernel and chooses on the host: for a CPU, and for models without graphs."""

    def __init__(self, runner: ModelRunner, max_rows: int) -> None:
        self.sequences: list[Sequence] = []
        self._runner = runner
        self._all_argmax = True
        self._tokens = torch.zeros(max_rows, 1, dtype=torch.long, device=runner.device)
        self._positions = torch.zeros(max_rows, 1, dtype=torch.long, device=runner.device)

    def record_ahead(self) -> bool:
        return False

    def join(self, sequence: Sequence) -> None:
        assert sequence.keys is not None
        assert sequence.values is not None
        position = len(sequence.prompt_ids) + sequence.output - 1 + sequence.rope_delta
        row = self._runner.batch.join(sequence.keys, sequence.values)
        sequence.row, sequence.keys, sequence.values = row, None, None
        self.sequences.append(sequence)
        self._tokens[row, 0] = sequence.last_token
        self._positions[row, 0] = position
        self._all_argmax = self._all_argmax and sequence.choice.is_argmax

    def leave(self, sequence: Sequence, spoilt: bool = False) -> None:
        row, last = sequence.row, self.sequences[-1]
        self._runner.batch.leave(row)
        self._tokens[row] = self._tokens[last.row]
        self._positions[row] = self._positions[last.row]
        self.sequences[row], last.row = last, row
        self.sequences.pop()
        sequence.row = -1
        self._all_argmax = all(s.choice.is_argmax for s in self.sequences)

    def step(self) -> list[Chosen]:
        running = list(self.sequences)
        rows = len(running)
        logits = self._runner.decode(self._tokens[:rows], self._positions[:rows])
        self._positions[:rows] += 1
        logprobs: list[StepLogprobs | None] | None = None
        failed: Mapping[int, Exception] = {}
        if self._all_argmax:
            tokens = logits.argmax(-1)
        else:
            tokens, logprobs, failed = sample_apart(
                logits, [s.choice for s in running], [s.output for s in running]
            )
        self._tokens[:rows, 0] = tokens
        return [
            Chosen(sequence, token, None if logprobs is None else logprobs[row], failed.get(row))
            for row, (sequence, token) in enumerate(zip(running, tokens.tolist(), strict=True))
        ]
