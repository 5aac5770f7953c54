"""Every flag there is, gathered from its declaration in `config.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dynamo.trtllm.config import (
    AudioLimits,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    PeerConfig,
    RuntimeConfig,
    TransferConfig,
    VideoLimits,
    WorkerConfig,
)
from dynamo.trtllm.engine_flags import ENGINE_FLAGS
from dynamo.trtllm.flag import Flag, flags_of
from dynamo.trtllm.invocation import CheckOptions, Sources

_TITLES = ("Model", "Role and peers", "Engine", "Media", "Transfer", "Check", "Older flags")
_LAYERS: tuple[tuple[str, type[Any]], ...] = (
    ("Model", ModelConfig),
    ("Role and peers", WorkerConfig),
    ("Role and peers", PeerConfig),
    ("Engine", EngineConfig),
    ("Engine", Sources),
    ("Media", MediaConfig),
    ("Media", VideoLimits),
    ("Media", AudioLimits),
    ("Transfer", TransferConfig),
    ("Check", CheckOptions),
    ("Older flags", RuntimeConfig),
)
"""Title that a layer's flags stand under in `--help` and README, unless a flag says another."""

OTHER_VARIABLES = frozenset({"DYN_TRTLLM_PULL_EGRESS"})
"""Variables with our prefix that are no flag's."""


def _declared() -> Iterator[tuple[str, Flag[Any]]]:
    for title, layer in _LAYERS:
        flags = list(flags_of(layer).values())
        if layer is EngineConfig:
            flags += ENGINE_FLAGS
        yield from ((each.group or title, each) for each in flags)


GROUPS: Mapping[str, list[Flag[Any]]] = {
    title: [each for group, each in _declared() if group == title] for title in _TITLES
}
FLAGS: Mapping[str, Flag[Any]] = {each.name: each for flags in GROUPS.values() for each in flags}
