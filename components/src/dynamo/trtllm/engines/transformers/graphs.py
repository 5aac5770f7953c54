"""Decoding as a CUDA graph: a step is recorded once for each shape of the batch, then replayed by one call.

A step of a model is about a thousand small kernels, and launching them one by one takes longer than
computing them. A graph (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs) launches all of
them at once, at the addresses that were recorded. So whatever a step reads and writes lies in storage that
stays (`static_cache`, `rows`), tokens are chosen on the device (`device_sampling`), and the next step
starts before the host has read what the last one chose.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from dynamo.trtllm.engines.transformers.batch import Chosen
from dynamo.trtllm.engines.transformers.device_sampling import Kind, choose, read
from dynamo.trtllm.engines.transformers.grammars import Masks
from dynamo.trtllm.engines.transformers.rows import RowTable
from dynamo.trtllm.engines.transformers.runner import ModelRunner
from dynamo.trtllm.engines.transformers.sequence import Sequence
from dynamo.trtllm.engines.transformers.static_cache import Bucket, StaticCache, usual_buckets
from dynamo.trtllm.errors import WorkerError

logger = logging.getLogger(__name__)

MAX_GRAPHS = 160
"""Each holds a few megabytes on the device; the one that was not used for longest goes first."""


class Recorder:
    """Runs steps: a new one as it is, recording it afterwards; a known one by replaying its record.

    A step reads and writes static storage only; running it twice is two steps. Owned by the engine's thread.
    """

    def __init__(self, records: bool, most: int = MAX_GRAPHS) -> None:
        self._records = records
        self._most = most
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def has_room(self) -> bool:
        """Whether one more can be recorded without giving one up."""
        return self._records and len(self._graphs) < self._most

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do `step`, which is always the same for the same `key`."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        step()
        if self._records:
            self._record(key, step)

    def clear(self) -> None:
        """Forget all records: storage has moved."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()

    def _record(self, key: Hashable, step: Callable[[], None]) -> None:
        """Other threads may use the device meanwhile: only this thread's calls are recorded."""
        if len(self._graphs) >= self._most:
            torch.cuda.synchronize()
            self._graphs.popitem(last=False)
        if not self._graphs:  # memory that no graph uses any more is given back, and its handle with it
            self._pool = torch.cuda.graph_pool_handle()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning(
                "decode steps cannot be recorded as CUDA graphs and run one kernel after another",
                exc_info=error,
            )
            self._records = False
            return
        torch.cuda.current_stream().wait_stream(side)
        self._graphs[key] = graph


@dataclass(frozen=True)
class _Flight:
    """A step that was launched: whose tokens it chooses, and where they arrive on the host."""

    sequences: list[Sequence]
    kind: Kind
    result: torch.Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> list[Chosen]:
        if self.arrived is not None:
            self.arrived.synchronize()
        rows = read(self.result.tolist(), [s.choice for s in self.sequences], self.kind)
        return [
            Chosen(sequence, token, logprobs, ArithmeticError("logits are not finite") if token < 0 else None)
            for sequence, (token, logprobs) in zip(self.sequences, rows, strict=True)
        ]


class GraphBatch:
    """The running requests on a CUDA device; on another device the same steps run without being recorded.

    `step` gives the tokens of the step before, and none at first. A request that ended meanwhile was
    computed once more, in vain: its sequence is finished, and the token means nothing.
    """

    def __init__(
        self, runner: ModelRunner, max_rows: int, max_tokens: int, max_columns: int = 0, records: bool = True
    ) -> None:
        """`max_columns`: the most tokens of a request, for which steps are recorded ahead; 0: none are."""
        shape = runner.shape
        self.sequences: list[Sequence] = []
        self._runner = runner
        self._table = RowTable(max_rows, runner.vocabulary, shape.device)
        self._cache = StaticCache(shape, max_rows, max_tokens, self._table.integer("length", max_rows))
        self._recorder = Recorder(records and shape.device.type == "cuda")
        self._recorded = self._cache.version
        self._results: dict[int, torch.Tensor] = {}
        self._max_rows = max_rows
        self._kind = Kind()
        self._usual = usual_buckets(max_rows, max_columns, max_tokens) if max_columns else []
        self._ahead: dict[Kind, deque[Bucket]] = {Kind(): deque(self._usual)}
        """What is still to be recorded, by the kinds of steps that were wanted so far."""
        self._flight: _Flight | None = None

    def join(self, sequence: Sequence) -> None:
        assert sequence.keys is not None
        assert sequence.values is not None
        row = self._cache.join(sequence.keys, sequence.values)
        try:
            self._table.join(row, sequence, sequence.keys.shape[2])
        except Exception:
            self._cache.leave(row)
            self._table.clear(row)
            raise
        sequence.row, sequence.keys, sequence.values = row, None, None
        self.sequences.append(sequence)
        self._settle()

    def leave(self, sequence: Sequence, spoilt: bool = False) -> None:
        row, last = sequence.row, len(self.sequences) - 1
        self._cache.leave(row, spoilt)
        self._table.move(last, row)
        self._table.clear(last)
        self.sequences[row] = self.sequences[last]
        self.sequences[row].row = row
        self.sequences.pop()
        sequence.row = -1
        self._settle()

    def step(self) -> list[Chosen]:
        """Launch a step if any request needs one more, then wait for the step before it.

        A grammar has to know each token before it can say what may follow:
        then the step before is waited for first.
        """
        before, self._flight = self._flight, None
        if not self._goes_on(before) or (before is not None and self._kind.guided):
            return [] if before is None else before.read()
        failed = self._write_masks() if self._kind.guided else []
        self._flight = self._launch(before)
        return failed if before is None else before.read()

    def record_ahead(self) -> bool:
        """While no request is running: record one more step that may be wanted. False: nothing is left to
        do.

        Recording takes as long as several steps, and running requests would wait for it. Steps are recorded
        for what requests have asked for so far, plain greedy ones first.
        """
        if self.sequences or not self._recorder.has_room:
            return False
        for kind, buckets in self._ahead.items():
            while buckets:
                bucket = buckets.popleft()
                if (bucket, kind) not in self._recorder:
                    return self._record(bucket, kind)
        return False

    def _record(self, bucket: Bucket, kind: Kind) -> bool:
        try:
            self._cache.lay_out_empty(bucket)
            self._run(bucket, kind)
        except torch.OutOfMemoryError:
            logger.warning(
                "too little memory is left to record decode steps ahead; each is recorded when it is needed"
            )
            self._ahead, self._usual = {}, []
            return False
        return True

    def _write_masks(self) -> list[Chosen]:
        """Tell the device what the grammars allow; those of no more use fail their requests."""
        failed = []
        masks = Masks(len(self.sequences), self._table.vocabulary)
        for row, sequence in enumerate(self.sequences):
            choice = sequence.choice
            if choice.grammar is not None:
                try:
                    masks.allow(row, choice.grammar, choice.banned_at(sequence.output))
                except WorkerError as error:
                    masks.open(row)
                    failed.append(Chosen(sequence, 0, None, error))
        self._table.masks[: len(self.sequences)].copy_(torch.from_numpy(masks.bits))
        return failed

    def _settle(self) -> None:
        self._kind = Kind.of([s.choice for s in self.sequences], self._table.vocabulary)
        self._ahead.setdefault(self._kind, deque(self._usual))

    def _goes_on(self, before: _Flight | None) -> bool:
        coming = set() if before is None else {id(s) for s in before.sequences}
        return any(s.output + (id(s) in coming) < s.max_new_tokens for s in self.sequences)

    def _launch(self, before: _Flight | None) -> _Flight:
        bucket = self._cache.fit(len(self.sequences), max(self._cache.held) + 1)
        kind = self._kind
        result = self._run(bucket, kind)
        self._cache.end_step()
        on_host = result[: len(self.sequences)].to("cpu", non_blocking=True, copy=True)
        arrived = None
        if result.is_cuda:
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record()
        return _Flight(list(self.sequences), kind, on_host, arrived)

    def _run(self, bucket: Bucket, kind: Kind) -> torch.Tensor:
        """A step of `bucket`, which is laid out; returns where its result will be, [rows, kind.columns] on
        the device.
        """
        if self._recorded != self._cache.version:
            self._recorder.clear()
            self._recorded = self._cache.version
        result = self._result(kind.columns)[: bucket.rows]
        self._recorder.run((bucket, kind), lambda: self._compute(bucket, kind, result))
        return result

    def _result(self, columns: int) -> torch.Tensor:
        if columns not in self._results:
            self._results[columns] = torch.zeros(
                self._max_rows, columns, dtype=torch.float64, device=self._runner.shape.device
            )
        return self._results[columns]

    def _compute(self, bucket: Bucket, kind: Kind, result: torch.Tensor) -> None:
        """One token for every row of `bucket`, from what the device holds to what the device holds."""
        table, rows = self._table, bucket.rows
        positions = table.integer("length", rows) + table.integer("delta", rows)
        logits = self._runner.next_logits(
            table.integer("token", rows)[:, None], positions[:, None], self._cache.masks(), self._cache
        )
        tokens, shown = choose(logits, table, kind)
        result.copy_(shown)
        if kind.adjusted:
            table.count(tokens)
        table.advance(tokens)
