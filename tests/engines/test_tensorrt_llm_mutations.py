"""Misusing any recorded rule of TensorRT-LLM makes a named check fail: the adapter's source is changed, one rule at a time.

A mutant is a copy of the adapter's package under another name with one replacement. Its check must pass for the adapter as it
is, over both releases, and fail for the mutant over at least one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import dynamo.trtllm.engines.tensorrt_llm as adapter
from dynamo.trtllm.config import Role
from dynamo.trtllm.engines.port import EngineRequest, EngineState, GuidedDecoding, Prompt, Sampling
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, StartupError
from engines.contract import Output, add, generate, steps_of
from engines.tensorrt_llm_subject import (
    LLAMA4,
    LLAVA,
    QWEN25,
    RELEASES,
    TEXT,
    TRANSCEIVER,
    ask,
    ask_about,
    engine_config,
    installed,
    instances,
    leaked_handles,
    model_directory,
    picture,
    script,
    started,
)

Make = Callable[..., Any]
PACKAGE = Path(adapter.__file__).parent
BOTH_HALVES = {**TRANSCEIVER, "disable_overlap_scheduler": True}
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
DEADLINE_S = 5.0


class Place(NamedTuple):
    """Where a check runs: the adapter to use, a folder for models, and the release."""

    make: Make
    folder: Path
    release: str

    def config(self, architecture: str = TEXT, role: Role = Role.AGGREGATED, **changes: Any) -> Any:
        path = model_directory(self.folder / architecture, architecture)
        return engine_config(path, role, images=changes.pop("images", architecture != TEXT), **changes)

    def started(self, *args: Any, **changes: Any) -> Any:
        return started(self.config(*args, **changes), self.make)


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition never held")


async def over_json(engine: Any, asked: EngineRequest) -> Output:
    """Prefill and decode with the state as it is after crossing processes."""
    prefilled = await engine.prefill(asked)
    output = Output()
    add(output, prefilled.first)
    if prefilled.state is None:
        return output
    state = EngineState(json.loads(json.dumps(prefilled.state.meta)), prefilled.state.tensors)
    follow = replace(asked, prompt=Prompt(prefilled.prompt_token_ids))
    async with aclosing(engine.decode(follow, prefilled.first, state)) as steps:
        async for step in steps:
            add(output, step)
    return output


async def text_over_both_halves(place: Place) -> None:
    async with place.started(args=BOTH_HALVES) as (engine, _):
        whole, halves = await generate(engine, ask(**OPTIONS)), await over_json(engine, ask(**OPTIONS))
        assert halves.token_ids == whole.token_ids
        assert halves.usage == whole.usage


async def logprobs_over_both_halves(place: Place) -> None:
    async with place.started(args=BOTH_HALVES) as (engine, _):
        output = await over_json(engine, ask(**OPTIONS, logprobs=2))
        assert [row.chosen.token_id for row in output.logprobs] == output.token_ids


async def pictures_over_both_halves(place: Place) -> None:
    async with place.started(QWEN25, args=BOTH_HALVES) as (engine, _):
        asked = ask_about([picture(84, 56, 10)], **OPTIONS)
        whole, halves = await generate(engine, asked), await over_json(engine, asked)
        assert (halves.token_ids, halves.usage) == (whole.token_ids, whole.usage)
        assert leaked_handles() == []


async def pictures_encoded_apart(place: Place) -> None:
    items = [picture(84, 56, 10), picture(56, 112, 20)]
    async with place.started(QWEN25, Role.ENCODE) as (encoder, _):
        encoded = await encoder.encode(items)
    assert leaked_handles() == []
    async with place.started(QWEN25) as (engine, _):
        whole = await generate(engine, ask_about(items, **OPTIONS))
        assert (await generate(engine, ask_about(encoded, **OPTIONS))).token_ids == whole.token_ids
    async with place.started(QWEN25, args=BOTH_HALVES) as (engine, _):
        assert (await over_json(engine, ask_about(encoded, **OPTIONS))).token_ids == whole.token_ids
    assert leaked_handles() == []


async def pictures_by_text_or_ids(place: Place) -> None:
    """Both forms of the prompt mean the same, so their answers are the same; ids are what the frontend sent."""
    async with place.started(LLAVA) as (engine, _):
        asked = ask_about([picture()], placeholder="<image>", **OPTIONS)
        bare = replace(asked, prompt=replace(asked.prompt, text=None))
        output = await generate(engine, asked)
        assert output.token_ids == (await generate(engine, bare)).token_ids
        assert output.usage is not None
        assert output.usage.prompt_tokens == len(asked.prompt.token_ids) - 1 + 6
        hashed = replace(asked, media_hashes=("ab" * 8,))
        assert (await generate(engine, hashed)).token_ids == output.token_ids


async def embeddings_from_files(place: Place) -> None:
    async with place.started(LLAMA4) as (engine, _):
        adopted = [engine.adopt_embeddings("x", {"features": torch.full((3, 8), n)}, {}) for n in (1.0, 2.0)]
        asked = [ask_about([each], placeholder="<|image|>", **OPTIONS) for each in adopted]
        first, second = [await generate(engine, each) for each in asked]
        assert first.token_ids != second.token_ids
        assert first.usage is not None
        assert first.usage.prompt_tokens == len(asked[0].prompt.token_ids)


async def streaming_in_deltas(place: Place) -> None:
    async with place.started() as (engine, _):
        steps = await steps_of(engine.generate(ask(max_tokens=40, ignore_eos=True)))
        assert [len(step.token_ids) for step in steps] == [1] * 40
        assert instances()[-1].seen[-1]["sampling_params"].detokenize is False


async def end_tokens(place: Place) -> None:
    async with place.started() as (engine, _):
        free = await generate(engine, ask(max_tokens=64, ignore_eos=True))
        ended = await generate(engine, ask(max_tokens=64, eos_token_ids=frozenset({2, 3})))
        assert ended.finish == "eos"
        assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
        late = ask(max_tokens=20, min_tokens=4, ignore_eos=True, stop_token_ids=frozenset(free.token_ids[:4]))
        assert len((await generate(engine, late)).token_ids) >= 4


async def fresh_params(place: Place) -> None:
    async with place.started() as (engine, _):
        for _ in range(2):
            await generate(engine, ask(max_tokens=2))
        first, second = (call["sampling_params"] for call in instances()[-1].seen)
        assert first is not second


async def options_by_release(place: Place) -> None:
    async with place.started(args={"guided_decoding_backend": "xgrammar"}) as (engine, _):
        asked = replace(ask(max_tokens=2, guided=GuidedDecoding(json={"a": 1})), priority=0.7, cache_salt="s")
        await generate(engine, asked)
        call = instances()[-1].seen[-1]
        assert call["sampling_params"].guided_decoding.json == '{"a": 1}'
        assert (call.get("priority"), call["cache_salt"]) == (0.7 if place.release != "1.2.1" else None, "s")


async def leaving_aborts(place: Place) -> None:
    async with place.started() as (engine, _):
        async with aclosing(engine.generate(ask(max_tokens=30, ignore_eos=True))) as steps:
            async for _ in steps:
                break
        assert instances()[-1].aborted == [(1, 1)]


async def decode_aborts_late(place: Place) -> None:
    async with place.started(args=BOTH_HALVES) as (engine, _):
        prefilled = await engine.prefill(ask(**OPTIONS))
        script().step_delay_s = 0.02
        task = asyncio.create_task(anext(engine.decode(ask(**OPTIONS), prefilled.first, prefilled.state)))
        await until(lambda: len(instances()[-1].seen) == 2)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: instances()[-1].aborted)
        assert instances()[-1].aborted[0][1] >= 1


async def one_request_fails(place: Place) -> None:
    async with place.started() as (engine, _):
        script().fail_at_token = 2
        with pytest.raises(EngineFault):
            await generate(engine, ask(**OPTIONS))
        script().fail_at_token = None
        await engine.check_health()
        await generate(engine, ask(**OPTIONS))


async def the_engine_dies(place: Place) -> None:
    async with place.started() as (engine, _):
        script().hang_at_token = 1
        waiting = asyncio.gather(generate(engine, ask(**OPTIONS)), return_exceptions=True)
        await until(lambda: instances()[-1].seen)
        script().hang_at_token, script().fatal_at_token = None, 2
        with pytest.raises(EngineDead):
            await generate(engine, ask(**OPTIONS))
        assert (await asyncio.wait([waiting], timeout=1.0))[0]
        assert isinstance((await waiting)[0], EngineDead)
        with pytest.raises(EngineDead):
            await engine.check_health()


async def a_stuck_engine_is_found(place: Place) -> None:
    async with place.started(stall_timeout_s=0.1) as (engine, _):
        script().hang_at_token = 2
        with pytest.raises(EngineDead):
            await asyncio.wait_for(generate(engine, ask(**OPTIONS)), 1.0)


async def a_refusal_is_the_clients(place: Place) -> None:
    async with place.started(args={"max_num_tokens": 64}) as (engine, _):
        with pytest.raises(ClientFault):
            await generate(engine, ask(tuple(range(300, 400)), max_tokens=2))
        await engine.check_health()
        with pytest.raises(ClientFault):
            await generate(engine, EngineRequest(request_id="r", prompt=Prompt((5,)), sampling=Sampling(top_p=7.0)))


async def fields_of_another_release(place: Place) -> None:
    async with place.started(args=BOTH_HALVES) as (engine, _):
        prefilled = await engine.prefill(ask(**OPTIONS))
        params = {**prefilled.state.meta["params"], "new_field": 1, "multimodal_embedding_handles": [{}]}
        state = EngineState({**prefilled.state.meta, "params": params})
        steps = await steps_of(engine.decode(ask(**OPTIONS), prefilled.first, state))
        assert steps[-1].finish == "length"


async def arguments_by_release(place: Place) -> None:
    for bad in ({"max_batch_sise": 1}, {"kv_cache_config": {"dtipe": "fp8"}}):
        with pytest.raises(StartupError, match="does not know the engine argument"):
            await place.make(place.config(args=bad)).start()
    args = {"cache_transceiver_config": {"backend": "ucx"}, "num_postprocess_workers": 2}
    async with place.started(args=args):
        built = instances()[-1].args
        assert (built.cache_transceiver_config.backend, built.num_postprocess_workers) == ("UCX", None)


async def prefill_role(place: Place) -> None:
    async with place.started(role=Role.PREFILL) as (engine, _):
        assert (await engine.prefill(ask(**OPTIONS))).state is not None


async def kv_events(place: Place) -> None:
    told: list[Any] = []
    arrived = asyncio.Event()

    class Publisher:
        def publish_stored(self, *args: Any) -> None:
            told.append(args)
            arrived.set()

    async with place.started(publish_kv_events=True) as (engine, _):
        engine.attach_kv_publisher(lambda rank: Publisher())
        for number in (1, 2):
            arrived.clear()
            await generate(engine, ask(tuple(range(300, 370)), max_tokens=2))
            await asyncio.wait_for(arrived.wait(), DEADLINE_S)
            assert len(told) == number
            await asyncio.sleep(0.15)  # longer than the double's iterators wait
        assert [len(args[2]) for args in told] == [2, 2]
        assert all(-(1 << 63) <= h < 1 << 63 for args in told for h in args[2])


class Mutation(NamedTuple):
    module: str
    old: str
    new: str
    check: Callable[[Place], Awaitable[None]]


MUTATIONS = {
    "sampling parameters are shared": Mutation(
        "sampling",
        "        return library.sampling_params(**values)",
        "        return library.__dict__.setdefault('_shared', library.sampling_params(**values))",
        fresh_params,
    ),
    "arguments after streaming are positional": Mutation(
        "engine",
        "generate_async(source, params, streaming=streaming, **self._options(request, disaggregated))",
        "generate_async(source, params, None, None, streaming, None, disaggregated)",
        text_over_both_halves,
    ),
    "cumulative ids are passed on": Mutation(
        "engine",
        "new = output.token_ids[sent:]\n                        if new",
        "new = output.token_ids\n                        if new",
        streaming_in_deltas,
    ),
    "max_tokens keeps the library's default": Mutation(
        "sampling", '"max_tokens": max_tokens, "detokenize"', '"detokenize"', streaming_in_deltas
    ),
    "the library detokenizes": Mutation("sampling", '"detokenize": False, ', "", streaming_in_deltas),
    "end_id is left to a tokenizer that is not there": Mutation("sampling", '"end_id": end_id}', '"end_id": None}', end_tokens),
    "the end token is passed on": Mutation(
        "engine", "        return new[:-1]\n    if finish", "        return new\n    if finish", end_tokens
    ),
    "stop tokens ignore min_tokens": Mutation("sampling", "if stop_ids and not sampling.min_tokens:", "if stop_ids:", end_tokens),
    "an argument that the release lacks is sent": Mutation(
        "engine", 'request.priority is not None and "priority" in known', "request.priority is not None", options_by_release
    ),
    "a grammar is given as an object": Mutation(
        "sampling",
        "json=guided.json if isinstance(guided.json, str) else json.dumps(guided.json)",
        "regex=None",
        options_by_release,
    ),
    "leaving does not abort": Mutation("engine", "            result.abort()", "            pass", leaving_aborts),
    "decode is aborted at once": Mutation("engine", "if deferred and not reader.seen and", "if False and", decode_aborts_late),
    "a request's error is taken for the engine's": Mutation(
        "engine",
        "reader.over = True\n                raise self._request_fault(request, error)",
        "reader.over = True\n                raise self._died(error)",
        one_request_fails,
    ),
    "the engine's error is taken for a request's": Mutation(
        "engine",
        "reader.over = True\n                raise self._died(error)",
        "reader.over = True\n                raise self._request_fault(request, error)",
        the_engine_dies,
    ),
    "those who wait for a dead engine are forgotten": Mutation(
        "watch", "                flight.task.cancel()", "                pass", the_engine_dies
    ),
    "nobody looks for a stuck engine": Mutation("engine", "self._own(self._watch.run())", "pass", a_stuck_engine_is_found),
    "a refusal is taken for the engine's death": Mutation(
        "engine",
        '            raise ClientFault("the engine refused this request\'s prompt, media or options") from error',
        "            raise self._died(error) from error",
        a_refusal_is_the_clients,
    ),
    "bad options are taken for the engine's fault": Mutation(
        "sampling", "except (ValueError, AssertionError) as error:", "except KeyError as error:", a_refusal_is_the_clients
    ),
    "opaque state stays bytes": Mutation(
        "handoff",
        '        return {"base64": base64.b64encode(bytes(value)).decode("ascii")}',
        "        return value",
        text_over_both_halves,
    ),
    "logits are sent": Mutation("handoff", '"first_gen_logits", ', "", text_over_both_halves),
    "the first token is given twice": Mutation(
        "engine", "submit, len(first.token_ids), deferred", "submit, 0, deferred", text_over_both_halves
    ),
    "decode asks for a context": Mutation(
        "handoff", '(request_type="generation_only"', '(request_type="context_only"', text_over_both_halves
    ),
    "no request id is unique over workers": Mutation(
        "engine", "if library.next_request_id is not None:", "if False:", text_over_both_halves
    ),
    "prefill asks for the whole answer": Mutation(
        "engine",
        'fields: dict[str, Any] = {"request_type": "context_only"}',
        'fields: dict[str, Any] = {"request_type": "context_and_generation"}',
        text_over_both_halves,
    ),
    "logprobs of the first token are not the library's own": Mutation(
        "handoff",
        "{int(token): make(logprob=logprob, rank=rank) for token",
        "{int(token): (logprob, rank) for token",
        logprobs_over_both_halves,
    ),
    "a missing first entry shifts the logprobs": Mutation(
        "engine",
        "self._lag = max(0, min(self._first, len(output.token_ids) - len(rows)))",
        "self._lag = 0",
        logprobs_over_both_halves,
    ),
    "fields of another release are set": Mutation(
        "handoff",
        'for name, value in meta["params"].items() if name in known}',
        'for name, value in meta["params"].items()}',
        fields_of_another_release,
    ),
    "handles reach decode": Mutation(
        "handoff", '"multimodal_embedding_handles", "first_gen', '"first_gen', fields_of_another_release
    ),
    "decode gets the prompt as it was": Mutation(
        "engine",
        "prompt_ids = tuple(result.prompt_token_ids)",
        "prompt_ids = request.prompt.token_ids",
        pictures_over_both_halves,
    ),
    "positions stay behind": Mutation("engine", "_with_mrope(params, submitted)", "params", pictures_over_both_halves),
    "decode makes no handles of positions": Mutation(
        "handoff", "            fields[handle_field] = private.make_handle(tensor)", "            pass", pictures_over_both_halves
    ),
    "media is prepared without the hand-off's parameters": Mutation(
        "engine",
        "sampling_params=params, disaggregated_params=disaggregated\n",
        "sampling_params=params\n",
        pictures_over_both_halves,
    ),
    "the tokenizer is left out beside images": Mutation(
        "arguments", "config.modality is Modality.MULTIMODAL or ", "", pictures_by_text_or_ids
    ),
    "a rendered prompt gets a second BOS": Mutation(
        "sampling", 'values["add_special_tokens"] = False', "pass", pictures_by_text_or_ids
    ),
    "hashes go where the release takes none": Mutation(
        "inputs",
        "if by_ids and len(uuids) == len(images) and self.library.takes_ids_beside_images:",
        "if uuids:",
        pictures_by_text_or_ids,
    ),
    "usage counts placeholders": Mutation("engine", "expanded=bool(prompt.media)", "expanded=False", pictures_by_text_or_ids),
    "embeddings go beside token ids": Mutation(
        "inputs",
        'inputs = self._prompt(prompt, by_ids=False)\n        inputs["multi_modal_embeddings"]',
        'inputs = self._prompt(prompt, by_ids=True)\n        inputs["multi_modal_embeddings"]',
        embeddings_from_files,
    ),
    "embeddings are a bare list": Mutation(
        "inputs",
        '= {"image": [item.tensors["features"] for item in encoded]}',
        '= [item.tensors["features"] for item in encoded]',
        embeddings_from_files,
    ),
    "prefill of encoded images gets the expanded prompt": Mutation(
        "inputs",
        "            ids.append(self.placeholder_id)\n",
        "            ids += prompt.token_ids[media.start : media.start + media.length]\n",
        pictures_encoded_apart,
    ),
    "encoded images ask one engine for a context only": Mutation(
        "engine", 'request_type="context_and_generation"', 'request_type="context_only"', pictures_encoded_apart
    ),
    "encoded images come without positions": Mutation(
        "inputs", "        if self.facts.mrope:\n", "        if False:\n", pictures_encoded_apart
    ),
    "positions ignore the images": Mutation(
        "mrope",
        "for start, (frames, height, width) in images:",
        "for start, (frames, height, width) in ():",
        pictures_encoded_apart,
    ),
    "the encoder's positions are not opened": Mutation(
        "encoder", 'for name in ("ids", "deltas"))', 'for name in ("ids",))', pictures_encoded_apart
    ),
    "an unknown argument is sent": Mutation(
        "arguments",
        "        if args[key] is not None:\n            raise",
        "        if False:\n            raise",
        arguments_by_release,
    ),
    "a nested argument is not looked at": Mutation(
        "arguments", "if fields is not None and isinstance(value, dict):", "if False:", arguments_by_release
    ),
    "lower case stays": Mutation("arguments", "value if spelled is None else spelled", "value", arguments_by_release),
    "postprocess workers are started": Mutation(
        "arguments",
        '_STRIPPED = ("num_postprocess_workers", "postprocess_tokenizer_dir")',
        "_STRIPPED = ()",
        arguments_by_release,
    ),
    "prefill keeps the overlap scheduler": Mutation(
        "arguments", "        _disable_overlap(args, library)", "        pass", prefill_role
    ),
    "no buffer for events": Mutation("arguments", 'cache["event_buffer_max_size"] = EVENT_BUFFER_SIZE', "pass", kv_events),
    "events end at the first timeout": Mutation(
        "events", "    while True:\n        started", "    for _ in (1,):\n        started", kv_events
    ),
    "every attention window is told": Mutation("events", "if int(window) != max(self._windows):", "if False:", kv_events),
    "partly filled blocks are told": Mutation("events", "if len(ids) != self._block_size:", "if not ids:", kv_events),
    "hashes are not signed": Mutation(
        "events",
        "    number &= (1 << 64) - 1\n    return number - (1 << 64) if number >= 1 << 63 else number",
        "    return number",
        kv_events,
    ),
}


@contextmanager
def mutant(folder: Path, mutation: Mutation | None) -> Iterator[Make]:
    """The adapter's class out of a copy of its package, changed by `mutation`."""
    name = f"mutant_{folder.name}"
    copy = folder / name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copy.glob("*.py"):
        source = file.read_text(encoding="utf-8").replace("dynamo.trtllm.engines.tensorrt_llm", name)
        if mutation is not None and file.stem == mutation.module:
            assert mutation.old in source, "the source that this mutation changes is no longer there"
            source = source.replace(mutation.old, mutation.new)
        file.write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(f"{name}.engine").TensorRTLLMEngine
    finally:
        sys.path.remove(str(folder))
        for loaded in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
            del sys.modules[loaded]


async def fails(check: Callable[[Place], Awaitable[None]], place: Place) -> bool:
    try:
        await asyncio.wait_for(check(place), 4 * DEADLINE_S)
    except (Exception, pytest.fail.Exception):
        return True
    return False


CHECKS = sorted({m.check for m in MUTATIONS.values()}, key=lambda c: c.__name__)


@pytest.mark.asyncio
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_the_adapter_passes_the_check(check: Callable[[Place], Awaitable[None]], release: str, tmp_path: Path) -> None:
    with mutant(tmp_path, None) as make, installed(release):
        await check(Place(make, tmp_path, release))


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUTATIONS)
async def test_the_check_notices(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    with mutant(tmp_path, mutation) as make:
        noticed = []
        for release in RELEASES:
            with installed(release):
                noticed.append(await fails(mutation.check, Place(make, tmp_path / release, release)))
    assert any(noticed), f"{mutation.check.__name__} passes although {name}"
