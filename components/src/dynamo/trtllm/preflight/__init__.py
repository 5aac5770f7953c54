"""Checks a configuration before anything is loaded: `--check`, and the same rules at every start.
Never imports an engine."""

from __future__ import annotations

from dynamo.trtllm.preflight.check import run
from dynamo.trtllm.preflight.faults import find_faults

__all__ = ["find_faults", "run"]
