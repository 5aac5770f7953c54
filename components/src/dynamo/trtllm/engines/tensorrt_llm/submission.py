"""Hands requests to the engine: inputs, sampling parameters and options, by what the release and the
loaded model take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.core import EncodedMedia, Prompt
from dynamo.trtllm.engines.port import EngineInfo, EngineRequest
from dynamo.trtllm.engines.tensorrt_llm import faults, handoff, sampling
from dynamo.trtllm.engines.tensorrt_llm.inputs import EngineInputs, ModelInputs
from dynamo.trtllm.engines.tensorrt_llm.library import Library
from dynamo.trtllm.engines.tensorrt_llm.results import Submitted, abort
from dynamo.trtllm.errors import ClientFault, WorkerError, require_room

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How one started engine is asked."""

    library: Library
    llm: Any
    info: EngineInfo
    inputs: ModelInputs
    guided: bool
    """True: the engine was started with a backend for grammars."""
    death: Callable[[BaseException], Awaitable[WorkerError | None]]
    """What to raise instead if an error turns out to be the engine's death."""
    first_request: asyncio.Event = field(default_factory=asyncio.Event)

    def room(self, request: EngineRequest) -> int:
        """Most output tokens: the request's own limit, and what the context length leaves. The library lowers
        it where an image expands further than the ids here show."""
        count, context = len(request.prompt.token_ids), self.info.context_length
        require_room(count, context)
        room = context - count
        wanted = request.sampling.max_tokens
        return room if wanted is None else min(wanted, room)

    def context_params(self) -> Any:
        """`DisaggregatedParams` of a context stage."""
        fields: dict[str, Any] = {"request_type": "context_only"}
        if self.library.next_request_id is not None:
            fields["disagg_request_id"] = self.library.next_request_id()
        return self.library.disaggregated_params(**fields)

    async def submit(
        self,
        request: EngineRequest,
        max_tokens: int,
        disaggregated: Any = None,
        *,
        streaming: bool = True,
        keep: tuple[torch.Tensor, ...] = (),
    ) -> Submitted:
        """Hands the request to the engine. Raises `ClientFault` when it refuses, `EngineDead` when it is
        gone."""
        prompt, ranks = request.prompt, self.info.data_parallel_size
        if request.dp_rank is not None and request.dp_rank >= ranks > 1:
            raise ClientFault(f"dp_rank must be between 0 and {ranks - 1}, not {request.dp_rank}")
        built = self.inputs.build(prompt, request.media_hashes)
        if built.disaggregated:
            disaggregated = self._with_handles(disaggregated, built)
        source: Any = built.inputs
        try:
            params = sampling.build_sampling_params(
                self.library,
                request.sampling,
                max_tokens,
                guided_backend=self.guided,
                special_tokens=built.special_tokens,
            )
            if prompt.media and self.library.has_preprocess:
                source = await self._preprocess(source, params, disaggregated)
            self.first_request.set()
            options = self.options(request, disaggregated)
            result = self.llm.generate_async(source, params, streaming=streaming, **options)
        except BaseException as error:
            handoff.discard(disaggregated, prepared=source)
            if not isinstance(error, Exception) or isinstance(error, WorkerError):
                raise
            raise await self._refused(request, error) from error
        self._check_expanded(result, prompt)
        kept = (*keep, *built.features, *built.positions)
        return Submitted(result, disaggregated, kept, built.positions, expanded=bool(prompt.media))

    def _with_handles(self, disaggregated: Any, built: EngineInputs) -> Any:
        disaggregated = disaggregated or self.library.disaggregated_params(
            request_type="context_and_generation"
        )
        for name, value in (built.disaggregated or {}).items():
            setattr(disaggregated, name, value)
        return disaggregated

    async def _preprocess(self, source: Any, params: Any, disaggregated: Any) -> Any:
        """Image processing, which takes tens of milliseconds, off the event loop."""
        working = asyncio.ensure_future(
            asyncio.to_thread(
                self.llm.preprocess, source, sampling_params=params, disaggregated_params=disaggregated
            )
        )
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda done: _forget(done, disaggregated))
            raise

    async def _refused(self, request: EngineRequest, error: Exception) -> WorkerError:
        logger.info("The engine refused request %s: %s: %s", request.request_id, type(error).__name__, error)
        items = [media.item for media in request.prompt.media]
        encoded = bool(items) and all(isinstance(item, EncodedMedia) for item in items)
        return await self.death(error) or faults.refused(
            error, self.library.request_error, len(items), encoded
        )

    def _check_expanded(self, result: Any, prompt: Prompt) -> None:
        """Only the library knows how far images expand, and it does once it has the request."""
        count, context = len(result.prompt_token_ids) if prompt.media else 0, self.info.context_length
        if count >= context:
            abort(result)
        require_room(count, context, with_media=True)

    def options(self, request: EngineRequest, disaggregated: Any) -> dict[str, Any]:
        """Keyword arguments of `generate_async`, only those that the release knows and the request uses."""
        known, options = self.library.generate_parameters, {}
        if disaggregated is not None:
            options["disaggregated_params"] = disaggregated
        if request.cache_salt is not None and "cache_salt" in known:
            options["cache_salt"] = request.cache_salt
        if request.trace_headers and "trace_headers" in known:
            options["trace_headers"] = dict(request.trace_headers)
        if request.priority is not None and "priority" in known:
            options["priority"] = min(1.0, max(0.0, request.priority))
        scheduling = self.library.scheduling_params
        if request.dp_rank is not None and self.info.data_parallel_size > 1 and scheduling is not None:
            options["scheduling_params"] = scheduling(
                attention_dp_rank=request.dp_rank, attention_dp_relax=False
            )
        return options


def _forget(working: asyncio.Task[Any], disaggregated: Any) -> None:
    """What was prepared for a caller that has left: its media lie in shared memory until somebody opens
    them."""
    if not working.cancelled():
        prepared = None if working.exception() is not None else working.result()
        handoff.discard(disaggregated, prepared=prepared)
