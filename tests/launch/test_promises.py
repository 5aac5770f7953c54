"""What the scripts would run with TensorRT-LLM, held to `--check`:
models it can serve that way, and GPUs for every rank."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from dynamo.trtllm.preflight import run
from dynamo.trtllm.utils.trtllm_utils import parse
from environment import clean_environment, on_x86_64
from launch.harness import ROOT, run_script
from model_directory import make_model_directory

__all__ = ["clean_environment", "on_x86_64"]

SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
MAVERICK = "meta-llama/Llama-4-Maverick-17B-128E-Instruct"
QWEN2 = ROOT / "engine_configs" / "qwen2-vl-7b-instruct"
GUIDE_DISAGG = {
    "MODEL_PATH": "Qwen/Qwen2-VL-7B-Instruct",
    "SERVED_MODEL_NAME": "Qwen/Qwen2-VL-7B-Instruct",
    "PREFILL_ENGINE_ARGS": "examples/backends/trtllm/engine_configs/qwen2-vl-7b-instruct/prefill.yaml",
    "DECODE_ENGINE_ARGS": "examples/backends/trtllm/engine_configs/qwen2-vl-7b-instruct/decode.yaml",
    "MODALITY": "multimodal",
}
GUIDE_EPD = {
    "MODEL_PATH": SCOUT,
    "ENCODE_ENDPOINT": "dyn://dynamo.tensorrt_llm_encode.generate",
    "ALLOWED_LOCAL_MEDIA_PATH": "/tmp",
    "MAX_FILE_SIZE_MB": "50",
}
LAUNCHES = [
    ("agg.sh", {}),
    ("agg.sh", {"MODEL_PATH": MAVERICK, "AGG_ENGINE_ARGS": "engine_configs/llama4/multimodal/agg.yaml"}),
    ("disagg.sh", {}),
    ("disagg.sh", GUIDE_DISAGG),
    ("disagg_multimodal.sh", {}),
    ("disagg_e_pd.sh", {}),
    ("epd_disagg.sh", {}),
    ("epd_disagg.sh", GUIDE_EPD),
    ("multinode/srun_disaggregated.sh", {}),
    ("multinode/srun_aggregated.sh", {"MODEL_PATH": MAVERICK}),
]
NAMES = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen2-VL-7B-Instruct": "qwen2-vl-7b-instruct",
    "Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b-instruct",
    "Llama-4-Scout-17B-16E-Instruct": "llama-4-scout-17b-16e-instruct",
    "Llama-4-Maverick-17B-128E-Instruct": "llama-4-maverick-17b-128e-instruct",
}


def workers(script: str, settings: dict[str, str], *arguments: str) -> list[tuple[dict[str, str], list[str]]]:
    """Environment and arguments of each worker that the script would run."""
    done = run_script(script, "--dry-run", *arguments, **{"DYNAMO_PYTHON": "/some/python", **settings})
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        if "dynamo.trtllm" in words:
            environment = dict(
                word.split("=", 1) for word in words if "=" in word and not word.startswith("-")
            )
            found.append((environment, words[words.index("dynamo.trtllm") + 1 :]))
    return found


def check(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `--check` prints for the worker over a directory of its model."""
    place = words.index("--model-path") + 1
    directory = make_model_directory(tmp_path / "model", NAMES[words[place].rpartition("/")[2]])
    run(parse(["--check", *words[:place], str(directory), *words[place + 1 :]]))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "settings"), LAUNCHES, ids=[" ".join([name, *given.values()]) for name, given in LAUNCHES]
)
def test_check_finds_no_fault_in_any_worker_of_a_script_and_each_has_a_gpu_for_every_rank(
    script: str, settings: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = workers(script, settings)
    assert found
    for environment, words in found:
        assert check(words, tmp_path, capsys).splitlines()[-1] == "no fault found"
        content = yaml.safe_load(Path(words[words.index("--extra-engine-args") + 1]).read_text())
        if "CUDA_VISIBLE_DEVICES" in environment:
            ranks = content.get("tensor_parallel_size", 1) * content.get("pipeline_parallel_size", 1)
            assert len(environment["CUDA_VISIBLE_DEVICES"].split(",")) == ranks


def test_workers_of_one_launch_share_no_gpu_and_prefill_fits_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for script, settings in LAUNCHES:
        found = workers(script, settings)
        # The encode worker of Llama 4 loads no weights, so it may share a GPU.
        loading = [environment for environment, words in found if not (SCOUT in words and "encode" in words)]
        devices = [
            gpu
            for environment in loading
            for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if gpu
        ]
        assert len(devices) == len(set(devices)), script
        files = {
            words[words.index("--disaggregation-mode") + 1]: words
            for _, words in found
            if "--disaggregation-mode" in words
        }
        if "prefill" in files:
            other = files["decode"][files["decode"].index("--extra-engine-args") + 1]
            assert check([*files["prefill"], "--against", other], tmp_path, capsys).endswith(
                "no fault found\n"
            ), script


def test_only_a_model_whose_prefill_cannot_take_embeddings_leaves_an_encode_worker_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files_alone = "serves embedding files only"
    (_, encode), *_ = workers("epd_disagg.sh", {})
    assert files_alone not in check(encode, tmp_path, capsys)
    (_, encode), *_ = workers("epd_disagg.sh", {"MODEL_PATH": SCOUT})
    assert files_alone in check(encode, tmp_path, capsys)


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
def test_a_model_that_takes_neither_is_refused_by_each_worker_that_would_need_it(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "MODEL_PATH": "Qwen/Qwen2-VL-7B-Instruct",
        "PREFILL_ENGINE_ARGS": str(QWEN2 / "prefill.yaml"),
        "DECODE_ENGINE_ARGS": str(QWEN2 / "decode.yaml"),
    }
    found = {
        words[words.index("--disaggregation-mode") + 1]: words
        for _, words in workers("epd_disagg.sh", settings)
    }
    faults = [
        line for line in check(found[role], tmp_path, capsys).splitlines() if line.startswith("fault: ")
    ]
    expected = {
        "encode": [
            (
                "fault: TensorRT-LLM cannot encode images of Qwen2VLForConditionalGeneration "
                "in a worker of their own"
            )
        ],
        "prefill": [
            (
                "fault: TensorRT-LLM takes no embeddings for Qwen2VLForConditionalGeneration "
                "from an encode worker"
            )
        ],
        "decode": [],
    }
    assert [
        fault.partition(":")[0] + ":" + fault.partition(":")[2].partition(":")[0] for fault in faults
    ] == expected[role]


@pytest.mark.parametrize(
    "script", ["agg.sh", "disagg.sh", "disagg_multimodal.sh", "disagg_e_pd.sh", "epd_disagg.sh"]
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-seq-len", "4096", "--kv-block-size", "64", "--publish-kv-events"],
        ["--encode-fallback", "--peer-timeout", "5", "--transfer-pool-mb", "64", "--transfer-ttl", "20"],
        ["--max-images", "3", "--media-cache-mb", "0", "--max-file-size-mb", "5"],
        ["--prefill-endpoint", "dyn://a.prefill.generate", "--transfer-through-host"],
    ],
    ids=lambda words: words[0],
)
def test_a_flag_after_the_dashes_ends_no_role_of_any_script(
    script: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, words in workers(script, {}, "--", *arguments):
        assert check(words, tmp_path, capsys).splitlines()[-1] == "no fault found"
