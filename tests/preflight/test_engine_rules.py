"""Engine arguments that TensorRT-LLM's own validators refuse together, and versions that were not tried."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from dynamo.trtllm.preflight import find_faults, run
from dynamo.trtllm.utils.trtllm_utils import parse, parse_args
from environment import on_x86_64
from model_directory import make_model_directory

QWEN3 = "qwen3-0.6b"
PREFILL = ["--disaggregation-mode", "prefill", "--trtllm.cache_transceiver_config.backend"]
RUNTIME = "--trtllm.cache_transceiver_config.transceiver_runtime"
PIPELINED = "cache_transceiver_config.enable_pipelined_transfer"


__all__ = ["on_x86_64"]


def said(dotted: str, value: str) -> str:
    return f"{dotted} {value} (--trtllm.{dotted})"


def faults(tmp_path: Path, *arguments: str) -> list[str]:
    tmp_path.mkdir(exist_ok=True)
    model = make_model_directory(tmp_path / "model", QWEN3)
    return find_faults(parse_args(["--model-path", str(model), *arguments]))


@pytest.mark.parametrize("backend", ["UCX", "MOONCAKE", "MPI"])
def test_the_python_transceiver_with_a_backend_that_it_does_not_have_is_refused(
    tmp_path: Path, backend: str
) -> None:
    section = "cache_transceiver_config"
    assert faults(tmp_path, *PREFILL, backend, RUNTIME, "PYTHON") == [
        f"{said(f'{section}.transceiver_runtime', 'PYTHON')} moves KV caches by NIXL only, and "
        f"{said(f'{section}.backend', backend)}: set the backend to NIXL, or transceiver_runtime to CPP, "
        f"on prefill and "
        "decode"
    ]


@pytest.mark.parametrize(
    ("backend", "runtime"),
    [("NIXL", "PYTHON"), ("DEFAULT", "PYTHON"), ("UCX", "CPP"), ("UCX", "auto"), ("UCX", None)],
)
def test_pairs_of_transceiver_and_backend_that_work_are_no_fault(
    tmp_path: Path, backend: str, runtime: str | None
) -> None:
    assert faults(tmp_path, *PREFILL, backend, *([RUNTIME, runtime] if runtime else [])) == []


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ([], [f"{said(PIPELINED, 'True')} needs enable_chunked_prefill true"]),
        (["--trtllm.enable_chunked_prefill", "true"], []),
        (
            ["--trtllm.enable_chunked_prefill", "true", "--pipeline-parallel-size", "2"],
            [f"{said(PIPELINED, 'True')} needs pipeline_parallel_size 1"],
        ),
        (
            ["--trtllm.enable_chunked_prefill", "true", RUNTIME, "CPP"],
            [f"{said(PIPELINED, 'True')} needs cache_transceiver_config.transceiver_runtime PYTHON"],
        ),
    ],
)
def test_pipelined_transfer_names_what_it_needs(
    tmp_path: Path, arguments: list[str], sentences: list[str]
) -> None:
    assert faults(tmp_path, *PREFILL, "NIXL", f"--trtllm.{PIPELINED}", "true", *arguments) == sentences


def test_a_disk_cache_needs_a_directory_that_exists(tmp_path: Path) -> None:
    size = ["--trtllm.kv_cache_config.disk_cache_size", "1000"]
    path, there = "kv_cache_config.disk_cache_path", tmp_path / "cache"
    assert faults(tmp_path / "a", *size) == [
        f"{said('kv_cache_config.disk_cache_size', '1000')} needs {path}: name a directory on a local disk"
    ]
    named = [f"--trtllm.{path}", str(there)]
    assert faults(tmp_path / "b", *size, *named) == [
        f"{said(path, str(there))} is no directory on this machine: make it first"
    ]
    there.mkdir()
    assert faults(tmp_path / "c", *size, *named) == []


@pytest.mark.parametrize("name", ["encode_only", "mm_encoder_only"])
@pytest.mark.parametrize("role", ["agg", "decode"])
def test_an_engine_that_generates_nothing_is_refused(tmp_path: Path, name: str, role: str) -> None:
    roles = ["--disaggregation-mode", role, "--trtllm.cache_transceiver_config.backend", "NIXL"]
    assert faults(tmp_path, f"--trtllm.{name}", "true", *roles) == [
        f"{said(name, 'True')} leaves an engine that generates no text: remove it, and use "
        f"--disaggregation-mode encode "
        "for a worker that encodes images"
    ]


def test_shared_weights_and_balanced_experts_exclude_each_other(tmp_path: Path) -> None:
    override = "--override-engine-args"
    both = '{"load_format": "GMS", "moe_config": {"load_balancer": {"num_slots": 8}}}'
    assert faults(tmp_path / "both", override, both) == [
        "load_format GMS (override) cannot be used with moe_config.load_balancer, whose weights are not "
        "shared: remove one of them"
    ]
    assert faults(tmp_path / "weights", override, '{"load_format": "gms"}') == []
    assert faults(tmp_path / "experts", override, '{"moe_config": {"load_balancer": {"num_slots": 8}}}') == []


@pytest.mark.parametrize(
    ("versions", "notes"),
    [
        ({"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.6.9"}, []),
        (
            {"ai-dynamo": "1.7.0", "ai-dynamo-runtime": "1.7.0"},
            [
                "note: ai-dynamo 1.7.0 and ai-dynamo-runtime 1.7.0 are installed, and this package was "
                "tested with 1.6 "
                "only"
            ],
        ),
        (
            {"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.10.2rc1"},
            ["note: ai-dynamo-runtime 1.10.2rc1 is installed, and this package was tested with 1.6 only"],
        ),
        (
            {"tensorrt_llm": "1.4.0rc7"},
            [
                "note: TensorRT-LLM 1.4.0rc7 is not recorded: compared with the nearest record, 1.4.0rc2; "
                "what it takes is "
                "asked of it when the engine starts"
            ],
        ),
        ({"tensorrt_llm": "1.4.0rc2"}, []),
        ({}, []),
    ],
)
def test_check_says_in_one_sentence_which_installed_version_was_not_tried(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    versions: dict[str, str],
    notes: list[str],
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    model = make_model_directory(tmp_path / "model", QWEN3)
    assert run(parse(["--check", "--model-path", str(model)])) == 0
    printed = capsys.readouterr().out.splitlines()
    told = ("tested with", "is not recorded")
    assert [line for line in printed if line.startswith("note: ") and any(w in line for w in told)] == notes
