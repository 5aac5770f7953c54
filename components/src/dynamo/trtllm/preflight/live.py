"""`--check --live`: are the peers of this worker there, do they speak its schema,
and does NIXL work on this machine."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo.trtllm.config import EngineKind, Role, WorkerConfig, default_endpoint
from dynamo.trtllm.preflight.loopback import Loopback, measure_loopback

WAIT_S = 5.0
"""How long peers that run have to show up in discovery."""
SHORT_WAIT_S = 0.5
"""To read what has shown up by then."""


def peers_of(config: WorkerConfig) -> list[tuple[str, str]]:
    """Role and endpoint of each kind of worker that this one cannot do without."""
    found = []
    if config.peers.encode_endpoint is not None:
        found.append((Role.ENCODE.value, config.peers.encode_endpoint))
    other = config.role.other_half
    if other is not None:
        at_default = default_endpoint(other, config.runtime.namespace)
        found.append(
            (other.value, config.peers.prefill_endpoint if config.role.asks_prefill_workers else at_default)
        )
    return found


def ask_peers(config: WorkerConfig) -> tuple[list[str], list[str]]:
    """What was found of the running peers and of NIXL here, and what is wrong with it.
    Joins Dynamo as a client."""
    lines, faults = asyncio.run(_ask(config)) if peers_of(config) else (["no peers needed"], [])
    moves_tensors = not config.role.runs_language_model or config.peers.encode_endpoint is not None
    if moves_tensors or (config.role.moves_kv_caches and config.engine.kind is not EngineKind.TENSORRT_LLM):
        loopback = measure_loopback()
        if isinstance(loopback, Loopback):
            lines.append(f"NIXL loopback {loopback.rate / 1e9:.2f} GB/s over UCX, {loopback.transports}")
        else:
            faults.append(f"NIXL cannot hand memory over on this machine: {loopback}")
    return lines, faults


async def _ask(config: WorkerConfig) -> tuple[list[str], list[str]]:
    from dynamo.trtllm.service.runtime import connect

    runtime = connect(config.runtime)
    try:
        answers = await asyncio.gather(
            *(_ask_endpoint(runtime, role, endpoint) for role, endpoint in peers_of(config))
        )
        return [line for lines, _ in answers for line in lines], [
            fault for _, faults in answers for fault in faults
        ]
    finally:
        runtime.shutdown()


async def _ask_endpoint(runtime: Any, role: str, endpoint: str) -> tuple[list[str], list[str]]:
    """What was found of one role, and what is wrong with it."""
    from dynamo.trtllm.peers.messages import SCHEMA_KEY, SCHEMA_VERSION

    client = await runtime.endpoint(endpoint).client()
    try:
        found = sorted(await asyncio.wait_for(client.wait_for_instances(), WAIT_S))
    except asyncio.TimeoutError:
        return [], [f"no {role} worker runs at {endpoint}: start one, or correct namespace and discovery"]
    ours = await _with_schema(client, SCHEMA_KEY, str(SCHEMA_VERSION), len(found))
    line = f"{role} at {endpoint}: {len(found)} running, {len(ours)} with message schema {SCHEMA_VERSION}"
    others = [instance for instance in found if instance not in ours]
    if not others:
        return [line], []
    who = (
        f"1 {role} worker at {endpoint} speaks"
        if len(others) == 1
        else f"{len(others)} {role} workers at {endpoint} speak"
    )
    return [line], [
        f"{who} another message schema than {SCHEMA_VERSION}: run the same release on all workers"
    ]


async def _with_schema(client: Any, key: str, value: str, most: int) -> list[int]:
    """Instances whose model card names the schema: all of them at once, else as many as show up."""
    for count, wait_s in ((most, WAIT_S), (1, SHORT_WAIT_S)):
        try:
            return list(await client.wait_for_instances_by_runtime_data(key, value, count, wait_s))
        except Exception as error:  # the binding raises plain Exception for its own timeout
            if count == 1 and "tim" not in str(error).lower():
                raise
    return []
