from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.trtllm.engines.tensorrt_llm.record import RECORD
from dynamo.trtllm.preflight import run
from dynamo.trtllm.preflight.memory import GpuMemory, estimate
from dynamo.trtllm.preflight.shape import parse_shape
from dynamo.trtllm.utils.layers import find_value
from dynamo.trtllm.utils.trtllm_utils import parse, parse_args
from environment import on_x86_64
from model_directory import make_model_directory

ROOT = Path(__file__).parents[2] / "engine_configs"
FACTS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "facts").glob("*.json"))
}
FILES = {
    f"{facts['engine_configs']}/{path.stem}": (name, path)
    for name, facts in FACTS.items()
    for path in sorted((ROOT / facts["engine_configs"]).glob("*.yaml"))
}
FOR_THE_PORTABLE_ENGINE = "qwen2-vl-7b-instruct/encode"
H200_GB = 141
GPU_GB = {
    "qwen3": 16,
    "qwen2-vl-7b-instruct": 40,
    "qwen2.5-vl-7b-instruct": 40,
    "qwen3-vl-8b-instruct": 48,
    "qwen3-vl-30b-a3b-instruct": 80,
    "llava-v1.6-mistral-7b": 40,
    "gemma-3-12b-it": 80,
    "mistral-small-3.1-24b-instruct": 80,
    "llama4/multimodal": H200_GB,
    "llama4/multimodal/llama4-Scout": H200_GB,
}


__all__ = ["on_x86_64"]


def model_directory(parent: Path, name: str) -> Path:
    """A directory that holds what a check looks for, with weights that hold no tensor."""
    return make_model_directory(parent / name, name)


def arguments(key: str, directory: Path) -> list[str]:
    """The command line of the worker that the file `key` is for."""
    name, path = FILES[key]
    modality = "multimodal" if "vision_config" in FACTS[name]["config"] else "text"
    flags = [
        "--model-path",
        str(directory),
        "--disaggregation-mode",
        path.stem,
        "--extra-engine-args",
        str(path),
    ]
    flags += ["--modality", modality]
    return [*flags, "--engine", "transformers"] if key == FOR_THE_PORTABLE_ENGINE else flags


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def test_every_file_belongs_to_a_model_whose_dimensions_are_known() -> None:
    assert {path for _, path in FILES.values()} == set(ROOT.rglob("*.yaml"))
    roles = {
        directory: {Path(key).name for key in FILES if str(Path(key).parent) == directory}
        for directory in GPU_GB
    }
    assert all({"agg", "prefill", "decode"} <= found for found in roles.values())
    with_encoder = {directory for directory, found in roles.items() if "encode" in found}
    assert with_encoder == {
        "qwen2-vl-7b-instruct",
        "qwen2.5-vl-7b-instruct",
        "qwen3-vl-8b-instruct",
        "qwen3-vl-30b-a3b-instruct",
        "llava-v1.6-mistral-7b",
        "llama4/multimodal/llama4-Scout",
    }


@pytest.mark.parametrize("key", FILES)
def test_each_value_survives_the_merge_with_its_origin(key: str, tmp_path: Path) -> None:
    name, path = FILES[key]
    engine = parse_args(arguments(key, model_directory(tmp_path, name))).engine
    written = dict(leaves(yaml.safe_load(path.read_text())))
    assert written
    for dotted, value in written.items():
        assert find_value(engine.args, dotted) == value
        assert engine.origins[dotted] == f"file {path.name}"


@pytest.mark.parametrize("release", RECORD)
@pytest.mark.parametrize("key", FILES)
def test_every_recorded_release_knows_every_key_and_value(key: str, release: str) -> None:
    record = RECORD[release]
    content = yaml.safe_load(FILES[key][1].read_text())
    assert set(content) <= set(record.llm_arguments)
    for section, fields in content.items():
        if isinstance(fields, dict):
            assert set(fields) <= set(record.nested[section])
    for dotted, accepted in record.choices.items():
        if dotted in dict(leaves(content)):
            assert find_value(content, dotted) in accepted


@pytest.mark.parametrize("key", FILES)
def test_a_file_holds_only_values_that_differ_from_a_default_and_gives_a_reason_for_each(key: str) -> None:
    text = FILES[key][1].read_text()
    for dotted, value in leaves(yaml.safe_load(text)):
        section, _, name = dotted.rpartition(".")
        defaults = [release.nested[section][name] for release in RECORD.values()] if section else []
        assert not defaults or any(value != default for default in defaults), dotted
        written = re.search(rf"^ *#[^\n]*\n *{name}: ", text, re.MULTILINE)
        assert written is not None, f"{dotted} has no reason above it"


@pytest.mark.parametrize("release", RECORD)
@pytest.mark.parametrize("key", FILES)
def test_check_finds_no_fault_with_any_release_on_the_gpus_that_a_file_is_sized_for(
    key: str,
    release: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynamo.trtllm.preflight.faults.release_to_check", lambda: RECORD[release])
    name, path = FILES[key]
    flags = [
        *arguments(key, model_directory(tmp_path, name)),
        "--check",
        "--gpu-memory-gb",
        str(GPU_GB[str(Path(key).parent)]),
    ]
    other = {"prefill": "decode", "decode": "prefill"}.get(path.stem)
    against = ["--against", str(path.with_name(f"{other}.yaml"))] if other else []
    code = run(parse([*flags, *against]))
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "no fault found"
    assert code == 0


@pytest.mark.parametrize("key", [key for key in FILES if not key.endswith("encode")])
def test_the_cache_holds_at_least_four_of_the_longest_requests(key: str, tmp_path: Path) -> None:
    name, _ = FILES[key]
    shape = parse_shape(FACTS[name]["config"])
    assert shape is not None
    engine = parse_args(arguments(key, model_directory(tmp_path, name))).engine
    memory = estimate(shape, engine, GpuMemory(GPU_GB[str(Path(key).parent)], "the table"))
    longest = engine.args.get("max_seq_len") or 8192
    assert memory.kv_tokens >= 4 * longest


@pytest.mark.parametrize("name", FACTS)
def test_estimated_sizes_are_within_one_percent_of_the_counted_ones(name: str) -> None:
    shape = parse_shape(FACTS[name]["config"])
    assert shape is not None
    assert shape.parameters == pytest.approx(FACTS[name]["parameters"], rel=0.01)


def test_the_readme_tells_the_numbers_that_the_check_computes() -> None:
    text = (ROOT / "README.md").read_text()
    rows = {
        cells[1].strip(" `"): cells
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) == 9
    }
    for facts in FACTS.values():
        shape = parse_shape(facts["config"])
        assert shape is not None
        row = rows[facts["engine_configs"]]
        assert f"{2 * shape.layers * shape.kv_heads * shape.head_dim * 2:,} B" in row[6]
        assert float(row[5].split()[0]) == pytest.approx(shape.weight_bytes / 1e9, rel=0.01)


def test_tensorrt_llm_is_refused_for_the_encoder_of_qwen2_vl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = model_directory(tmp_path, "qwen2-vl-7b-instruct")
    code = run(parse(["--check", "--model-path", str(directory), "--disaggregation-mode", "encode"]))
    assert code == 1
    assert (
        "fault: TensorRT-LLM cannot encode images of Qwen2VLForConditionalGeneration in a worker of their "
        "own: leave the encode worker out, prefill and aggregated workers encode them"
    ) in capsys.readouterr().out
