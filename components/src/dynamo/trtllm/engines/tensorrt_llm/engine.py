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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.config import EngineConfig, Role
from dynamo.trtllm.core import DecodedImage, DecodedMedia, EncodedMedia, MediaShape, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState, Prefilled
from dynamo.trtllm.engines.tensorrt_llm import (
    arguments,
    embeddings,
    events,
    handoff,
    private,
    results,
    starting,
)
from dynamo.trtllm.engines.tensorrt_llm.encoder import ImageEncoder
from dynamo.trtllm.engines.tensorrt_llm.health import Health
from dynamo.trtllm.engines.tensorrt_llm.inputs import ModelInputs
from dynamo.trtllm.engines.tensorrt_llm.library import load_library
from dynamo.trtllm.engines.tensorrt_llm.model import describe_model
from dynamo.trtllm.engines.tensorrt_llm.results import Reader, Submitted, abort
from dynamo.trtllm.engines.tensorrt_llm.submission import Submission
from dynamo.trtllm.engines.tensorrt_llm.watch import Watch
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, WorkerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 0.5
"""The library's iterators wait with `asyncio.wait_for`, which before Python 3.12 can swallow a
cancellation."""
_SHUTDOWN_S = 30.0
"""How long the library may take to shut down."""


class TensorRTLLMEngine(Engine):
    """See the module. Requests share the watch, the set of background tasks and the latest gauges."""

    holds_until_decoded = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._watch = Watch(config.stall_timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._gauges = events.Gauges()
        self._llm: Any = None
        self._health: Health | None = None
        self._encoder: ImageEncoder | None = None
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
        if config.role is Role.ENCODE:
            return self._start_encoder()
        self._args = arguments.llm_arguments(config, self._library)
        self._llm = starting.construct(self._library, self._library.llm, self._args)
        info = starting.describe_engine(self._library, self._llm, config, self._args, self._model)
        self._info = info
        self._submission = Submission(
            library=self._library,
            llm=self._llm,
            info=info,
            inputs=ModelInputs.of(self._library, self._llm, self._model, info.placeholder_id("image")),
            guided=self._args.get("guided_decoding_backend") is not None,
            death=self._death,
        )
        self._watch_over_it()
        if config.publish_metrics:
            ready = self._submission.first_request
            self._own(events.follow(self._llm.get_stats_async, ready, self._gauges.take))
        return info

    def _start_encoder(self) -> EngineInfo:
        model, info = self._model, starting.describe_encoder(self._library, self._config, self._model)
        if not model.facts.encodes_apart or model.placeholder_id is None:
            logger.warning("%s has no encoder of its own: this worker serves embedding files only", model.architecture)
            return info
        args = arguments.encoder_arguments(self._config, self._library)
        self._llm = starting.construct(self._library, self._library.multimodal_encoder, args)
        self._watch_over_it()
        health = self._health
        assert health is not None
        self._encoder = ImageEncoder(
            self._llm,
            model.facts,
            model.placeholder_id,
            info.max_num_seqs,
            lambda: health.cause_of_death() is not None,
        )
        return info

    def _watch_over_it(self) -> None:
        self._health = Health(self._llm, self._died, lambda: self._watch.steps)
        self._own(self._watch.run())

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        asked = self._submission
        return self._stream(request, lambda: asked.submit(request, asked.room(request)), 0, deferred=False)

    def decode(self, request: EngineRequest, first: Step, state: EngineState) -> AsyncGenerator[Step | Tokens, None]:
        async def submit() -> Submitted:
            if request.prompt.media:
                raise EngineFault("decode was given media, which prefill has dealt with")
            return await self._attach(request, self._submission.room(request), state)

        return self._stream(request, submit, len(first.token_ids), deferred=True)

    def abandon(self, request: EngineRequest, state: EngineState) -> None:
        self._own(self._fetch_and_forget(request, state))

    async def prefill(self, request: EngineRequest) -> Prefilled:
        asked = self._submission
        room = asked.room(request)
        # With room for one token nothing is handed over: a context stage would hold its blocks for a decode
        # that never comes.
        params = asked.context_params() if room > 1 else None
        with self._watch.flight() as flight:
            submitted = await asked.submit(request, 1, params, streaming=False)
            result, failed, prefilled = submitted.result, False, None
            try:
                await result.aresult()
                flight.waiting = False
                self._watch.steps += 1
                prefilled = self._prefilled(request, submitted, room)
                return prefilled
            except WorkerError:
                raise
            except Exception as error:
                failed = isinstance(error, self._library.request_error)
                raise await self._failed(request, error) from error
            finally:
                if prefilled is None or prefilled.state is None:
                    results.drop_positions(result.outputs[0].disaggregated_params, submitted)
                    if not failed:
                        abort(result)

    def media_tokens(self, shape: MediaShape, options: Mapping[str, Any]) -> int | None:
        return None

    async def encode(self, items: Sequence[DecodedMedia]) -> list[EncodedMedia]:
        if self._encoder is None:
            raise ClientFault("pictures of this model are encoded where its prompt is; this worker takes embedding files only")
        images = [item for item in items if isinstance(item, DecodedImage)]
        if len(images) != len(items):
            raise ClientFault("this model takes images only")
        with self._watch.flight() as flight:
            encoded = await self._encoder.encode(images)
            flight.waiting = False
            self._watch.steps += 1
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
        self._watch.require_alive()
        if self._health is not None:
            cause = self._health.cause_of_death()
            if cause is not None:
                self._died(cause)
                self._watch.require_alive()

    def stats(self) -> Mapping[str, float]:
        published = {} if self._kv_events is None else {"kv_events_total": float(self._kv_events.published)}
        return {"active_requests": float(self._watch.active), **self._gauges.all(), **published}

    def attach_kv_publisher(self, create: Callable[[int], events.KvPublisher]) -> bool:
        wanted = self._config.publish_kv_events and self._config.role in (Role.AGGREGATED, Role.PREFILL)
        if not wanted or self._llm is None or not arguments.events_enabled(self._args):
            return False
        self._kv_events = events.KvEvents(create, self._info.kv_block_size)
        ready = self._submission.first_request
        self._own(events.follow(self._llm.get_kv_cache_events_async, ready, self._kv_events.take))
        return True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._health is not None:
            self._health.close()
        self._watch.end(EngineDead("the engine is closed"))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_AGAIN_S)
        if self._encoder is not None:
            await self._encoder.close()
        if self._llm is not None:
            await _shut_down(self._llm)

    async def _stream(
        self, request: EngineRequest, submit: Callable[[], Awaitable[Submitted]], sent: int, *, deferred: bool
    ) -> AsyncGenerator[Step | Tokens, None]:
        """The loop that every output token passes: no work in it that is not needed for each."""
        watch = self._watch
        with watch.flight() as flight:
            submitted = await submit()
            result = submitted.result
            reader = Reader(request, submitted, sent)
            plain = reader.plain
            try:
                async for _ in result:
                    flight.waiting = False
                    watch.steps += 1
                    output = result.outputs[0]
                    if plain and output.finish_reason is None:
                        new = output.token_ids[sent:]
                        if new:
                            sent += len(new)
                            yield new
                    else:
                        step = reader.read(output, sent)
                        if step is not None:
                            sent += len(step.token_ids)
                            yield step
                            if step.finish is not None:
                                return
                        plain = reader.plain
                    flight.waiting = True
                raise EngineFault("the engine ended the request without a reason")
            except WorkerError:
                raise
            except Exception as error:
                reader.over = isinstance(error, self._library.request_error)
                raise await self._failed(request, error) from error
            finally:
                if not reader.over:
                    if deferred and not reader.seen and flight.ended_by is None:
                        self._own(self._abort_after_first(submitted))
                    else:
                        abort(result)

    async def _attach(self, request: EngineRequest, room: int, state: EngineState) -> Submitted:
        """Submits a prefilled request: the engine fetches its KV cache and goes on."""
        params, keep = handoff.unpack_state(self._library, state)
        return await self._submission.submit(request, room, params, keep=keep)

    def _prefilled(self, request: EngineRequest, submitted: Submitted, room: int) -> Prefilled:
        result = submitted.result
        output = result.outputs[0]
        params = output.disaggregated_params or getattr(result, "disaggregated_params", None)
        token_ids = list(output.token_ids) or list(getattr(params, "first_gen_tokens", None) or ())
        prompt_ids = tuple(result.prompt_token_ids)
        cached = results.cached_tokens(result)
        first = results.first_step(request, output, token_ids, len(prompt_ids), room, params)
        if submitted.disaggregated is None or output.finish_reason == "stop":
            return Prefilled(first, prompt_ids, None, cached)
        positions: tuple[torch.Tensor, ...] = ()
        placed = self._model.facts.mrope and bool(request.prompt.media)
        if placed and not results.positions_left(params, submitted):
            positions = submitted.mrope or results.positions_of_pictures(request, prompt_ids)
        return Prefilled(first, prompt_ids, handoff.pack_state(self._library, params, positions), cached)

    async def _fetch_and_forget(self, request: EngineRequest, state: EngineState) -> None:
        """Prefill's engine holds a request's KV cache until decode's has fetched it, or for a minute: so
        it is fetched."""
        try:
            submitted = await self._attach(request, 1, state)
            await self._abort_after_first(submitted)
        except WorkerError as error:
            logger.info("Request %s could not be taken back: %s", request.request_id, error)
        finally:
            state.release()

    async def _abort_after_first(self, submitted: Submitted) -> None:
        """Aborting before the KV cache has arrived would leave prefill with a transfer that nobody ends."""
        result = submitted.result
        try:
            with self._watch.flight():
                async for _ in result:
                    break
        except Exception as error:
            logger.debug("A request that its client left ended with %s", type(error).__name__)
        finally:
            abort(result)

    async def _failed(self, request: EngineRequest, error: Exception) -> WorkerError:
        """What to raise for an exception of a result."""
        logger.warning("The engine failed request %s: %s: %s", request.request_id, type(error).__name__, error)
        return await self._death(error) or EngineFault("the engine failed this request")

    async def _death(self, error: BaseException) -> WorkerError | None:
        """`EngineDead` if the library says that its engine is, after `error`; the known refusals are not
        worth a question."""
        health = self._health
        assert health is not None
        certain = isinstance(error, (ValueError, TypeError, NotImplementedError, self._library.request_error))
        if health.cause_of_death() is None and (certain or await health.lives()):
            return None
        self._died(health.cause_of_death() or "it does not answer")
        return EngineDead("the engine died")

    def _died(self, cause: str) -> None:
        logger.critical("The engine is dead: %s", cause)
        self._watch.end(EngineDead("the engine died"))

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


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
