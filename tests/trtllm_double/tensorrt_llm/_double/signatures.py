"""Signatures and pydantic classes made from the tables, so that the double refuses exactly what the release
does not have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Optional

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from tensorrt_llm._double.release import Release
from tensorrt_llm._double.tables import OF_ITS_OWN, REQUIRED, SECTIONS

STRICT = ConfigDict(
    extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True, validate_assignment=False
)


class CapacitySchedulerPolicy(str, Enum):
    """`tensorrt_llm.llmapi.CapacitySchedulerPolicy`."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


def signature(parameters: Mapping[str, Any]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = [inspect.Parameter("self", kind)]
    for name, default in parameters.items():
        made.append(
            inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is REQUIRED else default)
        )
    return inspect.Signature(made)


def configuration_classes(release: Release) -> dict[str, type[BaseModel]]:
    """Every nested configuration of the release by its class name; those that others hold come first."""
    classes: dict[str, type[BaseModel]] = {}
    holders = ("KvCacheConfig", "SchedulerConfig")
    for name in [*(n for n in release.nested if n not in holders), *holders]:
        fields = {
            key: _field(release, f"{name}.{key}", key, value, classes)
            for key, value in release.nested[name].items()
        }
        classes[name] = create_model(name, __config__=STRICT, **fields)  # type: ignore[call-overload]
    return classes


def arguments_class(
    release: Release, classes: Mapping[str, type[BaseModel]], name: str = "TorchLlmArgs"
) -> type[BaseModel]:
    fields = {key: _field(release, key, key, default, classes) for key, default in release.arguments.items()}
    made: type[BaseModel] = create_model(name, __config__=STRICT, **fields)  # type: ignore[call-overload]
    return made


def _field(
    release: Release, dotted: str, key: str, default: Any, classes: Mapping[str, type[BaseModel]]
) -> tuple[Any, Any]:
    nested = classes.get(SECTIONS.get(key, ""))
    if nested is not None:
        made = default is OF_ITS_OWN
        return (nested, Field(default_factory=nested)) if made else (Optional[nested], None)  # noqa: UP045
    if key == "capacity_scheduler_policy":
        return CapacitySchedulerPolicy, CapacitySchedulerPolicy(default)
    if key == "load_format":
        return Annotated[Any, AfterValidator(_load_format(release.choices["load_format"]))], default
    return _kind(release, dotted), ... if default is REQUIRED else default


def _load_format(choices: tuple[Any, ...]) -> Any:
    """A name in any case, or the library's enumeration (llm_args.py: `LoadFormat[value.upper()]`)."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value.lower() not in choices:
            raise ValueError(f"Invalid LoadFormat: {value}")
        return value

    return check


def _kind(release: Release, dotted: str) -> Any:
    choices = release.choices.get(dotted)
    if choices is None:
        return Any
    values: Any = Literal[tuple(c for c in choices if c is not None)]
    return Optional[values] if None in choices else values  # noqa: UP045
