"""Whether the library's engine lives: by what the library itself says, and by nothing that a request holds.

A dead engine of many processes tells nobody. Its parent notes the death when it is asked, and asking can
block, because a message to a dead rank waits for ever. So a thread reads what is noted, and lets another
thread ask.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm import private
from dynamo.trtllm.last_resort import exit_after

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often the notes are read; a read of three attributes."""
ASK_S = 2.0
"""How often the library is asked; a message within this machine."""
ANSWER_S = 6.0
"""An engine that neither answers nor makes a step for so long is as good as dead;
so is an event loop that has not heard of the death by then."""


class Health:
    """Looks after one engine from its construction to its end, and reports its death once, on the event
    loop."""

    def __init__(self, llm: Any, on_death: Callable[[str], None], steps: Callable[[], int]) -> None:
        """`steps` counts what the engine has done for requests: while it grows, the engine lives."""
        self._llm = llm
        self._on_death = on_death
        self._steps = steps
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._heard = threading.Event()
        self._asked_at: float | None = None
        """When the question was asked that has no answer yet."""
        self._answered_at = time.monotonic()
        self._denied: str | None = None
        threading.Thread(target=self._look, name="engine-health", daemon=True).start()

    def cause_of_death(self) -> str | None:
        """What is known now, without asking."""
        return private.cause_of_death(self._llm) or self._denied

    async def lives(self) -> bool:
        """Ask now. For an error that could be the request's or the engine's."""
        if self.cause_of_death() is not None:
            return False
        answer: asyncio.Future[None] = self._loop.create_future()
        self._ask(lambda: self._loop.call_soon_threadsafe(_settle, answer))
        await asyncio.wait({answer}, timeout=ANSWER_S)
        return answer.done() and self.cause_of_death() is None

    def close(self) -> None:
        """Stop looking: the engine is shut down on purpose from here on."""
        self._closed.set()

    def _look(self) -> None:
        """Silence is counted in looks: a process that stood still as a whole has not waited for an answer."""
        silent, seen = 0, self._steps()
        while not self._closed.wait(LOOK_S):
            heard = self._asked_at is None or self._steps() != seen
            silent, seen = 0 if heard else silent + 1, self._steps()
            cause = self.cause_of_death() or ("it does not answer" if silent * LOOK_S >= ANSWER_S else None)
            if cause is not None:
                self._report(cause)
                return
            if self._asked_at is None and time.monotonic() - self._answered_at >= ASK_S:
                self._ask(lambda: None)

    def _ask(self, then: Callable[[], object]) -> None:
        def ask() -> None:
            try:
                if not private.ask_health(self._llm):
                    self._denied = "it says that it is not well"
            except Exception as error:
                self._denied = f"its health check failed with {type(error).__name__}: {error}"
            self._asked_at, self._answered_at = None, time.monotonic()
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                then()

        self._asked_at = time.monotonic()
        threading.Thread(target=ask, name="engine-ask", daemon=True).start()

    def _report(self, cause: str) -> None:
        """Tell the event loop. One that is itself stuck in a message to a dead rank can only be ended with
        the process."""

        def hear() -> None:
            self._heard.set()
            if not self._closed.is_set():
                self._on_death(cause)

        try:
            self._loop.call_soon_threadsafe(hear)
        except RuntimeError:
            return  # the loop is closed, and the process with it
        if not self._heard.wait(ANSWER_S) and not self._closed.is_set():
            logger.critical("The engine is dead (%s) and the event loop is stuck in it, exiting", cause)
            exit_after(0.0)


def _settle(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)
