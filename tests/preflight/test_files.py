"""A model's directory that lacks something, or has it cut short or as a pointer,
is refused with the file's name."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dynamo.trtllm.model_files import find_chat_template
from dynamo.trtllm.preflight import find_faults, run
from dynamo.trtllm.served_template import with_served_template
from dynamo.trtllm.utils.trtllm_utils import parse, parse_args
from model_directory import make_model_directory

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
IS_POINTER = (
    "is a Git LFS pointer and not the file itself: "
    "run `git lfs pull` in that directory, or download the model again"
)
NO_JSON = "is no JSON, or was cut short: download it again"
ENGINES = ["tensorrt_llm", "transformers", "double"]
MULTIMODAL = ["--modality", "multimodal"]
COMPLETIONS = ["--endpoint-types", "completions"]
ROLES = ["agg", "prefill", "decode", "encode"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_directory(tmp_path / "m", "qwen2.5-vl-7b-instruct")


def faults(model: Path, *arguments: str, engine: str = "transformers") -> list[str]:
    return find_faults(parse_args(["--model-path", str(model), "--engine", engine, *MULTIMODAL, *arguments]))


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def ones(size: int) -> dict[str, object]:
    return {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}


def replace_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "no config.json: give the directory of a complete model"),
        (
            "tokenizer.json",
            "no tokenizer.json, which Dynamo's frontend makes token ids with: download the complete model",
        ),
        (
            "tokenizer_config.json",
            (
                "no tokenizer_config.json, which Dynamo's frontend reads beside the chat template: "
                "download the complete model"
            ),
        ),
    ],
)
def test_what_the_frontend_reads_is_named_when_it_is_missing(
    engine: str, file: str, words: str, model: Path
) -> None:
    (model / file).unlink()
    assert faults(model, engine=engine) == [f"the model directory {model} has {words}"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (POINTER, IS_POINTER),
        ('{"model": {"type": "BPE", "vo', NO_JSON),
        ("\ufeff{}", NO_JSON),
        ("", "is empty: download it again"),
        ("[]", "holds no JSON object: download it again"),
    ],
    ids=["pointer", "cut short", "byte order mark", "empty", "list"],
)
def test_a_file_that_the_frontend_cannot_read_is_one_fault(
    engine: str, file: str, content: str, words: str, model: Path
) -> None:
    (model / file).write_text(content)
    assert faults(model, engine=engine) == [f"{file} of the model directory {model} {words}"]


def test_json_that_is_whole_but_describes_nothing_is_refused(model: Path) -> None:
    for content in ("{}", '{"model": {}}', '{"model": {"type": "BPE"}}'):
        (model / "tokenizer.json").write_text(content)
        (fault,) = faults(model)
    assert [fault] == [
        f"tokenizer.json of the model directory {model} describes no tokenizer: download the complete model"
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "architectures", [None, [], [1], "Qwen2VLForConditionalGeneration", {"name": "Qwen"}]
)
def test_a_configuration_that_names_no_architecture_is_a_fault(
    architectures: object, engine: str, model: Path
) -> None:
    replace_json(model / "config.json", architectures=architectures)
    found = [sentence for sentence in faults(model, engine=engine) if "names no architectures" in sentence]
    assert found == [
        f"the config.json of {model} names no architectures, by which engine and frontend know the model: "
        "download the complete model"
    ]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_far_beyond_its_kind_is_a_fault_and_is_not_read(file: str, model: Path) -> None:
    os.truncate(model / file, 1 << 30)
    assert faults(model) == [
        (
            f"{file} of the model directory {model} is larger than 256 MB, "
            "which no file of its kind is: download it again"
        )
    ]


@pytest.mark.parametrize(
    "key", ["num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_size", "intermediate_size"]
)
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, 1e308])
def test_a_model_whose_dimensions_are_none_is_refused_and_its_plan_is_still_printed(
    key: str, value: object, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_json(model / "config.json", **{key: value})
    assert run(parse(["--check", "--model-path", str(model), *MULTIMODAL])) == 1
    printed = capsys.readouterr().out
    assert "  unknown: the model's config.json is not on this machine" in printed
    assert (
        f"fault: the config.json of {model} does not describe a decoder with attention heads and layers"
        in printed
    )


def test_a_tokenizer_in_a_form_that_the_frontend_does_not_read_is_told_how_to_be_converted(
    model: Path,
) -> None:
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    (fault,) = faults(model)
    assert fault.endswith(
        "convert what is there, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of Transformers does"
    )
    (model / "tokenizer.model").rename(model / "tiktoken.model")
    assert faults(model) == []


def test_a_model_without_a_chat_template_is_refused_where_chats_are_served(
    model: Path, tmp_path: Path
) -> None:
    replace_json(model / "tokenizer_config.json", chat_template=None)
    (fault,) = faults(model)
    assert fault.startswith(
        f"the model directory {model} has no chat template, neither chat_template.jinja nor"
    )
    assert faults(model, "--disaggregation-mode", "decode") == [fault]
    assert (
        faults(model, "--disaggregation-mode", "prefill")
        == faults(model, "--disaggregation-mode", "encode")
        == []
    )
    assert faults(model, *COMPLETIONS) == []
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert faults(model, "--custom-jinja-template", str(tmp_path / "own.jinja")) == []
    (model / "chat_template.jinja").write_text("  \n")
    assert faults(model) == [fault]
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert faults(model) == []


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (POINTER, IS_POINTER),
        (
            "a\n{% for x in %}",
            "is no chat template, its line 2 is not Jinja: correct it, or give another template",
        ),
    ],
)
def test_a_chat_template_that_is_none_is_refused(template: str, words: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert faults(model) == [f"chat_template.jinja of the model directory {model} {words}"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (b"{{ a", "is no chat template, its line 1 is not Jinja: correct it, or give another template"),
        (b" ", "is empty: give a Jinja template"),
        (b"\xff\xfe", "cannot be read as text: give a Jinja template"),
    ],
)
def test_a_template_of_the_users_own_is_looked_at_too(
    template: bytes, words: str, model: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.jinja"
    own.write_bytes(template)
    assert faults(model, "--custom-jinja-template", str(own)) == [
        f"the file of --custom-jinja-template {words}"
    ]


def test_tags_that_only_chat_templates_have_are_taken(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m }}{%- endgeneration -%}{% break %}{% endfor %}"
    )
    assert faults(model) == []


ODD = (
    "has a chat_template in tokenizer_config.json that is neither "
    "a text nor a list of named texts: correct it"
)
NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("named", [NAMED, NAMED[::-1], NAMED[1:]])
def test_of_several_named_chat_templates_the_default_is_handed_to_the_frontend(
    file: str, named: list[dict[str, str]], model: Path
) -> None:
    replace_json(model / "tokenizer_config.json", chat_template=None)
    (model / file).write_text(json.dumps({"chat_template": named}))
    assert faults(model) == []
    config = parse_args(["--model-path", str(model)]).model
    handed = with_served_template(config, str(model), ()).custom_jinja_template
    assert handed is not None
    assert Path(handed).read_text() == "plain"
    (model / "chat_template.jinja").write_text("own file")
    assert with_served_template(config, str(model), ()) == config
    found = find_chat_template(model)
    assert (found.text, found.named) == ("own file", False) if found else None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}],
            (
                "has chat templates named rag, tool_use in tokenizer_config.json and none named default: "
                "write the one to use into a file, and give it with --custom-jinja-template FILE"
            ),
        ),
        ({"default": "a"}, ODD),
        (5, ODD),
        ([], ODD),
        (["a"], ODD),
    ],
)  # fmt: skip
def test_chat_templates_without_a_default_or_of_an_odd_form_are_refused(
    value: object, words: str, model: Path
) -> None:
    replace_json(model / "tokenizer_config.json", chat_template=value)
    assert faults(model) == [f"the model directory {model} {words}"]


def zipped(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"x" * 500)
    file.write_bytes(file.read_bytes()[:-30])


AGAIN = "download it again"
TENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
WEIGHTS: list[tuple[str, str, bytes, str]] = [
    ("pointer", TENSORS, POINTER.encode(), IS_POINTER),
    ("empty", TENSORS, b"", f"is empty: {AGAIN}"),
    ("no header", TENSORS, b"\x01\x02", f"was cut short or holds no tensors: {AGAIN}"),
    ("cut header", TENSORS, safetensors(ones(9))[:20], f"was cut short or holds no tensors: {AGAIN}"),
    (
        "cut",
        TENSORS,
        safetensors(ones(1000), b"x" * 400),
        f"was cut short, 474 of 1,074 bytes are there: {AGAIN}",
    ),
    ("too long", TENSORS, safetensors(ones(4), b"x" * 9), f"is 5 bytes longer than its header says: {AGAIN}"),
    ("no JSON", TENSORS, struct.pack("<Q", 3) + b"abc", f"has a damaged header: {AGAIN}"),
    ("no offsets", TENSORS, safetensors({"w": 5}), f"has a damaged header: {AGAIN}"),
    ("pickle pointer", PICKLE, POINTER.encode(), IS_POINTER),
    ("no pickle", PICKLE, b"<html>", f"holds no weights that PyTorch wrote: {AGAIN}"),
    ("cut archive", PICKLE, b"", f"was cut short: {AGAIN}"),
]


@pytest.mark.parametrize(("name", "file", "content", "words"), WEIGHTS, ids=[case[0] for case in WEIGHTS])
@pytest.mark.parametrize("engine", ENGINES[:2])
def test_weights_that_are_not_whole_are_refused_by_name(
    engine: str, name: str, file: str, content: bytes, words: str, model: Path
) -> None:
    (model / "model.safetensors").unlink()
    (model / file).write_bytes(content)
    if name == "cut archive":
        zipped(model / file)
    assert faults(model, engine=engine) == [f"{file} of the model directory {model} {words}"]
    assert faults(model, engine="double") == faults(model, "--load-format", "dummy", engine=engine) == []


def test_every_shard_of_an_index_must_be_there_and_whole_and_only_those(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index.write_text(json.dumps({"weight_map": {f"w{number}": shard for number, shard in enumerate(shards)}}))
    assert faults(model) == [
        (
            f"the model directory {model} has no {shards[0]} and 2 more, which {index.name} names: "
            "download the complete model"
        )
    ]
    for shard in shards:
        (model / shard).write_bytes(safetensors({}))
    (model / "consolidated.safetensors").write_text(POINTER)
    assert faults(model) == []
    (model / shards[1]).write_text(POINTER)
    assert faults(model) == [f"{shards[1]} of the model directory {model} {IS_POINTER}"]
    index.write_text(POINTER)
    assert faults(model) == [f"{index.name} of the model directory {model} {IS_POINTER}"]
    index.write_text("{}")
    assert faults(model) == [
        f"{index.name} of the model directory {model} names no weights: download it again"
    ]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_parts_without_an_index_tell_by_their_names_which_are_missing(suffix: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    content = safetensors({}) if suffix == ".safetensors" else b"\x80\x02."
    (model / f"model-00002-of-00003{suffix}").write_bytes(content)
    assert faults(model) == [
        (
            f"the model directory {model} has no model-00001-of-00003{suffix} and 1 more, "
            "one of 3 parts: download the complete model"
        )
    ]
    for number in (1, 3):
        (model / f"model-0000{number}-of-00003{suffix}").write_bytes(content)
    assert faults(model) == []


@pytest.mark.parametrize("name", ["a/b/c", "two words", "https://host/model", "org/"])
def test_a_path_that_can_be_no_model_is_refused(name: str) -> None:
    assert faults(Path("x"), "--model-path", name) == [
        f"--model-path {name} is neither a directory on this machine nor a Hugging Face name"
    ]


def test_a_file_is_no_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert faults(Path("model.safetensors")) == [
        "--model-path model.safetensors is not a directory on this machine"
    ]


def test_files_that_never_end_are_not_read(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")
    (fault,) = faults(model)
    assert "tokenizer.json" in fault


@pytest.mark.parametrize("engine", ENGINES)
def test_a_configuration_that_is_a_pipe_or_nested_without_end_is_a_fault(engine: str, model: Path) -> None:
    file = model / "config.json"
    file.write_text("[" * 100_000)
    assert [
        sentence
        for sentence in faults(model, engine=engine)
        if "config.json" in sentence and NO_JSON in sentence
    ]
    file.unlink()
    os.mkfifo(file)
    assert [sentence for sentence in faults(model, engine=engine) if "no config.json" in sentence]


@pytest.mark.parametrize("role", ROLES)
def test_every_role_refuses_a_directory_without_weights(role: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert faults(model, "--disaggregation-mode", role) == [
        (
            f"the model directory {model} has no weights (*.safetensors, *.bin, "
            "*.pt, *.pth): download the complete model"
        )
    ]


def test_a_worker_ends_with_the_sentence_and_neither_serves_nor_prints_a_traceback(model: Path) -> None:
    (model / "model.safetensors").write_text(POINTER)
    command = [
        sys.executable,
        "-m",
        "dynamo.trtllm",
        "--model-path",
        str(model),
        "--engine",
        "transformers",
        *MULTIMODAL,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dynamo.trtllm: model.safetensors of the model directory {model} {IS_POINTER}\n"
