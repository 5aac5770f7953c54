"""What a record of one release holds, and the values that stand for what a default cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record.models import ModelFacts
from dynamo.trtllm.engines.tensorrt_llm.record.videos import NO_VIDEO, NOT_READ, VideoFacts


class _Word:
    """A value that is only itself, with a name to print."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


REQUIRED: Any = _Word("required")
"""Default of a parameter that has none."""
UNSAID: Any = _Word("not recorded")
"""Default of a field whose name was read and whose default was not."""
MADE: Any = _Word("made by the class")
"""Default of a field that gets a new object of its class, or the value of an expression."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release: names and defaults are those a caller may rely on, each group with its source."""

    version: str
    llm_arguments: Mapping[str, str]
    """Constructor keys of `LLM` -> source. A key that is not here is refused by that release."""
    nested: Mapping[str, Mapping[str, Any]]
    """Configuration object -> its fields -> default."""
    nested_sources: Mapping[str, str]
    choices: Mapping[str, tuple[Any, ...]]
    """Dotted name -> the values it accepts, spelled as the library wants them."""
    generate_async: Mapping[str, Any]
    """Parameters of `LLM.generate_async` -> default; all after `streaming` are passed by keyword."""
    preprocess: Mapping[str, Any]
    """Parameters of `LLM.preprocess` -> default; empty where the release has no such method."""
    encoder_arguments: Mapping[str, Any]
    encoder_generate_async: Mapping[str, Any]
    sampling: Mapping[str, Any]
    guided: Mapping[str, Any]
    disaggregated: tuple[str, ...]
    """Fields of `DisaggregatedParams`; all default to None."""
    methods: tuple[str, ...]
    """Public methods and properties of `LLM` that the adapter may use."""
    behaviours: Mapping[str, tuple[Any, str]]
    """Name of a behaviour -> its value and its source."""
    videos: Mapping[str, VideoFacts] = field(default_factory=dict)
    """Architecture -> what becomes of its videos; see `video_facts`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Group -> source, for the groups that have no source of their own."""
    read_in: Mapping[str, str] = field(default_factory=dict)
    """Sources that no other release names: key -> where that is. They join `SOURCES`."""
    read_from: str = "source"
    """`source`, or `documentation` for a release whose source could not be read."""

    def video_facts(self, architecture: str | None, model: ModelFacts) -> VideoFacts:
        """What this release does with videos of `model`, whose class is `architecture`."""
        if "V" not in model.modalities:
            return VideoFacts(NO_VIDEO, NO_VIDEO, model.source)
        return self.videos.get(architecture or "", NOT_READ)


def names(source: str, text: str) -> dict[str, str]:
    """Names in `text`, each with its source."""
    return dict.fromkeys(text.split(), source)


def fields(text: str, /, **defaults: Any) -> dict[str, Any]:
    """Fields in `text`, whose defaults were not read, and those with a default."""
    return {**dict.fromkeys(text.split(), UNSAID), **defaults}


def unset(text: str) -> dict[str, Any]:
    """Fields in `text`, all of which default to None."""
    return dict.fromkeys(text.split())
