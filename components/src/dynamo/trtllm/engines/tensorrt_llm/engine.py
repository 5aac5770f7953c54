"""The adapter: TensorRT-LLM's LLM API behind the engine port.

One request is one `generate_async` call. The library yields one object that it changes in place, with cumulative token ids,
so the streaming loop keeps a count and copies only what is new. How requests end here: a refusal raised while submitting is
the client's fault; `RequestError` fails one request; any other exception means that the engine is dead, and the watch ends
all others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.trtllm.config import EngineConfig, Modality, Role
from dynamo.trtllm.engines.port import (
    DecodedImage,
    EncodedImage,
    Engine,
    EngineInfo,
    EngineRequest,
    EngineState,
    Prefilled,
    Prompt,
    Step,
    StepLogprobs,
    Tokens,
    Usage,
)
from dynamo.trtllm.engines.tensorrt_llm import arguments, events, handoff, inputs, private, sampling
from dynamo.trtllm.engines.tensorrt_llm.encoder import ImageEncoder
from dynamo.trtllm.engines.tensorrt_llm.library import Library, load_library
from dynamo.trtllm.engines.tensorrt_llm.model import ModelDescription, describe_model
from dynamo.trtllm.engines.tensorrt_llm.watch import Watch
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, LimitFault, StartupError, WorkerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 8192
DEFAULT_BLOCK_SIZE = 32
_REFUSALS = (ValueError, TypeError, OverflowError, AssertionError)
"""What the library raises while submitting when it does not like the request."""
_CANCEL_AGAIN_S = 0.5
"""The library's iterators wait with `asyncio.wait_for`, which before Python 3.12 can swallow a cancellation."""
_MACHINE_IDS = 1021
"""Request ids hold a ten-bit machine part; this prime is what the library's other users take."""


class _Submitted(NamedTuple):
    """A request that the engine has. `keep` lives as long as the request: handles point to it."""

    result: Any
    disaggregated: Any = None
    keep: tuple[torch.Tensor, ...] = ()
    mrope: tuple[torch.Tensor, ...] = ()
    expanded: bool = False
    """True: the library expanded the prompt, so its own count of prompt tokens is the right one."""


class _Reader:
    """Reads one step of a request from the library's output object, where there is more to it than new token ids."""

    def __init__(self, request: EngineRequest, submitted: _Submitted, sent: int) -> None:
        self._request = request
        self._submitted = submitted
        self._first = sent
        self._late_stops = sampling.late_stop_ids(request.sampling)
        self._lag: int | None = None
        """Tokens at the start that have no logprobs entry: decode of some releases has none for the first token."""
        self._simple = not self._late_stops and request.sampling.logprobs is None
        self._opens = sent == 0
        """True until the first step, which says what the prompt counts; of a handed-over request prefill's does."""
        self.plain = False
        """True: a step that is not the last needs no reading. The first step always is read."""
        self.seen = self._simple and sent == 0
        """True: the engine has made a step, as far as it matters for a handed-over request."""
        self.over = False
        """True: the engine is done with the request, so nothing is left to abort."""

    def read(self, output: Any, sent: int) -> Step | None:
        """The step since `sent` tokens; None when it brought nothing to pass on."""
        self.seen, self.plain = True, self._simple
        if self._late_stops:
            cut = sampling.find_stop(output.token_ids, sent, self._late_stops, self._request.sampling.min_tokens)
            if cut is not None:
                return self._stopped(output, sent, cut)
        if output.finish_reason is not None:
            self.over = True
            return self._last(output, sent)
        new = output.token_ids[sent:]
        if not new:
            self.plain = self._simple and not self._opens
            return None
        usage, self._opens = self._usage(len(new)) if self._opens else None, False
        return Step(new, self._logprobs(output, new, sent), usage=usage)

    def _stopped(self, output: Any, sent: int, cut: int) -> Step:
        """The final step of a request that the adapter itself ends, before the stop token at index `cut`."""
        finish, stop_reason = sampling.finish_of("stop", output.token_ids[cut], self._request.sampling)
        new = output.token_ids[sent:cut]
        return Step(new, self._logprobs(output, new, sent), finish, stop_reason, self._usage(cut))

    def _last(self, output: Any, sent: int) -> Step:
        """The final step. The ids may have shrunk below what was sent; the token that ended the answer is not passed on."""
        finish, stop_reason = sampling.finish_of(output.finish_reason, output.stop_reason, self._request.sampling)
        new = _without_end(self._request, output, output.token_ids[sent:], finish)
        return Step(new, self._logprobs(output, new, sent), finish, stop_reason, self._usage(sent + len(new)))

    def _logprobs(self, output: Any, new: list[int], sent: int) -> tuple[StepLogprobs, ...] | None:
        count = self._request.sampling.logprobs
        if count is None:
            return None
        rows = output.logprobs or []
        if self._lag is None:
            self._lag = max(0, min(self._first, len(output.token_ids) - len(rows)))
        return sampling.step_logprobs(new, rows[sent - self._lag :], count)

    def _usage(self, completion_tokens: int) -> Usage:
        result, request = self._submitted.result, self._request
        prompt = result.prompt_token_ids if self._submitted.expanded else request.prompt.token_ids
        return Usage(len(prompt), completion_tokens, _cached_tokens(result))


class TensorRTLLMEngine(Engine):
    """See the module. Requests share the watch, the set of draining tasks and the latest gauges."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._watch = Watch(config.stall_timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._gauges: dict[str, float] = {}
        self._llm: Any = None
        self._encoder_object: Any = None
        self._encoder: ImageEncoder | None = None
        self._kv_events: events.KvEvents | None = None
        self._closed = False

    async def start(self) -> EngineInfo:
        config = self._config
        self._library = await asyncio.to_thread(load_library)
        self._model = describe_model(config.model_path)
        _require_servable(config, self._model)
        self._first_request = asyncio.Event()
        self._machine_id = secrets.randbelow(_MACHINE_IDS)
        if config.role is Role.ENCODE:
            return await self._start_encoder()
        self._args = arguments.llm_arguments(config, self._library)
        self._llm = await asyncio.to_thread(_construct, self._library, self._library.llm, self._args)
        self._info = self._describe()
        self._inputs = inputs.ModelInputs(
            library=self._library,
            facts=self._model.facts,
            placeholder_id=self._info.image_placeholder_id,
            hidden_size=self._model.hidden_size,
        )
        self._own(self._watch.run())
        if config.publish_metrics:
            self._own(events.follow(self._llm.get_stats_async, self._first_request, self._take_stats))
        return self._info

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        return self._stream(request, lambda: self._submit(request, self._room(request)), 0, deferred=False)

    def decode(self, request: EngineRequest, first: Step, state: EngineState) -> AsyncGenerator[Step | Tokens, None]:
        async def submit() -> _Submitted:
            if request.prompt.media:
                raise EngineFault("decode was given media, which prefill has dealt with")
            params, keep = handoff.unpack_state(self._library, state)
            return await self._submit(request, self._room(request), params, keep=keep)

        return self._stream(request, submit, len(first.token_ids), deferred=True)

    async def prefill(self, request: EngineRequest) -> Prefilled:
        room = self._room(request)
        with self._watch.flight() as flight:
            submitted = await self._submit(request, 1, self._context_params(), streaming=False)
            result, failed, prefilled = submitted.result, False, None
            try:
                await result.aresult()
                flight.waiting = False
                self._watch.steps += 1
                prefilled = self._prefilled(request, submitted, room)
                return prefilled
            except self._library.request_error as error:
                failed = True
                raise self._request_fault(request, error) from error
            except WorkerError:
                raise
            except Exception as error:
                failed = True
                raise self._died(error) from error
            finally:
                if prefilled is None or prefilled.state is None:
                    handoff.discard(submitted.disaggregated, result.outputs[0].disaggregated_params)
                    if not failed:
                        _abort(result)

    def image_tokens(self, width: int, height: int) -> int | None:
        return None

    async def encode(self, images: Sequence[DecodedImage]) -> list[EncodedImage]:
        self._watch.require_alive()
        if self._encoder is None:
            raise ClientFault("pictures of this model are encoded where its prompt is; this worker takes embedding files only")
        return await self._encoder.encode(images)

    def adopt_embeddings(self, digest: str, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any]) -> EncodedImage:
        model = self._model
        return inputs.adopt(model.facts, model.placeholder_id, model.hidden_size, digest, tensors["features"], extras)

    async def check_health(self) -> None:
        self._watch.require_alive()

    def stats(self) -> Mapping[str, float]:
        published = {} if self._kv_events is None else {"kv_events_total": float(self._kv_events.published)}
        return {"active_requests": float(self._watch.active), **self._gauges, **published}

    def attach_kv_publisher(self, create: Callable[[int], events.KvPublisher]) -> bool:
        wanted = self._config.publish_kv_events and self._config.role is not Role.DECODE
        if self._llm is None or not wanted or not arguments.events_enabled(self._args):
            return False
        self._kv_events = events.KvEvents(create, self._info.kv_block_size)
        self._own(events.follow(self._llm.get_kv_cache_events_async, self._first_request, self._kv_events.take))
        return True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.end(EngineDead("the engine is closed"))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_AGAIN_S)
        if self._encoder is not None:
            await self._encoder.close()
        for owner in (self._llm, self._encoder_object):
            if owner is not None:
                await asyncio.to_thread(owner.shutdown)

    async def _start_encoder(self) -> EngineInfo:
        facts, placeholder = self._model.facts, self._model.placeholder_id
        info = EngineInfo(
            context_length=self._model.max_positions or DEFAULT_CONTEXT_LENGTH,
            kv_block_size=DEFAULT_BLOCK_SIZE,
            total_kv_blocks=None,
            max_num_seqs=int(self._config.args.get("max_batch_size") or 1),
            max_num_batched_tokens=int(self._config.args.get("max_num_tokens") or DEFAULT_CONTEXT_LENGTH),
            image_placeholder_id=placeholder,
            encodes_apart=True,
            hidden_size=self._model.hidden_size,
            extras={"tensorrt_llm": self._library.version, "images_encoded_apart": facts.encodes_apart},
        )
        if facts.encodes_apart and placeholder is not None:
            args = arguments.encoder_arguments(self._config, self._library)
            self._encoder_object = await asyncio.to_thread(_construct, self._library, self._library.multimodal_encoder, args)
            self._encoder = ImageEncoder(self._encoder_object, facts, placeholder, info.max_num_seqs)
        else:
            logger.warning("%s has no encoder of its own: this worker serves embedding files only", self._model.architecture)
        return info

    def _describe(self) -> EngineInfo:
        """What the started engine is, by what it says itself where it does."""
        built, args, model = getattr(self._llm, "args", None), self._args, self._model
        capacity = self._capacity()
        cache = args.get("kv_cache_config")
        block_size = capacity.get("tokensPerBlock") or (cache.get("tokens_per_block") if isinstance(cache, dict) else None)
        takes_images = self._config.modality is Modality.MULTIMODAL and self._config.role is not Role.DECODE
        return EngineInfo(
            context_length=_first(getattr(built, "max_seq_len", None), args.get("max_seq_len"), model.max_positions)
            or DEFAULT_CONTEXT_LENGTH,
            kv_block_size=_first(block_size) or DEFAULT_BLOCK_SIZE,
            total_kv_blocks=_first(capacity.get("maxNumBlocks")),
            max_num_seqs=_first(getattr(built, "max_batch_size", None), args.get("max_batch_size")) or 2048,
            max_num_batched_tokens=_first(getattr(built, "max_num_tokens", None), args.get("max_num_tokens")) or 8192,
            image_placeholder_id=model.placeholder_id if takes_images else None,
            hidden_size=model.hidden_size if model.facts.attaches_embeddings else None,
            data_parallel_size=(_first(args.get("tensor_parallel_size")) or 1) if args.get("enable_attention_dp") else 1,
            extras={"tensorrt_llm": self._library.version, "images_encoded_apart": model.facts.encodes_apart},
        )

    def _capacity(self) -> Mapping[str, Any]:
        read = getattr(self._llm, "get_kv_cache_capacity", None)
        if not callable(read):
            return {}
        try:
            return dict(read() or {})
        except Exception as error:
            logger.info("The engine does not tell its KV cache's size: %s", error)
            return {}

    def _room(self, request: EngineRequest) -> int:
        """Most output tokens: the request's own limit, and what the context length leaves. The library lowers it where an image
        expands further than the ids here show."""
        count, context = len(request.prompt.token_ids), self._info.context_length
        if count >= context:
            raise LimitFault(f"the prompt has {count} tokens, which leaves no room in the context length of {context}")
        room = context - count
        wanted = request.sampling.max_tokens
        return room if wanted is None else min(wanted, room)

    def _context_params(self) -> Any:
        library = self._library
        fields: dict[str, Any] = {"request_type": "context_only"}
        if library.next_request_id is not None:
            fields["disagg_request_id"] = library.next_request_id(self._machine_id)
        return library.disaggregated_params(**fields)

    async def _submit(
        self,
        request: EngineRequest,
        max_tokens: int,
        disaggregated: Any = None,
        *,
        streaming: bool = True,
        keep: tuple[torch.Tensor, ...] = (),
    ) -> _Submitted:
        """Hands the request to the engine. Raises `ClientFault` when it refuses, `EngineDead` when it is gone."""
        prompt, ranks = request.prompt, self._info.data_parallel_size
        if request.dp_rank is not None and request.dp_rank >= ranks > 1:
            raise ClientFault(f"dp_rank must be between 0 and {ranks - 1}, not {request.dp_rank}")
        built = self._inputs.build(prompt, request.media_hashes)
        if built.disaggregated:
            disaggregated = disaggregated or self._library.disaggregated_params(request_type="context_and_generation")
            for name, value in built.disaggregated.items():
                setattr(disaggregated, name, value)
        guided = self._args.get("guided_decoding_backend") is not None
        params = sampling.build_sampling_params(
            self._library, request.sampling, max_tokens, guided_backend=guided, special_tokens=built.special_tokens
        )
        source: Any = built.inputs
        if prompt.media and self._library.has_preprocess:
            source = await self._preprocess(source, params, disaggregated)
        self._first_request.set()
        try:
            result = self._llm.generate_async(source, params, streaming=streaming, **self._options(request, disaggregated))
        except (*_REFUSALS, self._library.request_error) as error:
            handoff.discard(disaggregated)
            logger.info("The engine refused request %s: %s", request.request_id, error)
            raise ClientFault("the engine refused this request's prompt, media or options") from error
        except Exception as error:
            raise self._died(error) from error
        self._check_expanded(result, prompt)
        mrope = built.keep[-2:] if self._model.facts.mrope and built.keep else ()
        return _Submitted(result, disaggregated, (*keep, *built.keep), mrope, expanded=bool(prompt.media))

    def _check_expanded(self, result: Any, prompt: Prompt) -> None:
        """Only the library knows how far images expand, and it does once it has the request."""
        count, context = len(result.prompt_token_ids) if prompt.media else 0, self._info.context_length
        if count >= context:
            _abort(result)
            raise LimitFault(f"the prompt has {count} tokens with its images, and the context length is {context}")

    async def _preprocess(self, source: Any, params: Any, disaggregated: Any) -> Any:
        """Image processing, which takes tens of milliseconds, off the event loop."""
        try:
            return await asyncio.to_thread(
                self._llm.preprocess, source, sampling_params=params, disaggregated_params=disaggregated
            )
        except (*_REFUSALS, self._library.request_error) as error:
            handoff.discard(disaggregated)
            logger.info("The engine refused an input: %s", error)
            raise ClientFault("the engine refused this request's prompt or media") from error
        except Exception as error:
            raise EngineFault("the engine failed to prepare this request's media") from error

    def _options(self, request: EngineRequest, disaggregated: Any) -> dict[str, Any]:
        """Keyword arguments of `generate_async`, only those that the release knows and the request uses."""
        known, options = self._library.generate_parameters, {}
        if disaggregated is not None:
            options["disaggregated_params"] = disaggregated
        if request.cache_salt is not None and "cache_salt" in known:
            options["cache_salt"] = request.cache_salt
        if request.trace_headers and "trace_headers" in known:
            options["trace_headers"] = dict(request.trace_headers)
        if request.priority is not None and "priority" in known:
            options["priority"] = min(1.0, max(0.0, request.priority))
        if request.dp_rank is not None and self._info.data_parallel_size > 1 and self._library.scheduling_params is not None:
            options["scheduling_params"] = self._library.scheduling_params(
                attention_dp_rank=request.dp_rank, attention_dp_relax=False
            )
        return options

    async def _stream(
        self, request: EngineRequest, submit: Callable[[], Awaitable[_Submitted]], sent: int, *, deferred: bool
    ) -> AsyncGenerator[Step | Tokens, None]:
        """The loop that every output token passes: no work in it that is not needed for each."""
        watch = self._watch
        with watch.flight() as flight:
            submitted = await submit()
            result = submitted.result
            reader = _Reader(request, submitted, sent)
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
            except self._library.request_error as error:
                reader.over = True
                raise self._request_fault(request, error) from error
            except WorkerError:
                raise
            except Exception as error:
                reader.over = True
                raise self._died(error) from error
            finally:
                if not reader.over:
                    if deferred and not reader.seen and flight.ended_by is None:
                        self._own(self._abort_after_first(submitted))
                    else:
                        _abort(result)

    def _prefilled(self, request: EngineRequest, submitted: _Submitted, room: int) -> Prefilled:
        result = submitted.result
        output = result.outputs[0]
        params = output.disaggregated_params or getattr(result, "disaggregated_params", None)
        token_ids = list(output.token_ids) or list(getattr(params, "first_gen_tokens", None) or ())
        prompt_ids = tuple(result.prompt_token_ids)
        cached = _cached_tokens(result)
        first = self._first_step(request, output, token_ids, len(prompt_ids), room, params)
        if first.finish is not None:
            return Prefilled(first, prompt_ids, None, cached)
        state = handoff.pack_state(self._library, _with_mrope(params, submitted))
        if submitted.mrope and not state.tensors:
            state = EngineState(state.meta, dict(zip(handoff.MROPE_TENSORS, submitted.mrope, strict=True)))
        return Prefilled(first, prompt_ids, state, cached)

    def _first_step(
        self, request: EngineRequest, output: Any, token_ids: list[int], prompt_tokens: int, room: int, params: Any
    ) -> Step:
        """The first token, and whether it ends the request: the context stage itself always stops after one token."""
        options = request.sampling
        if output.finish_reason == "stop":
            finish, stop_reason = sampling.finish_of("stop", output.stop_reason, options)
            return Step((), None, finish, stop_reason, Usage(prompt_tokens, 0))
        if not token_ids:
            raise EngineFault("the engine returned no first token")
        token = token_ids[0]
        if options.min_tokens < 1 and token in options.stop_token_ids:
            return Step((), None, "stop", token, Usage(prompt_tokens, 0))
        if options.min_tokens < 1 and not options.ignore_eos and token in options.eos_token_ids:
            return Step((), None, "eos", None, Usage(prompt_tokens, 0))
        rows = None
        if options.logprobs is not None:
            rows = sampling.step_logprobs(token_ids, output.logprobs or handoff.first_logprobs(params), options.logprobs)
        if room <= len(token_ids):
            return Step(token_ids, rows, "length", None, Usage(prompt_tokens, len(token_ids)))
        return Step(token_ids, rows)

    async def _abort_after_first(self, submitted: _Submitted) -> None:
        """Aborting before the KV cache has arrived would leave prefill with a transfer that nobody ends."""
        result = submitted.result
        try:
            with self._watch.flight():
                async for _ in result:
                    break
        except Exception as error:
            logger.debug("A request that its client left ended with %s", type(error).__name__)
        finally:
            _abort(result)

    def _request_fault(self, request: EngineRequest, error: BaseException) -> WorkerError:
        logger.warning("The engine failed request %s: %s", request.request_id, error)
        return EngineFault("the engine failed this request")

    def _died(self, error: BaseException) -> EngineDead:
        logger.critical("The engine is dead: %s: %s", type(error).__name__, error)
        self._watch.end(EngineDead("the engine died"))
        return EngineDead("the engine died")

    def _take_stats(self, stats: Mapping[str, Any]) -> None:
        self._gauges = events.gauges_of(stats)

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _require_servable(config: EngineConfig, model: ModelDescription) -> None:
    """What the record knows cannot work is refused before anything is loaded."""
    facts, name = model.facts, model.architecture
    if config.role in (Role.PREFILL, Role.DECODE) and not facts.disaggregates:
        raise StartupError(f"TensorRT-LLM does not split {name} over prefill and decode workers: serve it aggregated")
    if config.role is not Role.ENCODE:
        return
    if not facts.encodes_apart and not facts.attaches_embeddings:
        raise StartupError(
            f"TensorRT-LLM cannot encode images of {name or 'this model'} in a worker of their own: leave the encode worker out, "
            "prefill and aggregated workers encode them"
        )
    if facts.encodes_apart and not private.handles_supported():
        raise StartupError("this TensorRT-LLM release cannot hand embeddings to another process: leave the encode worker out")


def _construct(library: Library, make: Any, args: Mapping[str, Any]) -> Any:
    """Loads the model, on a thread. Everything that goes wrong is told as one sentence."""
    if make is None:
        raise StartupError(f"TensorRT-LLM {library.version} has no MultimodalEncoder: leave the encode worker out")
    try:
        return make(**args)
    except Exception as error:
        raise StartupError(f"TensorRT-LLM {library.version} {_construction_fault(error)}") from error


def _construction_fault(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors):
        faults = errors()
        if faults:
            name = ".".join(str(part) for part in faults[0].get("loc", ()))
            return f"refused the engine argument {name}: {faults[0].get('msg', 'not valid')}"
    lines = str(error).strip().splitlines()
    return f"could not load the model: {lines[0] if lines else type(error).__name__}"


def _with_mrope(params: Any, submitted: _Submitted) -> Any:
    """Positions of an image that the engine encoded itself: some releases write them only into what they were given."""
    given = submitted.disaggregated
    if params is not None and not submitted.mrope and given is not None:
        for name in ("mrope_position_ids_handle", "mrope_position_deltas_handle"):
            if getattr(params, name, None) is None and getattr(given, name, None) is not None:
                setattr(params, name, getattr(given, name))
    return params


def _without_end(request: EngineRequest, output: Any, new: list[int], finish: str) -> list[int]:
    if not new:
        return new
    if finish == "eos" and new[-1] in request.sampling.eos_token_ids:
        return new[:-1]
    if finish == "stop" and new[-1] == output.stop_reason:
        return new[:-1]
    return new


def _cached_tokens(result: Any) -> int:
    return int(getattr(result, "cached_tokens", 0) or 0)


def _abort(result: Any) -> None:
    """Fire and forget. Calling it for a request that is over is not promised to be harmless."""
    try:
        if not result.finished and not result.aborted():
            result.abort()
    except Exception as error:
        logger.debug("Aborting a request failed with %s", type(error).__name__)


def _first(*values: Any) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
