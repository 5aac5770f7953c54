"""The TensorRT-LLM double against what is known of the library: construction, health, ids and configuration.

Each test names the file and the release in which the behaviour was read. `tests/trtllm_double/README.md` has
the list, and says what was inferred.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.tensorrt_llm_library import (
    DOUBLE,
    GEMMA3,
    LATER,
    LLAVA,
    MISTRAL3,
    QWEN25,
    RC29,
    RELEASES,
    library,
)

NO_DYNAMO = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dynamo":
            raise AssertionError("the double imports " + name)
sys.meta_path.insert(0, Blocked())
import importlib
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name, error
print(sys.modules["tensorrt_llm"].__version__)
"""


def modules() -> list[str]:
    files = (f.relative_to(DOUBLE).with_suffix("") for f in sorted(DOUBLE.rglob("*.py")))
    return [".".join(f.parts).removesuffix(".__init__") for f in files]


@pytest.mark.parametrize("release", RELEASES)
def test_every_module_of_the_double_loads_without_dynamo(release: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(DOUBLE), "TRTLLM_DOUBLE_RELEASE": release}
    done = subprocess.run(
        [sys.executable, "-c", NO_DYNAMO, *modules()], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.strip(), done.returncode) == (release, 0), done.stderr


def test_no_file_of_the_double_names_dynamo_in_an_import() -> None:
    for file in DOUBLE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in named if n.split(".")[0] == "dynamo"], file


@pytest.mark.parametrize("release", RELEASES)
def test_constructor_keys_are_those_of_the_release(release: str, tmp_path: Path) -> None:
    """llmapi/llm_args.py: 1.2.1, rc29; LLM.html of 1.4.0rc4."""
    only_later = ["model_kwargs", "sleep_config", "encode_only"]
    with library(release, tmp_path) as lib:
        for key in [*only_later, "no_such_key"]:
            if release in LATER and key in only_later:
                lib.llm(**{key: None})
                continue
            with pytest.raises(ValueError, match=key):
                lib.llm(**{key: None})


@pytest.mark.parametrize("release", RELEASES)
def test_nested_keys_and_choices_are_refused_by_pydantic(release: str, tmp_path: Path) -> None:
    """llmapi/llm_args.py, all releases: the classes forbid what they do not know."""
    with library(release, tmp_path) as lib:
        for given in (
            {"kv_cache_config": {"no_such_key": 1}},
            {"cache_transceiver_config": {"backend": "PIGEON"}},
            {"cache_transceiver_config": {"transceiver_runtime": "JAVA"}},
            {"guided_decoding_backend": "outlines"},
        ):
            with pytest.raises(ValidationError):
                lib.llm(**given)
        with pytest.raises(ValueError, match="no_such_format"):
            lib.llm(load_format="no_such_format")


@pytest.mark.parametrize("release", RELEASES)
def test_block_reuse_is_chosen_by_a_configuration_since_1_3(release: str, tmp_path: Path) -> None:
    """llm_args.py: rc29 and 1.4 have `block_reuse_config`; the older `block_reuse_policy` is gone from them;
    1.2.1 has neither. All have `sink_token_length`."""
    with library(release, tmp_path) as lib:
        assert lib.llm(kv_cache_config={"sink_token_length": 4}).args.kv_cache_config.sink_token_length == 4
        with pytest.raises(ValidationError):
            lib.llm(kv_cache_config={"block_reuse_policy": "per_request"})
        given = {"block_reuse_config": {"policy": "per_conversation", "max_num_turns": 2}}
        if release == "1.2.1":
            with pytest.raises(ValidationError):
                lib.llm(kv_cache_config=given)
            return
        assert lib.llm(kv_cache_config=given).args.kv_cache_config.block_reuse_config.max_num_turns == 2
        with pytest.raises(ValidationError):
            lib.llm(kv_cache_config={"block_reuse_config": {"policy": "none"}})


@pytest.mark.parametrize("release", RELEASES)
def test_routing_by_sessions_is_of_1_3(release: str, tmp_path: Path) -> None:
    """llm_args.py of rc29 and 1.4: `attention_dp_config.kv_cache_routing_max_sessions`."""
    given = {"attention_dp_config": {"kv_cache_routing_max_sessions": 8}}
    with library(release, tmp_path) as lib:
        if release == "1.2.1":
            with pytest.raises(ValidationError):
                lib.llm(**given)
        else:
            assert lib.llm(**given).args.attention_dp_config.kv_cache_routing_max_sessions == 8


def test_1_4_takes_no_arguments_that_it_removed(tmp_path: Path) -> None:
    """TorchLlmArgs.html of 1.4.0rc4 lacks them; inferred for rc2."""
    with library("1.4.0rc2", tmp_path) as lib:
        for key in ("enable_min_latency", "max_input_len"):
            with pytest.raises(ValueError, match=key):
                lib.llm(**{key: None})


def test_the_build_configuration_is_of_1_2(tmp_path: Path) -> None:
    """llmapi/__init__.py: `BuildConfig` left with the TensorRT backend."""
    for release in RELEASES:
        with library(release, tmp_path) as lib:
            assert hasattr(lib.part("llmapi"), "BuildConfig") is (release == "1.2.1")


@pytest.mark.parametrize("release", RELEASES)
def test_more_ranks_than_gpus_are_refused(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py, all: a `RuntimeError` of the constructor itself, with no cause."""
    with library(release, tmp_path, gpus=1) as lib, pytest.raises(RuntimeError, match="1 GPU") as caught:
        lib.llm(tensor_parallel_size=2)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("release", LATER)
@pytest.mark.parametrize("backend", ["UCX", "MPI", "MOONCAKE"])
def test_the_python_transceiver_takes_nixl_only(release: str, backend: str, tmp_path: Path) -> None:
    """_torch/pyexecutor/kv_cache_transceiver.py of 1.3: ValueError in the rank, so the cause of what `LLM`
    raises."""
    section = {"backend": backend, "transceiver_runtime": "PYTHON"}
    with library(release, tmp_path) as lib:
        with pytest.raises(RuntimeError) as caught:
            lib.llm(cache_transceiver_config=section)
        assert isinstance(caught.value.__cause__, ValueError)
        lib.llm(cache_transceiver_config={**section, "transceiver_runtime": "CPP"})


def test_what_the_automatic_transceiver_is(tmp_path: Path) -> None:
    """llm_args.py: rc29 says "auto", 1.4's documentation "PYTHON"."""
    made = {}
    for release in LATER:
        with library(release, tmp_path) as lib:
            section = lib.llm(cache_transceiver_config={"backend": "NIXL"}).args.cache_transceiver_config
            made[release] = section.transceiver_runtime
    assert made == {RC29: "auto", "1.4.0rc2": "PYTHON"}


@pytest.mark.parametrize("architecture", [GEMMA3, MISTRAL3])
@pytest.mark.parametrize("release", RELEASES)
def test_models_that_cannot_be_loaded_split(
    release: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """modeling_gemma3vl.py, modeling_mistral.py by the audit: NotImplementedError in the rank."""
    monkeypatch.setenv("TLLM_MULTIMODAL_DISAGGREGATED", "1")
    with library(release, tmp_path) as lib:
        with pytest.raises(RuntimeError) as caught:
            lib.llm(architecture)
        assert isinstance(caught.value.__cause__, NotImplementedError)
        lib.llm(QWEN25)
        monkeypatch.delenv("TLLM_MULTIMODAL_DISAGGREGATED")
        lib.llm(architecture)


def test_an_encoder_needs_a_model_that_splits(tmp_path: Path) -> None:
    """`@support_multimodal_disaggregated` of the model classes, 1.2 and 1.3."""
    with library(RC29, tmp_path) as lib:
        for architecture in (MISTRAL3, "LlamaForCausalLM"):
            with pytest.raises(RuntimeError):
                lib.encoder(architecture)
        lib.encoder(LLAVA)


def test_request_ids_have_a_node_and_a_process_since_rc22(tmp_path: Path) -> None:
    """llmapi/disagg_utils.py of 1.3 (after rc21); 1.2.1 has no such function."""
    for release in LATER:
        with library(release, tmp_path) as lib:
            module = lib.part("llmapi.disagg_utils")
            make = module.get_global_disagg_request_id
            assert list(inspect.signature(make).parameters) == ["node_id", "process_id"]
            assert module.MIN_GLOBAL_ID == 1 << 40
            made = [make(node, process) for node in (0, 255) for process in (0, 63) for _ in range(20)]
            assert len(set(made)) == len(made)
            assert all(1 << 40 <= number < (1 << 63) - 1 for number in made)
            for node, process in ((256, 0), (-1, 0), (0, 64), (0, -1)):
                with pytest.raises(ValueError, match="range"):
                    make(node, process)
    with library("1.2.1", tmp_path) as lib:
        assert not hasattr(lib.part("llmapi.disagg_utils"), "get_global_disagg_request_id")


def test_parameters_of_scheduling_and_conversations(tmp_path: Path) -> None:
    """scheduling_params.py of rc29; conversation_params.py is of late 1.3."""
    with library("1.2.1", tmp_path) as lib:
        assert lib.part("scheduling_params").SchedulingParams(attention_dp_rank=1).attention_dp_rank == 1
        with pytest.raises(ModuleNotFoundError):
            lib.part("conversation_params")
        assert "priority" not in inspect.signature(lib.root.LLM.generate_async).parameters
    with library(RC29, tmp_path) as lib:
        assert lib.part("conversation_params").ConversationParams(conversation_id="a").conversation_id == "a"
        assert "conversation_params" in inspect.signature(lib.root.LLM.generate_async).parameters


@pytest.mark.parametrize("release", RELEASES)
def test_an_unknown_argument_of_a_call_is_a_type_error(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py: `generate_async` takes no `**kwargs`."""
    with library(release, tmp_path) as lib, pytest.raises(TypeError):
        lib.llm().generate_async([301], no_such_argument=1)


def test_a_dead_idle_engine_is_seen_by_1_3_only(tmp_path: Path) -> None:
    """llmapi/llm.py `_check_health` of 1.2.1 asks whether someone shut it down, and submitting raises what
    killed the ranks; executor/proxy.py of 1.3 asks the ranks, and a request waits for ever."""
    with library("1.2.1", tmp_path, dies_idle_after_s=0.0) as lib:
        engine = lib.llm()
        assert engine._check_health() is True
        with pytest.raises(RuntimeError, match="MPI"):
            lib.ask(engine, [301])
        assert engine._check_health() is False
    for release in LATER:
        with library(release, tmp_path, dies_idle_after_s=0.0) as lib:
            engine = lib.llm()
            assert engine._check_health() is False
            assert isinstance(engine._executor._fatal_error, RuntimeError)

            async def hangs(engine: Any = engine) -> bool:
                result = engine.generate_async([301])
                done, _ = await asyncio.wait([asyncio.ensure_future(result.aresult())], timeout=0.05)
                return not done

            assert asyncio.run(hangs())


def test_asking_a_dead_rank_can_block(tmp_path: Path) -> None:
    """executor/proxy.py of 1.3: the question is a message."""
    with library(RC29, tmp_path, dies_idle_after_s=0.0, health_blocks_s=0.05) as lib:
        engine = lib.llm()
        began = time.monotonic()
        assert engine._check_health() is False
        assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("release", RELEASES)
def test_an_engine_that_was_shut_down_refuses(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py, all: `_executor` is None then."""
    with library(release, tmp_path) as lib:
        engine = lib.llm()
        assert engine._check_health() is True
        engine.shutdown()
        engine.shutdown()
        assert (engine._executor, engine._check_health()) == (None, False)
        with pytest.raises(RuntimeError, match="shutting down"):
            engine.generate_async([301])


def test_attention_dp_ranks_have_a_statistics_row_each_since_1_3(tmp_path: Path) -> None:
    """_torch/pyexecutor/py_executor.py of 1.3 by the audit and Dynamo's publisher; inferred for 1.2.1."""

    async def rows(engine: Any, lib: Any) -> list[dict[str, Any]]:
        place = lib.part("scheduling_params").SchedulingParams(attention_dp_rank=1)
        await engine.generate_async(list(range(300, 364)), scheduling_params=place)
        return [row async for row in engine.get_stats_async(timeout=0.05)]

    args = {"enable_attention_dp": True, "tensor_parallel_size": 2, "enable_iter_perf_stats": True}
    for release in RELEASES:
        with library(release, tmp_path) as lib:
            made = asyncio.run(rows(lib.llm(**args), lib))
            used = [(row.get("attentionDpRank"), row["kvCacheStats"]["usedNumBlocks"]) for row in made]
            assert used == ([(None, 0)] if release == "1.2.1" else [(0, 0), (1, 2)])


def test_stored_blocks_carry_the_cache_salt_since_1_3(tmp_path: Path) -> None:
    """_utils.py of 1.3 by the audit and Dynamo's publisher; that 1.2.1 has no such field is inferred."""

    async def stored(engine: Any) -> list[dict[str, Any]]:
        await engine.generate_async(list(range(300, 364)), cache_salt="s")
        events = [event async for event in engine.get_kv_cache_events_async(timeout=0.05)]
        return [b for e in events if e.get("data", {}).get("type") == "stored" for b in e["data"]["blocks"]]

    for release in RELEASES:
        with library(release, tmp_path) as lib:
            blocks = asyncio.run(stored(lib.llm(kv_cache_config={"event_buffer_max_size": 16})))
            salts = {block.get("cache_salt") for block in blocks}
            assert salts == ({None} if release == "1.2.1" else {"s"})
