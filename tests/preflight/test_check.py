from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.trtllm.preflight import run
from dynamo.trtllm.preflight.memory import find_gpu_memory
from dynamo.trtllm.utils.trtllm_utils import parse
from environment import on_x86_64
from model_directory import make_model_directory

ROOT = Path(__file__).parents[2]
QWEN3 = ROOT / "engine_configs" / "qwen3"


__all__ = ["on_x86_64"]


def make_model(directory: Path, name: str) -> str:
    return str(make_model_directory(directory, name))


def test_the_plan_tells_what_the_worker_would_be_and_where_each_value_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "m", "llama-4-scout-17b-16e-instruct")
    config = ROOT / "engine_configs" / "llama4" / "multimodal" / "llama4-Scout" / "prefill.yaml"
    command = [
        "--check",
        "--model-path",
        path,
        "--served-model-name",
        "scout",
        "--disaggregation-mode",
        "prefill",
    ]
    encoder = "dyn://dynamo.tensorrt_llm_encode.generate"
    command += ["--modality", "multimodal", "--encode-endpoint", encoder]
    command += ["--extra-engine-args", str(config), "--max-batch-size", "4", "--gpu-memory-gb", "141"]
    assert run(parse(command)) == 0
    printed = capsys.readouterr().out
    assert (
        printed.splitlines()
        == f"""worker
  a prefill worker, multimodal, --engine tensorrt_llm
  model {path} (Llama4ForConditionalGeneration, 108587 million parameters, bfloat16)
  served as scout for chat, completions
  endpoint dyn://dynamo.prefill.generate
  discovery etcd, request plane tcp, response plane tcp, event plane zmq
peers
  needs a decode worker of the same model
  needs an encode worker at {encoder}, waits 60 s for it, answers 503 while there is none
engine arguments
  cache_transceiver_config.backend = "NIXL"  (file prefill.yaml)
  cache_transceiver_config.kv_transfer_timeout_ms = 60000  (file prefill.yaml)
  cache_transceiver_config.max_tokens_in_buffer = 8192  (file prefill.yaml)
  disable_overlap_scheduler = true  (file prefill.yaml)
  kv_cache_config.enable_block_reuse = false  (file prefill.yaml)
  kv_cache_config.free_gpu_memory_fraction = 0.3  (file prefill.yaml)
  kv_cache_config.tokens_per_block = 32  (default)
  max_batch_size = 4  (--max-batch-size)
  max_seq_len = 8192  (file prefill.yaml)
  pipeline_parallel_size = 1  (default)
  tensor_parallel_size = 4  (file prefill.yaml)
media
  at most 16 image, 1 video and 1 audio parts, and 200 MB of media in a request
  at most 50 MB and 64000000 pixels in one image
  local embedding files, no media, below /tmp
  downloads end after 30 s, 64 at once, 16 from one host, private addresses refused
  cache of 256 MB
transfers
  KV caches by the engine over NIXL, buffer of 8192 tokens, longest expanded prompt 8192 tokens by max_seq_len
  embeddings by NIXL, pool of 256 MB, kept 60 s
memory
  weights about 217.2 GB, 54.3 GB on each of 4 GPUs
  KV cache 196608 bytes per token, 49152 on each of 4 GPUs
  0.3 of what the weights leave of 141 GB (--gpu-memory-gb) holds at most 529213 tokens
  which is 64.6 requests of 8192 tokens
no fault found""".splitlines()
    )


def test_the_plan_of_other_roles_leaves_out_what_they_have_no_use_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "m", "qwen3-vl-8b-instruct")
    command = [
        "--check",
        "--model-path",
        path,
        "--engine",
        "transformers",
        "--modality",
        "multimodal",
        "--disaggregation-mode",
    ]
    assert run(parse([*command, "decode", "--device", "cpu"])) == 0
    decode = capsys.readouterr().out
    assert (
        "peers\n  needs a prefill worker of the same model; "
        "asks dyn://dynamo.prefill.generate again when one was lost\n"
    ) in decode
    assert "media\n  takes none\n" in decode
    assert "transfers\n  KV caches by NIXL, pool of 256 MB, kept 60 s\n" in decode
    assert "147456 bytes per token, 147456 on one device\nno fault found" in decode
    assert run(parse([*command, "encode", "--transfer-through-host"])) == 0
    encode = capsys.readouterr().out
    assert "peers\n  is called by prefill and aggregated workers that name its endpoint\n" in encode
    assert "transfers\n  embeddings by NIXL through host memory, pool of 256 MB, kept 60 s\n" in encode
    assert "  weights about 1.1 GB, 1.1 GB on one device\n  no KV cache\n" in encode
    assert run(parse([*command, "agg"])) == 0
    aggregated = capsys.readouterr().out
    assert "peers\n  needs none\n" in aggregated
    assert "transfers\n  none\n" in aggregated


def test_memory_follows_parallelism_dtype_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "m", "qwen3-0.6b")

    def memory(*arguments: str) -> list[str]:
        assert run(parse(["--check", "--model-path", path, "--gpu-memory-gb", "80", *arguments])) == 0
        return capsys.readouterr().out.partition("memory\n")[2].splitlines()

    assert "  KV cache 114688 bytes per token, 14336 on each of 16 GPUs" in memory(
        "--tensor-parallel-size", "16"
    )
    assert "  KV cache 114688 bytes per token, 57344 on each of 2 GPUs" in memory(
        "--pipeline-parallel-size", "2"
    )
    assert "  KV cache 114688 bytes per token, 114688 on each of 2 GPUs" in memory(
        "--tensor-parallel-size", "2", "--enable-attention-dp"
    )
    assert "  KV cache 57344 bytes per token, 57344 on one device" in memory(
        "--trtllm.kv_cache_config.dtype", "fp8"
    )
    assert memory("--dtype", "float32")[:2] == [
        "  weights about 2.4 GB, 2.4 GB on one device",
        "  KV cache 229376 bytes per token, 229376 on one device",
    ]
    assert "at most 1000 tokens" in memory("--trtllm.kv_cache_config.max_tokens", "1000")[2]


def test_layers_with_a_window_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(parse(["--check", "--model-path", make_model(tmp_path / "m", "gemma-3-12b-it")]))
    assert "  of which 40 of 48 layers keep at most 1024 tokens of a request\n" in capsys.readouterr().out


def test_the_size_of_a_gpu_is_given_asked_of_the_driver_or_assumed_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_gpu_memory(24.0).gigabytes == 24.0
    monkeypatch.setenv("PATH", str(tmp_path))
    assumed = find_gpu_memory(None)
    assert (assumed.gigabytes, assumed.source.startswith("assumed")) == (80.0, True)
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    driver.chmod(0o755)
    asked = find_gpu_memory(None)
    assert (round(asked.gigabytes, 1), asked.source) == (85.5, "the driver")
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert find_gpu_memory(None).source.startswith("assumed")


PAIRS = [
    (
        {"cache_transceiver_config": {"backend": "UCX"}},
        [(
            "cache_transceiver_config.backend is NIXL on prefill and UCX on decode: "
            "make them equal, since both sides must speak the same transport"
        )],
    ),
    (
        {"cache_transceiver_config": None},
        [(
            "cache_transceiver_config.backend is NIXL on prefill and None on decode: "
            "make them equal, since both sides must speak the same transport"
        )],
    ),
    (
        {"dtype": "float16"},
        [(
            "dtype is auto on prefill and float16 on decode: make them equal, "
            "since KV caches are handed over as they are"
        )],
    ),
    (
        {"kv_cache_config": {"dtype": "fp8"}},
        [(
            "kv_cache_config.dtype is auto on prefill and fp8 on decode: "
            "make them equal, since KV caches are handed over as they are"
        )],
    ),
    (
        {"kv_cache_config": {"tokens_per_block": 64}},
        [(
            "kv_cache_config.tokens_per_block is 32 on prefill and 64 on decode: "
            "make them equal, since KV caches are handed over block by block"
        )],
    ),
    (
        {"cache_transceiver_config": {"max_tokens_in_buffer": 1024}},
        [(
            "cache_transceiver_config.max_tokens_in_buffer is 1024 on decode, below prefill's longest "
            "expanded prompt of 16384 tokens by max_seq_len: raise it to at least that"
        )],
    ),
    (
        {"max_seq_len": 8192},
        [(
            "max_seq_len is 16384 on prefill and 8192 on decode: "
            "decode must take at least what prefill hands over"
        )],
    ),
    (
        {"attn_backend": "FLASHINFER", "tensor_parallel_size": 2},
        [
            (
                "tensor_parallel_size is 1 on prefill and 2 on decode, "
                "and attn_backend FLASHINFER lays KV caches out by it: make them equal"
            ),
            (
                "attn_backend differs between prefill and decode: make them equal, "
                "since it decides how KV caches are laid out"
            ),
        ],
    ),
    ({"tensor_parallel_size": 2, "max_batch_size": 7}, []),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentences"), PAIRS, ids=[json.dumps(case[0]) for case in PAIRS])
def test_prefill_and_decode_that_do_not_fit_together_are_refused_from_either_side(
    changes: dict[str, object], sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    from dynamo.trtllm.utils.layers import Layer, merge_layers
    from dynamo.trtllm.utils.yaml_files import read_yaml

    other, _ = merge_layers([Layer("file", read_yaml(QWEN3 / "decode.yaml")), Layer("change", changes)])
    path = tmp_path / "decode.yaml"
    path.write_text(yaml.safe_dump(other))
    model = ["--check", "--model-path", make_model(tmp_path / "m", "qwen3-0.6b")]
    prefill = [
        *model,
        "--disaggregation-mode",
        "prefill",
        "--extra-engine-args",
        str(QWEN3 / "prefill.yaml"),
        "--against",
        str(path),
    ]
    assert run(parse(prefill)) == (1 if sentences else 0)
    faults = [
        line.removeprefix("fault: ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("fault: ")
    ]
    assert faults == sentences
    decode = [
        *model,
        "--disaggregation-mode",
        "decode",
        "--extra-engine-args",
        str(path),
        "--against",
        str(QWEN3 / "prefill.yaml"),
    ]
    run(parse(decode))
    printed = capsys.readouterr().out.splitlines()
    assert set(sentences) <= {line.removeprefix("fault: ") for line in printed}


def test_different_splits_that_may_work_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decode.yaml"
    path.write_text(
        (QWEN3 / "decode.yaml").read_text() + "tensor_parallel_size: 2\nenable_attention_dp: true\n"
    )
    command = [
        "--check",
        "--model-path",
        make_model(tmp_path / "m", "qwen3-0.6b"),
        "--disaggregation-mode",
        "prefill",
    ]
    command += [
        "--extra-engine-args",
        str(QWEN3 / "prefill.yaml"),
        "--pipeline-parallel-size",
        "2",
        "--against",
        str(path),
    ]
    assert run(parse(command)) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")] == [
        "note: tensor_parallel_size 1 on prefill and 2 on decode: KV heads are split anew on the way",
        "note: pipeline parallelism on prefill with tensor parallelism on decode hangs in TensorRT-LLM 1.2.1",
        "note: enable_attention_dp differs between prefill and decode: KV heads are split anew on the way",
    ]


BLOCKED = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tensorrt_llm"}:
            raise ImportError(name)

sys.meta_path.insert(0, Block())
from dynamo.trtllm.preflight import run
from dynamo.trtllm.utils.trtllm_utils import parse
sys.exit(run(parse(sys.argv[1:])))
"""


@pytest.mark.parametrize("engine", ["tensorrt_llm", "transformers"])
def test_a_check_imports_no_engine(engine: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", "qwen3-vl-8b-instruct")
    command = [
        sys.executable,
        "-c",
        BLOCKED,
        "--check",
        "--model-path",
        path,
        "--modality",
        "multimodal",
        "--engine",
        engine,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr, result.stdout.splitlines()[-1]) == (0, "", "no fault found")
