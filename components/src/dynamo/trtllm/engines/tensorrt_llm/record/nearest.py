"""The record to judge a release by: its own, or the nearest one, which is then said."""

from __future__ import annotations

import re

from dynamo.trtllm.engines.tensorrt_llm.record.release import Release
from dynamo.trtllm.engines.tensorrt_llm.record.releases import RECORD

PAIRED_WITH_DYNAMO = "1.3.0rc29"
"""Judges a version that is no number."""


def release_record(version: str) -> Release:
    """The record nearest to `version`; see `nearest_release`."""
    return nearest_release(version)[0]


def nearest_release(version: str) -> tuple[Release, str | None]:
    """The record of `version`, or the nearest one and a sentence that says so.

    Nearest is the same minor line, else the newest line below it, else the oldest of all.
    """
    if version in RECORD:
        return RECORD[version], None
    record = RECORD[_nearest(version)]
    return (
        record,
        f"TensorRT-LLM {version} is not recorded: compared with the nearest record, {record.version}",
    )


def _nearest(version: str) -> str:
    line = _line(version)
    if line is None:
        return PAIRED_WITH_DYNAMO
    below = [recorded for recorded in RECORD if (_line(recorded) or line) <= line]
    return below[-1] if below else next(iter(RECORD))


def _line(version: str) -> tuple[int, int] | None:
    """Major and minor number."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
