"""The worker's life in Dynamo: serving, health, metrics and shutdown, through the low-level runtime.

It knows nothing of requests or media: `server` drives the handler, the engine is asked only whether it lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dynamo.common.utils.graceful_shutdown import get_grace_period_seconds, graceful_shutdown_with_discovery
from dynamo.common.utils.runtime import create_runtime
from dynamo.health_check import HEALTH_CHECK_KEY
from dynamo.runtime import DistributedRuntime, Endpoint

from dynamo.trtllm.config import RuntimeConfig, WorkerConfig
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import EngineDead, ShuttingDown, StartupError, WorkerDead, WorkerError
from dynamo.trtllm.frontend.endpoint import EndpointServer
from dynamo.trtllm.last_resort import exit_after
from dynamo.trtllm.service.metrics_page import MetricsPage
from dynamo.trtllm.service.presence import Presence
from dynamo.trtllm.service.registration import Registration

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_SECOND_SIGNAL = 70
_LEAST_TO_LEAVE_S = 3.0
"""What the end gets after the engine's death, where the grace is shorter."""
_DRAIN_AND_CLOSE_S = 60.0
"""What the end gets after the grace otherwise: Dynamo drains for up to 30 s, the rest is for the engine."""
_SHOWING_BACKENDS = ("file", "etcd", "mem")
"""Kinds of discovery in which a worker was seen to find itself; Kubernetes was not tried."""
_CANCELS = 3



@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often a service looks and tries."""

    health_s: float = 0.5
    """Seconds between two looks at the engine's health."""
    cancel_s: float = 0.2
    """Seconds that requests get to end in after each time they are cancelled."""


def connect(config: RuntimeConfig) -> DistributedRuntime:
    """Join Dynamo, on the event loop that will serve.
    Raises `StartupError` when discovery or a plane is out of reach.

    The one place that writes this process's environment:
    Dynamo's Rust side reads some of its options only there.
    """
    for name, value in config.environment.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    try:
        runtime, _ = create_runtime(
            config.discovery_backend,
            config.request_plane,
            event_plane=config.event_plane,
            response_plane=config.response_plane,
        )
    except Exception as error:  # the binding raises plain Exception
        raise StartupError(
            f"cannot join Dynamo with discovery {config.discovery_backend} "
            f"and request plane {config.request_plane}: {error}"
        ) from error
    return runtime


class Service:
    """One registered endpoint, from registration to exit.

    `Drain` callbacks run after the worker left discovery and requests have ended;
    `close` belongs to the caller.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        config: WorkerConfig,
        engine: Engine,
        info: EngineInfo,
        pace: Pace = Pace(),
    ) -> None:
        self._runtime = runtime
        self._pace = pace
        self._config = config
        self._endpoint: Endpoint = runtime.endpoint(config.runtime.endpoint)
        self._registration = Registration(self._endpoint, config, engine, info)
        self._shutdown: asyncio.Task[None] | None = None
        self._presence: asyncio.Task[None] | None = None
        self._death: WorkerDead | None = None
        self._exit_code = 0

    @property
    def instance_id(self) -> int:
        """This worker's id in discovery."""
        return int(self._endpoint.connection_id())

    async def run(
        self,
        server: EndpointServer,
        metrics: MetricsPage,
        drained: Callable[[], Any],
        check_health: Callable[[], Awaitable[None]],
    ) -> int:
        """Register, serve until a signal or the engine's death, and return the exit code."""
        self._server, self._drained, self._check_health = server, drained, check_health
        metrics.expose(self._endpoint, self._config)
        health = asyncio.create_task(self._watch_health(), name="engine-health")
        try:
            await self._registration.first()
            self._presence = asyncio.create_task(self._watch_discovery(), name="presence")
            self._install_signals()  # until here a signal ends the process at once
            logger.info(
                "serving %s as %s at %s",
                self._config.model.name,
                self._config.role.value,
                self._config.runtime.endpoint,
            )
            await self._serve(server)
            if self._shutdown is None:
                logger.error("the runtime stopped serving by itself, leaving")
                self._exit_code = EXIT_FAILED
                exit_after(_DRAIN_AND_CLOSE_S)
            else:
                await self._shutdown
        finally:
            health.cancel()
            if self._presence is not None:
                self._presence.cancel()
        return self._exit_code

    def died(self, error: WorkerDead) -> None:
        """The one place that decides that the process ends because it can serve nothing any more:
        every request ends at once."""
        if self._death is not None:
            return
        part = "engine" if isinstance(error, EngineDead) else "transfer"
        logger.critical("the %s is dead, leaving: %s", part, error)
        self._death = error
        self._exit_code = EXIT_FAILED
        self._server.end_all(error)
        exit_after(max(get_grace_period_seconds(), _LEAST_TO_LEAVE_S))
        if self._shutdown is None:
            self._begin_shutdown(grace_s=0.0)

    async def _serve(self, server: EndpointServer) -> None:
        try:
            await self._endpoint.serve_endpoint(
                server.endpoint_handler(),
                graceful_shutdown=True,
                metrics_labels=[("model", self._config.model.name)],
                health_check_payload=health_check_payload(self._config.runtime),
            )
        except Exception as error:  # the binding raises plain Exception
            raise StartupError(f"cannot serve {self._config.runtime.endpoint}: {error}") from error

    async def _watch_discovery(self) -> None:
        known = self._config.runtime.discovery_backend in _SHOWING_BACKENDS
        try:
            again = self._registration.again
            why = await Presence(self.instance_id, self._endpoint.client, again, known).lost()
        except Exception:
            logger.exception(
                "discovery cannot be watched: a worker that it loses will not come back by itself"
            )
            return
        if self._shutdown is None:
            logger.critical("this worker is out of discovery and cannot register again, leaving: %s", why)
            self._exit_code = EXIT_FAILED
            exit_after(_DRAIN_AND_CLOSE_S)
            self._begin_shutdown(grace_s=0.0)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._pace.health_s)
            try:
                await self._check_health()
            except WorkerDead as error:
                self.died(error)
                return
            except WorkerError as error:
                logger.warning("health check: %s", error)
            except Exception:
                logger.exception("the health check itself failed")

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._shutdown is not None:
            logger.warning("second signal, exiting at once")
            logging.shutdown()
            os._exit(EXIT_SECOND_SIGNAL)
        grace_s = get_grace_period_seconds()
        exit_after(grace_s + _DRAIN_AND_CLOSE_S)
        self._begin_shutdown(grace_s)

    def _begin_shutdown(self, grace_s: float) -> None:
        if self._presence is not None:
            self._presence.cancel()  # from here on this worker is meant to be out of discovery
        self._shutdown = asyncio.create_task(
            graceful_shutdown_with_discovery(
                self._runtime, [self._endpoint], grace_period_s=grace_s, drain_callback=self._drain
            ),
            name="shutdown",
        )

    async def _drain(self) -> None:
        """Runs before the runtime, which waits for requests for ever; Dynamo cancels it after 30 s."""
        try:
            if self._death is not None:
                await self._let_go(self._death)
            else:
                await self._server.drained()
                await self._drained()
        finally:
            self._server.end_all(ShuttingDown("this worker is shutting down"))

    async def _let_go(self, death: WorkerDead) -> None:
        """End requests that wait as they clean up;
        give other workers half of the grace to read what is held."""
        for _ in range(_CANCELS):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._server.drained(), self._pace.cancel_s)
                break
            self._server.end_all(death)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained(), get_grace_period_seconds() / 2)


def health_check_payload(runtime: RuntimeConfig) -> dict[str, Any]:
    """The canary's request, in every role; `--health-check-payload` replaces it."""
    if runtime.health_check_payload:
        return {HEALTH_CHECK_KEY: True, **runtime.health_check_payload}
    return {
        HEALTH_CHECK_KEY: True,
        "token_ids": [1],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "routing": {"cache_salt": "dynamo-health-check"},
    }
