"""A request through each stage of the installed TensorRT-LLM: what `--engine-report` tries, each group in a
process of its own.

A process that hangs or dies costs its own stages and nothing else.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import killpg

from dynamo.trtllm.config import EngineKind, Modality, WorkerConfig
from dynamo.trtllm.engines.tensorrt_llm.record import ModelFacts
from dynamo.trtllm.model_files import find_model_directory
from dynamo.trtllm.preflight.faults import facts_of
from dynamo.trtllm.preflight.masking import mask_text
from dynamo.trtllm.preflight.shape import find_shape

TIMEOUT_S = 900.0
"""How long the stages of one group may take together: loading a model from a cold file system takes
minutes."""
MARK = "dynamo-trtllm-stage "
"""Starts a line that tells an outcome; libraries print lines of their own."""


TEXT, IMAGE, ENCODE = "text", "image", "encode"
HALVES, IMAGE_HALVES, ENCODED = "prefill and decode", "image over prefill and decode", "encoded image"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "whole": (TEXT, IMAGE),
    "halves": (HALVES, IMAGE_HALVES),
    "encoder": (ENCODE, ENCODED),
}
"""Stages that share engines, and so a process."""


def try_stages(config: WorkerConfig, timeout_s: float = TIMEOUT_S) -> Iterator[str]:
    """One line for each stage: what came of it, or why it was not tried."""
    directory = find_model_directory(config.engine.model_path)
    if directory is None:
        yield f"not tried: no model at {config.model.path} on this machine; give one with --model-path"
        return
    engine = replace(config.engine, kind=EngineKind.TENSORRT_LLM, model_path=str(directory))
    ready = replace(config, engine=engine)
    missing = _missing(ready)
    for group, stages in GROUPS.items():
        wanted = [stage for stage in stages if stage not in missing]
        told = _run(ready, group, wanted, timeout_s) if wanted else {}
        for stage in stages:
            yield f"{stage}: {told.get(stage) or f'not tried: {missing[stage]}'}"


def _missing(config: WorkerConfig) -> dict[str, str]:
    """Stages that cannot be tried with the configured model, and why."""
    shape = find_shape(config.engine.model_path)
    facts = facts_of(shape)
    name = shape.architecture if shape is not None else "this model"
    missing: dict[str, str] = {}
    if facts is None or not facts.encodes_apart:
        missing |= dict.fromkeys((ENCODE, ENCODED), f"TensorRT-LLM does not encode images of {name} apart")
    images = _no_images(config, facts, name)
    if images:
        missing |= dict.fromkeys((IMAGE, IMAGE_HALVES, ENCODE, ENCODED), images)
    if facts is not None and not facts.disaggregates:
        missing |= dict.fromkeys(
            (HALVES, IMAGE_HALVES), f"TensorRT-LLM does not split {name} over two workers"
        )
    return missing


def _no_images(config: WorkerConfig, facts: ModelFacts | None, name: str) -> str:
    if config.model.modality is not Modality.MULTIMODAL:
        return "the model is checked as a text model; --modality multimodal would try images"
    if facts is None or facts.placeholder is None:
        return f"the record does not say how {name} takes images"
    return ""


def _run(config: WorkerConfig, group: str, stages: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Runs the stages of one group; what came of each, also where its outcome never came."""
    command = [sys.executable, "-m", "dynamo.trtllm.preflight.stage_process", group, *stages]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, err = process.communicate(pickle.dumps(config.engine), timeout=timeout_s)
        said = _last_line(err.decode(errors="replace"))
        ended = f"its process ended with {process.returncode}: {said}"
    except subprocess.TimeoutExpired:
        _kill(process.pid)
        out, _ = process.communicate()
        ended = f"no answer within {timeout_s:g} s"
    finally:
        _kill(process.pid)
    told = dict(_outcomes(out.decode(errors="replace")))
    return {stage: mask_text(told.get(stage, f"FAILED: {ended}")) for stage in stages}


def _kill(group: int) -> None:
    """End the process and all that it started, ranks for instance."""
    with suppress(ProcessLookupError, PermissionError):
        killpg(group, signal.SIGKILL)


def _outcomes(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith(MARK):
            stage, outcome = json.loads(line[len(MARK) :])
            yield stage, outcome


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
