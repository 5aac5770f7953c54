"""`--check`: prints the plan, what is worth knowing and every fault;
says by its exit code whether there was one."""

from __future__ import annotations

import os

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.invocation import Invocation
from dynamo.trtllm.preflight.compare import compare, read_other
from dynamo.trtllm.preflight.faults import find_faults, without_wrong_values, wrong_values
from dynamo.trtllm.preflight.live import ask_peers
from dynamo.trtllm.preflight.memory import GIGABYTE, estimate, find_gpu_memory
from dynamo.trtllm.preflight.plan import find_notes, render
from dynamo.trtllm.preflight.report import engine_report
from dynamo.trtllm.preflight.shape import find_shape
from dynamo.trtllm.preflight.versions import untested

EXIT_FAULTS = 1


def run(invocation: Invocation) -> int:
    """Check `invocation` and print what was found. Returns 0 when there is no fault, else 1."""
    given, check = invocation.config, invocation.check
    if check is None:
        raise StartupError("nothing to check: add --check")
    config = without_wrong_values(given)
    shape = find_shape(config.engine.model_path)
    gpu = find_gpu_memory(check.gpu_memory_gb)
    memory = estimate(shape, config.engine, gpu) if shape is not None else None
    print(render(config, shape, gpu, memory))
    faults, notes = find_faults(given), [*invocation.notes, *untested(), *find_notes(config, shape)]
    if memory is not None and not memory.fits and check.gpu_memory_gb is not None:
        needed = f"the weights need {memory.weights_per_gpu / GIGABYTE:.1f} GB on each GPU"
        faults.append(f"{needed}, more than --gpu-memory-gb {check.gpu_memory_gb:g}: use more or larger GPUs")
    if check.against is not None:
        other = read_other(config, check.against)
        faults += [f"on the other side {fault}" for fault in wrong_values(other)]
        pair_faults, pair_notes = compare(config, without_wrong_values(other), shape)
        faults += pair_faults
        notes += pair_notes
    if check.live:
        lines, live_faults = ask_peers(config)
        print("\n  ".join(["live", *lines]))
        faults += live_faults
    if check.engine_report:
        for line in engine_report(config, os.environ):
            print(line, flush=True)
    _print_lines("note", notes)
    _print_lines("fault", faults)
    print("no fault found" if not faults else f"{len(faults)} fault{'s' if len(faults) > 1 else ''} found")
    return EXIT_FAULTS if faults else 0


def _print_lines(kind: str, sentences: list[str]) -> None:
    for sentence in sentences:
        print(f"{kind}: {sentence}")
