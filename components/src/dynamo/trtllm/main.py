"""Worker initialisation: parse, build, serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from dynamo.trtllm.engines.factory import require_installed
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.trtllm_utils import parse, write_config

if TYPE_CHECKING:
    from dynamo.trtllm.config import WorkerConfig
    from dynamo.trtllm.invocation import Invocation

EXIT_BAD_START = 2

logger = logging.getLogger(__name__)


def main() -> None:
    """Run the worker that `sys.argv` and the environment describe;
    returns when it has ended, exits non-zero when it failed."""
    try:
        code = _run(parse())
    except StartupError as error:
        print(f"dynamo.trtllm: {error.message}", file=sys.stderr)
        code = EXIT_BAD_START
    if code:
        sys.exit(code)


def _run(invocation: Invocation) -> int:
    if invocation.check is not None:
        from dynamo.trtllm.preflight.check import run

        return run(invocation)
    require_no_faults(invocation.config)
    require_installed(invocation.config.engine.kind)
    return _run_worker(invocation)


def require_no_faults(config: WorkerConfig) -> None:
    """What `--check` would find, found before anything is loaded. Raises `StartupError` with every fault."""
    from dynamo.trtllm.preflight.faults import find_faults

    faults = find_faults(config)
    if faults:
        raise StartupError("; ".join(faults))


def _run_worker(invocation: Invocation) -> int:
    import uvloop
    from dynamo.runtime.logging import configure_dynamo_logging

    configure_dynamo_logging()
    write_config(invocation.config)
    logging.getLogger("PIL").setLevel(logging.INFO)  # its debug lines hold bytes of the users' images
    for note in invocation.notes:
        logger.warning(note)
    uvloop.install()
    return asyncio.run(serve(invocation.config))


async def serve(config: WorkerConfig) -> int:
    """Build the worker's parts in order, serve, and take them down in reverse. Returns the exit code."""
    from dynamo.trtllm.engines.factory import create_engine
    from dynamo.trtllm.frontend.endpoint import EndpointServer
    from dynamo.trtllm.metrics import MODEL_LOAD_TIME
    from dynamo.trtllm.model_files import resolve_model
    from dynamo.trtllm.request_handlers.handlers import create_handler
    from dynamo.trtllm.served_template import with_served_template
    from dynamo.trtllm.service.binding_log import LoggedErrors
    from dynamo.trtllm.service.metrics_page import MetricsPage
    from dynamo.trtllm.service.runtime import Service, connect

    config = replace(config, engine=replace(config.engine, model_path=await resolve_model(config.model.path)))
    require_no_faults(config)  # once more: a model that was fetched just now could not be looked at before
    async with AsyncExitStack() as stack:
        quiet = stack.enter_context(LoggedErrors.on_stderr())
        engine = create_engine(config.engine)
        stack.push_async_callback(engine.close)
        starting = time.monotonic()
        info = await engine.start()
        load_time_s = time.monotonic() - starting
        kinds = info.media if config.runtime.hands_files_over else ()
        model = with_served_template(config.model, config.engine.model_path, kinds)
        config = replace(config, model=model)
        runtime = connect(config.runtime)
        stack.callback(runtime.shutdown)
        handler = await create_handler(config, engine, info, runtime)
        stack.push_async_callback(handler.close)
        service = Service(runtime, config, engine, info)
        server = EndpointServer(
            handler,
            push=config.runtime.pushes_chunks,
            on_dead=service.died,
            on_told=quiet.hide,
        )
        stack.callback(server.close)
        metrics = MetricsPage(config.role)
        metrics.add_durations(server.durations)
        metrics.add(server.stats, engine.stats, handler.stats, lambda: {MODEL_LOAD_TIME: load_time_s})
        # Modules and model live as long as the process:
        # without them a full collection is short, and stalls no request.
        gc.collect()
        gc.freeze()
        return await service.run(server, metrics, handler.drained, handler.check_health)
