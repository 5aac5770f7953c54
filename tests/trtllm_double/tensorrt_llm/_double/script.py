"""The release that the double plays and the faults that it acts out.

`TRTLLM_DOUBLE_RELEASE` chooses the release, `TRTLLM_DOUBLE_SCRIPT` holds `Script` fields as JSON; both are read at import, so
that a worker process can be scripted. Tests in one process change `script` itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields

from dynamo.trtllm.engines.tensorrt_llm.record import RECORD, Release

release: Release = RECORD[os.environ.get("TRTLLM_DOUBLE_RELEASE", "1.3.0rc29")]


@dataclass
class Script:
    """Token numbers count a request's output tokens from 0."""

    step_delay_s: float = 0.0
    gpus: int = 8
    fail_at_token: int | None = None
    """`RequestError` at this token of every request."""
    fatal_at_token: int | None = None
    """The executor shuts down and raises something that is no `RequestError`; others hang."""
    hang_at_token: int | None = None
    shrink_last: int = 0
    """The last step's ids are this many shorter than what was streamed."""
    transfer_fails: bool = False
    encode_fails_on: str | None = None
    """The encoder refuses images of this size, as `WxH`."""
    no_handles: bool = False


def _from_environment() -> Script:
    given = json.loads(os.environ.get("TRTLLM_DOUBLE_SCRIPT", "{}"))
    unknown = set(given) - {f.name for f in fields(Script)}
    if unknown:
        raise ValueError(f"the TensorRT-LLM double knows no script key {sorted(unknown)}")
    return Script(**given)


script = _from_environment()
