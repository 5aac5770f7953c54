"""The TensorRT-LLM adapter over the double of both recorded releases:
starting, options, streaming, ending, hand-over."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.config import Role
from dynamo.trtllm.core import GuidedDecoding, Prompt, Sampling, Step
from dynamo.trtllm.engines.port import EngineState
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from dynamo.trtllm.engines.tensorrt_llm.request_ids import id_maker
from dynamo.trtllm.errors import ClientFault, EngineDead, EngineFault, StartupError
from dynamo.trtllm.last_resort import EXIT_STUCK
from engines.contract import as_step, generate, split, steps_of
from engines.tensorrt_llm_subject import (
    RELEASES,
    TRANSCEIVER,
    ask,
    engine_config,
    forget,
    held_contexts,
    installed,
    instances,
    model_directory,
    release,
    script,
    started,
    until,
)

BOTH_HALVES = {**TRANSCEIVER, "disable_overlap_scheduler": True}


__all__ = ["release"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "model")


async def read(stream: Any, count: int) -> list[Step]:
    """The first `count` steps, then the stream is closed."""
    steps: list[Step] = []
    async with aclosing(stream) as open_stream:
        async for step in open_stream:
            steps.append(as_step(step))
            if len(steps) == count:
                break
    return steps


# Starting


@pytest.mark.asyncio
async def test_without_the_library_start_names_the_install_command_and_the_other_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(StartupError, match=r"pip install 'dynamo-trtllm\[trtllm\]'.*--engine transformers"):
        await TensorRTLLMEngine(engine_config(model)).start()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            {"max_batch_sise": 4},
            r"does not know the engine argument max_batch_sise; did you mean max_batch_size\?",
        ),
        (
            {"kv_cache_config": {"enable_block_reus": False}},
            r"enable_block_reus; did you mean enable_block_reuse\?",
        ),
        (
            {"tensor_parallel_size": 64},
            r"could not load the model: Only 8 GPUs are available, but 64 are required",
        ),
        (
            {"cache_transceiver_config": {"backend": "PIGEON"}},
            r"refused the engine argument cache_transceiver_config\.backend",
        ),
    ],
)
async def test_a_bad_argument_is_told_in_one_sentence(
    release: str, model: Path, args: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence) as fault:
        await TensorRTLLMEngine(engine_config(model, args=args)).start()
    assert f"TensorRT-LLM {release}" in fault.value.message
    assert "\n" not in fault.value.message


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("argument", "knows"),
    [
        ({"multimodal_config": {}}, {"1.3.0rc29"}),
        ({"sampler_type": "auto"}, {"1.2.1"}),
        ({"backend": "pytorch"}, set(RELEASES)),
    ],
)
async def test_only_arguments_of_the_installed_release_are_taken(
    release: str, model: Path, argument: Any, knows: set[str]
) -> None:
    engine = TensorRTLLMEngine(engine_config(model, args=argument))
    if release in knows:
        await engine.start()
    else:
        with pytest.raises(StartupError, match=f"TensorRT-LLM {release} does not know the engine argument"):
            await engine.start()
    await engine.close()


@pytest.mark.asyncio
async def test_values_are_spelled_as_the_library_wants_and_postprocess_workers_are_left_out(
    release: str, model: Path
) -> None:
    args = {
        "cache_transceiver_config": {"backend": "nixl"},
        "guided_decoding_backend": "XGrammar",
        "scheduler_config": {"capacity_scheduler_policy": "guaranteed_no_evict"},
        "num_postprocess_workers": 4,
        "gpus_per_node": None,
    }
    async with started(engine_config(model, args=args)):
        built = instances()[-1].args
        assert built.cache_transceiver_config.backend == "NIXL"
        assert built.guided_decoding_backend == "xgrammar"
        assert built.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
        assert built.num_postprocess_workers == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "skips"),
    [
        ({}, True),
        ({"args": {"skip_tokenizer_init": False}}, False),
        ({"args": {"guided_decoding_backend": "xgrammar"}}, False),
        ({"images": True, "args": {"skip_tokenizer_init": True}}, False),
    ],
)
async def test_the_tokenizer_is_left_out_unless_images_or_grammars_need_it(
    release: str, model: Path, changes: dict[str, Any], skips: bool
) -> None:
    async with started(engine_config(model, **changes)):
        assert instances()[-1].args.skip_tokenizer_init is skips


@pytest.mark.asyncio
async def test_a_disaggregated_role_needs_a_transceiver(release: str, model: Path) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        config = engine_config(model, role)
        bare = {k: v for k, v in config.args.items() if k != "cache_transceiver_config"}
        with pytest.raises(
            StartupError, match=rf"a {role.value} worker .* cache_transceiver_config\.backend"
        ):
            await TensorRTLLMEngine(replace(config, args=bare)).start()


@pytest.mark.asyncio
async def test_prefill_runs_without_the_overlap_scheduler(release: str, model: Path) -> None:
    async with started(engine_config(model, Role.PREFILL)):
        assert instances()[-1].args.disable_overlap_scheduler is True
    insisting = TensorRTLLMEngine(
        engine_config(model, Role.PREFILL, args={"disable_overlap_scheduler": False})
    )
    if release == "1.2.1":
        with pytest.raises(StartupError, match="needs disable_overlap_scheduler: true"):
            await insisting.start()
    else:
        await insisting.start()
    await insisting.close()


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_split_is_refused_before_loading(release: str, tmp_path: Path) -> None:
    path = model_directory(tmp_path / "g", "Gemma4ForConditionalGeneration")
    with pytest.raises(StartupError, match="does not split Gemma4ForConditionalGeneration"):
        await TensorRTLLMEngine(engine_config(path, Role.PREFILL)).start()
    assert instances() == []


@pytest.mark.asyncio
async def test_info_is_read_back_from_the_engine(release: str, model: Path) -> None:
    config = engine_config(
        model, args={"max_seq_len": None, "max_batch_size": 5, "kv_cache_config": {"tokens_per_block": 64}}
    )
    async with started(config) as (_, info):
        assert (info.context_length, info.max_num_seqs, info.max_num_batched_tokens) == (512, 5, 4096)
        expected = (64, None) if release == "1.2.1" else (32, 128)
        assert (info.kv_block_size, info.total_kv_blocks) == expected
        assert info.extras["tensorrt_llm"] == release
        assert (info.media, info.hidden_size) == ({}, None)


# Options of a request


SAMPLING_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 12}, {"top_k": 12}),
    ({"top_k": -1}, {"top_k": None}),
    ({"min_p": 0.05}, {"min_p": 0.05}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": -1}, {"seed": (1 << 64) - 1}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    ({"max_tokens": 9}, {"max_tokens": 9}),
    (
        {},
        {
            "max_tokens": 500,
            "end_id": -1,
            "pad_id": 0,
            "detokenize": False,
            "logprobs": None,
            "ignore_eos": False,
        },
    ),
    ({"min_tokens": 3, "eos_token_ids": frozenset({9})}, {"min_tokens": 3, "end_id": 9}),
    ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": None, "end_id": -1}),
    ({"stop_token_ids": frozenset({5, 4})}, {"stop_token_ids": [4, 5], "include_stop_str_in_output": False}),
    ({"eos_token_ids": frozenset({9, 8})}, {"end_id": 8, "pad_id": 8, "stop_token_ids": [9]}),
    (
        {"eos_token_ids": frozenset({9, 8}), "ignore_eos": True},
        {"end_id": -1, "stop_token_ids": None, "ignore_eos": False},
    ),
    ({"logprobs": 0}, {"logprobs": 1}),
    ({"logprobs": 4}, {"logprobs": 4}),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("options", "expected"), SAMPLING_CASES)
async def test_every_sampling_option_reaches_the_engine(
    release: str, model: Path, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with started(engine_config(model)) as (engine, _):
        await read(engine.generate(ask(**options)), 1)
        params = instances()[-1].seen[-1]["sampling_params"]
        assert {name: getattr(params, name) for name in expected} == expected


def test_no_sampling_option_is_left_out_of_these_tests() -> None:
    covered = {name for options, _ in SAMPLING_CASES for name in options} | {"guided", "prompt_logprobs"}
    assert covered == {f.name for f in fields(Sampling)}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        (GuidedDecoding(json={"type": "object"}), {"json": '{"type": "object"}'}),
        (GuidedDecoding(json='{"type": "array"}'), {"json": '{"type": "array"}'}),
        (GuidedDecoding(regex="a+"), {"regex": "a+"}),
        (GuidedDecoding(grammar="root ::= x"), {"grammar": "root ::= x"}),
        (GuidedDecoding(choice=("yes.", "no")), {"regex": r"(yes\.|no)"}),
        (GuidedDecoding(json_object=True), {"json_object": True}),
        (GuidedDecoding(structural_tag={"a": 1}), {"structural_tag": '{"a": 1}'}),
    ],
)
async def test_every_grammar_reaches_the_engine(
    release: str, model: Path, guided: GuidedDecoding, expected: dict[str, Any]
) -> None:
    async with started(engine_config(model, args={"guided_decoding_backend": "xgrammar"})) as (engine, _):
        await read(engine.generate(ask(guided=guided)), 1)
        given = instances()[-1].seen[-1]["sampling_params"].guided_decoding
        assert {name: value for name, value in vars(given).items() if value} == expected


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"guided": GuidedDecoding(regex="a")}, "started without a guided decoding backend"),
        ({"prompt_logprobs": 1}, "prompt_logprobs are not supported"),
        ({"top_p": 3.0}, "outside of what the engine accepts"),
    ],
)
async def test_an_option_that_cannot_be_honoured_is_refused(
    release: str, model: Path, options: Any, sentence: str
) -> None:
    async with started(engine_config(model)) as (engine, _):
        with pytest.raises(ClientFault, match=sentence):
            await generate(engine, ask(**options))
        assert (await generate(engine, ask(max_tokens=3, ignore_eos=True))).finish == "length"


@pytest.mark.asyncio
async def test_requests_do_not_share_sampling_params(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        for _ in range(2):
            await generate(engine, ask(max_tokens=2))
        first, second = (call["sampling_params"] for call in instances()[-1].seen)
        assert first is not second


@pytest.mark.asyncio
async def test_routing_options_go_where_the_release_has_them(release: str, model: Path) -> None:
    config = engine_config(model, args={"enable_attention_dp": True, "tensor_parallel_size": 4})
    async with started(config) as (engine, info):
        asked = replace(
            ask(max_tokens=2), priority=7.0, cache_salt="salt", dp_rank=3, trace_headers={"traceparent": "t"}
        )
        await generate(engine, asked)
        call = instances()[-1].seen[-1]
        assert (call["cache_salt"], call["trace_headers"]) == ("salt", {"traceparent": "t"})
        assert call["scheduling_params"].attention_dp_rank == 3
        assert call.get("priority") == (1.0 if release == "1.3.0rc29" else None)
        assert info.data_parallel_size == 4


# Streaming


@pytest.mark.asyncio
async def test_steps_hold_only_what_is_new_and_stay_as_they_are(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        steps = await steps_of(engine.generate(ask(max_tokens=8, ignore_eos=True)))
        whole = await generate(engine, ask(max_tokens=8, ignore_eos=True))
        assert [len(step.token_ids) for step in steps] == [1] * 8
        assert [step.token_ids[0] for step in steps] == whole.token_ids
        assert [step.finish for step in steps] == [None] * 7 + ["length"]


@pytest.mark.asyncio
async def test_the_end_token_is_not_passed_on(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        free = await generate(engine, ask(max_tokens=64, ignore_eos=True))
        ended = await generate(engine, ask(max_tokens=64, eos_token_ids=frozenset({2, 3})))
        assert ended.finish == "eos"
        assert ended.stop_reason is None
        assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
        assert ended.usage is not None
        assert ended.usage.completion_tokens == len(ended.token_ids) < 64


@pytest.mark.asyncio
async def test_a_second_end_token_ends_as_the_first_does(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        free = await generate(engine, ask(max_tokens=5, ignore_eos=True))
        ended = await generate(engine, ask(max_tokens=5, eos_token_ids=frozenset({2, free.token_ids[-1]})))
        assert (ended.finish, ended.stop_reason) == ("eos", None)
        assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[-1])]


@pytest.mark.asyncio
async def test_ids_that_shrink_on_the_last_step_take_nothing_back(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        free = await generate(engine, ask(max_tokens=6, ignore_eos=True))
        script().shrink_last = 3
        shrunk = await generate(engine, ask(max_tokens=6, ignore_eos=True))
        assert shrunk.token_ids == free.token_ids[:5]
        assert shrunk.usage is not None
        assert shrunk.usage.completion_tokens == 5


# Ending early


@pytest.mark.asyncio
async def test_leaving_a_stream_aborts_it_once_and_finishing_does_not(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        await generate(engine, ask(max_tokens=3, ignore_eos=True))
        assert instances()[-1].aborted == []
        await read(engine.generate(ask(max_tokens=30, ignore_eos=True)), 2)
        assert instances()[-1].aborted == [(2, 2)]


@pytest.mark.asyncio
async def test_cancelling_the_reader_aborts_the_request(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        script().hang_at_token = 1
        task = asyncio.create_task(generate(engine, ask(max_tokens=30, ignore_eos=True)))
        await until(lambda: instances()[-1].active and instances()[-1].seen)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [number for number, _ in instances()[-1].aborted] == [1]


@pytest.mark.asyncio
async def test_decode_is_aborted_only_after_its_first_token(release: str, model: Path) -> None:
    async with started(engine_config(model, args=BOTH_HALVES)) as (engine, _):
        asked = ask(max_tokens=30, ignore_eos=True)
        prefilled = await engine.prefill(asked)
        script().step_delay_s = 0.01
        task = asyncio.create_task(anext(engine.decode(asked, prefilled.first, prefilled.state)))
        await until(lambda: len(instances()[-1].seen) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: instances()[-1].aborted)
        assert instances()[-1].aborted[0][1] >= 1


@pytest.mark.asyncio
async def test_prefill_is_aborted_at_once(release: str, model: Path) -> None:
    async with started(engine_config(model, Role.PREFILL)) as (engine, _):
        script().hang_at_token = 0
        task = asyncio.create_task(engine.prefill(ask(max_tokens=9)))
        await until(lambda: instances()[-1].seen)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert instances()[-1].aborted == [(1, 0)]


# Failing


@pytest.mark.asyncio
async def test_what_the_engine_refuses_is_the_clients_fault_in_our_words(release: str, model: Path) -> None:
    async with started(engine_config(model, args={"max_num_tokens": 64})) as (engine, _):
        with pytest.raises(ClientFault) as fault:
            await generate(engine, ask(tuple(range(300, 300 + 100)), max_tokens=2))
        assert fault.value.message == "the engine refused this request's prompt or options"
        assert (await generate(engine, ask(max_tokens=2, ignore_eos=True))).finish == "length"


@pytest.mark.asyncio
async def test_a_request_error_fails_one_request(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        script().fail_at_token = 2
        with pytest.raises(EngineFault) as fault:
            await generate(engine, ask(max_tokens=9, ignore_eos=True))
        assert fault.value.message == "the engine failed this request"
        script().fail_at_token = None
        await engine.check_health()
        assert (await generate(engine, ask(max_tokens=9, ignore_eos=True))).finish == "length"
        assert instances()[-1].aborted == []


@pytest.mark.asyncio
async def test_any_other_error_is_the_engines_death_for_all(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        script().hang_at_token = 1
        waiting = [
            asyncio.create_task(generate(engine, ask(max_tokens=9, ignore_eos=True))) for _ in range(3)
        ]
        await until(lambda: len(instances()[-1].seen) == 3)
        script().hang_at_token, script().fatal_at_token = None, 2
        with pytest.raises(EngineDead):
            await generate(engine, ask(max_tokens=9, ignore_eos=True))
        for task in waiting:
            with pytest.raises(EngineDead):
                await asyncio.wait_for(task, 5)
        with pytest.raises(EngineDead):
            await engine.check_health()
        with pytest.raises(EngineDead):
            await generate(engine, ask(max_tokens=9))


@pytest.mark.asyncio
async def test_an_engine_that_was_shut_down_is_dead(release: str, model: Path) -> None:
    async with started(engine_config(model)) as (engine, _):
        instances()[-1].shutdown()
        with pytest.raises(EngineDead):
            await generate(engine, ask(max_tokens=2))
        with pytest.raises(EngineDead):
            await engine.check_health()


@pytest.mark.asyncio
async def test_an_engine_that_makes_no_step_is_found_and_its_requests_end(release: str, model: Path) -> None:
    async with started(engine_config(model, stall_timeout_s=0.2)) as (engine, _):
        script().hang_at_token = 3
        tasks = [asyncio.create_task(generate(engine, ask(max_tokens=9, ignore_eos=True))) for _ in range(2)]
        for task in tasks:
            with pytest.raises(EngineDead, match=r"no step for 0\.2 s"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(EngineDead):
            await engine.check_health()


@pytest.mark.asyncio
async def test_an_idle_engine_is_not_taken_for_a_stuck_one(release: str, model: Path) -> None:
    async with started(engine_config(model, stall_timeout_s=0.05)) as (engine, _):
        await generate(engine, ask(max_tokens=3))
        await asyncio.sleep(0.2)
        await engine.check_health()
        assert (await generate(engine, ask(max_tokens=3, ignore_eos=True))).finish == "length"


# Hand-over


@pytest.mark.asyncio
async def test_the_state_is_json_and_names_its_schema_and_release(release: str, model: Path) -> None:
    async with started(engine_config(model, Role.PREFILL)) as (engine, _):
        prefilled = await engine.prefill(ask(max_tokens=9, logprobs=2))
        assert prefilled.state is not None
        meta = json.loads(json.dumps(prefilled.state.meta))
        assert (meta["engine"], meta["schema"], meta["release"]) == ("tensorrt_llm", 1, release)
        assert set(meta["params"]["opaque_state"]) == {"base64"}
        assert "first_gen_logits" not in meta["params"]
        assert ("disagg_request_id" in meta["params"]) == (release == "1.3.0rc29")
        assert prefilled.state.tensors == {}
        assert [p.chosen.token_id for p in prefilled.first.logprobs or ()] == list(prefilled.first.token_ids)


def test_the_request_id_helper_is_called_as_its_signature_says() -> None:
    asked: list[tuple[int, ...]] = []

    def of_a_machine(machine_id: int) -> int:
        asked.append((machine_id,))
        return len(asked)

    def of_a_process(node_id: int, process_id: int = 0) -> int:
        asked.append((node_id, process_id))
        return len(asked)

    for helper, limits in ((of_a_machine, (1024,)), (of_a_process, (256, 64))):
        asked.clear()
        makers = [id_maker(helper) for _ in range(300)]
        assert [make() for make in makers] == list(range(1, 301))
        assert all(0 <= part < limit for parts in asked for part, limit in zip(parts, limits, strict=True))
        assert all(len({parts[at] for parts in asked}) > limits[at] // 8 for at in range(len(limits)))
        assert makers[0]() == 301
        assert asked[-1] == asked[0]


@pytest.mark.asyncio
async def test_request_ids_are_unique_over_prefill_requests(model: Path) -> None:
    with installed("1.3.0rc29"):
        async with started(engine_config(model, Role.PREFILL)) as (engine, _):
            states = [(await engine.prefill(ask(max_tokens=9))).state for _ in range(3)]
            ids = {state.meta["params"]["disagg_request_id"] for state in states}
            assert len(ids) == 3
            assert min(ids) >= 1 << 40


@pytest.mark.asyncio
async def test_fields_that_decodes_release_does_not_have_are_left_out(release: str, model: Path) -> None:
    async with started(engine_config(model, args=BOTH_HALVES)) as (engine, _):
        asked = ask(max_tokens=6, ignore_eos=True)
        whole = await generate(engine, asked)
        prefilled = await engine.prefill(asked)
        assert prefilled.state is not None
        meta = dict(prefilled.state.meta)
        meta["params"] = {**meta["params"], "remote_tail_start": 3, "multimodal_embedding_handles": [{}]}
        rest = [
            t
            for step in await steps_of(engine.decode(asked, prefilled.first, EngineState(meta)))
            for t in step.token_ids
        ]
        assert [*prefilled.first.token_ids, *rest] == whole.token_ids


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "meta", [{}, {"engine": "double", "schema": 1}, {"engine": "tensorrt_llm", "schema": 2, "params": {}}]
)
async def test_a_state_of_another_kind_is_an_engine_fault(
    release: str, model: Path, meta: dict[str, Any]
) -> None:
    async with started(engine_config(model, Role.DECODE)) as (engine, _):
        with pytest.raises(EngineFault, match="not one that this engine understands"):
            await read(engine.decode(ask(max_tokens=4), Step([300]), EngineState(meta)), 1)


@pytest.mark.asyncio
async def test_decode_needs_the_prompt_that_was_prefilled(release: str, model: Path) -> None:
    async with started(engine_config(model, args=BOTH_HALVES)) as (engine, _):
        prefilled = await engine.prefill(ask(max_tokens=6, ignore_eos=True))
        with pytest.raises(EngineFault):
            await read(engine.decode(ask((300, 301), max_tokens=6), prefilled.first, prefilled.state), 1)


@pytest.mark.asyncio
async def test_a_failed_transfer_fails_the_request_and_not_the_engine(release: str, model: Path) -> None:
    async with started(engine_config(model, args=BOTH_HALVES)) as (engine, _):
        asked = ask(max_tokens=6, ignore_eos=True)
        prefilled = await engine.prefill(asked)
        script().transfer_fails = True
        with pytest.raises(EngineFault):
            await read(engine.decode(asked, prefilled.first, prefilled.state), 1)
        await engine.check_health()


@pytest.mark.asyncio
async def test_a_request_that_its_first_token_ends_leaves_a_state_only_where_the_engine_holds_one(
    release: str, model: Path
) -> None:
    async with started(engine_config(model, args=BOTH_HALVES)) as (engine, _):
        token = (await engine.prefill(ask(max_tokens=9))).first.token_ids[0]
        by_length = await engine.prefill(ask(max_tokens=1))
        by_stop = await engine.prefill(ask(max_tokens=9, stop_token_ids=frozenset({token})))
        by_eos = await engine.prefill(ask(max_tokens=9, eos_token_ids=frozenset({token})))
        ends = [(list(each.first.token_ids), each.first.finish) for each in (by_length, by_stop, by_eos)]
        assert ends == [([token], "length"), ([], "stop"), ([], "eos")]
        assert [each.state is None for each in (by_length, by_stop, by_eos)] == [True, False, True]
        engine.abandon(replace(ask(), prompt=Prompt(by_stop.prompt_token_ids)), by_stop.state)
        await until(lambda: len(held_contexts()) == 1)  # the first request's, which nobody decodes here


@pytest.mark.asyncio
async def test_prefill_asks_for_one_token_whatever_the_request_wants(release: str, model: Path) -> None:
    async with started(engine_config(model, args=BOTH_HALVES)) as (engine, _):
        await split(engine, ask(max_tokens=7, min_tokens=5, eos_token_ids=frozenset({2})))
        context, generation = instances()[-1].seen
        assert (context["sampling_params"].max_tokens, context["streaming"]) == (1, False)
        assert context["disaggregated_params"].request_type == "context_only"
        assert (generation["sampling_params"].max_tokens, generation["streaming"]) == (7, True)
        assert generation["disaggregated_params"].request_type == "generation_only"


PREFILL_SCRIPT = """
import asyncio, json, sys
from dynamo.trtllm.config import Role
from engines.tensorrt_llm_subject import ask, engine_config, started

async def main():
    async with started(engine_config(sys.argv[1], Role.PREFILL)) as (engine, _):
        made = await engine.prefill(ask(max_tokens=9, ignore_eos=True))
        first = list(made.first.token_ids)
        print(json.dumps({"first": first, "ids": made.prompt_token_ids, "meta": made.state.meta}))

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_prefill_in_one_process_and_decode_in_another_give_what_one_engine_gives(
    release: str, model: Path
) -> None:
    tests = Path(__file__).parents[1]
    folders = [str(tests), str(tests / "trtllm_double"), *(p for p in sys.path if p)]
    environment = {**os.environ, "TRTLLM_DOUBLE_RELEASE": release, "PYTHONPATH": os.pathsep.join(folders)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PREFILL_SCRIPT, str(model), env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    sent = json.loads(out.splitlines()[-1])
    asked = ask(tuple(sent["ids"]), max_tokens=9, ignore_eos=True)
    async with started(engine_config(model, Role.DECODE)) as (engine, _):
        stream = engine.decode(asked, Step(sent["first"]), EngineState(sent["meta"]))
        rest = [token for step in await steps_of(stream) for token in step.token_ids]
    async with started(engine_config(model)) as (engine, _):
        assert sent["first"] + rest == (await generate(engine, asked)).token_ids


STUCK_SCRIPT = """
import asyncio, sys, time
from dynamo.trtllm.engines.tensorrt_llm import health
from engines.tensorrt_llm_subject import engine_config, started

health.ANSWER_S = 0.5

async def main():
    async with started(engine_config(sys.argv[1])):
        print("started", flush=True)
        time.sleep(60)  # as in a message to a dead rank

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_process_whose_event_loop_is_stuck_in_a_dead_engine_ends(model: Path) -> None:
    tests = Path(__file__).parents[1]
    folders = [str(tests), str(tests / "trtllm_double"), *(p for p in sys.path if p)]
    environment = {
        **os.environ,
        "TRTLLM_DOUBLE_SCRIPT": json.dumps({"dies_idle_after_s": 0.2}),
        "PYTHONPATH": os.pathsep.join(folders),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK_SCRIPT, str(model), env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 50)
    assert out.split() == [b"started"]
    assert process.returncode == EXIT_STUCK


@pytest.mark.asyncio
async def test_closing_twice_and_after_a_failed_start_is_safe(release: str, model: Path) -> None:
    failed = TensorRTLLMEngine(engine_config(model, args={"nonsense": 1}))
    with pytest.raises(StartupError):
        await failed.start()
    await failed.close()
    engine = TensorRTLLMEngine(engine_config(model))
    await engine.start()
    await engine.close()
    await engine.close()
    assert instances()[-1].is_shutdown
