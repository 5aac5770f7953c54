"""`--check --engine-report`: what a user can send, over no library, an odd one, and the double."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamo.trtllm.preflight import run
from dynamo.trtllm.preflight.masking import MASK, mask
from dynamo.trtllm.preflight.stages import try_stages
from dynamo.trtllm.utils.trtllm_utils import parse, parse_args
from engines.tensorrt_llm_subject import DOUBLE, QWEN25, TEXT, model_directory
from engines.trtllm_trees import files_of, write

CHECK = ["--check", "--engine-report", "--model-path"]
STAGES = (
    "text",
    "image",
    "prefill and decode",
    "image over prefill and decode",
    "encode",
    "encoded image",
)
LAYERS = {
    "hidden_size": 8, "max_position_embeddings": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 1000,
}  # fmt: skip
EYE = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "depth": 1, "num_heads": 1}


def model(folder: Path, architecture: str) -> str:
    """A directory that the double can serve and the check can read the dimensions of."""
    vision = {} if architecture == TEXT else {"vision_config": EYE}
    return str(model_directory(folder, architecture, text_config=LAYERS, **LAYERS, **vision))


def printed_report(*arguments: str, library: Path, **variables: str) -> dict[str, list[str]]:
    """Sections of the report that a process of its own prints, by their titles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(library), *sys.path]), **variables}
    command = [sys.executable, "-m", "dynamo.trtllm", *CHECK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    sections: dict[str, list[str]] = {}
    for line in done.stdout.partition("engine report\n")[2].splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            sections[line.strip()] = []
        elif line.startswith("    ") and sections:
            sections[list(sections)[-1]].append(line[4:])
    assert sections, done.stderr
    return sections


def outcomes(lines: list[str]) -> Mapping[str, str]:
    return dict(line.split(": ", 1) for line in lines)


def test_where_the_library_is_missing_the_report_says_what_was_not_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(parse([*CHECK, "nobody/no-such-model"])) == 0
    report = capsys.readouterr().out.partition("engine report\n")[2]
    missing = "TensorRT-LLM is not installed here"
    assert f"  source\n    {missing}: its source was not read and no rule was checked\n" in report
    assert f"    {missing}: text, image, prefill and decode, encode were not tried\n" in report
    assert "  configuration\n    agg, text, --engine tensorrt_llm, nobody/no-such-model\n" in report


def test_each_stage_is_tried_over_an_installed_library_and_told_in_one_line(tmp_path: Path) -> None:
    report = printed_report(
        model(tmp_path / "qwen", QWEN25),
        "--modality",
        "multimodal",
        library=DOUBLE,
        TRTLLM_DOUBLE_RELEASE="1.3.0rc29",
        HF_TOKEN="hf_0123456789abcdef",
    )
    told = outcomes(report["a request through each stage"])
    assert tuple(told) == STAGES
    counted = {stage: outcome.rpartition(", ")[0] for stage, outcome in told.items()}
    assert counted == {**dict.fromkeys(STAGES, "ok, 8 tokens"), "encode": "ok, 64 rows of 8"}
    assert "HF_TOKEN=***" in report["configuration"]
    assert "installed 1.3.0rc29, record 1.3.0rc29" in report["signatures of the imported library"]
    assert "DisaggregatedParams: 16 names" in report["signatures of the imported library"]
    assert any(line.split()[:2] == ["holds", "constructor"] for line in report["source"])


def test_a_stage_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOUBLE), *sys.path]))
    monkeypatch.setenv("TRTLLM_DOUBLE_RELEASE", "1.2.1")
    monkeypatch.setenv("TRTLLM_DOUBLE_SCRIPT", '{"transfer_fails": true}')
    told = outcomes(list(try_stages(parse_args(["--model-path", model(tmp_path / "llama", TEXT)]))))
    assert told["text"].startswith("ok, 8 tokens, ")
    assert told["prefill and decode"].startswith("FAILED: EngineFault: ")
    assert "Error in kv cache transfer" in told["prefill and decode"]
    assert told["image"].startswith("not tried: the model is checked as a text model")


LIBRARIES = {
    "hangs": ("import time\ntime.sleep(600)\n", "FAILED: no answer within 3 s"),
    "dies": (
        "import os, sys\nprint('out of luck', file=sys.stderr, flush=True)\nos._exit(7)\n",
        "FAILED: its process ended with 7: out of luck",
    ),
}


@pytest.mark.parametrize("how", LIBRARIES)
def test_a_library_that_hangs_or_dies_costs_its_stages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    text, outcome = LIBRARIES[how]
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    config = parse_args(["--model-path", model(tmp_path / "model", TEXT)])
    assert list(try_stages(config, timeout_s=3 if how == "hangs" else 120)) == [
        f"text: {outcome}",
        "image: not tried: the model is checked as a text model; --modality multimodal would try images",
        f"prefill and decode: {outcome}",
        *(
            f"{stage}: not tried: the model is checked as a text model; --modality multimodal would try "
            f"images"
            for stage in STAGES[3:]
        ),
    ]


def test_without_a_model_on_the_machine_no_stage_is_tried() -> None:
    told = list(try_stages(parse_args(["--model-path", "nobody/no-such-model"])))
    assert told == ["not tried: no model at nobody/no-such-model on this machine; give one with --model-path"]


def test_the_source_of_a_library_that_cannot_be_imported_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, files_of("1.3.0rc29"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert run(parse([*CHECK, "nobody/no-such-model"])) == 0
    report = capsys.readouterr().out.partition("engine report\n")[2]
    assert "27 rules hold, 0 broken, 0 not found" in report
    assert "TensorRT-LLM is installed but cannot be imported: needs compiled parts" in report
    assert "tensorrt_llm" not in sys.modules


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "anything", MASK),
        ("api_key", "anything", MASK),
        ("AWS_SECRET_ACCESS_KEY", "anything", MASK),
        ("TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY", "anything", MASK),
        ("otlp_traces_endpoint", "https://me:word@127.0.0.1:4317/x", f"https://{MASK}@127.0.0.1:4317/x"),
        ("note", "see hf_0123456789abcdef", f"see {MASK}"),
        (
            "env_overrides",
            {"PASSWORD": "word", "NCCL_DEBUG": "INFO"},
            {"PASSWORD": MASK, "NCCL_DEBUG": "INFO"},
        ),
        ("max_num_tokens", 8192, 8192),
        ("tokenizer", "a/path", "a/path"),
        ("tokens_per_block", 32, 32),
    ],
)
def test_secrets_are_masked_and_nothing_else_is(name: str, value: object, shown: object) -> None:
    assert mask({name: value}) == {name: shown}


def test_the_plan_masks_secrets_of_engine_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    override = '{"env_overrides": {"HF_TOKEN": "hf_0123456789abcdef", "NCCL_DEBUG": "INFO"}}'
    run(parse(["--check", "--model-path", "nobody/no-such-model", "--override-engine-args", override]))
    printed = capsys.readouterr().out
    assert 'env_overrides.HF_TOKEN = "***"' in printed
    assert 'env_overrides.NCCL_DEBUG = "INFO"' in printed
    assert "0123456789abcdef" not in printed


FAKE = '''
import dataclasses

__version__ = "1.3.0rc29"


class LLM:
    def generate_async(self, inputs, sampling_params=None, brand_new=None):
        """Nothing."""


@dataclasses.dataclass
class SamplingParams:
    max_tokens: int = 32
    novelty: int = 0
'''

FAKE_API = '''
import dataclasses

import tensorrt_llm


class GuidedDecodingParams:
    def __init__(self, json=None):
        """Nothing."""


@dataclasses.dataclass
class DisaggregatedParams:
    request_type: str = ""


class KvCacheConfig:
    model_fields = {"tokens_per_block": None, "shiny": None}
'''

FAKE_ARGS = """
import types

from tensorrt_llm.llmapi import KvCacheConfig


class TorchLlmArgs:
    cache = types.SimpleNamespace(annotation=KvCacheConfig)
    model_fields = {"model": None, "glitter": None, "kv_cache_config": cache}
"""


def test_the_engine_report_shows_how_an_installed_release_differs_from_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "tensorrt_llm"
    (package / "llmapi").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "llmapi" / "__init__.py").write_text(FAKE_API)
    (package / "llmapi" / "llm_args.py").write_text(FAKE_ARGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert run(parse([*CHECK, "nobody/no-such-model"])) == 0
    report = capsys.readouterr().out.partition("signatures of the imported library\n")[2].splitlines()
    assert report[0] == "    installed 1.3.0rc29, record 1.3.0rc29"
    assert {
        "    LLM arguments: 3 names",
        "      LLM arguments: only installed: glitter",
        "      LLM arguments: only in the record: max_batch_size",
        "      LLM.generate_async: only installed: brand_new",
        "      SamplingParams: only installed: novelty",
        "      GuidedDecodingParams: only in the record: regex",
        "      DisaggregatedParams: only in the record: opaque_state",
        "      kv_cache_config: only installed: shiny",
        "    LLM methods: 1 names",
    } <= set(report)
    assert "tensorrt_llm" not in sys.modules
