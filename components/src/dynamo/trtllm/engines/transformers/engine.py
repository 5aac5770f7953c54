"""The portable engine's adapter: checks requests on the event loop,
and waits there for what the engine's thread computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import transformers

from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.core import DecodedMedia, EncodedMedia, GuidedDecoding, MediaShape, Step, Usage
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState, Prefilled
from dynamo.trtllm.engines.transformers.batch import Batch, EagerBatch
from dynamo.trtllm.engines.transformers.encoder import ImageEncoder, MediaEncoder
from dynamo.trtllm.engines.transformers.grammars import Grammars
from dynamo.trtllm.engines.transformers.graphs import GraphBatch
from dynamo.trtllm.engines.transformers.intake import Intake
from dynamo.trtllm.engines.transformers.interleave import Interleave, clock_of
from dynamo.trtllm.engines.transformers.loading import LoadedModel, load_model, load_tokenizer
from dynamo.trtllm.engines.transformers.media import encoders_of
from dynamo.trtllm.engines.transformers.options import EngineOptions, parse_options
from dynamo.trtllm.engines.transformers.runner import ModelRunner
from dynamo.trtllm.engines.transformers.scheduler import Scheduler
from dynamo.trtllm.engines.transformers.sequence import Sequence as EngineSequence
from dynamo.trtllm.engines.transformers.sequence import Stage
from dynamo.trtllm.engines.transformers.verify import decodes_in_graphs, verify
from dynamo.trtllm.engines.transformers.worker import EncodeJob, Sink, Worker
from dynamo.trtllm.errors import ClientFault, EngineDead
from dynamo.trtllm.metrics import Readings
from dynamo.trtllm.model_files import resolve_model
from dynamo.trtllm.stages import waited_for_the_engine


class TransformersEngine(Engine):
    """See the package. Requests share the worker's thread and the pool that prepares media;
    all else is per request."""

    forks = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options: EngineOptions = parse_options(config.args)
        self._loaded: LoadedModel | None = None
        self._intake: Intake | None = None
        self._encoders: Mapping[str, MediaEncoder] = {}
        self._worker: Worker | None = None
        self._context_length = 0
        self._total_blocks = 0
        self._decoding = "eager"
        self._preparing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="media")
        self._grammars: Grammars | None = None
        self._compiling = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    async def start(self) -> EngineInfo:
        directory = await resolve_model(self._config.model_path)
        self._worker = Worker(asyncio.get_running_loop())
        await self._worker.start(lambda: self._set_up(directory))
        return self._info()

    def _set_up(self, directory: str) -> tuple[Scheduler, Mapping[str, MediaEncoder]]:
        """Runs in the worker's thread."""
        loaded = load_model(directory, self._config, self._options)
        self._total_blocks = loaded.kv_tokens // self._options.tokens_per_block
        self._context_length = min(loaded.context_length, self._total_blocks * self._options.tokens_per_block)
        verify(loaded)
        self._encoders = encoders_of(loaded)
        if self._encoders:
            threads = torch.get_num_threads()
            self._preparing.submit(torch.set_num_threads, threads)
        self._grammars = Grammars(partial(load_tokenizer, directory), loaded.logits, loaded.eos_token_ids)
        runner = ModelRunner(loaded, self._options.max_batch_size)
        batch: Batch = EagerBatch(runner, self._options.max_batch_size)
        interleave = None
        if decodes_in_graphs(loaded, self._options):
            longest = self._context_length if self._config.role.decodes else 0
            batch = GraphBatch(runner, self._options.max_batch_size, loaded.kv_tokens, longest)
            while batch.record_ahead():
                pass
            interleave = Interleave(loaded.model, clock_of(loaded.device))
            self._decoding = "cuda graphs"
        self._loaded = loaded
        self._intake = Intake(loaded, self._options, self._context_length)
        return Scheduler(runner, batch, self._options, self._total_blocks, interleave), self._encoders

    def _info(self) -> EngineInfo:
        loaded, options = self._require_loaded(), self._options
        return EngineInfo(
            context_length=self._context_length,
            kv_block_size=options.tokens_per_block,
            total_kv_blocks=self._total_blocks,
            max_num_seqs=options.max_batch_size,
            max_num_batched_tokens=options.max_num_tokens,
            media={kind: each.input(self._context_length) for kind, each in self._encoders.items()},
            hidden_size=loaded.hidden_size if self._encoders else None,
            extras={
                "architecture": loaded.architecture,
                "family": loaded.family.name if loaded.family else "text",
                "device": str(loaded.device),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "decoding": self._decoding,
                "torch_threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "image_token_id": loaded.features.get("image"),
            },
        )

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        return self._stream(request, lambda: self._require_intake().sequence(request, Stage.GENERATE))

    async def prefill(self, request: EngineRequest) -> Prefilled:
        sequence = self._require_intake().sequence(request, Stage.PREFILL)
        worker = self._require_worker()
        await self._guide(sequence, request.sampling.guided)
        sequence.submitted_s = time.perf_counter()
        worker.submit(sequence)
        try:
            prefilled: Prefilled = await sequence.sink.get()
        except asyncio.CancelledError:
            worker.cancel(sequence)
            raise
        waited_for_the_engine(sequence.admitted_s - sequence.submitted_s)
        return prefilled

    def decode(
        self, request: EngineRequest, first: Step | None, state: EngineState
    ) -> AsyncGenerator[Step, None]:
        """See the port. `state` is read at the first step;
        release it when a step has come, or when the stream has ended."""
        return self._stream(request, lambda: self._require_intake().continued(request, first, state))

    def media_tokens(self, shape: MediaShape, options: Mapping[str, Any]) -> int | None:
        return self._require_encoder(shape.kind).tokens_of(shape.sizes, options)

    async def encode(self, items: Sequence[DecodedMedia]) -> list[EncodedMedia]:
        worker = self._require_worker()
        worker.require_alive()
        loop = asyncio.get_running_loop()
        jobs: list[EncodeJob] = []
        encoders = [self._require_encoder(item.kind) for item in items]
        # All at once, so that requests are served in the order in which they came.
        preparing = [
            loop.run_in_executor(self._preparing, encoder.preprocess, item)
            for encoder, item in zip(encoders, items, strict=True)
        ]
        try:
            for item, pixels in zip(items, preparing, strict=True):
                jobs.append(EncodeJob(item.kind, await pixels, Sink()))
                worker.submit(jobs[-1])
            return [await job.sink.get() for job in jobs]
        except BaseException:
            for pixels in preparing:
                if not pixels.cancel() and not pixels.cancelled():
                    pixels.exception()  # one failure is enough to tell
            for job in jobs:
                worker.cancel(job)
            raise

    def adopt_embeddings(
        self, kind: str, digest: str, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any]
    ) -> EncodedMedia:
        encoder = self._encoders.get(kind)
        if not isinstance(encoder, ImageEncoder):
            raise ClientFault(f"this model takes no precomputed embeddings of {kind}")
        return encoder.adopt(digest, tensors, extras)

    async def check_health(self) -> None:
        self._require_worker().require_alive()

    def stats(self) -> Readings:
        return self._worker.stats() if self._worker is not None else {}

    async def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._worker is not None:
            await self._worker.stop()

    async def _stream(
        self, request: EngineRequest, prepare: Callable[[], EngineSequence]
    ) -> AsyncGenerator[Step, None]:
        """Steps of the sequence that `prepare` makes. One generator deep: this is run for every token."""
        worker, sequence = self._require_worker(), prepare()
        sink, ended = sequence.sink, False
        if sequence.output >= sequence.max_new_tokens:
            yield Step((), None, "length", None, Usage(len(sequence.prompt_ids), sequence.output))
            return
        await self._guide(sequence, request.sampling.guided)
        sequence.submitted_s = time.perf_counter()
        worker.submit(sequence)
        try:
            step: Step = await sink.get()
            if sequence.stage is Stage.GENERATE:
                waited_for_the_engine(sequence.admitted_s - sequence.submitted_s)
            while True:
                ended = step.finish is not None
                yield step
                if ended:
                    return
                step = await sink.get()
        finally:
            if not ended:
                worker.cancel(sequence)

    async def _guide(self, sequence: EngineSequence, guided: GuidedDecoding | None) -> None:
        """Give `sequence` the grammar that it asked for. Raises `ClientFault`."""
        if guided is None:
            return
        assert self._grammars is not None
        compiled = asyncio.get_running_loop().run_in_executor(self._compiling, self._grammars.compile, guided)
        sequence.choice.grammar = await compiled
        sequence.eos_ids |= sequence.choice.grammar.ends  # where a grammar is complete nothing else may come

    def _require_intake(self) -> Intake:
        if self._intake is None:
            raise EngineDead("the engine has not been started")
        return self._intake

    def _require_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineDead("the engine has not been started")
        return self._loaded

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise EngineDead("the engine has not been started")
        return self._worker

    def _require_encoder(self, kind: str) -> MediaEncoder:
        self._require_loaded()
        if kind not in self._encoders:
            raise ClientFault(f"this model takes no {kind}")
        return self._encoders[kind]
