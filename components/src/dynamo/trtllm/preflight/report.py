"""`--engine-report`: what a person needs to send with a report of a bug, without secrets.

TensorRT-LLM's source beside the record and by the rules, its signatures as an import shows them, the
configuration, and a request through each stage. Whatever imports or loads is a process of its own; what
could not be tried is said.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from dynamo.trtllm import __version__
from dynamo.trtllm.config import EngineKind, WorkerConfig
from dynamo.trtllm.engines.tensorrt_llm.record import Release, nearest_release
from dynamo.trtllm.engines.tensorrt_llm.source.compare import compare_names, recorded_groups
from dynamo.trtllm.engines.tensorrt_llm.source.reading import read, render
from dynamo.trtllm.preflight.masking import mask, mask_text
from dynamo.trtllm.preflight.memory import find_gpu_memory
from dynamo.trtllm.preflight.stages import try_stages
from dynamo.trtllm.preflight.versions import DYNAMO, installed
from dynamo.trtllm.utils.layers import leaves, origin_of

READ_TIMEOUT_S = 600
"""Importing TensorRT-LLM takes minutes on a cold file system."""
LIBRARY = "tensorrt_llm"
_PACKAGES = (*DYNAMO, LIBRARY, "torch", "transformers", "nixl", "pydantic")
_ENVIRONMENT = ("DYN_", "TLLM_", "TRTLLM_", "UCX_", "NCCL_", "NIXL_", "CUDA_", "HF_")
NOT_INSTALLED = "TensorRT-LLM is not installed here"


def engine_report(config: WorkerConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """The report, line by line as it comes. Says so where TensorRT-LLM is missing or cannot be read or
    imported."""
    yield "engine report"
    yield from _section("versions", _versions())
    if util.find_spec(LIBRARY) is None:
        yield from _section("source", [f"{NOT_INSTALLED}: its source was not read and no rule was checked"])
    else:
        yield from _section("source", _source())
        yield from _section("signatures of the imported library", _signatures())
    yield from _section("configuration", _configuration(config, environment))
    yield from _section("a request through each stage", _requests(config))


def _section(title: str, lines: Iterator[str] | list[str]) -> Iterator[str]:
    yield f"  {title}"
    for line in lines:
        yield textwrap.indent(line, "    ")


def _versions() -> Iterator[str]:
    found = {package: installed(package) or "not installed" for package in _PACKAGES}
    machine = f"{platform.system()} {platform.machine()}"
    yield f"dynamo-trtllm {__version__}, Python {platform.python_version()}, {machine}"
    yield ", ".join(f"{package} {version}" for package, version in found.items())
    gpu = find_gpu_memory(None)
    yield f"GPU memory {gpu.gigabytes:.0f} GB, {gpu.source}"


def _source() -> Iterator[str]:
    """The installed package's source, found without importing it."""
    spec = util.find_spec(LIBRARY)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            yield from render(read(Path(folder)))
        except ValueError as error:
            yield f"not read: {error}"


def _signatures() -> Iterator[str]:
    command = [sys.executable, "-m", "dynamo.trtllm.preflight.signatures"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield f"TensorRT-LLM was not imported within {READ_TIMEOUT_S} s"
        return
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield f"TensorRT-LLM cannot be imported: {reason}"
        return
    found: dict[str, Any] = json.loads(lines[-1])
    record, note = nearest_release(found["version"])
    yield f"installed {found['version']}, record {record.version}"
    if note is not None:
        yield note
    yield from compare_with_record(found, record)


def compare_with_record(found: Mapping[str, Any], record: Release) -> Iterator[str]:
    """What the imported library has and how its names differ from `record`, group by group."""
    for group, recorded in recorded_groups(record).items():
        names = found["groups"].get(group)
        if names is None:
            continue
        used = [name for name in names if group != "LLM methods" or name in recorded]
        yield f"{group}: {len(names)} names"
        for difference in compare_names(used, recorded, group):
            where = "installed" if difference.kind == "added" else "in the record"
            yield f"  {group}: only {where}: {difference.name}"


def _configuration(config: WorkerConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """The merged engine arguments with their origins, and variables that change what libraries do; secrets
    masked."""
    engine = f"--engine {config.engine.kind.value}"
    yield f"{config.role.value}, {config.model.modality.value}, {engine}, {config.model.path}"
    for dotted, value in sorted(leaves(mask(config.engine.args))):
        origin = origin_of(config.engine.origins, dotted)
        yield f"{dotted} = {json.dumps(value, default=str)}  ({mask_text(origin)})"
    for name in sorted(name for name in environment if name.startswith(_ENVIRONMENT)):
        yield f"{name}={mask(environment[name], name)}"


def _requests(config: WorkerConfig) -> Iterator[str]:
    if util.find_spec(LIBRARY) is None:
        yield (f"{NOT_INSTALLED}: text, image, prefill and decode, encode were not tried")
    elif config.engine.kind is not EngineKind.TENSORRT_LLM:
        yield f"not tried: --engine {config.engine.kind.value} does not use TensorRT-LLM"
    else:
        yield from try_stages(config)
