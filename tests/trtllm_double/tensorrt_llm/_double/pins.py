"""KV blocks of contexts that decode has not fetched yet.

The context's engine holds them until decode has fetched them or `kv_transfer_timeout_ms` has passed (None:
for ever). Held contexts are files in `TRTLLM_DOUBLE_PINS` where that names a folder, so that tests can see
those of worker processes; else they are kept here.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_here: dict[str, float | None] = {}
_gone: set[str] = set()


def hold(name: str, timeout_ms: float | None) -> None:
    until = None if timeout_ms is None else time.time() + timeout_ms / 1000
    folder = _folder()
    if folder is None:
        _here[name] = until
        return
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(until), encoding="utf-8")
    temporary.replace(folder / name)


def release(name: str) -> bool:
    """Decode has fetched it. False: it was fetched before, or its time was over; a context of an unknown
    process counts as held."""
    folder = _folder()
    if folder is not None:
        known = name in held()
        (folder / name).unlink(missing_ok=True)
        return known
    known = name not in _gone and (name not in _here or name in held())
    _here.pop(name, None)
    _gone.add(name)
    return known


def held() -> list[str]:
    """Names of the contexts whose blocks are held now, of all processes that share the folder."""
    folder = _folder()
    if folder is None:
        known = dict(_here)
    else:
        files = (f for f in sorted(folder.iterdir()) if not f.name.startswith("."))
        known = {f.name: json.loads(f.read_text(encoding="utf-8")) for f in files}
    now = time.time()
    return [name for name, until in known.items() if until is None or until > now]


def _folder() -> Path | None:
    named = os.environ.get("TRTLLM_DOUBLE_PINS")
    if not named:
        return None
    Path(named).mkdir(parents=True, exist_ok=True)
    return Path(named)
