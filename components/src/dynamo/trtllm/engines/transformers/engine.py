"""The portable engine's adapter: checks requests on the event loop, and waits there for what the engine's thread computes."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import transformers

from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.core import DecodedImage, DecodedMedia, EncodedMedia, GuidedDecoding, MediaShape, PlacedMedia, Step, Usage
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState, MediaInput, Prefilled
from dynamo.trtllm.engines.transformers.batch import Batch, EagerBatch
from dynamo.trtllm.engines.transformers.encoder import ImageEncoder
from dynamo.trtllm.engines.transformers.grammars import Grammars
from dynamo.trtllm.engines.transformers.graphs import GraphBatch
from dynamo.trtllm.engines.transformers.interleave import Interleave
from dynamo.trtllm.engines.transformers.loading import LoadedModel, load_model, load_tokenizer
from dynamo.trtllm.engines.transformers.options import EngineOptions, parse_options
from dynamo.trtllm.engines.transformers.runner import ModelRunner
from dynamo.trtllm.engines.transformers.sampling import make_choice
from dynamo.trtllm.engines.transformers.scheduler import Scheduler
from dynamo.trtllm.engines.transformers.sequence import ImageSpan, Stage
from dynamo.trtllm.engines.transformers.sequence import Sequence as EngineSequence
from dynamo.trtllm.engines.transformers.state import unpack_state
from dynamo.trtllm.engines.transformers.verify import decodes_in_graphs, verify
from dynamo.trtllm.engines.transformers.worker import EncodeJob, Sink, Worker
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, LimitFault, PartFault, require_room
from dynamo.trtllm.model_files import resolve_model

_MAX_SEED = 1 << 63


class TransformersEngine(Engine):
    """See the package. Requests share the worker's thread and the pool that prepares images; all else is per request."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options: EngineOptions = parse_options(config.args)
        self._loaded: LoadedModel | None = None
        self._encoder: ImageEncoder | None = None
        self._worker: Worker | None = None
        self._context_length = 0
        self._total_blocks = 0
        self._decoding = "eager"
        self._preparing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="image")
        self._grammars: Grammars | None = None
        self._compiling = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    async def start(self) -> EngineInfo:
        directory = await resolve_model(self._config.model_path)
        self._worker = Worker(asyncio.get_running_loop())
        await self._worker.start(lambda: self._set_up(directory))
        return self._info()

    def _set_up(self, directory: str) -> tuple[Scheduler, ImageEncoder | None]:
        """Runs in the worker's thread."""
        loaded = load_model(directory, self._config, self._options)
        self._total_blocks = loaded.kv_tokens // self._options.tokens_per_block
        self._context_length = min(loaded.context_length, self._total_blocks * self._options.tokens_per_block)
        verify(loaded)
        if loaded.family is not None and loaded.image is not None:
            self._encoder = ImageEncoder(loaded, loaded.family, loaded.image)
            threads = torch.get_num_threads()
            self._preparing.submit(torch.set_num_threads, threads)
        self._grammars = Grammars(partial(load_tokenizer, directory), loaded.logits, loaded.eos_token_ids)
        runner = ModelRunner(loaded, self._options.max_batch_size)
        batch: Batch = EagerBatch(runner, self._options.max_batch_size)
        interleave = None
        if decodes_in_graphs(loaded, self._options):
            batch = GraphBatch(runner, self._options.max_batch_size, loaded.kv_tokens)
            interleave = Interleave(loaded.model)
            self._decoding = "cuda graphs"
        self._loaded = loaded
        return Scheduler(runner, batch, self._options, self._total_blocks, interleave), self._encoder

    def _info(self) -> EngineInfo:
        loaded, options = self._require_loaded(), self._options
        return EngineInfo(
            context_length=self._context_length,
            kv_block_size=options.tokens_per_block,
            total_kv_blocks=self._total_blocks,
            max_num_seqs=options.max_batch_size,
            max_num_batched_tokens=options.max_num_tokens,
            media=self._media(loaded),
            hidden_size=loaded.hidden_size if self._encoder else None,
            extras={
                "architecture": loaded.architecture,
                "family": loaded.family.name if loaded.family else "text",
                "device": str(loaded.device),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "decoding": self._decoding,
                "torch_threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "image_token_id": loaded.image.feature if loaded.image else None,
            },
        )

    def _media(self, loaded: LoadedModel) -> dict[str, MediaInput]:
        if loaded.image is None or loaded.family is None:
            return {}
        options = loaded.family.image_options(loaded.image, self._context_length)
        placeholder = loaded.image.placeholder
        image = MediaInput(
            placeholder_id=placeholder, encodes=True, takes_encoded=True, takes_files=True, options=options
        )
        return {"image": image}

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        return self._stream(request, lambda: self._sequence(request, Stage.GENERATE))

    async def prefill(self, request: EngineRequest) -> Prefilled:
        sequence = self._sequence(request, Stage.PREFILL)
        worker = self._require_worker()
        await self._guide(sequence, request.sampling.guided)
        worker.submit(sequence)
        try:
            prefilled: Prefilled = await sequence.sink.get()
        except asyncio.CancelledError:
            worker.cancel(sequence)
            raise
        return prefilled

    def decode(self, request: EngineRequest, first: Step, state: EngineState) -> AsyncGenerator[Step, None]:
        """See the port. `state` is read at the first step; release it when a step has come, or when the stream has ended."""
        return self._stream(request, lambda: self._continued(request, first, state))

    def _continued(self, request: EngineRequest, first: Step, state: EngineState) -> EngineSequence:
        """The sequence of a request whose context stage ran elsewhere."""
        if len(first.token_ids) != 1 or first.finish is not None:
            raise EngineFault("the prefill worker handed over a request that has no token to continue")
        loaded = self._require_loaded()
        if not 0 <= first.token_ids[0] < loaded.vocabulary:
            raise EngineFault("the prefill worker handed over a token that is not in the model's vocabulary")
        sequence = self._sequence(request, Stage.DECODE)
        keys, values, delta, seed = unpack_state(state, loaded.cache_shape, len(sequence.prompt_ids))
        sequence.keys, sequence.values = keys, values
        sequence.rope_delta, sequence.choice.seed = delta, seed
        sequence.last_token, sequence.output = first.token_ids[0], 1
        return sequence

    def media_tokens(self, shape: MediaShape, options: Mapping[str, Any]) -> int | None:
        width, height = shape.sizes
        return self._require_encoder().tokens_of(width, height, options)

    async def encode(self, items: Sequence[DecodedMedia]) -> list[EncodedMedia]:
        encoder, worker = self._require_encoder(), self._require_worker()
        worker.require_alive()
        loop = asyncio.get_running_loop()
        jobs: list[EncodeJob] = []
        try:
            for image in items:
                if not isinstance(image, DecodedImage):
                    raise ClientFault(f"this model takes no {image.kind}")
                pixels = await loop.run_in_executor(self._preparing, encoder.preprocess, image)
                jobs.append(EncodeJob(pixels, Sink()))
                worker.submit(jobs[-1])
            return [await job.sink.get() for job in jobs]
        except BaseException:
            for job in jobs:
                worker.cancel(job)
            raise

    def adopt_embeddings(
        self, kind: str, digest: str, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any]
    ) -> EncodedMedia:
        return self._require_encoder().adopt(digest, tensors, extras)

    async def check_health(self) -> None:
        self._require_worker().require_alive()

    def stats(self) -> Mapping[str, float]:
        return self._worker.stats() if self._worker is not None else {}

    async def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._worker is not None:
            await self._worker.stop()

    async def _stream(self, request: EngineRequest, prepare: Callable[[], EngineSequence]) -> AsyncGenerator[Step, None]:
        """Steps of the sequence that `prepare` makes. One generator deep: this is run for every token."""
        worker, sequence = self._require_worker(), prepare()
        sink, ended = sequence.sink, False
        if sequence.output >= sequence.max_new_tokens:
            yield Step((), None, "length", None, Usage(len(sequence.prompt_ids), sequence.output))
            return
        await self._guide(sequence, request.sampling.guided)
        worker.submit(sequence)
        try:
            while not ended:
                step: Step = await sink.get()
                ended = step.finish is not None
                yield step
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

    def _sequence(self, request: EngineRequest, stage: Stage) -> EngineSequence:
        """Check `request` against the model and its limits. Raises `ClientFault`."""
        loaded, sampling, prompt = self._require_loaded(), request.sampling, request.prompt
        length = len(prompt.token_ids)
        if not length:
            raise ClientFault("the prompt is empty")
        require_room(length, self._context_length)
        if self._options.max_input_len is not None and length > self._options.max_input_len:
            raise LimitFault(f"the prompt has {length} tokens; at most {self._options.max_input_len} are taken")
        images = tuple(map(self._span, itertools.repeat(prompt.token_ids), prompt.media, prompt.positions()))
        for position, (before, after) in zip(prompt.positions()[1:], itertools.pairwise(images), strict=True):
            if before.stop >= after.start:
                raise PartFault(position, "there must be at least one token between two images", kind=after.item.kind)
        _require_known_ids(prompt.token_ids, images if stage is not Stage.DECODE else None, loaded)
        room = self._context_length - length
        longest = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        eos = frozenset() if sampling.ignore_eos else sampling.eos_token_ids or loaded.eos_token_ids
        seed = secrets.randbelow(_MAX_SEED) if sampling.seed is None else sampling.seed
        held = length if stage is Stage.PREFILL else length + longest
        return EngineSequence(
            stage=stage,
            prompt_ids=tuple(prompt.token_ids),
            images=images,
            choice=make_choice(sampling, seed, eos, loaded.logits),
            max_new_tokens=longest,
            stop_ids=sampling.stop_token_ids,
            eos_ids=eos,
            blocks=-(-held // self._options.tokens_per_block),
            sink=Sink(),
        )

    def _span(self, token_ids: Sequence[int], media: PlacedMedia, position: int) -> ImageSpan:
        """One image at its place, with as many rows of features as the prompt has image tokens there."""
        loaded, item = self._require_loaded(), media.item
        if loaded.image is None:
            raise ClientFault("this worker takes no images")
        if not isinstance(item, EncodedMedia):
            raise EngineFault("the portable engine takes images only through its encode stage")
        placed = token_ids[media.start : media.start + media.length].count(loaded.image.feature)
        names = ["features", *(f"features.{level}" for level in range(1, loaded.levels + 1))]
        for name in names:
            tensor = item.tensors.get(name)
            if tensor is None or tuple(tensor.shape) != (placed, loaded.hidden_size):
                wanted = f"{placed} x {loaded.hidden_size}"
                raise PartFault(position, f"its embeddings are not the {wanted} that the prompt needs", kind=item.kind)
        return ImageSpan(item, media.start, media.start + media.length)

    def _require_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineDead("the engine has not been started")
        return self._loaded

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise EngineDead("the engine has not been started")
        return self._worker

    def _require_encoder(self) -> ImageEncoder:
        self._require_loaded()
        if self._encoder is None:
            raise ClientFault("this worker takes no images")
        return self._encoder


def _require_known_ids(token_ids: Sequence[int], images: tuple[ImageSpan, ...] | None, loaded: LoadedModel) -> None:
    """Ids must lie in the embedding table, but for image tokens that stand for features. `images` is None in the decode stage."""
    if min(token_ids) >= 0 and max(token_ids) < loaded.vocabulary:
        return
    feature = loaded.image.feature if loaded.image else None
    unknown = [i for i in token_ids if i != feature and not 0 <= i < loaded.vocabulary]
    if unknown:
        raise ClientFault(f"token id {unknown[0]} is not in the model's vocabulary of {loaded.vocabulary}")
    if images is not None and token_ids.count(feature) != sum(s.item.tensors["features"].shape[0] for s in images):
        raise ClientFault("the prompt holds image tokens that belong to no image")
