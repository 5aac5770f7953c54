"""The record against the installed TensorRT-LLM, its source and its signatures:
what the adapter relies on is there."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.engines.tensorrt_llm import private
from dynamo.trtllm.engines.tensorrt_llm.library import Library, load_library, nested_fields
from dynamo.trtllm.engines.tensorrt_llm.record import RECORD, REQUIRED
from dynamo.trtllm.engines.tensorrt_llm.source.reading import read, render
from dynamo.trtllm.engines.tensorrt_llm.source.rules import Outcome
from gpu.tensorrt_llm_machine import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY
USED = {
    "generate_async",
    "get_kv_cache_capacity",
    "get_kv_cache_events_async",
    "get_stats_async",
    "preprocess",
    "shutdown",
}


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


def test_the_librarys_source_breaks_no_rule_that_the_adapter_relies_on() -> None:
    spec = importlib.util.find_spec("tensorrt_llm")
    assert spec is not None
    assert spec.origin is not None
    reading = read(Path(spec.origin).parent)
    print("\n".join(render(reading)))
    assert {v.rule.name: v.form for v in reading.of(Outcome.BROKEN)} == {}
    assert [v.rule.name for v in reading.of(Outcome.NOT_FOUND)] == []


def test_the_installed_release_is_recorded(library: Library) -> None:
    assert library.version in RECORD


def test_constructor_keys_are_those_of_the_record(library: Library) -> None:
    installed, recorded = set(library.argument_fields) | {"backend"}, set(library.record.llm_arguments)
    assert {"recorded only": sorted(recorded - installed)} == {"recorded only": []}
    print("not recorded:", sorted(installed - recorded))


def test_fields_of_nested_configurations_are_those_of_the_record(library: Library) -> None:
    missing = {}
    for name, recorded in library.record.nested.items():
        fields = nested_fields(library.argument_fields.get(name))
        if fields is not None:
            missing[name] = sorted(set(recorded) - fields)
    assert {name: names for name, names in missing.items() if names} == {}


def test_generate_async_has_the_recorded_parameters(library: Library) -> None:
    parameters = inspect.signature(library.llm.generate_async).parameters
    found = {name: p.default for name, p in parameters.items() if name != "self"}
    for name, default in library.record.generate_async.items():
        assert name in found
        if default is not REQUIRED:
            assert found[name] == default, name


@pytest.mark.parametrize("which", ["sampling", "guided"])
def test_parameter_objects_have_the_recorded_fields_and_defaults(library: Library, which: str) -> None:
    cls: Any = library.sampling_params if which == "sampling" else library.guided_decoding_params
    made = cls()
    recorded = getattr(library.record, which)
    assert sorted(name for name in recorded if not hasattr(made, name)) == []
    set_by_the_class = {"best_of", "pad_id", "logprobs_mode"}
    assert {n: getattr(made, n) for n in recorded if n not in set_by_the_class} == {
        n: default for n, default in recorded.items() if n not in set_by_the_class
    }


def test_disaggregated_params_have_the_recorded_fields(library: Library) -> None:
    fields = {f.name for f in dataclasses.fields(library.disaggregated_params)}
    assert sorted(set(library.record.disaggregated) - fields) == []


def test_methods_are_there(library: Library) -> None:
    missing = {name for name in library.record.methods if not hasattr(library.llm, name)}
    assert sorted(missing & USED) == []
    print("recorded, not found on the class:", sorted(missing))


def test_the_encoder_takes_what_is_recorded(library: Library) -> None:
    assert library.multimodal_encoder is not None
    parameters = inspect.signature(library.multimodal_encoder.__init__).parameters
    assert sorted(set(library.record.encoder_arguments) - set(parameters)) == []
    assert "use_tqdm" in inspect.signature(library.multimodal_encoder.generate).parameters


def test_request_error_is_a_runtime_error_and_handles_can_be_opened(library: Library) -> None:
    assert issubclass(library.request_error, RuntimeError)
    assert library.request_error is not RuntimeError
    assert private.handles_supported()
