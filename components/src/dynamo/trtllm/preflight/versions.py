"""Installed versions that were not tried with this package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from dynamo.trtllm.engines.tensorrt_llm.record import nearest_release

DYNAMO = ("ai-dynamo", "ai-dynamo-runtime")
TESTED_LINES = ("1.6",)
"""Minor versions of Dynamo that the tests run on."""


def installed(package: str) -> str | None:
    """The installed version of a package, None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untested() -> Iterator[str]:
    """One sentence for Dynamo and one for TensorRT-LLM, where an installed version is not a tried or
    recorded one."""
    found = {package: version for package in DYNAMO if (version := installed(package)) is not None}
    strange = {package: version for package, version in found.items() if _line(version) not in TESTED_LINES}
    if strange:
        names = " and ".join(f"{package} {version}" for package, version in strange.items())
        verb = "are" if len(strange) > 1 else "is"
        yield f"{names} {verb} installed, and this package was tested with {' and '.join(TESTED_LINES)} only"
    engine = installed("tensorrt_llm")
    note = nearest_release(engine)[1] if engine is not None else None
    if note is not None:
        yield f"{note}; what it takes is asked of it when the engine starts"


def _line(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
