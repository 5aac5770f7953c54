"""Signatures and classes made from the record, so that the double refuses exactly what the recorded release does not have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, create_model

from dynamo.trtllm.engines.tensorrt_llm.record import REQUIRED, Release


def signature(parameters: Mapping[str, Any], keyword_after: str | None = None) -> inspect.Signature:
    """Parameters after `keyword_after` are keyword-only: their positions differ between releases."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = [inspect.Parameter("self", kind)]
    for name, default in parameters.items():
        made.append(inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is REQUIRED else default))
        if name == keyword_after:
            kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(made)


def arguments_class(release: Release) -> type[BaseModel]:
    """A pydantic class of all constructor keys, strict as the real one, with a class for each recorded nested configuration."""
    strict = ConfigDict(extra="forbid", protected_namespaces=())
    fields: dict[str, Any] = {}
    for name in release.llm_arguments:
        if name in release.nested:
            inner = {
                key: (_kind(release, f"{name}.{key}"), default if _is_choice(release, f"{name}.{key}", default) else None)
                for key, default in release.nested[name].items()
            }
            nested = create_model(name.title().replace("_", ""), __config__=strict, **inner)  # type: ignore[call-overload]
            fields[name] = (Optional[nested], None)  # noqa: UP045
        else:
            fields[name] = (_kind(release, name), None)
    made: type[BaseModel] = create_model("TorchLlmArgs", __config__=strict, **fields)
    return made


def _kind(release: Release, dotted: str) -> Any:
    choices = release.choices.get(dotted)
    if choices is None:
        return Any
    return Optional[Literal[tuple(c for c in choices if c is not None)]]  # noqa: UP045


def _is_choice(release: Release, dotted: str, default: Any) -> bool:
    return dotted not in release.choices or default in release.choices[dotted]
