"""Kinds and ranges of engine arguments, from every source,
asked by --check and at the start, for every engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.main import require_no_faults
from dynamo.trtllm.preflight import run
from dynamo.trtllm.utils.flags import FLAGS
from dynamo.trtllm.utils.trtllm_utils import parse

DEMO = ["--model-path", "demo"]
ENGINES = ["tensorrt_llm", "transformers", "double"]
FRACTION = "a fraction above 0 and at most 1"
SIZE = "a whole number of at least 0"
POLICY = "multimodal_config.encoder_scheduling_policy"
WINDOW = "kv_cache_config.max_attention_window"
HOST_CACHE = "kv_cache_config.host_cache_size"
HUGE = "0x" + "f" * 9000
COUNTS = "a list of whole numbers of at least 1"
PLAIN = "made of texts, finite numbers, truth values, lists and mappings"
UNFILLED = " (variables are not filled in here: write the value itself)"
SHARE = "kv_cache_config.free_gpu_memory_fraction"
COUNT = "a whole number of at least 1"
NO_NUMBER = " (write plain digits without quotes, for instance 8000 and not 8e3)"
YES = " (YAML reads yes, no, on and off as true and false)"
WRONG = [
    ("tensor_parallel_size: ${TP}", 'tensor_parallel_size "${TP}"', COUNT + UNFILLED),
    ("tensor_parallel_size: two", 'tensor_parallel_size "two"', COUNT),
    ("tensor_parallel_size: [2]", "tensor_parallel_size [2]", COUNT),
    ("tensor_parallel_size: 0", "tensor_parallel_size 0", COUNT),
    ("tensor_parallel_size: -1", "tensor_parallel_size -1", COUNT),
    ('tensor_parallel_size: "2"', 'tensor_parallel_size "2"', COUNT + NO_NUMBER),
    ("pipeline_parallel_size: 2.0", "pipeline_parallel_size 2.0", COUNT),
    ("max_batch_size: yes", "max_batch_size true", COUNT + YES),
    ("max_batch_size: off", "max_batch_size false", COUNT + YES),
    ("max_num_tokens: 8e3", 'max_num_tokens "8e3"', COUNT + NO_NUMBER),
    ("max_seq_len: 1:30", 'max_seq_len "1:30"', COUNT),
    ("max_seq_len: 5000000000", "max_seq_len 5000000000", f"{COUNT} (too large)"),
    ("max_batch_size: {a: 1}", 'max_batch_size {"a": 1}', COUNT),
    ("kv_cache_config: {free_gpu_memory_fraction: 90%}", f'{SHARE} "90%"', FRACTION),
    ("kv_cache_config: {free_gpu_memory_fraction: 1.5}", f"{SHARE} 1.5", FRACTION),
    ("kv_cache_config: {free_gpu_memory_fraction: .nan}", f"{SHARE} NaN", FRACTION),
    ("kv_cache_config: {enable_block_reuse: 1}", "kv_cache_config.enable_block_reuse 1", "true or false"),
    ("kv_cache_config: {max_attention_window: [512, 0]}", f"{WINDOW} [512, 0]", COUNTS),
    (f"kv_cache_config: {{host_cache_size: {HUGE}}}", f"{HOST_CACHE} a value of the type int", SIZE),
    (f"multimodal_config: {{encoder_scheduling_policy: {HUGE}}}", f"{POLICY} a value of the type int", PLAIN),
    ("kv_cache_config: [1]", "kv_cache_config [1]", "a mapping"),
    ('enable_chunked_prefill: "false"', 'enable_chunked_prefill "false"', "true or false"),
    ("dtype: fp8", 'dtype "fp8"', "one of auto, float16, bfloat16 or float32"),
    ("load_format: 3", "load_format 3", "a text"),
    ("model_kwargs: {scale: .inf}", "model_kwargs.scale Infinity", PLAIN),
]  # fmt: skip


def faults_of(text: str) -> list[str]:
    return [line.removeprefix("fault: ") for line in text.splitlines() if line.startswith("fault: ")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("content", "given", "wanted"), WRONG, ids=[case[0][:60] for case in WRONG])
def test_a_value_of_the_wrong_kind_is_one_fault_with_key_value_origin_and_kind_and_ends_every_start(
    engine: str, content: str, given: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(content + "\n")
    invocation = parse(["--check", *DEMO, "--engine", engine, "--extra-engine-args", str(path)])
    assert run(invocation) == 1
    sentence = f"{given} (file engine.yaml) must be {wanted}"
    assert faults_of(capsys.readouterr().out) == [sentence]
    with pytest.raises(StartupError) as refusal:
        require_no_faults(invocation.config)
    assert refusal.value.message == sentence


@pytest.mark.parametrize("role", ["agg", "prefill", "decode", "encode"])
def test_each_source_and_role_is_asked_the_same(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--check", *DEMO, "--engine", "transformers", "--disaggregation-mode", role]
    assert (
        run(
            parse([*command, "--override-engine-args", '{"max_batch_size": 1e3, "tensor_parallel_size": -1}'])
        )
        == 1
    )
    assert faults_of(capsys.readouterr().out) == [
        f"tensor_parallel_size -1 (override) must be {COUNT}",
        f"max_batch_size 1000.0 (override) must be {COUNT}",
    ]
    assert run(parse([*command, "--trtllm.kv_cache_config.free_gpu_memory_fraction", "0"])) == 1
    (fault,) = faults_of(capsys.readouterr().out)
    assert fault.startswith(
        "kv_cache_config.free_gpu_memory_fraction 0 (--trtllm.kv_cache_config.free_gpu_memory_fraction)"
    )


def test_the_plan_is_computed_with_the_default_in_the_place_of_a_wrong_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(parse(["--check", *DEMO, "--trtllm.tensor_parallel_size", "-1", "--trtllm.zzz", "1"])) == 1
    printed = capsys.readouterr().out
    assert "MB on one device" in printed
    assert "-4" not in printed.partition("memory")[2].partition("fault")[0]
    assert len(faults_of(printed)) == 2


ARGUMENT_FLAGS = sorted(flag.name for flag in FLAGS.values() if flag.argument and "N" in flag.kind.metavar)


@pytest.mark.parametrize("name", ARGUMENT_FLAGS)
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "9" * 12])
def test_a_flag_of_an_engine_argument_has_the_arguments_range(name: str, text: str) -> None:
    with pytest.raises(StartupError, match=f"^{name} must be {FLAGS[name].kind.wanted}, not "):
        parse([*DEMO, f"{name}={text}"])


@pytest.mark.parametrize(
    "text", ["[1]", "1", "null", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 50_000, "@file"]
)
def test_an_override_that_is_no_json_object_is_refused_at_once(text: str) -> None:
    with pytest.raises(StartupError, match=r"^--override-engine-args must be a JSON object, not "):
        parse([*DEMO, "--override-engine-args", text])


EMPTY = [
    "kv_cache_config",
    "kv_cache_config.free_gpu_memory_fraction",
    "tensor_parallel_size",
    "enable_chunked_prefill",
]


@pytest.mark.parametrize("dotted", EMPTY)
def test_a_key_without_a_value_leaves_its_default_and_is_noted(
    dotted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("".join(f"{' ' * depth}{key}:\n" for depth, key in enumerate(dotted.split("."))))
    command = ["--check", *DEMO, "--extra-engine-args", str(path)]
    assert run(parse(command)) == 0
    printed = capsys.readouterr().out
    assert f"note: {dotted} (file engine.yaml) is empty, so its default holds\n" in printed
    assert parse(command).config.engine.args == parse(DEMO).config.engine.args


def test_an_empty_section_of_the_other_side_leaves_its_defaults_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "decode.yaml"
    other.write_text("kv_cache_config:\ncache_transceiver_config: {backend: NIXL}\n")
    command = [
        "--check",
        *DEMO,
        "--disaggregation-mode",
        "prefill",
        "--trtllm.cache_transceiver_config.backend",
        "NIXL",
    ]
    assert run(parse([*command, "--against", str(other)])) == 0
    other.write_text("kv_cache_config: {tokens_per_block: 3x}\ncache_transceiver_config: {backend: NIXL}\n")
    assert run(parse([*command, "--against", str(other)])) == 1
    assert 'on the other side kv_cache_config.tokens_per_block "3x"' in capsys.readouterr().out


def test_nothing_still_turns_off_what_an_engine_lets_be_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("cuda_graph_config: null\n")
    assert parse([*DEMO, "--extra-engine-args", str(path)]).config.engine.args["cuda_graph_config"] is None


def test_blocks_of_the_kv_cache_are_a_power_of_two_for_tensorrt_llm_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--check", *DEMO, "--kv-block-size", "48"]
    assert run(parse(command)) == 1
    assert faults_of(capsys.readouterr().out) == [
        (
            "kv_cache_config.tokens_per_block 48 (--kv-block-size) must be a power "
            "of two above 1 for TensorRT-LLM, for instance 32"
        )
    ]
    assert run(parse([*command, "--engine", "transformers"])) == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"step_delay_s": "x"}, "double.step_delay_s 'x' must be a number of at least 0"),
        ({"answer_tokens": 1.5}, "double.answer_tokens 1.5 must be a whole number of at least 0"),
        ({"fail_start": 1}, "double.fail_start 1 must be true or false"),
        ({"stepdelay": 1}, "the double engine knows no script key stepdelay; see DoubleScript"),
    ],
)
def test_the_doubles_script_is_checked_as_well(
    script: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "--check",
        *DEMO,
        "--engine",
        "double",
        "--override-engine-args",
        json.dumps({"double": script}),
    ]
    assert run(parse(command)) == 1
    assert faults_of(capsys.readouterr().out) == [words]


def test_a_key_with_a_dot_is_told_how_to_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("kv_cache_config.dtype: fp8\n")
    assert run(parse(["--check", *DEMO, "--extra-engine-args", str(path)])) == 1
    (fault,) = faults_of(capsys.readouterr().out)
    assert fault.endswith("a name with a dot is none in YAML, write dtype below kv_cache_config")


def test_a_worker_with_a_wrong_value_ends_in_one_sentence_before_it_loads_anything(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("max_batch_size: ${BATCH}\n")
    command = [
        sys.executable,
        "-m",
        "dynamo.trtllm",
        *DEMO,
        "--engine",
        "transformers",
        "--extra-engine-args",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f'dynamo.trtllm: max_batch_size "${{BATCH}}" (file engine.yaml) must be {COUNT} '
        "(variables are not filled in here: write the value itself)"
    ]
