"""The TensorRT-LLM double against what is known of the library: requests, their hand-over and their end.

Each test names the file and the release in which the behaviour was read. `tests/trtllm_double/README.md` has
the list, and says what was inferred.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines.tensorrt_llm_library import (
    DOUBLE,
    IMAGE,
    LATER,
    QWEN25,
    RC29,
    RELEASES,
    REQUEST_ID,
    Library,
    about,
    library,
    picture,
)

IDS = list(range(300, 312))
LONG = {"ignore_eos": True, "max_tokens": 12}


def prefilled(lib: Library, engine: Any, inputs: Any = IDS, **given: Any) -> Any:
    """A context's output."""
    return lib.ask(engine, inputs, lib.context(**given)).disaggregated_params


@pytest.mark.parametrize("release", RELEASES)
def test_prefill_and_decode_give_what_one_engine_gives(release: str, tmp_path: Path) -> None:
    """The double's own. A context makes one token, whatever was asked (llmapi/llm.py, all)."""
    with library(release, tmp_path) as lib:
        whole = lib.ask(lib.llm(), IDS, **LONG).outputs[0].token_ids
        prefill, decode = lib.split(), lib.split()
        answer = lib.ask(prefill, IDS, lib.context(), **LONG)
        context = answer.disaggregated_params
        assert answer.outputs[0].finish_reason == "length"
        assert (context.first_gen_tokens, context.request_type) == (whole[:1], "context_only")
        assert lib.ask(decode, IDS, lib.generation(context), **LONG).outputs[0].token_ids == whole


@pytest.mark.parametrize("release", RELEASES)
def test_a_contexts_blocks_are_held_until_decode_has_fetched_them(release: str, tmp_path: Path) -> None:
    """py_executor.py, all: `kv_transfer_timeout_ms` ends it otherwise. What was fetched cannot be fetched
    again."""
    with library(release, tmp_path) as lib:
        prefill, decode = lib.split(), lib.split()
        contexts = [prefilled(lib, prefill) for _ in range(2)]
        assert len(lib.held()) == 2
        lib.ask(decode, IDS, lib.generation(contexts[0]), max_tokens=4)
        assert len(lib.held()) == 1
        with pytest.raises(lib.failed, match="transfer"):
            lib.ask(decode, IDS, lib.generation(contexts[0]), max_tokens=4)
        brief = lib.split(transceiver={"kv_transfer_timeout_ms": 1})
        late = prefilled(lib, brief)
        time.sleep(0.005)
        assert len(lib.held()) == 1
        with pytest.raises(lib.failed, match="transfer"):
            lib.ask(decode, IDS, lib.generation(late), max_tokens=4)


def test_held_contexts_of_other_processes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double's own: `TRTLLM_DOUBLE_PINS` names a folder that processes share."""
    pins = tmp_path / "pins"
    monkeypatch.setenv("TRTLLM_DOUBLE_PINS", str(pins))
    other = "from tensorrt_llm._double import pins; pins.hold('other', 60000); print(pins.held())"
    env = {**os.environ, "PYTHONPATH": str(DOUBLE)}
    done = subprocess.run([sys.executable, "-c", other], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['other']", done.stderr
    (tmp_path / "models").mkdir()
    with library(RC29, tmp_path / "models") as lib:
        context = prefilled(lib, lib.split())
        assert len(lib.held()) == len(list(pins.iterdir())) == 2
        lib.ask(lib.split(), IDS, lib.generation(context), max_tokens=2)
        assert lib.held() == ["other"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_decode_of_one_token_fetches_and_ends(release: str, tmp_path: Path) -> None:
    """base_worker.py, all: the first token counts, so the blocks go although nothing is made."""
    with library(release, tmp_path) as lib:
        context = prefilled(lib, lib.split())
        answer = lib.ask(lib.split(), IDS, lib.generation(context), max_tokens=1)
        assert (answer.outputs[0].token_ids, answer.outputs[0].finish_reason) == (
            context.first_gen_tokens, "length",
        )  # fmt: skip
        assert lib.held() == []


@pytest.mark.parametrize("release", LATER)
@pytest.mark.parametrize("kept", ["none", "empty"])
def test_the_python_transceiver_hands_an_endpoint_over_and_no_state(
    release: str, kept: str, tmp_path: Path
) -> None:
    """executor/result.py of rc29 and what 1.4's transceiver fills: `ctx_info_endpoint` and `ctx_dp_rank`
    carry the context, `opaque_state` is None or empty."""
    runtime = {"transceiver_runtime": "PYTHON"} if release == RC29 else {}
    with library(release, tmp_path, opaque_state=kept) as lib:
        prefill, decode = lib.split(transceiver=runtime), lib.split(transceiver=runtime)
        context = prefilled(lib, prefill)
        assert context.opaque_state == {"none": None, "empty": b""}[kept]
        assert isinstance(context.ctx_info_endpoint, str)
        assert context.ctx_dp_rank == 0
        for lost in ("ctx_info_endpoint", "ctx_dp_rank"):
            params = lib.generation(context)
            setattr(params, lost, None)
            with pytest.raises(lib.failed, match="transfer"):
                lib.ask(decode, IDS, params, max_tokens=4)
        assert len(lib.ask(decode, IDS, lib.generation(context), **LONG).outputs[0].token_ids) == 12


@pytest.mark.parametrize("release", ["1.2.1", RC29])
def test_the_cpp_transceiver_hands_its_state_over(release: str, tmp_path: Path) -> None:
    """executor/result.py of 1.2.1 and rc29; "auto" of rc29 is inferred to be C++ where nothing else is
    said."""
    with library(release, tmp_path) as lib:
        context = prefilled(lib, lib.split())
        assert isinstance(context.opaque_state, bytes)
        params = lib.generation(context)
        params.opaque_state = None
        with pytest.raises(lib.failed, match="transfer"):
            lib.ask(lib.split(), IDS, params, max_tokens=4)


@pytest.mark.parametrize("release", LATER)
def test_decode_needs_a_request_id_within_the_range(release: str, tmp_path: Path) -> None:
    """llmapi/disagg_utils.py of 1.3 says the range; that a transfer without an id fails is inferred."""
    with library(release, tmp_path) as lib:
        context = prefilled(lib, lib.split())
        for number in (None, 7):
            params = lib.generation(context)
            params.disagg_request_id = number
            with pytest.raises(lib.failed, match="transfer"):
                lib.ask(lib.split(), IDS, params, max_tokens=4)


@pytest.mark.parametrize("release", RELEASES)
def test_a_contexts_output_keeps_hashes_and_loses_handles(release: str, tmp_path: Path) -> None:
    """executor/result.py, 1.2.1 and rc29: what was given with the context's fields put in and
    `multimodal_embedding_handles` None. Positions: 1.2.1 keeps the given handles, which the rank has opened;
    rc29 makes new ones."""
    with library(release, tmp_path) as lib:
        asked = about(picture(), picture(shade=3))
        made = [lib.encode(lib.encoder(), about(p)) for p in (picture(), picture(shade=3))]
        handles = [m.multimodal_embedding_handles[0] for m in made]
        hashes = [m.multimodal_hashes[0] for m in made]
        engine = lib.llm(QWEN25)
        expanded = engine.model.in_vocabulary(lib.ask(engine, asked, max_tokens=1).prompt_token_ids)
        positions = lib.part("_double.model").mrope_positions(expanded, IMAGE, [(1, 2, 3)] * 2)
        disagg = lib.context(
            multimodal_embedding_handles=handles, multimodal_hashes=hashes,
            mrope_position_ids_handle=lib.handle(positions[0]),
            mrope_position_deltas_handle=lib.handle(positions[1]),
        )  # fmt: skip
        context = lib.ask(lib.split(QWEN25), {"prompt": asked["prompt"]}, disagg).disaggregated_params
        assert context.multimodal_hashes == hashes
        assert context.multimodal_embedding_handles is None
        assert (context.mrope_position_ids_handle == disagg.mrope_position_ids_handle) is (release == "1.2.1")
        if release == "1.2.1":
            with pytest.raises(RuntimeError, match="gone"):
                lib.view(context.mrope_position_ids_handle)
        else:
            assert lib.view(context.mrope_position_ids_handle).equal(positions[0])


@pytest.mark.parametrize("release", RELEASES)
def test_images_leave_their_positions_in_what_was_given(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py, 1.2.1 and 1.3: the rank gets handles that are written into the given parameters."""
    with library(release, tmp_path) as lib:
        disagg = lib.context()
        context = lib.ask(lib.split(QWEN25), about(picture()), disagg).disaggregated_params
        assert disagg.mrope_position_ids_handle is not None
        with pytest.raises(RuntimeError, match="gone"):
            lib.view(disagg.mrope_position_ids_handle)
        if release in LATER:
            assert lib.view(context.mrope_position_deltas_handle).tolist() == [[-3]]


def test_a_context_with_the_overlap_scheduler_kills_the_worker_in_1_2(tmp_path: Path) -> None:
    """base_worker.py of 1.2: ValueError outside what becomes a `RequestError`."""
    section = {"cache_transceiver_config": {"backend": "NIXL"}}
    with library("1.2.1", tmp_path) as lib:
        engine = lib.llm(**section)
        with pytest.raises(ValueError, match="overlap"):
            lib.ask(engine, IDS, lib.context())
        assert engine._check_health() is False
    with library(RC29, tmp_path) as lib:
        assert lib.ask(lib.llm(**section), IDS, lib.context()).finished


@pytest.mark.parametrize("release", RELEASES)
def test_a_context_without_a_transceiver_kills_the_worker(release: str, tmp_path: Path) -> None:
    """base_worker.py, 1.2 and 1.3: an assertion outside what becomes a `RequestError`; inferred that the
    worker ends in 1.3 too."""
    with library(release, tmp_path) as lib:
        engine = lib.llm(disable_overlap_scheduler=True)
        with pytest.raises(AssertionError):
            lib.ask(engine, IDS, lib.context())
        assert engine._check_health() is False


@pytest.mark.parametrize("release", RELEASES)
def test_ignore_eos_empties_all_stop_words_since_1_3(release: str, tmp_path: Path) -> None:
    """base_worker.py: 1.3 sends no stop words with `ignore_eos`; 1.2 sends them. `end_id=-1` keeps them in
    both."""
    with library(release, tmp_path) as lib:
        engine = lib.llm()
        tokens = lib.ask(engine, IDS, **LONG).outputs[0].token_ids
        stops = {"stop_token_ids": [tokens[2]]}
        ignored = lib.ask(engine, IDS, **LONG, **stops).outputs[0]
        cut = tokens[: tokens.index(tokens[2])]
        assert ignored.token_ids == (cut if release == "1.2.1" else tokens)
        kept = lib.ask(engine, IDS, end_id=-1, max_tokens=12, **stops).outputs[0]
        assert (kept.token_ids, kept.finish_reason, kept.stop_reason) == (cut, "stop", tokens[2])


@pytest.mark.parametrize("release", RELEASES)
def test_length_is_stronger_than_a_stop_word_and_the_end_token_stronger_than_both(
    release: str, tmp_path: Path
) -> None:
    """_torch/pyexecutor/sampler.py (`_write_finish_reasons`), 1.2 and 1.3. So a context ends with "length"
    although its token is a stop word, and decode does not look at that token again."""
    with library(release, tmp_path) as lib:
        engine = lib.llm()
        tokens = lib.ask(engine, IDS, **LONG).outputs[0].token_ids

        def ended(count: int, **sampling: Any) -> tuple[list[int], str, Any]:
            output = lib.ask(engine, IDS, max_tokens=count, **sampling).outputs[0]
            return [t for t in output.token_ids if t != 2], output.finish_reason, output.stop_reason

        stops = {"stop_token_ids": [tokens[0]], "end_id": -1}
        assert ended(1, **stops) == (tokens[:1], "length", None)
        assert ended(2, **stops) == ([], "stop", tokens[0])
        assert ended(1, end_id=tokens[0])[1] == "stop"
        context = lib.ask(lib.split(), IDS, lib.context(), **stops)
        assert context.outputs[0].finish_reason == "length"
        assert context.disaggregated_params.first_gen_tokens == tokens[:1]
        decoded = lib.ask(
            lib.split(), IDS, lib.generation(context.disaggregated_params), max_tokens=2, **stops
        )
        assert decoded.outputs[0].token_ids == tokens[:2]
        ended_there = lib.ask(lib.split(), IDS, lib.context(), end_id=tokens[0])
        assert ended_there.outputs[0].finish_reason == "stop"
        assert ended_there.disaggregated_params.first_gen_tokens is None


def test_a_context_may_end_unfinished(tmp_path: Path) -> None:
    """executor/result.py, all: "not_finished" is known of contexts; the PyTorch sampler says "length"."""
    with library(RC29, tmp_path, context_reason="not_finished") as lib:
        assert lib.ask(lib.split(), IDS, lib.context()).outputs[0].finish_reason == "not_finished"


@pytest.mark.parametrize("release", RELEASES)
def test_stop_words_are_trimmed_from_log_probabilities_since_1_3(release: str, tmp_path: Path) -> None:
    """executor/result.py: 1.2.1 trims the ids only, so log probabilities are one longer; rc29 both."""
    with library(release, tmp_path) as lib:
        engine = lib.llm()
        tokens = lib.ask(engine, IDS, **LONG).outputs[0].token_ids
        output = lib.ask(
            engine, IDS, end_id=-1, max_tokens=12, stop_token_ids=[tokens[2]], logprobs=1
        ).outputs[0]
        assert len(output.logprobs) - len(output.token_ids) == (1 if release == "1.2.1" else 0)


@pytest.mark.parametrize("release", RELEASES)
def test_a_prompt_longer_than_a_step_is_refused_by_the_call(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py (`_check_arguments`), 1.2.1 and 1.3: `RequestError` out of `generate_async`, unless
    prefill is chunked."""
    with library(release, tmp_path) as lib:
        engine = lib.llm(max_num_tokens=8)

        async def call() -> None:
            engine.generate_async(IDS)

        with pytest.raises(lib.failed, match="max_num_tokens"):
            asyncio.run(call())
        assert lib.ask(lib.llm(max_num_tokens=8, enable_chunked_prefill=True), IDS, max_tokens=1).finished


@pytest.mark.parametrize("release", RELEASES)
def test_a_prompt_as_long_as_the_context_fails_in_its_first_step(release: str, tmp_path: Path) -> None:
    """base_worker.py (`_deduce_max_tokens`), 1.2 and 1.3: the call takes it, reading it raises."""
    with library(release, tmp_path) as lib:
        engine = lib.llm(max_seq_len=len(IDS))

        async def read() -> Any:
            return await engine.generate_async(IDS, lib.sampling(end_id=2))

        with pytest.raises(lib.failed):
            asyncio.run(read())
        assert engine._check_health() is True


@pytest.mark.parametrize("release", RELEASES)
def test_max_tokens_is_lowered_to_what_the_context_leaves(release: str, tmp_path: Path) -> None:
    """base_worker.py (`_deduce_max_tokens`), 1.2 and 1.3."""
    with library(release, tmp_path) as lib:
        answer = lib.ask(lib.llm(max_seq_len=len(IDS) + 3), IDS, ignore_eos=True, max_tokens=50)
        assert (len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason) == (3, "length")


@pytest.mark.parametrize("release", RELEASES)
def test_aborting_ends_a_request_and_does_nothing_once_it_is_over(release: str, tmp_path: Path) -> None:
    """base_worker.py (`abort_request`), all: of a finished request it is a warning only."""
    with library(release, tmp_path) as lib:
        engine = lib.llm()

        async def run() -> tuple[Any, Any]:
            over = await engine.generate_async(IDS, lib.sampling(end_id=2, max_tokens=2))
            over.abort()
            over.abort()
            cut = engine.generate_async(IDS, lib.sampling(end_id=2, ignore_eos=True, max_tokens=400))
            await anext(cut)
            cut.abort()
            return over, await cut

        over, cut = asyncio.run(run())
        assert over.outputs[0].finish_reason == "length"
        assert (cut.outputs[0].finish_reason, len(cut.outputs[0].token_ids)) == ("cancelled", 1)
        assert engine.aborted == [(cut.id, 1)]
        assert engine.active == set()


@pytest.mark.parametrize("error", ["AssertionError", "ValueError"])
@pytest.mark.parametrize("release", RELEASES)
def test_result_handling_can_fail_one_request(release: str, error: str, tmp_path: Path) -> None:
    """executor/result.py, all: lengths are asserted, an unknown reason is a ValueError; the engine lives."""
    with library(release, tmp_path, handling_fails_at_token=1, handling_error=error) as lib:
        engine = lib.llm()
        with pytest.raises((AssertionError, ValueError)) as caught:
            lib.ask(engine, IDS, max_tokens=4)
        assert type(caught.value).__name__ == error
        assert engine._check_health() is True
        assert lib.ask(engine, IDS, max_tokens=1).finished


@pytest.mark.parametrize("release", RELEASES)
def test_one_failed_request_has_an_error_since_1_3(release: str, tmp_path: Path) -> None:
    """executor/result.py: `RequestError` from reading, all; `error` and `finished` in rc29."""
    with library(release, tmp_path, fail_at_token=1) as lib:
        engine = lib.llm()
        seen: list[Any] = []

        async def read() -> None:
            seen.append(engine.generate_async(IDS, lib.sampling(end_id=2, max_tokens=4)))
            await seen[0]

        with pytest.raises(lib.failed):
            asyncio.run(read())
        assert issubclass(lib.failed, RuntimeError)
        assert (seen[0].finished, bool(getattr(seen[0], "error", None))) == (release in LATER,) * 2
        assert engine._check_health() is True


def test_a_fatal_error_is_raised_again_each_time(tmp_path: Path) -> None:
    """executor/result.py of rc29 (`_terminal_error`)."""
    with library(RC29, tmp_path, fatal_at_token=1) as lib:
        engine = lib.llm()

        async def read() -> list[type[BaseException]]:
            result = engine.generate_async(IDS, lib.sampling(end_id=2, max_tokens=4))
            return [type(e) for e in [await _caught(result) for _ in range(2)]]

        first, again = asyncio.run(read())
        assert first is again is RuntimeError
        assert not issubclass(first, lib.failed)
        assert engine._check_health() is False


async def _caught(result: Any) -> BaseException:
    try:
        await result.aresult()
    except RuntimeError as error:
        return error
    raise AssertionError("it was answered")


@pytest.mark.parametrize("release", RELEASES)
def test_prompts_of_another_form_are_refused(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py: TypeError for neither text nor ids (an AssertionError of inputs/data.py in 1.2.1); 1.3
    refuses four keys of encoder-decoder models."""
    with library(release, tmp_path) as lib:
        engine = lib.llm()
        neither = TypeError if release in LATER else AssertionError
        for inputs, error in (({}, neither), ({"multi_modal_data": {}}, neither), (7, TypeError)):
            with pytest.raises(error):
                lib.ask(engine, inputs)
        if release in LATER:
            with pytest.raises(ValueError, match="encoder_inputs"):
                lib.ask(engine, {"prompt_token_ids": IDS, "encoder_inputs": 1})
        dynamos = {"prompt": "301", "prompt_token_ids": IDS, "multi_modal_data": None}
        assert lib.ask(engine, dynamos, max_tokens=1).prompt_token_ids == IDS


@pytest.mark.parametrize("release", RELEASES)
def test_fields_of_parameters_are_those_of_the_release(release: str, tmp_path: Path) -> None:
    """disaggregated_params.py and sampling_params.py, 1.2.1 and rc29: slots, so nothing else can be set."""
    with library(release, tmp_path) as lib:
        later = {"disagg_request_id": REQUEST_ID, "ctx_dp_rank": 0, "ctx_info_endpoint": "tcp://h:1"}
        newest = {"remote_tail_start": 1, "multimodal_input_layout": None}
        for given, known in ((later, release in LATER), (newest, release == "1.4.0rc2")):
            if known:
                lib.root.DisaggregatedParams(request_type="context_only", **given)
                continue
            with pytest.raises(TypeError):
                lib.root.DisaggregatedParams(request_type="context_only", **given)
        with pytest.raises(AttributeError):
            lib.context().no_such_field = 1
        with pytest.raises(ValueError, match="request type"):
            lib.context(request_type="both")
        with pytest.raises(TypeError):
            lib.sampling(no_such_parameter=1)
        with pytest.raises(ValueError, match="top_p"):
            lib.sampling(top_p=2.0)


def test_a_script_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    """The double's own."""
    with pytest.raises(ValueError, match="no_such_key"), library(RC29, tmp_path, no_such_key=1):
        pass
    assert json.loads(os.environ.get("TRTLLM_DOUBLE_SCRIPT", "{}")) == {}
