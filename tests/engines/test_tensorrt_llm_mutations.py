"""Misusing a rule of TensorRT-LLM makes a named check fail:
one mend, or one older rule, is taken back at a time.

A mutation replaces a function or an attribute of the adapter by one that does it wrong, so it says what the
adapter would do and not how its source is spelled. Each check passes for the adapter as it is (the audit's
tests and the first one here), and must fail under its mutation over at least one release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from secrets import randbelow
from typing import Any, NamedTuple

import pytest
import torch

from dynamo.trtllm.config import Role
from dynamo.trtllm.core import GuidedDecoding, Prompt, Sampling, Step
from dynamo.trtllm.engines.port import EngineRequest, EngineState
from dynamo.trtllm.engines.tensorrt_llm import (
    arguments,
    embeddings,
    encoder,
    engine,
    events,
    handoff,
    inputs,
    library,
    mrope,
    private,
    results,
    sampling,
    starting,
    streams,
    submission,
    watch,
)
from dynamo.trtllm.engines.tensorrt_llm.encoder import EncoderThread
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from dynamo.trtllm.engines.tensorrt_llm.health import Health
from dynamo.trtllm.engines.tensorrt_llm.streams import Streams
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, StartupError
from engines import tensorrt_llm_audit as audit
from engines.contract import generate, steps_of
from engines.tensorrt_llm_audit import OPTIONS, Place, over_json, same_in_halves
from engines.tensorrt_llm_subject import (
    LLAVA,
    QWEN25,
    RELEASES,
    ask,
    ask_about,
    installed,
    instances,
    leaked_handles,
    patience,
    picture,
    script,
    until,
)

Patch = pytest.MonkeyPatch
Check = Callable[[Place], Awaitable[None]]
DEADLINE_S = 20.0
IMPATIENT_S = 2.0


# Checks of rules that no row of the audit names.


async def logprobs_over_both_halves(place: Place) -> None:
    async with place.both() as (subject, _):
        output = await over_json(subject, ask(**OPTIONS, logprobs=2))
        assert [row.chosen.token_id for row in output.logprobs] == output.token_ids


async def text_over_both_halves(place: Place) -> None:
    async with place.both() as (subject, _):
        await same_in_halves(subject, ask(**OPTIONS))


async def images_over_both_halves(place: Place) -> None:
    async with place.both(QWEN25) as (subject, _):
        await same_in_halves(subject, ask_about([picture(84, 56, 10)], **OPTIONS))
    assert leaked_handles() == []


async def usage_counts_expanded_images(place: Place) -> None:
    async with place.started(LLAVA) as (subject, _):
        asked = ask_about([picture()], placeholder=LLAVA, **OPTIONS)
        for each in (asked, replace(asked, media_hashes=("ab" * 8,))):
            output = await generate(subject, each)
            assert output.usage is not None
            assert output.usage.prompt_tokens == len(asked.prompt.token_ids) - 1 + 6


async def streaming_in_deltas(place: Place) -> None:
    async with place.started() as (subject, _):
        steps = await steps_of(subject.generate(ask(max_tokens=40, ignore_eos=True)))
        assert [len(step.token_ids) for step in steps] == [1] * 40
        assert instances()[-1].seen[-1]["sampling_params"].detokenize is False


async def end_tokens(place: Place) -> None:
    async with place.started() as (subject, _):
        free = await generate(subject, ask(max_tokens=64, ignore_eos=True))
        ended = await generate(subject, ask(max_tokens=64, eos_token_ids=frozenset({2, 3})))
        assert ended.finish == "eos"
        assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
        late = ask(max_tokens=20, min_tokens=4, ignore_eos=True, stop_token_ids=frozenset(free.token_ids[:4]))
        assert len((await generate(subject, late)).token_ids) >= 4


async def fresh_params(place: Place) -> None:
    async with place.started() as (subject, _):
        for _ in range(2):
            await generate(subject, ask(max_tokens=2))
        first, second = (call["sampling_params"] for call in instances()[-1].seen)
        assert first is not second


async def options_by_release(place: Place) -> None:
    async with place.started(args={"guided_decoding_backend": "xgrammar"}) as (subject, _):
        guided = ask(max_tokens=2, guided=GuidedDecoding(json={"a": 1}))
        await generate(subject, replace(guided, priority=0.7, cache_salt="s"))
        call = instances()[-1].seen[-1]
        assert call["sampling_params"].guided_decoding.json == '{"a": 1}'
        assert (call.get("priority"), call["cache_salt"]) == (None if place.is_old else 0.7, "s")


async def leaving_aborts(place: Place) -> None:
    async with place.started() as (subject, _):
        async with aclosing(subject.generate(ask(max_tokens=30, ignore_eos=True))) as steps:
            async for _ in steps:
                break
        assert instances()[-1].aborted == [(1, 1)]


async def decode_aborts_late(place: Place) -> None:
    async with place.both() as (subject, _):
        prefilled = await subject.prefill(ask(**OPTIONS))
        script().step_delay_s = 0.02
        task = asyncio.create_task(anext(subject.decode(ask(**OPTIONS), prefilled.first, prefilled.state)))
        await until(lambda: len(instances()[-1].seen) == 2)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: instances()[-1].aborted)
        assert instances()[-1].aborted[0][1] >= 1


async def one_request_fails(place: Place) -> None:
    async with place.started() as (subject, _):
        script().fail_at_token = 2
        with pytest.raises(EngineFault):
            await generate(subject, ask(**OPTIONS))
        script().fail_at_token = None
        await subject.check_health()
        await generate(subject, ask(**OPTIONS))


async def the_engine_dies(place: Place) -> None:
    async with place.started() as (subject, _):
        script().hang_at_token = 1
        waiting = asyncio.gather(generate(subject, ask(**OPTIONS)), return_exceptions=True)
        await until(lambda: instances()[-1].seen)
        script().hang_at_token, script().fatal_at_token = None, 2
        with pytest.raises(EngineDead):
            await generate(subject, ask(**OPTIONS))
        assert (await asyncio.wait([waiting], timeout=1.0))[0]
        assert isinstance((await waiting)[0], EngineDead)
        with pytest.raises(EngineDead):
            await subject.check_health()


async def a_stuck_engine_is_found(place: Place) -> None:
    async with place.started(stall_timeout_s=0.1) as (subject, _):
        script().hang_at_token = 2
        with pytest.raises(EngineDead):
            await asyncio.wait_for(generate(subject, ask(**OPTIONS)), 2.0)


async def a_refusal_is_the_clients(place: Place) -> None:
    async with place.started(args={"max_num_tokens": 64}) as (subject, _):
        with pytest.raises(ClientFault):
            await generate(subject, ask(tuple(range(300, 400)), max_tokens=2))
        await subject.check_health()
        wrong = EngineRequest(request_id="r", prompt=Prompt((5,)), sampling=Sampling(top_p=7.0))
        with pytest.raises(ClientFault):
            await generate(subject, wrong)


async def fields_of_another_release(place: Place) -> None:
    async with place.both() as (subject, _):
        prefilled = await subject.prefill(ask(**OPTIONS))
        params = {**prefilled.state.meta["params"], "new_field": 1, "multimodal_embedding_handles": [{}]}
        state = EngineState({**prefilled.state.meta, "params": params})
        steps = await steps_of(subject.decode(ask(**OPTIONS), prefilled.first, state))
        assert steps[-1].finish == "length"


async def arguments_by_release(place: Place) -> None:
    for bad in ({"max_batch_sise": 1}, {"kv_cache_config": {"dtipe": "fp8"}}):
        with pytest.raises(StartupError, match="does not know the engine argument"):
            await TensorRTLLMEngine(place.config(args=bad)).start()
    args = {"cache_transceiver_config": {"backend": "nixl"}, "num_postprocess_workers": 2}
    async with place.started(args=args):
        built = instances()[-1].args
        assert (built.cache_transceiver_config.backend, built.num_postprocess_workers) == ("NIXL", 0)


async def prefill_role(place: Place) -> None:
    async with place.started(role=Role.PREFILL) as (subject, _):
        assert (await subject.prefill(ask(**OPTIONS))).state is not None


async def kv_events(place: Place) -> None:
    told: list[Any] = []

    class Publisher:
        def publish_stored(self, *args: Any, **_: Any) -> None:
            told.append(args)

    async with place.started(publish_kv_events=True) as (subject, _):
        subject.attach_kv_publisher(lambda rank: Publisher())
        for number in (1, 2):
            await generate(subject, ask(tuple(range(300, 370)), max_tokens=2))
            await until(lambda at=number: len(told) >= at)
            await asyncio.sleep(0.15)  # longer than the double's iterators wait
            assert len(told) == number
        assert [len(args[2]) for args in told] == [2, 2]
        assert all(-(1 << 63) <= h < 1 << 63 for args in told for h in args[2])


# Taking mends back.


def changed_inputs(change: Callable[[inputs.EngineInputs], inputs.EngineInputs]) -> Callable[[Patch], None]:
    """The engine is given what `change` makes of a prompt."""
    original = inputs.ModelInputs.build

    def build(self: Any, prompt: Any, uuids: Any = ()) -> Any:
        return change(original(self, prompt, uuids))

    return lambda patch: patch.setattr(inputs.ModelInputs, "build", build)


def without(*keys: str) -> Callable[[inputs.EngineInputs], inputs.EngineInputs]:
    return lambda built: built._replace(inputs={k: v for k, v in built.inputs.items() if k not in keys})


def changed_params(change: Callable[[Any], None]) -> Callable[[Patch], None]:
    """The library's sampling parameters after `change`."""
    original = sampling.build_sampling_params

    def build(*args: Any, **options: Any) -> Any:
        params = original(*args, **options)
        change(params)
        return params

    return lambda patch: patch.setattr(sampling, "build_sampling_params", build)


def changed_request(**changes: Any) -> Callable[[Patch], None]:
    """Requests are read as if these sampling fields were others."""

    def build(lib: Any, asked: Any, *args: Any, **options: Any) -> Any:
        return original(lib, replace(asked, **changes), *args, **options)

    original = sampling.build_sampling_params
    return lambda patch: patch.setattr(sampling, "build_sampling_params", build)


def changed_state(change: Callable[[EngineState], EngineState]) -> Callable[[Patch], None]:
    """Prefill hands over what `change` makes of its state."""
    original = handoff.pack_state
    return lambda patch: patch.setattr(handoff, "pack_state", lambda *given: change(original(*given)))


def changed_arguments(change: Callable[[dict[str, Any]], None]) -> Callable[[Patch], None]:
    original = arguments.llm_arguments

    def build(*given: Any) -> dict[str, Any]:
        args = original(*given)
        change(args)
        return args

    return lambda patch: patch.setattr(arguments, "llm_arguments", build)


def changed_library(**changes: Any) -> Callable[[Patch], None]:
    """The installed release as if it were read otherwise."""
    original = library.load_library
    return lambda patch: patch.setattr(engine, "load_library", lambda: replace(original(), **changes))


def changed_decode_params(change: Callable[[Any], None]) -> Callable[[Patch], None]:
    original = handoff.unpack_state

    def unpack(lib: Any, state: Any) -> Any:
        params, keep = original(lib, state)
        change(params)
        return params, keep

    return lambda patch: patch.setattr(handoff, "unpack_state", unpack)


def changed_context_params(change: Callable[[Any], None]) -> Callable[[Patch], None]:
    original = submission.Submission.context_params

    def build(self: Any) -> Any:
        params = original(self)
        change(params)
        return params

    return lambda patch: patch.setattr(submission.Submission, "context_params", build)


def replaced(holder: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(holder, name, value)


def reader_that(name: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """`Reader.<name>` with its result changed."""
    original = getattr(results.Reader, name)
    return lambda patch: patch.setattr(
        results.Reader, name, lambda self, *args: change(original(self, *args))
    )


def one_id(helper: Callable[..., int]) -> Callable[[], int]:
    made = helper(1)
    return lambda: made


def one_number(helper: Callable[..., int]) -> Callable[[], int]:
    number = randbelow(1021)
    return lambda: helper(number)


def long_deltas(original: Any) -> Any:
    def positions(*given: Any) -> Any:
        ids, deltas = original(*given)
        return ids, deltas.long()

    return positions


async def not_alive(self: Health) -> bool:
    return False


async def encode_by_generate(self: EncoderThread, images: Any) -> Any:
    outputs = await asyncio.to_thread(self._encoder.generate, [self._inputs(image) for image in images])
    return [self._take(image, output) for image, output in zip(images, outputs, strict=True)]


def nobody_asks(patch: Patch) -> None:
    patch.setattr(private, "cause_of_death", lambda llm: None)
    patch.setattr(private, "ask_health", lambda llm: True)


def refuse_empty(original: Any) -> Any:
    def pack(lib: Any, params: Any, *rest: Any) -> Any:
        if not params.opaque_state:
            raise EngineFault("the engine returned nothing that decode could continue from")
        return original(lib, params, *rest)

    return pack


def unsalted(original: Any) -> Any:
    def take(self: Any, event: Mapping[str, Any]) -> None:
        data = event.get("data") or {}
        blocks = [{k: v for k, v in block.items() if k != "cache_salt"} for block in data.get("blocks") or ()]
        original(self, {**event, "data": {**data, "blocks": blocks}})

    return take


def without_state(original: Any) -> Any:
    """A finished request has no state, whatever the engine still holds."""

    async def prefill(self: Any, request: Any) -> Any:
        prefilled = await original(self, request)
        return replace(prefilled, state=None) if prefilled.first.finish is not None else prefilled

    return prefill


def forgotten(self: Any, request: Any, state: EngineState) -> None:
    state.release()


def on_a_thread(original: Any) -> Any:
    def construct(*given: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(original, *given).result()

    return construct


def as_client_reads(built: inputs.EngineInputs) -> inputs.EngineInputs:
    """Embeddings given as a bare list."""
    given = built.inputs.get("multi_modal_embeddings")
    if not isinstance(given, dict):
        return built
    return built._replace(inputs={**built.inputs, "multi_modal_embeddings": given["image"]})


def ignore_the_end(params: Any) -> None:
    if params.end_id == sampling.NO_END_ID:
        params.ignore_eos = True


class Mutation(NamedTuple):
    take_back: Callable[[Patch], None]
    check: Check


def share_params(patch: Patch) -> None:
    original = sampling.build_sampling_params
    kept: dict[int, Any] = {}
    patch.setattr(
        sampling,
        "build_sampling_params",
        lambda lib, *a, **o: kept.setdefault(id(lib), original(lib, *a, **o)),
    )


def changed_steps(change: Callable[[EngineRequest, Step], Step]) -> Callable[[Patch], None]:
    """Streams yield what `change` makes of a request's steps."""
    original = Streams.read

    async def read(self: Any, request: EngineRequest, *args: Any, **options: Any) -> Any:
        async for step in original(self, request, *args, **options):
            yield change(request, step) if isinstance(step, Step) else step

    return lambda patch: patch.setattr(Streams, "read", read)


def with_end_token(request: EngineRequest, step: Step) -> Step:
    return step._replace(token_ids=[*step.token_ids, 2]) if step.finish == "eos" else step


def with_unexpanded_usage(request: EngineRequest, step: Step) -> Step:
    if step.usage is None:
        return step
    return step._replace(usage=step.usage._replace(prompt_tokens=len(request.prompt.token_ids)))


def start_over(original: Any) -> Any:
    """A stream that passes on all ids so far, each time."""

    async def stream(self: Any, *args: Any, **options: Any) -> Any:
        sent: list[int] = []
        async for step in original(self, *args, **options):
            if isinstance(step, list):
                sent = [*sent, *step]
                yield list(sent)
            else:
                yield step

    return stream


ROWS: dict[str, Mutation] = {
    "1: one number for node and process": Mutation(
        replaced(library, "id_maker", one_number), audit.request_ids
    ),
    "1: one id for all requests": Mutation(
        replaced(library, "id_maker", one_id),
        audit.request_ids,
    ),
    "2: token ids alone beside handles": Mutation(
        changed_inputs(lambda built: without("prompt")(built) if built.disaggregated else built),
        audit.prompt_beside_handles,
    ),
    "3: deltas of 64 bits": Mutation(
        lambda patch: patch.setattr(mrope, "positions", long_deltas(mrope.positions)), audit.int32_deltas
    ),
    "3: deltas of 64 bits from an older worker": Mutation(
        lambda patch: patch.setattr(torch.Tensor, "int", lambda self: self), audit.int32_deltas
    ),
    "4: what is not known as a refusal is the engine's death": Mutation(
        replaced(Health, "lives", not_alive), audit.requests_end_alone
    ),
    "5: a bare tensor for Llama 4": Mutation(
        replaced(embeddings, "engine_form", lambda item: item.tensors["features"]), audit.dictionary_of_llama4
    ),
    "5: special tokens are not counted": Mutation(
        lambda patch: patch.setattr(embeddings, "DICTIONARY_MODELS", frozenset()), audit.dictionary_of_llama4
    ),
    "6: a state without bytes is refused": Mutation(
        lambda patch: patch.setattr(handoff, "pack_state", refuse_empty(handoff.pack_state)),
        audit.state_without_bytes,
    ),
    "7: the rendered first token stays": Mutation(
        replaced(private, "front_of_a_text", lambda llm: ""), audit.one_beginning
    ),
    "7: token ids for every model": Mutation(
        replaced(private, "takes_ids_beside_images", lambda llm: True), audit.one_beginning
    ),
    "8: no processor arguments": Mutation(
        changed_inputs(without("mm_processor_kwargs")), audit.processor_arguments
    ),
    "9: ignore_eos is passed on": Mutation(
        changed_params(ignore_the_end), audit.stop_tokens_under_ignore_eos
    ),
    "9: the length wins over a stop token": Mutation(
        replaced(sampling, "end_at", lambda *_: None), audit.a_stop_token_at_the_limit
    ),
    "10: prefill lets go of what its engine holds": Mutation(
        lambda patch: patch.setattr(TensorRTLLMEngine, "prefill", without_state(TensorRTLLMEngine.prefill)),
        audit.first_tokens_that_end,
    ),
    "10: decode answers without its engine": Mutation(
        replaced(TensorRTLLMEngine, "holds_until_decoded", False), audit.nothing_stays_held
    ),
    "10: the engine forgets what it is told": Mutation(
        replaced(TensorRTLLMEngine, "abandon", forgotten), audit.nothing_stays_held
    ),
    "11: nobody listens": Mutation(
        replaced(Health, "cause_of_death", lambda self: None), audit.idle_death_is_found
    ),
    "11: nobody asks": Mutation(nobody_asks, audit.death_is_asked_for),
    "12: a batch is read at once": Mutation(
        replaced(EncoderThread, "encode", encode_by_generate), audit.images_end_alone
    ),
    "13: blocks lose their salt": Mutation(
        lambda patch: patch.setattr(events.KvEvents, "take", unsalted(events.KvEvents.take)),
        audit.salted_blocks,
    ),
    "14: scheduling parameters in one place": Mutation(
        changed_library(scheduling_params=None), audit.ranks_are_told
    ),
    "15: the model is loaded on another thread": Mutation(
        lambda patch: patch.setattr(starting, "construct", on_a_thread(starting.construct)), audit.main_thread
    ),
    "16: any backend for the Python transceiver": Mutation(
        replaced(arguments, "PYTHON_BACKENDS", ("NIXL", "DEFAULT", "UCX", "MOONCAKE", "MPI")),
        audit.transceivers_that_fit,
    ),
}


def drop_mrope(params: Any) -> None:
    params.mrope_position_ids_handle = params.mrope_position_deltas_handle = None


def expand_again(built: inputs.EngineInputs) -> inputs.EngineInputs:
    """Handles beside a prompt that holds the placeholders' expansion."""
    if not built.disaggregated:
        return built
    text = built.inputs["prompt"].replace("<|image_pad|>", "<|image_pad|> <|image_pad|>")
    return built._replace(inputs={**built.inputs, "prompt": text})


OLDER: dict[str, Mutation] = {
    "sampling parameters are shared": Mutation(share_params, fresh_params),
    "cumulative ids are passed on": Mutation(
        lambda patch: patch.setattr(Streams, "read", start_over(Streams.read)),
        streaming_in_deltas,
    ),
    "max_tokens keeps the library's default": Mutation(
        changed_params(lambda params: setattr(params, "max_tokens", 32)), streaming_in_deltas
    ),
    "the library detokenizes": Mutation(
        changed_params(lambda params: setattr(params, "detokenize", True)), streaming_in_deltas
    ),
    "end_id is left to a tokenizer that is not there": Mutation(
        changed_params(lambda params: setattr(params, "end_id", None)), end_tokens
    ),
    "the end token is passed on": Mutation(
        changed_steps(with_end_token), end_tokens
    ),
    "stop tokens ignore min_tokens": Mutation(changed_request(min_tokens=0), end_tokens),
    "an argument that the release lacks is sent": Mutation(
        changed_library(generate_parameters=frozenset({"cache_salt", "trace_headers", "priority"})),
        options_by_release,
    ),
    "a grammar is given as something else": Mutation(
        changed_request(guided=GuidedDecoding(regex="a")), options_by_release
    ),
    "leaving does not abort": Mutation(replaced(streams, "abort", lambda result: None), leaving_aborts),
    "decode is aborted at once": Mutation(
        lambda patch: patch.setattr(
            Streams,
            "abort_after_first",
            lambda self, submitted: asyncio.sleep(0, results.abort(submitted.result)),
        ),
        decode_aborts_late,
    ),
    "the engine's error is taken for a request's": Mutation(
        replaced(Health, "cause_of_death", lambda self: None), the_engine_dies
    ),
    "those who wait for a dead engine are forgotten": Mutation(
        replaced(watch.Watch, "end", lambda self, reason: None),
        the_engine_dies,
    ),
    "nobody looks for a stuck engine": Mutation(
        replaced(watch.Watch, "run", lambda self: asyncio.sleep(0)), a_stuck_engine_is_found
    ),
    "a refusal is taken for the engine's fault": Mutation(
        replaced(submission.faults, "refused", lambda *_: EngineFault("the engine failed this request")),
        a_refusal_is_the_clients,
    ),
    "opaque state stays bytes": Mutation(
        changed_state(
            lambda s: EngineState({**s.meta, "params": {**s.meta["params"], "opaque_state": b"x"}}, s.tensors)
        ),
        text_over_both_halves,
    ),
    "decode asks for a context": Mutation(
        changed_decode_params(lambda params: setattr(params, "request_type", "context_only")),
        text_over_both_halves,
    ),
    "prefill asks for the whole answer": Mutation(
        changed_context_params(lambda params: setattr(params, "request_type", "context_and_generation")),
        text_over_both_halves,
    ),
    "no request id": Mutation(changed_library(next_request_id=None), text_over_both_halves),
    "logprobs of the first token are not the library's own": Mutation(
        changed_library(logprob=lambda logprob, rank: (logprob, rank)), logprobs_over_both_halves
    ),
    "fields of another release are set": Mutation(
        changed_library(
            disaggregated_fields=frozenset(
                {"opaque_state", "first_gen_tokens", "ctx_request_id", "new_field"}
            )
        ),
        fields_of_another_release,
    ),
    "handles reach decode": Mutation(
        changed_decode_params(lambda params: setattr(params, "multimodal_embedding_handles", [{}])),
        fields_of_another_release,
    ),
    "positions stay behind": Mutation(
        changed_state(lambda state: EngineState(state.meta, {})), images_over_both_halves
    ),
    "decode makes no handles of positions": Mutation(
        changed_decode_params(drop_mrope), images_over_both_halves
    ),
    "usage counts placeholders": Mutation(
        changed_steps(with_unexpanded_usage), usage_counts_expanded_images
    ),
    "embeddings are a bare list": Mutation(changed_inputs(as_client_reads), audit.dictionary_of_llama4),
    "handles beside an expanded prompt": Mutation(changed_inputs(expand_again), audit.prompt_beside_handles),
    "encoded images come without positions": Mutation(
        changed_inputs(
            lambda built: (
                built._replace(
                    disaggregated={k: v for k, v in built.disaggregated.items() if "mrope" not in k}
                )
                if built.disaggregated
                else built
            )
        ),
        audit.prompt_beside_handles,
    ),
    "positions ignore the images": Mutation(
        lambda patch: patch.setattr(inputs.mrope, "positions", flat(mrope.positions)),
        audit.prompt_beside_handles,
    ),
    "the encoder's positions are not opened": Mutation(
        replaced(encoder.mrope, "grid_of", lambda positions, rows: None),
        audit.prompt_beside_handles,
    ),
    "postprocess workers are started": Mutation(
        changed_arguments(lambda args: args.update(num_postprocess_workers=2)), arguments_by_release
    ),
    "an unknown argument is sent": Mutation(
        replaced(arguments, "llm_arguments", lambda config, lib: {**config.args, "model": config.model_path}),
        arguments_by_release,
    ),
    "a nested argument is not looked at": Mutation(
        replaced(arguments, "nested_fields", lambda field: None), arguments_by_release
    ),
    "lower case stays": Mutation(
        changed_arguments(
            lambda args: (
                args["cache_transceiver_config"].update(backend="nixl")
                if "cache_transceiver_config" in args
                else None
            )
        ),
        arguments_by_release,
    ),
    "prefill keeps the overlap scheduler": Mutation(
        changed_arguments(lambda args: args.pop("disable_overlap_scheduler", None)), prefill_role
    ),
    "no buffer for events": Mutation(
        changed_arguments(lambda args: args["kv_cache_config"].pop("event_buffer_max_size", None)), kv_events
    ),
    "events end at the first timeout": Mutation(
        lambda patch: patch.setattr(events, "follow", once(events.follow)), kv_events
    ),
    "every attention window is told": Mutation(
        lambda patch: patch.setattr(events.KvEvents, "take", of_any_window(events.KvEvents.take)), kv_events
    ),
    "partly filled blocks are told": Mutation(
        lambda patch: patch.setattr(events.KvEvents, "take", filled_up(events.KvEvents.take)), kv_events
    ),
    "hashes are not signed": Mutation(replaced(events, "signed_hash", int), kv_events),
}


def flat(original: Any) -> Any:
    return lambda length, placed: original(length, [])


def once(original: Any) -> Any:
    async def follow(read: Any, ready: Any, take: Any) -> None:
        await ready.wait()
        async for item in read(timeout=2.0):
            if item:
                take(item)

    return follow


def of_any_window(original: Any) -> Any:
    return lambda self, event: original(self, {k: v for k, v in event.items() if k != "window_size"})


def filled_up(original: Any) -> Any:
    def take(self: Any, event: Mapping[str, Any]) -> None:
        data = event.get("data") or {}
        blocks = [{**block, "tokens": (block["tokens"] * 32)[:32]} for block in data.get("blocks") or ()]
        original(self, {**event, "data": {**data, "blocks": blocks}})

    return take


MUTATIONS = {**ROWS, **OLDER}


async def fails(check: Check, place: Place) -> bool:
    try:
        await asyncio.wait_for(check(place), DEADLINE_S)
    except (Exception, pytest.fail.Exception):
        return True
    return False


CHECKS = sorted(
    {m.check for m in OLDER.values()} - {m.check for m in ROWS.values()}, key=lambda c: c.__name__
)


@pytest.mark.asyncio
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_the_adapter_passes_the_check(check: Check, release: str, tmp_path: Path) -> None:
    with installed(release):
        await check(Place(tmp_path, release))


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUTATIONS)
async def test_the_check_notices(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    mutation = MUTATIONS[name]
    noticed = False
    for release in reversed(RELEASES):
        if not noticed:
            with installed(release), monkeypatch.context() as patch:
                patch.setattr(patience, "seconds", IMPATIENT_S)
                mutation.take_back(patch)
                noticed = await fails(mutation.check, Place(tmp_path / release, release))
    assert noticed, f"{mutation.check.__name__} passes although {name}"


def test_each_row_of_the_audit_has_a_mutation() -> None:
    assert {int(name.partition(":")[0]) for name in ROWS} == set(range(1, 17))
