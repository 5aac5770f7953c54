"""The chat template that Dynamo's frontend is given where the model's own files do not serve it."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dynamo.trtllm.config import ModelConfig
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.model_files import find_chat_template
from dynamo.trtllm.multimodal.kinds.registry import KINDS

_AS_MEDIA = """\
{%%- set by_part = %s -%%}
{%%- set read = namespace(messages=[]) -%%}
{%%- for message in messages -%%}
{%%- if message.content and message.content is not string and message.content is iterable -%%}
{%%- set own = namespace(parts=[]) -%%}
{%%- for part in message.content -%%}
{%%- set own.parts = own.parts + [by_part.get(part.type, part) if part is mapping else part] -%%}
{%%- endfor -%%}
{%%- set read.messages = read.messages + [dict(message, content=own.parts)] -%%}
{%%- else -%%}
{%%- set read.messages = read.messages + [message] -%%}
{%%- endif -%%}
{%%- endfor -%%}
{%%- set messages = read.messages -%%}{{ '' }}"""
"""Stands before a template: parts in a form that it does not know become media parts in one that it does."""


def with_served_template(model: ModelConfig, directory: str, kinds: Iterable[str]) -> ModelConfig:
    """`model` with a chat template in a file of its own, where the one in `directory` would not do. `kinds`
    are those of the media that the engine takes. The file goes when the process ends.

    * Dynamo's frontend lists a model with a list of named templates and then refuses every chat: the default
      is taken.
    * A part like `input_audio` is unknown to most templates. They write no placeholder for it, so that the
      frontend, which does not know it either, would have it answered as if it were not there. The template is
      told that it is a sound: then the worker either gets it, or misses it and says so.
    """
    text, own = _chosen(model, Path(directory))
    if text is None:
        return model
    others = {
        part: {"type": KINDS[kind].part_type, KINDS[kind].part_type: {"url": ""}}
        for kind in kinds
        if kind in KINDS
        for part in KINDS[kind].message_parts
        if part not in text
    }
    if others:
        text = _AS_MEDIA % json.dumps(others) + text
    elif own:
        return model
    handle, name = tempfile.mkstemp(prefix="dynamo-trtllm-", suffix=".jinja")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    atexit.register(Path(name).unlink, missing_ok=True)
    return replace(model, custom_jinja_template=name)


def _chosen(model: ModelConfig, directory: Path) -> tuple[str | None, bool]:
    """The template's text, and whether the frontend finds it by itself; None: there is none."""
    if model.custom_jinja_template:
        return Path(model.custom_jinja_template).read_text(encoding="utf-8"), True
    with suppress(StartupError):  # no default among several: said already where a chat is served
        template = find_chat_template(directory)
        if template is not None:
            return template.text, not template.named
    return None, True
