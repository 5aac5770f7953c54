"""A NIXL loopback: two agents of one process hand memory over.
Run by `live` as a process, so that UCX's log is its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

TENSOR_BYTES = 16 << 20
TRIES = 4
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Loopback:
    """The best of several hand-overs, in bytes per second,
    and the transports that UCX chose between the agents."""

    rate: float
    transports: str


def measure_loopback() -> Loopback | str:
    """The loopback of this machine, or the reason why there is none."""
    command = [sys.executable, "-m", "dynamo.trtllm.preflight.loopback"]
    environment = {**os.environ, "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stdout"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"no hand-over ended within {2 * DEADLINE_S:g} s"
    lines = result.stdout.splitlines()
    answers = [line for line in lines if line.startswith('{"rate"')]
    if result.returncode or not answers:
        return (result.stderr.strip().splitlines() or ["no reason given"])[-1]
    return Loopback(float(json.loads(answers[-1])["rate"]), find_transports(result.stdout))


def find_transports(log: str) -> str:
    """What UCX's log says it uses for remote memory access between the agents."""
    chosen = re.findall(r"(?:intra|inter)-node cfg#\d+ +(.*)", log)
    return re.sub(r" +", " ", chosen[-1]).strip() if chosen else "not told by UCX"


async def _hand_over() -> float:
    import torch

    from dynamo.trtllm.config import TransferConfig
    from dynamo.trtllm.transfer.registry import create_transfer

    config = TransferConfig(pool_bytes=4 * TENSOR_BYTES, time_to_live_s=DEADLINE_S)
    sender, reader = create_transfer(config), create_transfer(config)
    tensors = {"payload": torch.ones(TENSOR_BYTES, dtype=torch.uint8)}
    best = 0.0
    try:
        await sender.start()
        await reader.start()
        for _ in range(TRIES):
            offer = await sender.offer(tensors, DEADLINE_S)
            began = time.perf_counter()
            received = await reader.fetch(offer.descriptor, DEADLINE_S / 2)
            best = max(best, TENSOR_BYTES / (time.perf_counter() - began))
            received.release()
    finally:
        await reader.close()
        await sender.close()
    return best


if __name__ == "__main__":
    print(json.dumps({"rate": asyncio.run(_hand_over())}))
