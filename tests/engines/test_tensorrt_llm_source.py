"""The reader of TensorRT-LLM's source, over small trees in the shapes of each release: facts, differences,
and every rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.engines.tensorrt_llm.read_source import main
from dynamo.trtllm.engines.tensorrt_llm.record import MADE, RECORD, REQUIRED, SOURCES, UNSAID, nearest_release
from dynamo.trtllm.engines.tensorrt_llm.source.reading import Reading, read
from dynamo.trtllm.engines.tensorrt_llm.source.rules import RULES, Outcome
from engines.trtllm_trees import DISAGG_UTILS, MM_ENCODER, VERSIONS, Files, change, files_of, write

PREFILL_READS_MORE = 'text_prompt = inputs.get("prompt")\n        grid = inputs["image_grid"]'
SAME_FOR_ALL = VERSIONS
NEW_ONLY = VERSIONS[1:]

TAKEN_BACK: Mapping[str, tuple[tuple[str, ...], str, str, str, str]] = {
    # rule: releases, file, what the library has, what it has instead, the form that is told
    "constructor": (
        SAME_FOR_ALL,
        "llmapi/llm.py",
        "tokenizer_revision=None, **kwargs",
        "tokenizer_revision=None",
        "model, tokenizer, tokenizer_mode, skip_tokenizer_init, trust_remote_code, tensor_parallel_size, "
        "dtype, revision, "
        "tokenizer_revision",
    ),
    "request-options": (
        SAME_FOR_ALL,
        "llmapi/llm.py",
        "    def generate_async(",
        "    async def generate_async(",
        "a coroutine",
    ),
    "preprocess": (
        NEW_ONLY,
        "llmapi/llm.py",
        "inputs, sampling_params=None, disaggregated_params=None):",
        "inputs, params=None):",
        "without sampling_params, disaggregated_params",
    ),
    "sampling-fields": (
        SAME_FOR_ALL,
        "sampling_params.py",
        "    min_tokens: Optional[int] = None\n",
        "",
        "without min_tokens",
    ),
    "output-fields": (
        SAME_FOR_ALL,
        "executor/result.py",
        "    stop_reason: Optional[Union[int, str]] = None\n",
        "",
        "without stop_reason",
    ),
    "result-methods": (
        SAME_FOR_ALL,
        "executor/result.py",
        "    async def aresult(self): ...\n",
        "",
        "without aresult",
    ),
    "request-error": (
        SAME_FOR_ALL,
        "executor/utils.py",
        "RequestError(RuntimeError)",
        "RequestError(BaseException)",
        "BaseException",
    ),
    "stop-words-under-ignore-eos": (
        SAME_FOR_ALL,
        "executor/base_worker.py",
        "else request.sampling_params.end_id,",
        "else self.eos,",
        "end id changed",
    ),
    "request-ids": (
        NEW_ONLY,
        "llmapi/disagg_utils.py",
        "node_id: int, process_id: int = 0",
        "node_id: int, rack_id: int",
        "also wants rack_id",
    ),
    "request-id-ranges": (
        NEW_ONLY,
        "llmapi/disagg_utils.py",
        "PROCESS_ID_BITS = 6",
        "PROCESS_ID_BITS = 4",
        "8 bits of node, 4 of process",
    ),
    "disaggregated-fields": (
        SAME_FOR_ALL,
        "disaggregated_params.py",
        "    mrope_position_deltas_handle: Optional[Dict[str, Any]] = None\n",
        "",
        "without mrope_position_deltas_handle",
    ),
    "tensor-handles": (
        SAME_FOR_ALL,
        "_torch/shared_tensor/shared_tensor.py",
        "dump_to_dict",
        "to_dict",
        "without dump_to_dict",
    ),
    "transceiver-runtime": (
        ("1.3.0rc29",),
        "llmapi/llm_args.py",
        '"auto"]] = Field(default="auto")',
        '"auto"]] = Field(default="RUST")',
        "RUST",
    ),
    "prompt-beside-handles": (
        SAME_FOR_ALL,
        "_torch/models/modeling_qwen2vl.py",
        'text_prompt = inputs.get("prompt")',
        PREFILL_READS_MORE,
        "also reads image_grid",
    ),
    "mrope-deltas": (
        SAME_FOR_ALL,
        "_torch/models/modeling_qwen2vl.py",
        "dtype=torch.int32",
        "dtype=torch.int64",
        "int64",
    ),
    "fast-path-flag": (
        NEW_ONLY,
        "inputs/registry.py",
        "    supports_token_id_mm_expansion: ClassVar[bool] = False\n",
        "    def supports_token_id_mm_expansion(self, ids): ...\n",
        "a method",
    ),
    "split-flag": (
        SAME_FOR_ALL,
        "inputs/registry.py",
        '"support_mm_disagg"',
        '"supports_disagg"',
        "supports_disagg",
    ),
    "llama4-embeddings": (
        SAME_FOR_ALL,
        "_torch/models/modeling_llama.py",
        "m['image_special_tokens']",
        "m['special_tokens']",
        "image_special_token_offsets, mm_embeddings, special_tokens",
    ),
    "embedding-files": (
        SAME_FOR_ALL,
        "inputs/registry.py",
        "attach_multimodal_embeddings",
        "attach",
        "not Llama4ForConditionalGeneration",
    ),
    "processor-options": (
        SAME_FOR_ALL,
        "_torch/models/modeling_qwen2vl.py",
        ", **mm_processor_kwargs",
        "",
        "not Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration",
    ),
    "split-models": (
        SAME_FOR_ALL,
        "_torch/models/modeling_qwen2vl.py",
        "@support_multimodal_disaggregated\n",
        "",
        "not Qwen2_5_VLForConditionalGeneration",
    ),
    "placeholders": (
        SAME_FOR_ALL,
        "_torch/models/modeling_llama.py",
        "<|image|>",
        "<|picture|>",
        "Llama4ForConditionalGeneration writes <|picture|>",
    ),
    "chosen-frames": (
        NEW_ONLY,
        "_torch/models/modeling_qwen3vl.py",
        "video_metadata=video_metadata, ",
        "",
        "Qwen3VLForConditionalGeneration drops the times of frames",
    ),
    "encoder-methods": (
        SAME_FOR_ALL,
        "llmapi/mm_encoder.py",
        "def generate_async(self, inputs,",
        "async def generate_async(self, inputs,",
        "generate_async is a coroutine",
    ),
    "health": (
        SAME_FOR_ALL,
        "llmapi/llm.py",
        "def _check_health(self)",
        "def _is_well(self)",
        "neither noted nor asked",
    ),
    "executor-attribute": (SAME_FOR_ALL, "llmapi/llm.py", "_executor", "_engine", "another name"),
    "kv-event-fields": (SAME_FOR_ALL, "_utils.py", '"parent_hash"', '"parent"', "without parent_hash"),
}
"""Each rule, taken back in a tree. Two of them need a second change, made in `taken_back`."""


def taken_back(rule: str, version: str) -> Files:
    _, path, old, new, _ = TAKEN_BACK[rule]
    files = files_of(version)
    change(files, path, old, new)
    if rule == "embedding-files":
        change(files, "_torch/models/modeling_llama.py", "attach_multimodal_embeddings", "attach")
    if rule == "health" and version != "1.2.1":
        change(files, "llmapi/llm.py", ".check_health()", ".is_well()")
        change(files, "executor/executor.py", "check_health", "is_well")
        change(files, "executor/executor.py", "_fatal_error", "_broken")
    return files


def verdicts(reading: Reading) -> dict[str, tuple[Outcome, str | None]]:
    return {verdict.rule.name: (verdict.outcome, verdict.form) for verdict in reading.verdicts}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_rule_holds_in_a_tree_of_each_recorded_release(tmp_path: Path, version: str) -> None:
    reading = read(write(tmp_path, files_of(version)))
    assert reading.record.version == version
    assert reading.note is None
    assert {outcome for outcome, _ in verdicts(reading).values()} == {Outcome.HOLDS}
    assert reading.facts.unreadable == {}


TAKEN_BACK_SOMEWHERE = [
    (rule, version) for rule, (versions, *_) in TAKEN_BACK.items() for version in versions
]


@pytest.mark.parametrize(("rule", "version"), TAKEN_BACK_SOMEWHERE)
def test_a_rule_taken_back_in_a_tree_is_the_one_that_is_told(tmp_path: Path, rule: str, version: str) -> None:
    found = verdicts(read(write(tmp_path, taken_back(rule, version))))
    broken = {name: form for name, (outcome, form) in found.items() if outcome is Outcome.BROKEN}
    assert list(broken) == [rule]
    assert TAKEN_BACK[rule][-1] in str(broken[rule])


def test_no_rule_is_left_out_of_the_trees_that_take_one_back() -> None:
    assert {rule.name for rule in RULES} == set(TAKEN_BACK)
    assert all(rule.relies and rule.breaks and rule.seen and rule.file and rule.accepted for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_that_is_not_there_is_told_and_never_passed(tmp_path: Path, version: str) -> None:
    kept = {
        "version.py": files_of(version)["version.py"],
        "llmapi/llm.py": files_of(version)["llmapi/llm.py"],
    }
    reading = read(write(tmp_path, kept))
    found = verdicts(reading)
    in_llm = {"constructor", "request-options", "preprocess", "executor-attribute"}
    assert {name for name, (outcome, _) in found.items() if outcome is Outcome.HOLDS} == in_llm
    assert {outcome for name, (outcome, _) in found.items() if name not in in_llm} == {Outcome.NOT_FOUND}
    assert main([str(tmp_path)]) == 3


def test_a_file_that_no_python_can_parse_is_named_and_its_rules_are_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = files_of("1.3.0rc29")
    files["disaggregated_params.py"] += "\ndef broken(:\n"
    assert main([str(write(tmp_path, files))]) == 3
    printed = capsys.readouterr().out
    assert "cannot be parsed: disaggregated_params.py: " in printed
    assert "not found  disaggregated-fields" in printed


def test_fields_defaults_and_choices_are_read_as_the_library_declares_them(tmp_path: Path) -> None:
    facts = read(write(tmp_path, files_of("1.3.0rc29"))).facts
    assert dict(facts.groups["LLM arguments"]) == {
        "model": REQUIRED,
        "tokenizer_mode": "auto",
        "kv_cache_config": MADE,
        "scheduler_config": MADE,
        "cache_transceiver_config": None,
        "speculative_config": None,
        "_mpi_session": None,
        "max_batch_size": 2048,
        "attn_backend": "TRTLLM",
        "load_format": MADE,
    }
    assert facts.groups["kv_cache_config"] == {
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.9,
        "tokens_per_block": 32,
        "block_reuse_config": MADE,
        "use_kv_cache_manager_v2": "auto",
    }
    assert "speculative_config" not in facts.groups
    assert facts.choices["cache_transceiver_config.backend"] == (
        "DEFAULT",
        "UCX",
        "NIXL",
        "MOONCAKE",
        "MPI",
        None,
    )
    assert facts.choices["scheduler_config.capacity_scheduler_policy"] == (
        "MAX_UTILIZATION",
        "GUARANTEED_NO_EVICT",
        "STATIC_BATCH",
    )
    assert facts.choices["scheduler_config.waiting_queue_policy"] == ("fcfs", "priority")
    assert facts.choices["load_format"] == ("auto", "dummy", "vision_only", "gms")
    assert "attn_backend" not in facts.choices
    assert facts.groups["SamplingParams"]["max_tokens"] == 32
    assert "_stop_word_ids" not in facts.groups["SamplingParams"]
    assert facts.groups["LLM.generate_async"]["priority"] == 0.5


def test_registered_models_are_read_with_decorators_flags_and_placeholders(tmp_path: Path) -> None:
    models = {m.architecture: m for m in read(write(tmp_path, files_of("1.3.0rc29"))).facts.models}
    assert {name: (m.splits, m.fast_path) for name, m in models.items()} == {
        "Qwen2VLForConditionalGeneration": (False, False),
        "Qwen2_5_VLForConditionalGeneration": (True, False),
        "Qwen3VLForConditionalGeneration": (True, False),
        "LlavaNextForConditionalGeneration": (True, True),
        "Llama4ForConditionalGeneration": (False, False),
    }
    assert models["LlavaNextForConditionalGeneration"].placeholders == {"image": "<image>"}
    assert (
        models["Qwen2VLForConditionalGeneration"].placeholders["video"]
        == "<|vision_start|><|video_pad|><|vision_end|>"
    )
    assert models["Qwen2_5_VLForConditionalGeneration"].model_type == "qwen2_5_vl"


def written_from(release: str) -> Files:
    """A tree that has exactly what the record has of a release."""
    record = RECORD[release]
    lines = ["class TorchLlmArgs(BaseModel):"]
    classes: list[str] = []
    for name in record.llm_arguments:
        nested = record.nested.get(name)
        if nested is not None:
            classes += [
                f"class C_{name}(BaseModel):",
                *(_field(f"{name}.{n}", n, v, release) for n, v in nested.items()),
            ]
        annotation = f"Optional[C_{name}]" if nested is not None else _annotation(name, release)
        lines.append(f"    {name}: {annotation} = Field(default=None)")
    parameters = ", ".join(n if v is REQUIRED else f"{n}={v!r}" for n, v in record.generate_async.items())
    sampling = "\n".join(f"    {n}: object = {v!r}" for n, v in record.sampling.items())
    parts = "\n".join(f"    {name}: object = None" for name in record.disaggregated)
    return {
        "version.py": f'__version__ = "{release}"\n',
        "llmapi/llm_args.py": "\n".join([*classes, *lines]) + "\n",
        "llmapi/llm.py": f"class LLM:\n    def generate_async(self, {parameters}): ...\n",
        "sampling_params.py": f"class SamplingParams:\n{sampling}\n",
        "disaggregated_params.py": f"class DisaggregatedParams:\n{parts}\n",
    }


def _annotation(dotted: str, release: str) -> str:
    accepted = RECORD[release].choices.get(dotted)
    if accepted is None:
        return "object"
    return (
        f"Optional[Literal[{', '.join(repr(v) for v in accepted if v is not None)}]]"
        if None in accepted
        else (f"Literal[{', '.join(map(repr, accepted))}]")
    )


def _field(dotted: str, name: str, default: Any, release: str) -> str:
    value = (
        "Field(default_factory=dict)"
        if default is MADE or default is UNSAID
        else f"Field(default={default!r})"
    )
    return f"    {name}: {_annotation(dotted, release)} = {value}"


@pytest.mark.parametrize("release", RECORD)
def test_a_tree_with_exactly_what_is_recorded_differs_in_nothing(tmp_path: Path, release: str) -> None:
    reading = read(write(tmp_path, written_from(release)))
    named = {"LLM.preprocess", "LLM methods"}
    assert [str(d) for d in reading.differences if d.group not in named] == []
    assert set(RECORD[release].nested) <= set(reading.facts.groups)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "    max_tokens: object = 32",
            "    max_tokens: object = 64",
            "SamplingParams: default of max_tokens is 64 in the source, 32 in the record",
        ),
        ("    top_k: object = None\n", "", "SamplingParams: only in the record: top_k"),
        (
            "    top_k: object = None\n",
            "    top_k: object = None\n    top_z: object = 0\n",
            "SamplingParams: only in the source: top_z",
        ),
    ],
)
def test_a_changed_fact_is_one_difference_that_names_both_sides(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    files = written_from("1.3.0rc29")
    change(files, "sampling_params.py", old, new)
    differences = [str(d) for d in read(write(tmp_path, files)).differences if d.group == "SamplingParams"]
    assert differences == [told]


def test_choices_that_changed_are_a_difference(tmp_path: Path) -> None:
    files = written_from("1.3.0rc29")
    change(files, "llmapi/llm_args.py", "'CPP', 'PYTHON', 'auto'", "'CPP', 'PYTHON'")
    found = [d for d in read(write(tmp_path, files)).differences if d.kind == "choices"]
    assert [(d.group, d.name) for d in found] == [("cache_transceiver_config", "transceiver_runtime")]


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("1.3.0rc22", "1.3.0rc29"),
        ("1.4.0rc5", "1.4.0rc2"),
        ("1.6.0", "1.4.0rc2"),
        ("1.0.0", "1.2.1"),
        ("2.0", "1.4.0rc2"),
    ],
)
def test_a_release_that_is_not_recorded_is_held_against_the_nearest_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, nearest: str
) -> None:
    write(tmp_path, {**files_of(nearest), "version.py": f'__version__ = "{version}"\n'})
    assert main([str(tmp_path)]) == 0
    assert (
        f"TensorRT-LLM {version} is not recorded: compared with the nearest record, {nearest}"
        in capsys.readouterr().out
    )
    assert nearest_release(version)[0].version == nearest


def test_the_command_reads_an_installed_package_that_cannot_be_imported_and_prints_json(
    tmp_path: Path,
) -> None:
    package = write(tmp_path, files_of("1.4.0rc2")) / "tensorrt_llm"
    command = [sys.executable, "-m", "dynamo.trtllm.engines.tensorrt_llm.read_source", str(package), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["version"] == printed["record"] == "1.4.0rc2"
    assert {rule["outcome"] for rule in printed["rules"]} == {"holds"}
    assert printed["groups"]["cache_transceiver_config"]["transceiver_runtime"] == "PYTHON"


def test_another_release_can_be_asked_for_and_forms_that_the_adapter_also_takes_do_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, files_of("1.3.0rc29"))
    assert main([str(tmp_path), "--release", "1.2.1"]) == 0
    printed = capsys.readouterr().out
    assert (
        "  other form request-ids                  node and process\n    recorded: none; the adapter takes "
        "either" in printed
    )


def test_a_broken_rule_ends_the_command_with_one_and_says_what_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path, taken_back("mrope-deltas", "1.3.0rc29")))]) == 1
    printed = capsys.readouterr().out
    assert "  BROKEN     mrope-deltas                 int64" in printed
    assert "    what breaks: disaggregated images with Qwen models fail in the forward pass" in printed
    assert printed.splitlines()[-1].endswith("26 rules hold, 1 broken, 0 not found")


@pytest.mark.parametrize(
    "arguments", [["EMPTY"], ["EMPTY", "--release", "1.2.1"], ["TREE", "--release", "9.9"]]
)
def test_no_tree_and_no_record_are_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty"), "TREE": str(write(tmp_path / "tree", files_of("1.2.1")))}
    assert main([places.get(word, word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("read_source: ")
    assert len(error.splitlines()) == 1


def test_a_name_is_followed_through_imports_and_re_exports(tmp_path: Path) -> None:
    files = files_of("1.3.0rc29")
    files["llmapi/ids.py"] = DISAGG_UTILS
    files["llmapi/disagg_utils.py"] = "from tensorrt_llm.llmapi.ids import *\n"
    files["llmapi/encoders/__init__.py"] = "from .vision import VisionEncoder as MultimodalEncoder\n"
    files["llmapi/encoders/vision.py"] = MM_ENCODER.replace("from .llm", "from ..llm").replace(
        "class MultimodalEncoder", "class VisionEncoder"
    )
    files["llmapi/mm_encoder.py"] = "from .encoders import MultimodalEncoder\n"
    found = verdicts(read(write(tmp_path, files)))
    assert found["request-ids"] == (Outcome.HOLDS, "node and process")
    assert found["encoder-methods"] == (Outcome.HOLDS, "all of them")


def test_every_recorded_fact_and_rule_names_a_source_that_is_listed() -> None:
    used = {source for rule in RULES for source in rule.source.split(", ")}
    for record in RECORD.values():
        texts = [*record.llm_arguments.values(), *record.nested_sources.values(), *record.sources.values()]
        texts += [source for _, source in record.behaviours.values()]
        used |= {source for text in texts for source in text.split(", ")}
    assert used - set(SOURCES) == set()
