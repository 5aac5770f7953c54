"""A model's files: where they are, what their JSON holds, and which chat template they bring."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dynamo.trtllm.errors import StartupError

DEMO_MODEL = "demo"
DEMO_DIRECTORY = Path(__file__).parent / "demo" / "model"
DEMO_AUDIO_MODEL = "demo-audio"
DEMO_MODELS = {DEMO_MODEL: DEMO_DIRECTORY, DEMO_AUDIO_MODEL: DEMO_DIRECTORY.with_name("audio_model")}
"""The models that come with the package, by the words that name them."""
CONFIG = "config.json"
AGAIN = "download it again"
MAX_JSON_BYTES = 256 << 20
"""The largest tokenizers have 40 MB."""
POINTER_START = b"version https://git-lfs.github.com/spec/"
IS_POINTER = (
    "is a Git LFS pointer and not the file itself: "
    "run `git lfs pull` in that directory, or download the model again"
)
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks the assistant's part for training; frontends drop it, and Jinja itself does not know it."""


async def resolve_model(path: str) -> str:
    """The local directory of `path`. Raises `StartupError` when there is none and none can be fetched."""
    if path in DEMO_MODELS:
        return str(DEMO_MODELS[path])
    local = await asyncio.to_thread(_find_directory, path)
    if local is not None:
        return local
    if path.startswith(("/", "./", "../", "~")):
        raise StartupError(f"--model-path {path} is not a directory on this machine")
    from dynamo.llm import fetch_model

    try:
        return str(await fetch_model(path))
    except Exception as error:
        raise StartupError(
            f"--model-path {path} is neither a directory nor a model that can be fetched; "
            "check the name and the network"
        ) from error


def _find_directory(path: str) -> str | None:
    return str(Path(path).resolve()) if Path(path).is_dir() else None


def find_model_directory(path: str) -> Path | None:
    """The local directory of a model: itself, the demo's, or what the Hugging Face cache holds.
    Downloads nothing."""
    if path in DEMO_MODELS:
        return DEMO_MODELS[path]
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, CONFIG)
    except (ImportError, ValueError):
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def read_model_json(path: str, name: str = CONFIG) -> Mapping[str, Any]:
    """The object in a JSON file of the model at `path`;
    empty where it is not on this machine or not whole."""
    directory = find_model_directory(path)
    return read_object(directory / name) if directory is not None else {}


def architectures_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names by which engine and frontend know the model of a config.json; empty where it names none."""
    named = config.get("architectures")
    return tuple(each for each in named if isinstance(each, str)) if isinstance(named, list) else ()


def find_json_fault(file: Path) -> str | None:
    """What is wrong with a file that should hold a JSON object, as the end of a sentence; None: nothing, or
    no such file."""
    content = _content(file)
    return content if isinstance(content, str) else None


def read_object(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where `find_json_fault` would find one, or where there is no file."""
    content = _content(file)
    return content if isinstance(content, dict) else {}


def _content(file: Path) -> dict[str, Any] | str | None:
    """A pipe is no file: reading it may never end."""
    try:
        found = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    if found.st_size > MAX_JSON_BYTES:
        return f"is larger than {MAX_JSON_BYTES >> 20} MB, which no file of its kind is: {AGAIN}"
    return _read(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=8)
def _read(file: Path, _changed: int, _size: int) -> dict[str, Any] | str:
    """The content, or what is wrong. Kept, since a tokenizer of 30 MB takes a second and is asked for
    several times."""
    try:
        data = file.read_bytes()
    except OSError:
        return "cannot be read: check its permissions"
    if data.startswith(POINTER_START):
        return IS_POINTER
    if not data.strip():
        return f"is empty: {AGAIN}"
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return f"is no JSON, or was cut short: {AGAIN}"
    return content if isinstance(content, dict) else f"holds no JSON object: {AGAIN}"


@dataclass(frozen=True)
class ChatTemplate:
    """A model's default chat template. `named`: it is one of a list by name, which Dynamo's frontend does
    not read."""

    text: str
    file: str
    named: bool = False


def find_chat_template(directory: Path) -> ChatTemplate | None:
    """The default chat template in the order in which Dynamo's frontend looks; None where there is none.

    Raises `StartupError` with the end of a sentence about the directory where the frontend cannot use what
    is there.
    """
    fields: dict[str, Any] = {
        file: read_object(directory / file).get("chat_template")
        for file in ("chat_template.json", "tokenizer_config.json")
    }
    for file, value in fields.items():
        if not (value is None or isinstance(value, str) or _by_name(value)):
            raise StartupError(
                f"has a chat_template in {file} that is neither a text nor a list of named texts: correct it"
            )
    with suppress(OSError, UnicodeDecodeError):
        text = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        if text.strip():
            return ChatTemplate(text, "chat_template.jinja")
    for file, value in fields.items():
        if isinstance(value, list):
            return ChatTemplate(_default(_by_name(value), file), file, named=True)
        if value is not None and value.strip():
            return ChatTemplate(value, file)
    return None


def _by_name(value: Any) -> dict[str, str]:
    """The templates of a list as Transformers writes it; empty when it is something else."""
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
    except (TypeError, LookupError):
        return {}
    return named if isinstance(value, list) and all(isinstance(text, str) for text in named.values()) else {}


def _default(named: Mapping[str, str], file: str) -> str:
    if len(named) > 1 and "default" not in named:
        raise StartupError(
            f"has chat templates named {', '.join(sorted(named))} in {file} and none named default: "
            "write the one to use into a file, and give it with --custom-jinja-template FILE"
        )
    return named.get("default") or next(iter(named.values()))


def find_template_fault(file: Path) -> str | None:
    """As `template_fault`, of a file that must hold a template."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "cannot be read as text: give a Jinja template"
    return template_fault(text) if text.strip() else "is empty: give a Jinja template"


def template_fault(text: str) -> str | None:
    """What is wrong with a chat template, as the end of a sentence; None: nothing that can be seen without
    rendering it."""
    if text.encode("utf-8", "replace").startswith(POINTER_START):
        return IS_POINTER
    try:
        from jinja2 import Environment, TemplateSyntaxError
    except ImportError:
        return None
    try:
        Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(
            _GENERATION_TAG.sub("", text)
        )
    except TemplateSyntaxError as error:
        return (
            f"is no chat template, its line {error.lineno} is not Jinja: correct it, or give another template"
        )
    return None
