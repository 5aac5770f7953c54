#!/usr/bin/env python3
"""Serves one model in every topology on one GPU, measures each through Dynamo's frontend, stores it.

usage: serving.py MODEL_DIRECTORY OUT.json [TOPOLOGY ...]
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

import aiohttp  # noqa: E402
import torch  # noqa: E402

from dynamo.trtllm.metrics import STAGE_DURATION  # noqa: E402
from gpu.load import LOADS, Client  # noqa: E402
from processes.cluster import DEMO_NAME, Cluster  # noqa: E402
from processes.topologies import Deployment, deploy  # noqa: E402

THROUGH_HOST = "--transfer-through-host"
LIMITS = {"max_batch_size": 64, "max_seq_len": 8192}
STAGE_REQUESTS = 10
PACKAGES = ("ai-dynamo", "nixl", "torch", "transformers")


@dataclass(frozen=True)
class Setting:
    """One deployment to measure."""

    name: str
    topology: str
    options: tuple[str, ...] = ()


SETTINGS = (
    Setting("aggregated", "agg"),
    Setting("E/PD, directly", "disagg_e_pd"),
    Setting("E/PD, through host memory", "disagg_e_pd", (THROUGH_HOST,)),
    Setting("P/D, through host memory", "disagg", (THROUGH_HOST,)),
    Setting("E/P/D, through host memory", "epd_disagg", (THROUGH_HOST,)),
)


async def ask(url: str, with_burst: bool) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        client = Client(session, url, DEMO_NAME)
        found: dict[str, Any] = {"loads": []}
        for load in LOADS:
            measured = await client.measure(load)
            found["loads"].append(measured.as_dict())
            print(
                f"  {load.name}: TTFT {measured.ttft_ms:.0f} ms, ITL {measured.itl_ms:.2f} ms,"
                f" {measured.tokens_per_s:.0f} tokens/s, prompt {measured.prompt_tokens}",
                flush=True,
            )
        if with_burst:
            found["gaps"] = asdict(await client.gaps_under_a_burst())
            print(
                "  " + ", ".join(f"{name} {value:.1f}" for name, value in found["gaps"].items()), flush=True
            )
        return found


async def stages(url: str, deployment: Deployment) -> dict[str, float]:
    """Mean milliseconds of each stage of requests with one large picture, by role, from the workers' metrics.

    "client: TTFT" is what the client saw of the same requests.
    """

    def spent() -> dict[str, float]:
        found: dict[str, float] = {}
        for role, workers in deployment.workers.items():
            for sample in workers[0].families()[STAGE_DURATION.name].samples:
                if sample.name.endswith("_sum"):
                    name = f"{role}: {sample.labels['stage']}"
                    found[name] = found.get(name, 0.0) + sample.value * 1e3
        return found

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        client = Client(session, url, DEMO_NAME, first_seed=50_000)
        before, times = spent(), []
        for _ in range(STAGE_REQUESTS):
            body = client.body(client.pictures(1, 1036), 4)
            times.append((await client.ask(body, 4)).ttft_ms)
        after = spent()
    found = {name: (value - before.get(name, 0.0)) / STAGE_REQUESTS for name, value in after.items()}
    return {name: ms for name, ms in found.items() if ms >= 0.05} | {"client: TTFT": statistics.mean(times)}


def serve(setting: Setting, model: str) -> dict[str, Any]:
    """Start one deployment and measure it."""
    start = time.perf_counter()
    options = [
        "--engine",
        "transformers",
        "--modality",
        "multimodal",
        "--model-path",
        model,
        "--device",
        "cuda",
    ]
    options += ["--override-engine-args", json.dumps(LIMITS), *setting.options]
    # PYTHONPATH makes the workers processes of their own: CUDA does not survive a fork.
    with Cluster(env={"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "4"}) as cluster:
        deployment = deploy(setting.topology, cluster, options=options)
        ready = time.perf_counter() - start
        print(f"{setting.name}: ready after {ready:.0f} s", flush=True)
        with_details = setting.topology in ("agg", "epd_disagg")
        found = asyncio.run(ask(cluster.url, with_details))
        if with_details:
            found["stages"] = asyncio.run(stages(cluster.url, deployment))
            print("  " + ", ".join(f"{name} {ms:.1f}" for name, ms in found["stages"].items()), flush=True)
    return {"name": setting.name, "topology": setting.topology, "ready_s": ready, **found}


def generate_ms(model: str) -> float:
    """Per token of Transformers' `generate`, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("reference.py")), model]
    env = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}"}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=180)
    return float(done.stdout.split()[-1])


def machine() -> dict[str, str]:
    """Card, driver, date and versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[0]
    found = {
        "card": torch.cuda.get_device_name(),
        "driver": driver,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "?"
    return found


def main(arguments: Sequence[str]) -> None:
    model, out, *names = arguments
    result: dict[str, Any] = {"machine": machine(), "settings": []}
    result["generate_ms"] = generate_ms(model)
    print(f"generate: {result['generate_ms']:.2f} ms per token", flush=True)
    for setting in SETTINGS:
        if not names or setting.topology in names:
            result["settings"].append(serve(setting, model))
            Path(out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
