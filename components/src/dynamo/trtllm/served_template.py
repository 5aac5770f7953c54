"""The chat template that Dynamo's frontend is given where the model's own files do not serve it."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dynamo.trtllm.config import ModelConfig
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.model_files import find_chat_template
from dynamo.trtllm.multimodal.kinds.registry import KINDS

_MOST_REWRITTEN = 2000
"""Messages and parts of a request that is rewritten: a template grows a list only by copying it."""
_AS_MEDIA = """\
{%- set by_part = BY_PART -%}
{%- set seen = namespace(other=false, count=messages | length, messages=[]) -%}
{%- for message in messages -%}
{%- if message.content and message.content is not string and message.content is iterable -%}
{%- set seen.count = seen.count + message.content | length -%}
{%- for part in message.content -%}
{%- if part is mapping and part.type in by_part -%}{%- set seen.other = true -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if seen.other and seen.count > MOST -%}{{ raise_exception('too many messages and parts') }}{%- endif -%}
{%- for message in messages if seen.other -%}
{%- set own = namespace(parts=[], other=false) -%}
{%- if message.content and message.content is not string and message.content is iterable -%}
{%- for part in message.content -%}
{%- set other = by_part.get(part.type) if part is mapping else none -%}
{%- if other -%}{%- set own.other = true -%}{%- endif -%}
{%- set own.parts = (own.parts + [other or part]) | list -%}
{%- endfor -%}
{%- endif -%}
{%- set message = dict(message, content=own.parts) if own.other else message -%}
{%- set seen.messages = (seen.messages + [message]) | list -%}
{%- endfor -%}
{%- set messages = seen.messages if seen.other else messages -%}{{ '' }}"""
"""Stands before a template: parts in a form that it does not know become media parts in one that it does."""


def with_served_template(model: ModelConfig, directory: str, kinds: Iterable[str]) -> ModelConfig:
    """`model` with a chat template in a file of its own, where the one in `directory` would not do. `kinds`
    are those of the media that the engine takes; none where the frontend may not get a file that is not the
    model's own. The file goes when the process ends.

    * Dynamo's frontend lists a model with a list of named templates and then refuses every chat: the default
      is taken.
    * A part like `input_audio` is unknown to most templates. They write no placeholder for it, so that the
      frontend, which does not know it either, would have it answered as if it were not there. The template is
      told that it is a sound, or where the model takes none, an item of what it takes: then the worker either
      gets the sound and hears or refuses it, or misses an item and says so.
    """
    text, own = _chosen(model, Path(directory))
    if text is None:
        return model
    others = _others([kind for kind in kinds if kind in KINDS], text)
    if others:
        before = _AS_MEDIA.replace("BY_PART", json.dumps(others)).replace("MOST", str(_MOST_REWRITTEN))
        text = before + text
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


def _others(taken: Sequence[str], template: str) -> dict[str, dict[str, object]]:
    """What stands for each form of a part that `template` does not know: a media part as templates see one,
    with the kind as its type, of the kind itself or of another that is taken.
    """
    found: dict[str, dict[str, object]] = {}
    for kind in KINDS.values() if taken else ():
        seen_as = KINDS[kind.name if kind.name in taken else taken[0]]
        part: dict[str, object] = {"type": seen_as.name, seen_as.part_type: {"url": ""}}
        found.update((name, part) for name in kind.message_parts if name not in template)
    return found
