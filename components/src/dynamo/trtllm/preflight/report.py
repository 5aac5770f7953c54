"""`--engine-report`: the installed TensorRT-LLM's signatures beside the record, read in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import util
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record import Release, release_record

READ_TIMEOUT_S = 600
"""Importing TensorRT-LLM takes minutes on a cold file system."""


def engine_report() -> str:
    """The report as text. It says so where TensorRT-LLM is missing or cannot be imported, which is no fault of the user's."""
    if util.find_spec("tensorrt_llm") is None:
        return "engine report\n  TensorRT-LLM is not installed here"
    command = [sys.executable, "-m", "dynamo.trtllm.preflight.signatures"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"engine report\n  TensorRT-LLM cannot be read: {reason}"
    found: dict[str, Any] = json.loads(lines[-1])
    return "\n".join(["engine report", *(f"  {line}" for line in compare_with_record(found, release_record(found["version"])))])


def compare_with_record(found: Mapping[str, Any], record: Release) -> list[str]:
    """Lines that tell, group by group, what the installed release has and how it differs from `record`."""
    groups: dict[str, Iterable[str]] = {
        "LLM arguments": record.llm_arguments,
        "LLM.generate_async": record.generate_async,
        "SamplingParams": record.sampling,
        "GuidedDecodingParams": record.guided,
        "DisaggregatedParams": record.disaggregated,
        "LLM methods": record.methods,
        **record.nested,
    }
    lines = [f"installed {found['version']}, record {record.version}"]
    for group, known in groups.items():
        names = set(found["groups"].get(group, ()))
        lines.append(f"{group}: {' '.join(sorted(names)) or 'not found'}")
        lines += [f"  {group}: only installed: {name}" for name in sorted(names - set(known))]
        lines += [f"  {group}: only in the record: {name}" for name in sorted(set(known) - names)]
    return lines
