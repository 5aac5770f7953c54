"""The faults that the double acts out.

`TRTLLM_DOUBLE_SCRIPT` holds `Script` fields as JSON and is read at import, so that a worker process can be
scripted. Tests in one process change `script` itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields

from tensorrt_llm._double.release import release

__all__ = ["Script", "release", "script"]


@dataclass
class Script:
    """Token numbers count a request's output tokens from 0."""

    step_delay_s: float = 0.0
    gpus: int = 8
    fail_at_token: int | None = None
    """`RequestError` at this token of every request."""
    fatal_at_token: int | None = None
    """The executor shuts down and raises something that is no `RequestError`; others hang."""
    fatal_ends_others: bool = False
    """After a fatal error the requests that wait end with it as well, as `_terminal_error` of rc29 allows."""
    hang_at_token: int | None = None
    handling_fails_at_token: int | None = None
    handling_error: str = "AssertionError"
    """What the library's result handling raises at `handling_fails_at_token`: "AssertionError" or
    "ValueError". The engine lives."""
    context_reason: str = "length"
    """`finish_reason` of a context: "length" as the sampler says; result handling knows "not_finished"
    too."""
    shrink_last: int = 0
    """The last step's ids are this many shorter than what was streamed."""
    transfer_fails: bool = False
    encode_fails_on: str | None = None
    """The encoder refuses images of this size, as `WxH`."""
    no_handles: bool = False
    input_fails_on: str | None = None
    """Input processing raises `input_error` for images of this size, as `WxH`; "*": for every image."""
    input_error: str = "RuntimeError"
    """NotImplementedError, KeyError, RuntimeError, OSError, ValueError, TypeError, AssertionError or
    IndexError."""
    hashing_fails: bool = False
    """Media hashing raises, whatever the request."""
    transceiver_runtime: str | None = None
    """What `transceiver_runtime: auto` chooses for this model: "CPP" or "PYTHON"; None: as the release
    does."""
    opaque_state: str = "none"
    """What the Python transceiver leaves in `opaque_state`: "none", "empty" or "bytes"."""
    dies_idle_after_s: float | None = None
    """The engine's ranks die this long after construction, without a word; requests hang from then on."""
    health_blocks_s: float = 0.0
    """`_check_health` of a dead engine blocks its thread this long, as a message to a dead rank can."""


def _from_environment() -> Script:
    given = json.loads(os.environ.get("TRTLLM_DOUBLE_SCRIPT", "{}"))
    unknown = set(given) - {f.name for f in fields(Script)}
    if unknown:
        raise ValueError(f"the TensorRT-LLM double knows no script key {sorted(unknown)}")
    return Script(**given)


script = _from_environment()
