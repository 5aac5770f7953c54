"""`python -m dynamo.trtllm.sidecar`: the launcher of that name in `ai-dynamo`, which this package lies in
front of.

Run as a program, this package first steps aside, so that all of `dynamo.trtllm` is theirs in that process,
as if it were alone. Imported, this module becomes theirs and nothing else of their `dynamo.trtllm` is
seen.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

_NAME = "dynamo.trtllm.sidecar"
_OURS = Path(__file__).resolve().parents[2]
"""The folder on `sys.path` that holds this package's `dynamo`."""


def _their_file() -> Path:
    """Their `sidecar.py`. Raises `ModuleNotFoundError` where the installed `ai-dynamo` has none."""
    for folder in importlib.import_module("dynamo").__path__:
        file = Path(folder) / "trtllm" / "sidecar.py"
        if file.is_file() and _OURS not in file.resolve().parents:
            return file
    raise ModuleNotFoundError(f"the installed ai-dynamo has no {_NAME}", name=_NAME)


def _step_aside() -> None:
    """From here on `dynamo.trtllm` is the package of `ai-dynamo` in this process."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _OURS]
    for name in [n for n in sys.modules if n == "dynamo.trtllm" or n.startswith("dynamo.trtllm.")]:
        del sys.modules[name]
    vars(importlib.import_module("dynamo")).pop("trtllm", None)
    importlib.invalidate_caches()


if __name__ == "__main__":
    try:
        _their_file()
    except ModuleNotFoundError as error:
        sys.exit(f"dynamo.trtllm.sidecar: {error}")
    _step_aside()
    runpy.run_module(_NAME, run_name="__main__", alter_sys=True)
else:
    __file__ = str(_their_file())
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())
