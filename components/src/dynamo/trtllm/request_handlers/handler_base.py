"""What the roles share: the disaggregation modes' common steps, from the frontend's dict to the engine.

A handler reads: parse, prepare, call the engine. It raises from `errors`;
`frontend.endpoint` decides what the client sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamo.trtllm.core import Context, Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.frontend.response import Output
from dynamo.trtllm.metrics import Readings
from dynamo.trtllm.transfer.port import Offer, Transfer


class HandlerBase(ABC):
    """A role's handler. Holds no state of single requests."""

    def __init__(self, engine: Engine, info: EngineInfo, transfer: Transfer | None = None) -> None:
        self._engine = engine
        self._info = info
        self._needed_transfer = transfer

    @abstractmethod
    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Output, None]:
        """Parse and prepare one request, and return its output as it will come,
        the last item with its finish reason.

        `raw` goes no further than its parsing. A stream of the engine is returned as it is:
        each generator around it costs every token half a microsecond.
        """

    def stats(self) -> Readings:
        """This role's metrics, of the parts that it has."""
        return {}

    async def check_health(self) -> None:
        """Return at once while this role can serve; raise `WorkerDead` when it never will again."""
        await self._engine.check_health()
        if self._needed_transfer is not None:
            self._needed_transfer.check_health()

    async def drained(self) -> None:
        """Return when nothing that other workers still need is held here."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Free what the role holds."""

    def _canary(self, request: Request) -> AsyncGenerator[Step | Tokens, None]:
        """Answer a health check from the engine alone, in every role:
        nothing is handed over that nobody would fetch."""
        return self._engine.generate(request.engine_request)


@contextmanager
def withdrawn_on_failure(offer: Offer | None) -> Iterator[None]:
    """Withdraw `offer` if the block fails or is closed: the reply that names it did not leave."""
    try:
        yield
    except BaseException:
        if offer is not None:
            offer.release()
        raise
