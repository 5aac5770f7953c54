"""Requests straight to a worker's endpoint, past the frontend and all
that it checks, from a process of their own.

As a program: reads one JSON list of requests from standard input and asks all of them at once;
writes a list of outcomes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from processes.cluster import Cluster


class Outcome(NamedTuple):
    """What came of a request: "ok" and its chunks' token ids, or the exception's name and words."""

    status: str
    words: str
    token_ids: tuple[int, ...]


def ask_endpoint(
    cluster: Cluster, endpoint: str, requests: Sequence[Any], timeout_s: float = 60.0
) -> list[Outcome]:
    """The outcomes of `requests`, in order, sent side by side to the one instance of `endpoint`."""
    environment = {**cluster.environment(None), "DYN_LOG": "error", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, endpoint]
    text = json.dumps(list(requests))
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [
        Outcome(status, words, tuple(ids)) for status, words, ids in json.loads(done.stdout.splitlines()[-1])
    ]


async def _ask(client: Any, request: Any) -> tuple[str, str, list[int]]:
    ids: list[int] = []
    try:
        stream = await client.direct(request, client.instance_ids()[0], annotated=False)
        async for chunk in stream:
            ids += chunk["token_ids"]
    except Exception as error:
        return type(error).__name__, str(error), ids
    return "ok", "", ids


async def _main(endpoint: str) -> None:
    from dynamo.runtime import DistributedRuntime

    planes = (os.environ["DYN_DISCOVERY_BACKEND"], os.environ["DYN_REQUEST_PLANE"])
    runtime = DistributedRuntime(asyncio.get_running_loop(), *planes)
    client = await runtime.endpoint(endpoint).client()
    await client.wait_for_instances()
    outcomes = await asyncio.gather(*(_ask(client, each) for each in json.load(sys.stdin)))
    print(json.dumps(outcomes))
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
