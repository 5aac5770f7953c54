"""The chat template that the frontend is given, rendered as Transformers renders one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.config import ModelConfig
from dynamo.trtllm.served_template import with_served_template
from engines.families import byte_tokenizer, qwen2_audio

SOUND = {"type": "audio_url", "audio_url": {"url": "https://host/a"}}
SPOKEN = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TURNS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": [SOUND, {"type": "text", "text": "what?"}]}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "<"}, SPOKEN, SOUND, SPOKEN]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "x"},
    ],
)
ALL = "{% for m in messages %}{{ m.role }}, {{ m.content }}, {{ m.tool_calls }}, {{ m.x }}; {% endfor %}"


@pytest.fixture(scope="module")
def own() -> str:
    return str(qwen2_audio()[1].chat_template)


def served(directory: Path, template: str, kinds: tuple[str, ...], custom: str | None = None) -> str | None:
    (directory / "chat_template.jinja").write_text(template)
    found = with_served_template(ModelConfig(custom_jinja_template=custom), str(directory), kinds)
    file = found.custom_jinja_template
    return None if file is None else Path(file).read_text()


def rendered(template: str, turns: list[dict[str, Any]]) -> str:
    return str(byte_tokenizer().apply_chat_template(turns, chat_template=template, tokenize=False))


def as_url(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`turns` with every sound in the form that the templates of models know."""
    return json.loads(json.dumps(turns).replace(json.dumps(SPOKEN), json.dumps(SOUND)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("turns", TURNS)
def test_a_spoken_part_is_written_like_a_sound_by_url(
    own: str, turns: list[dict[str, Any]], tmp_path: Path
) -> None:
    given = served(tmp_path, own, ("audio",))
    assert given is not None
    assert rendered(given, turns) == rendered(own, as_url(turns))


@pytest.mark.parametrize("turns", TURNS[:2])
def test_all_else_reaches_the_template_as_before(turns: list[dict[str, Any]], tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    asked = [*turns, called, {"role": "tool", "content": "x", "x": 1}, {"role": "user", "content": ["a"]}]
    for template in (ALL, f"\n {ALL}"):
        given = served(tmp_path, template, ("audio",))
        assert given is not None
        assert rendered(given, asked) == rendered(template, asked)


def test_a_template_that_knows_spoken_parts_and_a_model_without_media_are_left_alone(
    own: str, tmp_path: Path
) -> None:
    assert served(tmp_path, own, ()) is None
    assert served(tmp_path, own + "{# input_audio #}", ("audio",)) is None


def test_a_template_of_the_operators_own_is_treated_alike(own: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("operator's {{ messages[0].content[0].type }}")
    given = served(tmp_path, own, ("audio",), str(file))
    assert given is not None
    assert rendered(given, [{"role": "user", "content": [SPOKEN]}]) == "operator's audio"
    assert served(tmp_path, own, (), str(file)) == file.read_text()


def test_a_model_without_audio_misses_an_item_of_what_it_takes(tmp_path: Path) -> None:
    template = "{% for part in messages[0].content %}{{ part.type }} {{ 'image_url' in part }};{% endfor %}"
    given = served(tmp_path, template, ("image", "video"))
    assert given is not None
    text = {"type": "text", "text": "a"}
    assert rendered(given, [{"role": "user", "content": [text, SPOKEN]}]) == "text False;image True;"


def test_so_many_parts_that_growing_a_list_of_them_would_hold_up_the_frontend_are_refused(
    own: str, tmp_path: Path
) -> None:
    given = served(tmp_path, own, ("audio",))
    assert given is not None
    text = {"type": "text", "text": "a"}
    many: list[dict[str, Any]] = [{"role": "user", "content": [text] * 3000}]
    assert rendered(given, many) == rendered(own, many)
    with pytest.raises(Exception, match="too many messages and parts"):
        rendered(given, [*many, {"role": "user", "content": [SPOKEN]}])
