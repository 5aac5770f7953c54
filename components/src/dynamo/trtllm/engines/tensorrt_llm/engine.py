"""The adapter: TensorRT-LLM's LLM API behind the engine port.

One request is one `generate_async` call. How requests end here: what is raised while preparing and submitting
is the client's fault or this request's; `RequestError` and anything else that a result raises fail one
request. The engine is dead when the library says so itself (see `health`), and then the watch ends all
requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.core import DecodedImage, DecodedMedia, EncodedMedia, MediaShape, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState, Prefilled
from dynamo.trtllm.engines.tensorrt_llm import (
    arguments,
    embeddings,
    events,
    handoff,
    private,
    starting,
)
from dynamo.trtllm.engines.tensorrt_llm.context_stage import ContextStage
from dynamo.trtllm.engines.tensorrt_llm.encoder import EncoderThread
from dynamo.trtllm.engines.tensorrt_llm.inputs import ModelInputs
from dynamo.trtllm.engines.tensorrt_llm.library import load_library
from dynamo.trtllm.engines.tensorrt_llm.model import describe_model
from dynamo.trtllm.engines.tensorrt_llm.results import Submitted
from dynamo.trtllm.engines.tensorrt_llm.streams import Streams
from dynamo.trtllm.engines.tensorrt_llm.submission import Submission
from dynamo.trtllm.engines.tensorrt_llm.vitals import Vitals
from dynamo.trtllm.errors import ClientFault, EngineFault

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 30.0
"""How long the library may take to shut down."""


class TensorRTLLMEngine(Engine):
    """See the module. Requests share the engine's vitals and the latest gauges."""

    holds_until_decoded = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._vitals = Vitals(config.stall_timeout_s)
        self._streams = Streams(self._vitals)
        self._gauges = events.Gauges()
        self._llm: Any = None
        self._encoder: EncoderThread | None = None
        self._kv_events: events.KvEvents | None = None
        self._closed = False

    async def start(self) -> EngineInfo:
        """Imports and constructs on this thread, the main one, as the library's other users do: its import
        starts MPI, which may be bound to the thread that started it. The event loop has nothing else to do
        yet, and until the worker serves the kernel acts on signals, so a long load can be ended.
        """
        config = self._config
        self._library = load_library()
        self._model = describe_model(config.model_path)
        starting.require_servable(config, self._model)
        if not config.role.runs_language_model:
            return self._start_encoder()
        self._args = arguments.llm_arguments(config, self._library)
        self._llm = starting.construct(self._library, self._library.llm, self._args)
        info = starting.describe_engine(self._library, self._llm, config, self._args, self._model)
        self._info = info
        self._submission = Submission(
            library=self._library,
            llm=self._llm,
            info=info,
            inputs=ModelInputs.of(self._library, self._llm, self._model, info.media),
            guided=self._args.get("guided_decoding_backend") is not None,
            death=self._vitals.death_behind,
        )
        self._context_stage = ContextStage(self._submission, self._model, self._vitals)
        self._vitals.begin(self._llm, self._library.request_error)
        if config.publish_metrics:
            ready = self._submission.first_request
            self._vitals.own(events.follow(self._llm.get_stats_async, ready, self._gauges.take))
        return info

    def _start_encoder(self) -> EngineInfo:
        model, info = self._model, starting.describe_encoder(self._library, self._config, self._model)
        if not model.facts.encodes_apart or model.placeholder_id is None:
            logger.warning(
                "%s has no encoder of its own: this worker serves embedding files only", model.architecture
            )
            return info
        args = arguments.encoder_arguments(self._config, self._library)
        self._llm = starting.construct(self._library, self._library.multimodal_encoder, args)
        self._vitals.begin(self._llm, self._library.request_error)
        self._encoder = EncoderThread(
            self._llm,
            model.facts,
            model.placeholder_id,
            info.max_num_seqs,
            lambda: self._vitals.cause_of_death() is not None,
        )
        return info

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        asked = self._submission
        return self._streams.read(
            request, lambda: asked.submit(request, asked.room(request)), 0, fetches_cache=False
        )

    def decode(
        self, request: EngineRequest, first: Step | None, state: EngineState
    ) -> AsyncGenerator[Step | Tokens, None]:
        assert first is not None  # only an engine that forks is asked for the first token

        async def submit() -> Submitted:
            if request.prompt.media:
                raise EngineFault("decode was given media, which prefill has dealt with")
            return await self._attach(request, self._submission.room(request), state)

        return self._streams.read(request, submit, len(first.token_ids), fetches_cache=True)

    def abandon(self, request: EngineRequest, state: EngineState) -> None:
        self._streams.fetch_and_forget(request, state, lambda: self._attach(request, 1, state))

    async def prefill(self, request: EngineRequest) -> Prefilled:
        return await self._context_stage.run(request)

    def media_tokens(self, shape: MediaShape, options: Mapping[str, Any]) -> int | None:
        return None

    async def encode(self, items: Sequence[DecodedMedia]) -> list[EncodedMedia]:
        if self._encoder is None:
            raise EngineFault("this engine has no encoder of its own")
        images = [item for item in items if isinstance(item, DecodedImage)]
        if len(images) != len(items):
            raise ClientFault("this model takes images only")
        watch = self._vitals.watch
        with watch.flight() as flight:
            encoded = await self._encoder.encode(images)
            flight.waiting = False
            watch.steps += 1
            return encoded

    def adopt_embeddings(
        self, kind: str, digest: str, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any]
    ) -> EncodedMedia:
        model = self._model
        return embeddings.adopt(
            model.facts,
            model.architecture,
            model.placeholder_id,
            model.hidden_size,
            digest,
            tensors["features"],
            extras,
        )

    async def check_health(self) -> None:
        self._vitals.require_alive()

    def stats(self) -> metrics.Readings:
        found = {metrics.ENGINE_ACTIVE: self._vitals.watch.active, **self._gauges.readings()}
        if self._kv_events is not None:
            found[metrics.ENGINE_KV_EVENTS] = self._kv_events.published
        return found

    def attach_kv_publisher(self, create: Callable[[int], events.KvPublisher]) -> bool:
        wanted = self._config.publish_kv_events and self._config.role.prefills
        if not wanted or self._llm is None or not arguments.events_enabled(self._args):
            return False
        self._kv_events = events.KvEvents(create, self._info.kv_block_size)
        ready = self._submission.first_request
        self._vitals.own(events.follow(self._llm.get_kv_cache_events_async, ready, self._kv_events.take))
        return True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._vitals.end()
        if self._encoder is not None:
            await self._encoder.close()
        if self._llm is not None:
            await _shut_down(self._llm)

    async def _attach(self, request: EngineRequest, room: int, state: EngineState) -> Submitted:
        """Submits a prefilled request: the engine fetches its KV cache and goes on."""
        params, keep = handoff.unpack_state(self._library, state)
        return await self._submission.submit(request, room, params, keep=keep)


async def _shut_down(llm: Any) -> None:
    """On a thread, for a while: an engine whose ranks are gone would wait for them for ever, so it is not
    even told."""
    if private.died_by_an_error(llm):
        return
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            llm.shutdown()
        except Exception as error:
            logger.warning("The engine did not shut down cleanly: %s", error)
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=run, name="engine-shutdown", daemon=True).start()
    try:
        await asyncio.wait_for(over.wait(), _SHUTDOWN_S)
    except asyncio.TimeoutError:
        logger.warning("The engine has not shut down within %g s", _SHUTDOWN_S)
