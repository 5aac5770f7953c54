"""The shipped model directory: its files load, and its chat template and tokenizer do what Dynamo's frontend
expects of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoProcessor, GenerationConfig

from dynamo.trtllm.demo import MODEL_DIR, train
from dynamo.trtllm.demo.artifacts import CHAT_TEMPLATE, MAX_WEIGHTS_BYTES, SPECIAL_TOKENS

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    return str(jinja2.Environment().from_string(CHAT_TEMPLATE).render(messages=messages, **variables))


def test_the_weights_take_at_most_five_megabytes() -> None:
    assert 0 < (MODEL_DIR / "model.safetensors").stat().st_size <= MAX_WEIGHTS_BYTES == 5_000_000


def test_the_directory_is_complete() -> None:
    assert {path.name for path in MODEL_DIR.iterdir()} >= {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_configuration_is_a_qwen2_vl_in_float32_with_room_for_long_answers() -> None:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert config.model_type == "qwen2_vl"
    assert str(config.dtype) == "torch.float32"
    assert config.text_config.max_position_embeddings >= 4096
    assert config.tie_word_embeddings


def test_generation_ends_at_the_end_of_the_turn_or_of_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ends = GenerationConfig.from_pretrained(MODEL_DIR).eos_token_id
    assert ends == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]


@pytest.mark.parametrize(
    "text",
    [
        "Describe the image.",
        "héllo wörld — naïve",
        "图片 红色",
        "🙂👍🏽",
        "\x00\x01\t\r\n\n  end  ",
        "".join(map(chr, range(256))),
    ],
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_and_tokenizers_give_the_same_ids() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    text = f"<|im_start|>user\n{PICTURE}What's  in it? Ümläut 图\n\n<|im_end|>\n<|im_start|>assistant\n"
    processor: Any = AutoProcessor
    assert processor.from_pretrained(MODEL_DIR).tokenizer(text).input_ids == tokenizer.encode(text).ids


def test_special_tokens_are_single_ids() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert [len(tokenizer.encode(token).ids) for token in SPECIAL_TOKENS] == [1] * len(SPECIAL_TOKENS)


def test_both_copies_of_the_chat_template_are_the_one_in_the_source() -> None:
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


def test_the_template_takes_a_string_and_a_list_alike() -> None:
    as_string = render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    as_list = render(
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], add_generation_prompt=True
    )
    assert as_string == as_list == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_the_template_keeps_texts_and_pictures_in_their_order(kind: str) -> None:
    content = [
        {"type": "text", "text": "first "},
        {"type": kind, "image_url": {"url": "x"}},
        {"type": "text", "text": " second "},
        {"type": kind, "image_url": {"url": "y"}},
        {"type": "text", "text": " end"},
    ]
    assert render([{"role": "user", "content": content}]) == (
        f"<|im_start|>user\nfirst {PICTURE} second {PICTURE} end<|im_end|>\n"
    )


def test_the_template_renders_every_role_and_ignores_tools() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(messages, tools=tools) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nt<|im_end|>\n"
    )


def test_training_by_path_makes_a_directory_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = [
        sys.executable,
        str(Path(train.__file__)),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    (out / "tokenizer.json").parent.mkdir()
    (out / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    command += [
        "--steps",
        "2",
        "--rows",
        "2",
        "--cases",
        "0",
        "--checkpoint",
        str(tmp_path / "checkpoint.pt"),
    ]
    subprocess.run(command, check=True, timeout=240)
    names = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    )
    for name in names:
        assert (out / name).read_bytes() == (MODEL_DIR / name).read_bytes()
    assert (out / "model.safetensors").stat().st_size == (MODEL_DIR / "model.safetensors").stat().st_size
    assert (tmp_path / "checkpoint.pt").exists()
