"""The recorded releases, oldest first: a file with a `RELEASE`, and a line here, for each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from dynamo.trtllm.engines.tensorrt_llm.record.release import Release

_FILES = (
    "v1_2_1",
    "v1_3_0rc29",
    "v1_4_0rc2",
)


def _read(file: str) -> Release:
    release: Release = import_module(f"{__name__}.{file}").RELEASE
    return release


RECORD: Mapping[str, Release] = {release.version: release for release in map(_read, _FILES)}
