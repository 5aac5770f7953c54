#!/usr/bin/env python3
"""The floor of `worker_cost.py`: a worker on Dynamo's runtime whose handler
pushes ready-made tokens and does nothing else.

usage: empty_worker.py MODEL_DIRECTORY NAME
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

FIRST_TOKEN = 300
TOKEN_SPAN = 50


async def handler(
    request: Mapping[str, Any], context: Any = None, response_sender: Any = None
) -> AsyncGenerator[dict[str, Any], None]:
    """As many tokens as were asked for, the event loop free between two of them."""
    count = request["stop_conditions"]["max_tokens"] or 1
    for index in range(count - 1):
        await asyncio.sleep(0)
        chunk = {"token_ids": [FIRST_TOKEN + index % TOKEN_SPAN], "index": 0}
        if response_sender is None:
            yield chunk
        else:
            response_sender.send(chunk)
    last = {"token_ids": [FIRST_TOKEN], "index": 0, "finish_reason": "length"}
    if response_sender is None:
        yield last
    else:
        response_sender.send(last)
        response_sender.close()


async def main(directory: str, name: str) -> None:
    loop = asyncio.get_running_loop()
    environment = os.environ
    runtime = DistributedRuntime(
        loop,
        environment.get("DYN_DISCOVERY_BACKEND", "file"),
        environment.get("DYN_REQUEST_PLANE", "tcp"),
        event_plane=environment.get("DYN_EVENT_PLANE", "zmq"),
    )
    endpoint = runtime.endpoint("dyn://dynamo.tensorrt_llm.generate")
    kinds = ModelType.Chat | ModelType.Completions
    await register_model(
        ModelInput.Tokens, kinds, endpoint, directory, name, worker_type=WorkerType.Aggregated
    )
    await endpoint.serve_endpoint(handler)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2]))
