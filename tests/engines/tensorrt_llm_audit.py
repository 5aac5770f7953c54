"""What TensorRT-LLM does, row by row of the audit of its source, and what the adapter has to make of it.

Each function is one check over one release: it fails where the adapter does not do what the library needs.
The audit runs them over the adapter as it is; the mutations run them over one with a mend taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dynamo.trtllm.config import Role
from dynamo.trtllm.core import EncodedMedia, Prompt
from dynamo.trtllm.engines.port import EngineRequest, EngineState
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, StartupError
from dynamo.trtllm.frontend.response import to_chunk
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.request_handlers.decode import DecodeHandler
from dynamo.trtllm.request_handlers.prefill import PrefillHandler
from dynamo.trtllm.transfer.local import LocalTransport
from dynamo.trtllm.transfer.pooled import PooledTransfer
from engines.contract import Output, add, generate
from engines.tensorrt_llm_subject import (
    GEMMA3,
    LLAMA4,
    LLAVA,
    MISTRAL3,
    QWEN3,
    QWEN25,
    TEXT,
    TRANSCEIVER,
    ask,
    ask_about,
    engine_config,
    forget,
    held_contexts,
    instances,
    leaked_handles,
    model_directory,
    patience,
    picture,
    script,
    started,
    until,
)
from fakes import answered, collect, raw_request

BOTH_HALVES = {**TRANSCEIVER, "disable_overlap_scheduler": True}
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
BOS = 1
SPECIAL = {"image_special_tokens": [21, 22, 23], "image_special_token_offsets": [0, 3, 6]}


class Place(NamedTuple):
    """Where a check runs: a folder for models, and the release."""

    folder: Path
    release: str

    @property
    def is_old(self) -> bool:
        return self.release == "1.2.1"

    def config(self, architecture: str = TEXT, role: Role = Role.AGGREGATED, **changes: Any) -> Any:
        path = model_directory(self.folder / architecture, architecture)
        images = changes.pop("images", architecture != TEXT)
        return engine_config(path, role, images=images, **changes)

    def started(self, *args: Any, **changes: Any) -> Any:
        return started(self.config(*args, **changes))

    def both(self, architecture: str = TEXT, **args: Any) -> Any:
        """One engine that can play prefill and decode."""
        return self.started(architecture, args={**BOTH_HALVES, **args})

    async def encoded(self, architecture: str, *shades: int) -> list[EncodedMedia]:
        """Images from an encode worker."""
        async with self.started(architecture, Role.ENCODE) as (encoder, _):
            return list(await encoder.encode([picture(84, 56, shade) for shade in shades]))


async def over_json(engine: Any, asked: EngineRequest) -> Output:
    """Prefill and decode with the state as it is after crossing processes."""
    prefilled = await engine.prefill(asked)
    output = Output()
    add(output, prefilled.first)
    if prefilled.state is None:
        return output
    state = EngineState(json.loads(json.dumps(prefilled.state.meta)), prefilled.state.tensors)
    follow = replace(asked, prompt=Prompt(prefilled.prompt_token_ids))
    if output.finish is not None:
        engine.abandon(follow, state)
        return output
    async with aclosing(engine.decode(follow, prefilled.first, state)) as steps:
        async for step in steps:
            add(output, step)
    return output


async def same_in_halves(engine: Any, asked: EngineRequest) -> Output:
    whole, halves = await generate(engine, asked), await over_json(engine, asked)
    assert halves.token_ids == whole.token_ids
    assert halves.usage == whole.usage
    return whole


# 1


async def request_ids(place: Place) -> None:
    """Every start gives a prefill worker whose ids decode takes, and no two requests have one id."""
    found = set()
    for number in range(8):
        async with place.both() as (engine, _):
            asked = ask((300 + number, 301), **OPTIONS)
            await same_in_halves(engine, asked)
            states = [(await engine.prefill(asked)).state for _ in range(2)]
            found |= {state.meta["params"].get("disagg_request_id") for state in states}
    assert found == {None} if place.is_old else len(found) == 16


# 2


async def prompt_beside_handles(place: Place) -> None:
    """Images from an encode worker give what images give, in one engine (E/PD) and in two (E/P/D)."""
    one_handle = {LLAVA, QWEN3} if place.is_old else set()
    for architecture in (QWEN25, QWEN3, LLAVA):
        shades = (10,) if architecture in one_handle else (10, 20)
        encoded = await place.encoded(architecture, *shades)
        asked = ask_about(encoded, placeholder=architecture, **OPTIONS)
        async with place.both(architecture) as (engine, _):
            raw = ask_about([picture(84, 56, s) for s in shades], placeholder=architecture, **OPTIONS)
            whole = await generate(engine, raw)
            assert (await generate(engine, asked)).token_ids == whole.token_ids, architecture
            assert (await over_json(engine, asked)).token_ids == whole.token_ids, architecture
        assert leaked_handles() == []


# 3


async def int32_deltas(place: Place) -> None:
    """Positions that the adapter makes, and those that another release's worker sent, are of its kinds."""
    encoded = await place.encoded(QWEN25, 10)
    async with place.both(QWEN25) as (engine, _):
        for items in (encoded, [picture(84, 56, 10)], [picture(56, 140, 30), picture(28, 28, 5)]):
            prefilled = await engine.prefill(ask_about(items, **OPTIONS))
            kinds = {name: t.dtype for name, t in prefilled.state.tensors.items()}
            assert kinds["mrope_position_deltas"] == torch.int32
            older = {name: tensor.long() for name, tensor in prefilled.state.tensors.items()}
            follow = replace(ask(**OPTIONS), prompt=Prompt(prefilled.prompt_token_ids))
            state = EngineState(prefilled.state.meta, older)
            async with aclosing(engine.decode(follow, prefilled.first, state)) as steps:
                assert [step async for step in steps]
            if not place.is_old:
                await generate(engine, ask_about(items, **OPTIONS))
    assert leaked_handles() == []


# 4


async def requests_end_alone(place: Place) -> None:
    """Whatever an input processor or a result raises fails that request and no other."""
    kinds = ("NotImplementedError", "KeyError", "RuntimeError", "OSError", "IndexError", "ValueError",
             "TypeError", "AssertionError")  # fmt: skip
    async with place.both(QWEN25) as (engine, _):
        for kind in kinds:
            script().input_fails_on, script().input_error = "28x28", kind
            bad, good = ask_about([picture(28, 28)], **OPTIONS), ask_about([picture(84, 56)], **OPTIONS)
            for attempt in (generate(engine, bad), engine.prefill(bad)):
                with pytest.raises(ClientFault, match="refused this request's prompt, media or options"):
                    await attempt
            await engine.check_health()
            assert (await generate(engine, good)).finish == "length"
        for kind in ("AssertionError", "ValueError"):
            script().handling_fails_at_token, script().handling_error = 2, kind
            with pytest.raises(EngineFault, match="the engine failed this request"):
                await generate(engine, ask(**OPTIONS))
            script().handling_fails_at_token = None
            await engine.check_health()
            await generate(engine, ask(**OPTIONS))
        assert instances()[-1].active == set()
    if place.is_old:
        encoded = await place.encoded(LLAVA, 10, 20)
        async with place.started(LLAVA) as (engine, _):
            with pytest.raises(ClientFault, match="one encoded image a request"):
                await generate(engine, ask_about(encoded, placeholder=LLAVA, **OPTIONS))
            await engine.check_health()
    assert leaked_handles() == []


# 5


async def dictionary_of_llama4(place: Place) -> None:
    """A file's rows and special tokens reach the engine as it wants them:
    in both topologies, one image and two."""
    async with place.both(LLAMA4) as (engine, _):

        def adopted(value: float, **extras: Any) -> EncodedMedia:
            return engine.adopt_embeddings(
                "image", f"f{value}", {"features": torch.full((1, 4, 8), value)}, extras
            )

        first = adopted(1.0, **SPECIAL)
        assert len(first.token_ids) == 7
        assert [first.token_ids[at] for at in (0, 3, 6)] == [21, 22, 23]
        crossed = replace(first, extras=json.loads(json.dumps(first.extras)))
        for items in ([first], [crossed], [first, adopted(2.0, **SPECIAL)]):
            asked = ask_about(items, placeholder=LLAMA4, **OPTIONS)
            output = await same_in_halves(engine, asked)
            assert output.usage is not None
            assert output.usage.prompt_tokens == len(asked.prompt.token_ids)
            assert_given_dictionaries(place, len(items))
        older = adopted(1.0, special_tokens=[21, 22, 23], image_token_offsets=[[1, 3], [4, 6]])
        assert older.token_ids == first.token_ids
        for extras in (
            {},
            {"image_special_tokens": [1]},
            {**SPECIAL, "image_special_token_offsets": [0, 3, 7]},
            {**SPECIAL, "image_special_token_offsets": [0, 3]},
            {"special_tokens": [1], "image_token_offsets": [[0, 9]]},
        ):
            with pytest.raises(ClientFault, match="image_special_token"):
                adopted(1.0, **extras)


def assert_given_dictionaries(place: Place, count: int) -> None:
    inputs = next(
        call["inputs"] for call in reversed(instances()[-1].seen) if call["disaggregated_params"] is None
    )
    if place.is_old:
        given = inputs["multi_modal_embeddings"]["image"]
        assert [(each["image_special_tokens"], tuple(each["mm_embeddings"].shape)) for each in given] == [
            ([21, 22, 23], (4, 8))
        ] * count


# 6


async def state_without_bytes(place: Place) -> None:
    """The Python transceiver names an endpoint, and its opaque state may be missing or empty."""
    section = {"backend": "NIXL"} if place.is_old else {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
    for kind in ("none", "empty", "bytes"):
        script().opaque_state = kind
        async with place.both(cache_transceiver_config=section) as (engine, _):
            await same_in_halves(engine, ask(**OPTIONS))
            await same_in_halves(engine, ask(**OPTIONS, logprobs=2))


# 7


async def one_beginning(place: Place) -> None:
    """The prompt that the engine works on is the frontend's with its images expanded: one first token."""
    for architecture in (QWEN25, LLAVA, GEMMA3, MISTRAL3, LLAMA4):
        async with place.both(architecture) as (engine, _):
            asked = ask_about([picture(84, 56, 10)], placeholder=architecture, **OPTIONS)
            ids = list(asked.prompt.token_ids)
            prefilled = await engine.prefill(asked)
            got, at = list(prefilled.prompt_token_ids), ids.index(299)
            assert got[:at] == ids[:at], architecture
            assert got[at + 6 :] == ids[at + 1 :], architecture
            assert got.count(BOS) == 1, architecture
    for architecture in (LLAVA,):
        (encoded,) = await place.encoded(architecture, 10)
        async with place.both(architecture) as (engine, _):
            prefilled = await engine.prefill(ask_about([encoded], placeholder=architecture, **OPTIONS))
            assert prefilled.prompt_token_ids.count(BOS) == 1


# 8


async def processor_arguments(place: Place) -> None:
    """Processors that unpack their arguments get a dictionary, so images are hashed from the first on."""
    told: list[Any] = []

    class Publisher:
        def publish_stored(self, *args: Any, **_: Any) -> None:
            told.append(args)

    for architecture in (LLAVA, QWEN25):
        async with place.started(architecture, publish_kv_events=True) as (engine, _):
            engine.attach_kv_publisher(lambda rank: Publisher())
            for shade in (10, 20):
                asked = ask_about([picture(224, 224, shade)], placeholder=architecture, max_tokens=2)
                told.clear()
                await generate(engine, asked)
                await until(lambda: told)
                assert (told[0][4] is not None) == (not place.is_old), (architecture, shade)
            by_ids = replace(asked, prompt=replace(asked.prompt, text=None))
            assert (await generate(engine, by_ids)).finish is not None


# 9


async def stop_tokens_under_ignore_eos(place: Place) -> None:
    """The request's own stop tokens stop it although the end of the sequence does not."""
    async with place.both() as (engine, _):
        free = (await generate(engine, ask(max_tokens=60, ignore_eos=True))).token_ids
        assert len(free) == 60
        for at in (1, 3):
            stop = free[at]
            asked = ask(
                max_tokens=60, ignore_eos=True, eos_token_ids=frozenset({2}), stop_token_ids=frozenset({stop})
            )
            for output in (await generate(engine, asked), await over_json(engine, asked)):
                assert (output.finish, output.stop_reason) == ("stop", stop)
                assert output.token_ids == free[: free.index(stop)]


# 10


@contextlib.asynccontextmanager
async def handlers(place: Place, architecture: str = TEXT) -> Any:
    """A prefill handler and a decode handler over one engine, joined as the frontend joins them."""
    async with place.both(architecture) as (engine, info):
        transfer = PooledTransfer(LocalTransport(), pool_bytes=1 << 20, time_to_live_s=30.0)
        await transfer.start()

        class Plain:
            async def prepare(self, request: Any, context: Any = None) -> EngineRequest:
                return request.engine_request  # type: ignore[no-any-return]

        prefill = PrefillHandler(engine, info, Plain(), transfer)  # type: ignore[arg-type]
        decode = DecodeHandler(engine, info, transfer, None, StopStrings(""))  # type: ignore[arg-type]
        try:
            yield prefill, decode
        finally:
            await decode.drained()
            await transfer.close()


async def nothing_stays_held(place: Place) -> None:
    """Decode's engine fetches what prefill's holds, or is told, however early a request ends."""
    async with handlers(place) as (prefill, decode):

        async def handed(**stop: Any) -> tuple[dict[str, Any], Any]:
            raw = raw_request(300, 301, 302, stop={"ignore_eos": True, **stop})
            first = {**raw, "stop_conditions": {**raw["stop_conditions"], "max_tokens": 1}}
            (reply,) = await collect(answered(prefill, first))
            handed_over = json.loads(json.dumps(to_chunk(reply) if not isinstance(reply, dict) else reply))
            assert len(held_contexts()) == 1
            return {
                **raw,
                "prefill_result": {"disaggregated_params": handed_over["disaggregated_params"]},
            }, reply

        raw, _ = await handed(max_tokens=1)
        (only,) = await collect(answered(decode, raw))
        assert only["finish_reason"] == "length"
        await until(lambda: not held_contexts())

        raw, _ = await handed(max_tokens=9)
        stream = answered(decode, raw)
        assert (await anext(stream))["token_ids"]
        await stream.aclose()
        await until(lambda: not held_contexts())

        raw, _ = await handed(max_tokens=9)
        assert len(await collect(answered(decode, raw))) == 9
        assert held_contexts() == []
        await until(lambda: not instances()[-1].active)


async def first_tokens_that_end(place: Place) -> None:
    """A first token that ends the request ends it in both topologies alike, and then nothing is held."""
    async with handlers(place) as (prefill, decode):
        free = raw_request(300, 301, 302, stop={"ignore_eos": True, "max_tokens": 9})
        reply = (await collect(answered(prefill, free)))[0]
        (token,) = reply["token_ids"]
        await collect(
            answered(
                decode, {**free, "prefill_result": {"disaggregated_params": reply["disaggregated_params"]}}
            )
        )
        for changed in (
            {"stop_conditions": {"ignore_eos": True, "max_tokens": 9, "stop_token_ids": [token]}},
            {"stop_conditions": {"max_tokens": 9}, "eos_token_ids": [token]},
            {"stop_conditions": {"max_tokens": 9}, "eos_token_ids": [2, token]},
            {"stop_conditions": {"max_tokens": 1}, "eos_token_ids": [2, token]},
        ):
            raw = {**free, **changed}
            reply = (await collect(answered(prefill, raw)))[0]
            chunk = reply
            if reply["finish_reason"] == "length":
                handed = {"disaggregated_params": json.loads(json.dumps(reply["disaggregated_params"]))}
                (chunk,) = await collect(answered(decode, {**raw, "prefill_result": handed}))
            ends = "stop" if "ignore_eos" in changed["stop_conditions"] else "eos"
            assert (chunk["finish_reason"], list(chunk["token_ids"])) == (ends, [])
            await until(lambda: not held_contexts())
        async with place.both(max_seq_len=13) as (engine, _):
            for options in ({"max_tokens": 1}, {"max_tokens": None}):
                prefilled = await engine.prefill(ask(**options))
                assert (prefilled.state, prefilled.first.finish) == (None, "length")
                assert held_contexts() == []


async def a_stop_token_at_the_limit(place: Place) -> None:
    """A token that ends the request ends it also where it is the last that was allowed."""
    async with place.both() as (engine, _):
        free = (await generate(engine, ask(max_tokens=6, ignore_eos=True))).token_ids
        for at in (0, 3, 5):
            token = free[at]
            for options, finish in (
                ({"stop_token_ids": frozenset({token}), "ignore_eos": True}, "stop"),
                ({"eos_token_ids": frozenset({2, token})}, "eos"),
            ):
                asked = ask(max_tokens=free.index(token) + 1, **options)
                output = await generate(engine, asked)
                assert (output.finish, output.token_ids) == (finish, free[: free.index(token)])
                assert output.usage is not None
                assert output.usage.completion_tokens == free.index(token)


# 11


async def death_is_asked_for(place: Place) -> None:
    """A dead engine is found while it is idle, also when asking it blocks, and who waits for it is told."""
    for blocks_s in (0.0, 30.0):
        script().dies_idle_after_s, script().health_blocks_s = 0.3, blocks_s
        async with place.started(stall_timeout_s=600.0) as (engine, _):
            script().hang_at_token = 1
            waiting = asyncio.create_task(generate(engine, ask(**OPTIONS)))
            if place.is_old:
                await until(lambda: instances()[-1]._executor.dead is not None)
                with pytest.raises(EngineDead):
                    await generate(engine, ask(**OPTIONS))
            with pytest.raises(EngineDead):
                await asyncio.wait_for(waiting, patience.seconds)
            with pytest.raises(EngineDead):
                await engine.check_health()
        script().hang_at_token = None


async def idle_death_is_found(place: Place) -> None:
    """As `death_is_asked_for`, with no request at all. 1.2.1 does not tell."""
    if place.is_old:
        return
    for role, architecture in ((Role.AGGREGATED, TEXT), (Role.DECODE, TEXT), (Role.ENCODE, LLAVA)):
        script().dies_idle_after_s = 0.2
        async with place.started(architecture, role) as (engine, _):
            await engine.check_health()
            await asyncio.wait_for(seen_dead(engine), patience.seconds)


async def seen_dead(engine: Any) -> None:
    while True:
        try:
            await engine.check_health()
        except EngineDead:
            return
        await asyncio.sleep(0.02)


# 12


async def images_end_alone(place: Place) -> None:
    """One bad image fails alone, beside others and within one call, and no handle is left unopened."""
    async with place.started(LLAVA, Role.ENCODE, args={"max_batch_size": 4}) as (engine, _):
        script().encode_fails_on = "28x28"
        bad, good = picture(28, 28), [picture(56, 56, shade) for shade in (1, 2, 3)]
        calls = [engine.encode([each]) for each in (good[0], bad, good[1], good[2])]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, EngineFault) for each in ended] == [False, True, False, False]
        with pytest.raises(EngineFault, match="the encoder failed on an image"):
            await engine.encode([good[0], bad, good[1]])
        script().input_fails_on, script().input_error = "84x56", "RuntimeError"
        with pytest.raises(ClientFault, match="refused this image"):
            await engine.encode([good[0], picture(84, 56)])
        script().step_delay_s = 0.05
        left = asyncio.create_task(engine.encode(good))
        await until(lambda: len(leaked_handles()) > 0)
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left
        await until(lambda: leaked_handles() == [])
        await engine.check_health()


# 13


async def salted_blocks(place: Place) -> None:
    """Blocks of a salted request are told with their salt, others without."""
    told: list[tuple[list[int], str | None]] = []

    class Publisher:
        def publish_stored(self, *args: Any, cache_salt: str | None = None, **_: Any) -> None:
            told.append((args[2], cache_salt))

    async with place.started(publish_kv_events=True) as (engine, _):
        engine.attach_kv_publisher(lambda rank: Publisher())
        asked = ask(tuple(range(300, 370)), max_tokens=2)
        for salt in ("tenant-1", None, "tenant-2"):
            told.clear()
            await generate(engine, replace(asked, cache_salt=salt))
            await until(lambda: told)
            assert [s for _, s in told] == [None if place.is_old else salt]


# 14


async def ranks_are_told(place: Place) -> None:
    """The rank that the router chose reaches the engine wherever the release keeps `SchedulingParams`."""
    api = sys.modules["tensorrt_llm"].llmapi
    if hasattr(api, "SchedulingParams"):
        del api.SchedulingParams
    args = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with place.started(args=args) as (engine, info):
        assert info.data_parallel_size == 2
        for rank in (0, 1):
            await generate(engine, replace(ask(max_tokens=2), dp_rank=rank))
            assert instances()[-1].seen[-1]["scheduling_params"].attention_dp_rank == rank
        with pytest.raises(ClientFault, match="dp_rank must be between 0 and 1"):
            await generate(engine, replace(ask(max_tokens=2), dp_rank=2))


# 15


@contextmanager
def imports_of_the_library() -> Iterator[list[str]]:
    """Names of the threads on which `tensorrt_llm` is imported meanwhile."""
    threads: list[str] = []

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "tensorrt_llm":
                threads.append(threading.current_thread().name)

    finder = Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield threads
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


async def main_thread(place: Place) -> None:
    """Import and construction, as the library's other users do them."""
    forget()
    with imports_of_the_library() as imported:
        async with place.started():
            pass
    assert imported == ["MainThread"]
    threads: list[str] = []
    loaded = sys.modules["tensorrt_llm"]

    def recorded(kind: Any) -> Any:
        class Recorded(kind):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                threads.append(threading.current_thread().name)
                super().__init__(*args, **kwargs)

        return Recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "LLM", recorded(loaded.LLM))
        patch.setattr(loaded.llmapi, "MultimodalEncoder", recorded(loaded.llmapi.MultimodalEncoder))
        async with place.started():
            pass
        async with place.started(LLAVA, Role.ENCODE):
            pass
    assert threads == ["MainThread"] * 2


# 16


async def transceivers_that_fit(place: Place) -> None:
    """A backend that the chosen transceiver cannot use is refused with what to write instead;
    where none was chosen, one that can use it is."""
    python = {"backend": "UCX", "transceiver_runtime": "PYTHON"}
    for backend in ("UCX", "MOONCAKE", "MPI"):
        section = {"backend": backend} if place.is_old else {**python, "backend": backend}
        config = place.config(role=Role.PREFILL, args={"cache_transceiver_config": section})
        if place.is_old:
            async with started(config):
                continue
        with pytest.raises(StartupError, match=rf"{backend} needs transceiver_runtime: CPP"):
            await TensorRTLLMEngine(config).start()
        for fitting in ({"backend": backend, "transceiver_runtime": "CPP"}, {"backend": backend}):
            async with place.both(cache_transceiver_config=fitting) as (engine, _):
                await same_in_halves(engine, ask(**OPTIONS))
