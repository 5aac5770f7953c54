"""Reads the results of running requests, each to its end or until its client leaves."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from dynamo.trtllm.core import Step, Tokens
from dynamo.trtllm.engines.port import EngineRequest, EngineState
from dynamo.trtllm.engines.tensorrt_llm.results import Progress, Reader, Submitted, abort
from dynamo.trtllm.engines.tensorrt_llm.vitals import Vitals
from dynamo.trtllm.errors import EngineFault, WorkerError

logger = logging.getLogger(__name__)

Submit = Callable[[], Awaitable[Submitted]]
"""Hands the request to the library, once there is room for it."""


class Streams:
    """The streams of one engine. They share its vitals and nothing else."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals

    async def read(
        self, request: EngineRequest, submit: Submit, sent: int, *, fetches_cache: bool
    ) -> AsyncGenerator[Step | Tokens, None]:
        """Submit the request and yield its output, of which the client has `sent` tokens already.

        With `fetches_cache` the engine first fetches the request's KV cache from prefill's, which an abort
        must not interrupt. Every output token passes this loop: no work in it that is not needed for each.
        """
        vitals = self._vitals
        watch = vitals.watch
        with watch.flight() as flight:
            submitted = await submit()
            result = submitted.result
            reader = Reader(request, submitted, sent)
            ids_suffice = reader.ids_suffice
            try:
                async for _ in result:
                    flight.waiting = False
                    watch.steps += 1
                    output = result.outputs[0]
                    if ids_suffice and output.finish_reason is None:
                        new = output.token_ids[sent:]
                        if new:
                            sent += len(new)
                            yield new
                    else:
                        step = reader.read(output, sent)
                        if step is not None:
                            sent += len(step.token_ids)
                            yield step
                            if step.finish is not None:
                                return
                        ids_suffice = reader.ids_suffice
                    flight.waiting = True
                raise EngineFault("the engine ended the request without a reason")
            except WorkerError:
                raise
            except Exception as error:
                if vitals.is_one_requests(error):
                    reader.progress = Progress.OVER
                raise await vitals.failure(request.request_id, error) from error
            finally:
                if reader.progress is not Progress.OVER:
                    if fetches_cache and reader.progress is Progress.SUBMITTED and flight.ended_by is None:
                        vitals.own(self.abort_after_first(submitted))
                    else:
                        abort(result)

    def fetch_and_forget(
        self, request: EngineRequest, state: EngineState, submit: Callable[[], Awaitable[Submitted]]
    ) -> None:
        """Prefill's engine holds a request's KV cache until decode's has fetched it, or for a minute:
        so it is fetched, for nobody. Does not wait; releases `state`."""

        async def fetch() -> None:
            try:
                await self.abort_after_first(await submit())
            except WorkerError as error:
                logger.info("Request %s could not be taken back: %s", request.request_id, error)
            finally:
                state.release()

        self._vitals.own(fetch())

    async def abort_after_first(self, submitted: Submitted) -> None:
        """Aborting before the KV cache has arrived would leave prefill with a transfer that nobody ends."""
        result = submitted.result
        try:
            with self._vitals.watch.flight():
                async for _ in result:
                    break
        except Exception as error:
            logger.debug("A request that its client left ended with %s", type(error).__name__)
        finally:
            abort(result)
