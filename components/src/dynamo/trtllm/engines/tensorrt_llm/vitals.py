"""Whether a started engine lives, who is told when it does not,
and the tasks that run beside its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.health import Health
from dynamo.trtllm.engines.tensorrt_llm.watch import Watch
from dynamo.trtllm.errors import EngineDead, EngineFault, WorkerError

logger = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 0.5
"""The library's iterators wait with `asyncio.wait_for`,
which before Python 3.12 can swallow a cancellation."""


class Vitals:
    """One engine's: `watch` knows its requests, `Health` asks the library. Shared by all requests."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.watch = Watch(stall_timeout_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._health: Health | None = None
        self._request_error: type[BaseException] = Exception

    def begin(self, llm: Any, request_error: type[BaseException]) -> None:
        """The engine is constructed. `request_error` is what the library raises for one request."""
        self._health = Health(llm, self.died, lambda: self.watch.steps)
        self._request_error = request_error
        self.own(self.watch.run())

    def own(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` beside the requests, until the engine's end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_one_requests(self, error: BaseException) -> bool:
        """True: the library raised `error` for one request and has let go of it."""
        return isinstance(error, self._request_error)

    def cause_of_death(self) -> str | None:
        """What is known now, without asking; None while the engine lives, and before there is one."""
        return None if self._health is None else self._health.cause_of_death()

    def require_alive(self) -> None:
        """Raise `EngineDead` once no further request will be served."""
        self.watch.require_alive()
        cause = self.cause_of_death()
        if cause is not None:
            self.died(cause)
            self.watch.require_alive()

    def died(self, cause: str) -> None:
        """End all requests: the engine is gone."""
        logger.critical("The engine is dead: %s", cause)
        self.watch.end(EngineDead("the engine died"))

    async def death_behind(self, error: BaseException) -> WorkerError | None:
        """`EngineDead` if the library says that its engine is, after `error`.
        The known refusals are not worth a question."""
        assert self._health is not None
        known = isinstance(error, (ValueError, TypeError, NotImplementedError)) or self.is_one_requests(error)
        if self.cause_of_death() is None and (known or await self._health.lives()):
            return None
        self.died(self.cause_of_death() or "it does not answer")
        return EngineDead("the engine died")

    async def failure(self, request_id: str, error: Exception) -> WorkerError:
        """What to raise for an exception of a request's result."""
        logger.warning("The engine failed request %s: %s: %s", request_id, type(error).__name__, error)
        return await self.death_behind(error) or EngineFault("the engine failed this request")

    async def end(self) -> None:
        """Stop looking, end all requests and all tasks: the engine is shut down on purpose from here on."""
        if self._health is not None:
            self._health.close()
        self.watch.end(EngineDead("the engine is closed"))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_AGAIN_S)
