from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from dynamo.trtllm.preflight import find_faults, run
from dynamo.trtllm.utils.trtllm_utils import parse, parse_args
from model_directory import make_model_directory

Model = Callable[[str], Path]
NIXL = ["--trtllm.cache_transceiver_config.backend", "NIXL"]
PREFILL = ["--disaggregation-mode", "prefill"]
DECODE = ["--disaggregation-mode", "decode"]
ENCODE = ["--disaggregation-mode", "encode"]
MULTIMODAL = ["--modality", "multimodal"]
ENCODER = ["--encode-endpoint", "dyn://dynamo.tensorrt_llm_encode.generate"]
PORTABLE = ["--engine", "transformers"]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An x86_64 machine without TensorRT-LLM."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Makes a complete model directory of one of the known models, with weights that hold no tensor."""

    def make(name: str) -> Path:
        return make_model_directory(tmp_path / name, name)

    return make


REFUSALS = [
    (
        "llama-4-maverick-17b-128e-instruct",
        ["--tensor-parallel-size", "16"],
        (
            "Llama4ForConditionalGeneration has 40 attention heads, which tensor_parallel_size 16 "
            "(--tensor-parallel-size) does not divide: use 1, 2, 4, 8 or 40, or set enable_attention_dp"
        ),
    ),
    (
        "qwen2-vl-7b-instruct",
        ["--tensor-parallel-size", "7"],
        (
            "Qwen2VLForConditionalGeneration has 4 KV heads, which tensor_parallel_size 7 "
            "(--tensor-parallel-size) neither divides nor is a multiple of: use 1, 2, 4 or 28, or set "
            "enable_attention_dp"
        ),
    ),
    (
        "qwen3-vl-30b-a3b-instruct",
        ["--tensor-parallel-size", "4", "--expert-parallel-size", "3"],
        "moe_expert_parallel_size 3 (--expert-parallel-size) does not divide tensor_parallel_size 4 "
        "(--tensor-parallel-size): choose "
        "one that does",
    ),
    (
        "qwen3-0.6b",
        ["--pipeline-parallel-size", "29"],
        (
            "Qwen3ForCausalLM has 28 layers, fewer than pipeline_parallel_size 29 "
            "(--pipeline-parallel-size): use at most so many"
        ),
    ),
    (
        "qwen3-0.6b",
        ["--trtllm.speculative_config.max_draft_len", "3"],
        (
            "speculative_config needs a decoding_type, by which TensorRT-LLM knows its other keys: "
            "add it, or remove it all"
        ),
    ),
    (
        "qwen3-0.6b",
        [*PORTABLE, "--tensor-parallel-size", "2"],
        (
            "tensor_parallel_size 2 (--tensor-parallel-size) must be 1 for the portable engine: "
            "it runs on one device"
        ),
    ),
    (
        "qwen3-0.6b",
        PREFILL,
        (
            "a prefill worker moves KV caches and needs cache_transceiver_config.backend in its engine "
            "configuration, the same on prefill and decode, for instance NIXL"
        ),
    ),
    (
        "qwen3-0.6b",
        DECODE,
        (
            "a decode worker moves KV caches and needs cache_transceiver_config.backend in its engine "
            "configuration, the same on prefill and decode, for instance NIXL"
        ),
    ),
    (
        "qwen3-0.6b",
        [
            *DECODE,
            *NIXL,
            "--trtllm.cache_transceiver_config.max_tokens_in_buffer",
            "4096",
            "--max-seq-len",
            "8192",
        ],
        "cache_transceiver_config.max_tokens_in_buffer 4096 "
        "(--trtllm.cache_transceiver_config.max_tokens_in_buffer) is below the "
        "longest expanded prompt, 8192 tokens by max_seq_len: raise it to at least that",
    ),
    (
        "qwen3-0.6b",
        [*DECODE, *NIXL, "--trtllm.cache_transceiver_config.max_tokens_in_buffer", "4096"],
        (
            "cache_transceiver_config.max_tokens_in_buffer 4096 "
            "(--trtllm.cache_transceiver_config.max_tokens_in_buffer) is below the longest expanded "
            "prompt, 40960 tokens by the model's context length, since max_seq_len is not set: raise it "
            "to at least that"
        ),
    ),
    (
        "qwen3-0.6b",
        [*PREFILL, *NIXL, "--trtllm.cache_transceiver_config.max_tokens_in_buffer", "4096"],
        (
            "cache_transceiver_config.max_tokens_in_buffer 4096 "
            "(--trtllm.cache_transceiver_config.max_tokens_in_buffer) is below the longest expanded "
            "prompt, 8192 tokens by max_num_tokens, since enable_chunked_prefill is off: raise it to at "
            "least that"
        ),
    ),
    (
        "qwen2-vl-7b-instruct",
        [*MULTIMODAL, "--limit-mm-per-prompt", "image=2,images=3"],
        "--limit-mm-per-prompt: 'images' is no kind of media; there are image, video and audio",
    ),
    ("qwen3-0.6b", MULTIMODAL, "Qwen3ForCausalLM takes no images: use --modality text, or another model"),
    (
        "qwen3-0.6b",
        [*MULTIMODAL, *PORTABLE],
        "Qwen3ForCausalLM takes no media: use --modality text, or another model",
    ),
    (
        "llama-4-scout-17b-16e-instruct",
        [*MULTIMODAL, *PORTABLE],
        "the portable engine takes media with Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA, LLaVA-NeXT, Mistral 3, "
        "Gemma 3, Qwen2-Audio only, not with "
        "Llama4ForConditionalGeneration",
    ),
    (
        "qwen3-vl-8b-instruct",
        [*MULTIMODAL, "--trtllm.disable_mm_encoder", "true"],
        "disable_mm_encoder True (--trtllm.disable_mm_encoder) leaves nobody to encode images: add "
        "--encode-endpoint with an encode "
        "worker, or remove it",
    ),
    (
        "qwen3-vl-8b-instruct",
        [*MULTIMODAL, "--load-format", "vision_only"],
        (
            "load_format vision_only (--load-format) leaves the text model out, "
            "so only an encode worker can use it: remove it"
        ),
    ),
    (
        "qwen3-vl-8b-instruct",
        [*MULTIMODAL, "--encode-endpoint", "dyn://dynamo.tensorrt_llm.generate"],
        (
            "--encode-endpoint dyn://dynamo.tensorrt_llm.generate is this worker's own endpoint: "
            "give that of the encode worker"
        ),
    ),
    (
        "qwen2-vl-7b-instruct",
        [*MULTIMODAL, *ENCODER],
        (
            "TensorRT-LLM takes no embeddings for Qwen2VLForConditionalGeneration from an encode worker: "
            "remove --encode-endpoint"
        ),
    ),
    (
        "gemma-3-12b-it",
        ENCODE,
        (
            "TensorRT-LLM cannot encode images of Gemma3ForConditionalGeneration in a worker of their "
            "own: leave the encode worker out, prefill and aggregated workers encode them"
        ),
    ),
    (
        "qwen3-0.6b",
        ["--trtllm.kv_cache_config.free_memory_fraction", "0.3"],
        "TensorRT-LLM 1.3.0rc29 does not know the engine argument kv_cache_config.free_memory_fraction "
        "(--trtllm.kv_cache_config.free_memory_fraction): did you mean free_gpu_memory_fraction?",
    ),
    (
        "qwen3-0.6b",
        ["--trtllm.kv_cach_config.dtype", "fp8"],
        (
            "TensorRT-LLM 1.3.0rc29 does not know the engine argument kv_cach_config "
            "(--trtllm.kv_cach_config.dtype): did you mean kv_cache_config?"
        ),
    ),
    (
        "qwen3-0.6b",
        ["--trtllm.zzz", "1"],
        "TensorRT-LLM 1.3.0rc29 does not know the engine argument zzz (--trtllm.zzz): remove it",
    ),
    ("qwen3-0.6b", ["--trtllm.moe_config", "1"], "moe_config 1 (--trtllm.moe_config) must be a mapping"),
    (
        "qwen3-0.6b",
        [*DECODE, "--trtllm.cache_transceiver_config.backend", "RDMA"],
        (
            "cache_transceiver_config.backend RDMA (--trtllm.cache_transceiver_config.backend) "
            "must be one of DEFAULT, UCX, NIXL, MOONCAKE, MPI"
        ),
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"), REFUSALS, ids=[f"{case[0]} {' '.join(case[1])}" for case in REFUSALS]
)
def test_check_refuses_by_its_sentence(
    name: str, arguments: list[str], sentence: str, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--model-path", str(model(name)), *arguments]
    assert find_faults(parse_args(command)) == [sentence]
    assert run(parse([*command, "--check"])) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [f"fault: {sentence}", "1 fault found"]


ALLOWED = [
    ("llama-4-maverick-17b-128e-instruct", ["--tensor-parallel-size", "16", "--enable-attention-dp"]),
    ("qwen2-vl-7b-instruct", ["--tensor-parallel-size", "28"]),
    ("qwen3-vl-30b-a3b-instruct", ["--tensor-parallel-size", "8", "--expert-parallel-size", "4"]),
    ("qwen3-0.6b", [*PORTABLE, *PREFILL]),
    ("qwen3-0.6b", [*DECODE, "--trtllm.cache_transceiver_config.backend", "nixl"]),
    ("qwen3-vl-8b-instruct", [*MULTIMODAL, *ENCODER, "--trtllm.disable_mm_encoder", "true"]),
    ("qwen3-vl-8b-instruct", [*ENCODE, "--load-format", "vision_only"]),
    ("llama-4-scout-17b-16e-instruct", [*MULTIMODAL, *ENCODER, "--tensor-parallel-size", "4"]),
    ("gemma-3-12b-it", [*MULTIMODAL, *PORTABLE]),
    ("qwen3-0.6b", ["--engine", "double", "--trtllm.zzz", "1", "--modality", "multimodal"]),
]


@pytest.mark.parametrize(
    ("name", "arguments"), ALLOWED, ids=[f"{case[0]} {' '.join(case[1])}" for case in ALLOWED]
)
def test_what_works_is_let_through(name: str, arguments: list[str], model: Model) -> None:
    assert find_faults(parse_args(["--model-path", str(model(name)), *arguments])) == []


def test_every_fault_is_found_at_once(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    path = model("qwen2-vl-7b-instruct")
    (path / "tokenizer.json").unlink()
    command = [
        "--model-path",
        str(path),
        *PREFILL,
        *MULTIMODAL,
        *ENCODER,
        "--tensor-parallel-size",
        "6",
        "--trtllm.zzz",
        "1",
    ]
    assert run(parse([*command, "--check"])) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    marks = (
        "has no tokenizer.json",
        "28 attention heads",
        "4 KV heads",
        "moves KV caches",
        "takes no embeddings",
        "zzz",
    )
    assert [next((mark for mark in marks if mark in line), line) for line in faults] == list(marks)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("config.json", "has no config.json: give the directory of a complete model"),
        (
            "tokenizer.json",
            (
                "has no tokenizer.json, which Dynamo's frontend makes token ids with: "
                "download the complete model"
            ),
        ),
        (
            "model.safetensors",
            "has no weights (*.safetensors, *.bin, *.pt, *.pth): download the complete model",
        ),
        (
            "preprocessor_config.json",
            (
                "has no image processor (preprocessor_config.json, processor_config.json): "
                "download the complete model"
            ),
        ),
    ],
)
def test_a_model_directory_without_what_is_needed_is_refused(file: str, sentence: str, model: Model) -> None:
    path = model("qwen3-vl-8b-instruct")
    (path / file).unlink()
    assert find_faults(parse_args(["--model-path", str(path), *MULTIMODAL])) == [
        f"the model directory {path} {sentence}"
    ]


def test_a_text_or_decode_worker_needs_no_image_processor_and_dummy_weights_need_no_file(
    model: Model,
) -> None:
    path = model("qwen3-vl-8b-instruct")
    for file in ("preprocessor_config.json", "model.safetensors"):
        (path / file).unlink()
    for flags in (["--modality", "text"], [*MULTIMODAL, *DECODE, *NIXL]):
        assert find_faults(parse_args(["--model-path", str(path), "--load-format", "dummy", *flags])) == []


def test_a_directory_that_does_not_exist_or_describes_no_decoder_is_refused(
    tmp_path: Path, model: Model
) -> None:
    missing = str(tmp_path / "missing")
    assert find_faults(parse_args(["--model-path", missing])) == [
        f"--model-path {missing} is not a directory on this machine"
    ]
    path = model("qwen3-0.6b")
    (path / "config.json").write_text('{"model_type": "t5"}')
    assert find_faults(parse_args(["--model-path", str(path)])) == [
        (
            f"the config.json of {path} does not describe a decoder with attention heads and layers: "
            "give another model"
        )
    ]


def test_a_model_that_is_not_here_yet_is_no_fault_but_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse(["--check", "--model-path", "nobody/no-such-model"])) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (
        "note: the model is not on this machine yet, so head counts, modality and memory were not checked"
        in printed
    )
    assert "  unknown: the model's config.json is not on this machine" in printed


def test_an_architecture_that_the_record_does_not_list_is_noted_not_refused(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model("qwen3-vl-8b-instruct")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "architectures": ["NewVLForConditionalGeneration"]})
    )
    assert run(parse(["--check", "--model-path", str(path), *MULTIMODAL])) == 0
    assert (
        "note: the record of TensorRT-LLM does not list NewVLForConditionalGeneration, "
        "so what it can do with images was not checked"
    ) in capsys.readouterr().out


KV_OVER_NIXL = [*PREFILL, *NIXL]


@pytest.mark.parametrize(
    ("arguments", "system", "architecture", "sentence"),
    [
        (
            KV_OVER_NIXL,
            "linux",
            "aarch64",
            (
                "cache_transceiver_config.backend NIXL (--trtllm.cache_transceiver_config.backend) moves "
                "KV caches by NIXL, which TensorRT-LLM supports on x86_64 only and this is aarch64: set "
                "it to UCX on prefill and decode"
            ),
        ),
        (
            [*PREFILL, "--trtllm.cache_transceiver_config.backend", "DEFAULT"],
            "linux",
            "aarch64",
            (
                "cache_transceiver_config.backend DEFAULT (--trtllm.cache_transceiver_config.backend) "
                "moves KV caches by NIXL, which TensorRT-LLM supports on x86_64 only and this is aarch64: "
                "set it to UCX on prefill and decode"
            ),
        ),
        (
            [*PREFILL, *PORTABLE],
            "darwin",
            "arm64",
            (
                "a prefill worker moves KV caches by NIXL, which runs on Linux "
                "on x86_64 or aarch64, not on darwin on arm64"
            ),
        ),
        (
            [*PORTABLE, *ENCODER, *MULTIMODAL],
            "linux",
            "riscv64",
            (
                "an aggregated worker moves embeddings by NIXL, which runs on Linux "
                "on x86_64 or aarch64, not on linux on riscv64"
            ),
        ),
        ([*PREFILL, "--trtllm.cache_transceiver_config.backend", "UCX"], "linux", "aarch64", None),
        ([*PREFILL, *PORTABLE], "linux", "aarch64", None),
    ],
)
def test_a_platform_that_nixl_does_not_support_is_refused(
    arguments: list[str],
    system: str,
    architecture: str,
    sentence: str | None,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_args(["--model-path", str(model("qwen3-vl-8b-instruct")), *arguments])
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: architecture)
    assert find_faults(config) == ([sentence] if sentence else [])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([*ENCODE, *PORTABLE], "an encode worker moves embeddings"),
        ([*DECODE, "--engine", "double"], "a decode worker moves KV caches"),
        ([*PREFILL, *PORTABLE, *MULTIMODAL, *ENCODER], "a prefill worker moves embeddings and KV caches"),
    ],
)
def test_missing_nixl_is_refused_where_something_moves_by_it(
    arguments: list[str], what: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = str(model("qwen3-vl-8b-instruct"))
    sentence = f"{what} by NIXL, which is not installed here: run `pip install nixl`"
    assert find_faults(parse_args(["--model-path", path, *arguments])) == [sentence]
    assert find_faults(parse_args(["--model-path", path, "--engine", "double"])) == []


def test_an_installed_release_decides_which_engine_arguments_there_are(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "--model-path",
        str(model("qwen3-0.6b")),
        "--trtllm.multimodal_config.encoder_cache_max_bytes",
        "0",
    ]
    assert find_faults(parse_args(command)) == []
    monkeypatch.setattr(metadata, "version", lambda name: "1.2.1")
    assert find_faults(parse_args(command)) == [
        "TensorRT-LLM 1.2.1 does not know the engine argument multimodal_config "
        "(--trtllm.multimodal_config.encoder_cache_max_bytes): remove it"
    ]
    monkeypatch.setattr(metadata, "version", lambda name: "1.5.0")
    assert find_faults(parse_args([*command, "--trtllm.zzz", "1"])) == []


def test_a_model_that_cannot_be_split_over_prefill_and_decode_is_refused(model: Model) -> None:
    path = model("gemma-3-12b-it")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "architectures": ["Gemma4ForConditionalGeneration"]})
    )
    assert find_faults(parse_args(["--model-path", str(path), *PREFILL, *NIXL])) == [
        (
            "TensorRT-LLM does not split Gemma4ForConditionalGeneration over prefill and decode workers: "
            "serve it aggregated"
        )
    ]


def test_weights_that_do_not_fit_a_named_gpu_are_refused(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(model("llama-4-maverick-17b-128e-instruct"))
    command = ["--check", "--model-path", path, "--tensor-parallel-size", "8", "--gpu-memory-gb"]
    assert run(parse([*command, "80"])) == 1
    assert (
        "fault: the weights need 100.4 GB on each GPU, more than --gpu-memory-gb 80: use more or larger GPUs"
    ) in capsys.readouterr().out
    assert run(parse([*command, "141"])) == 0
