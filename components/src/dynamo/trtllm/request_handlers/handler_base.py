"""What the roles share: the disaggregation modes' common steps, from the frontend's dict to the engine and back to chunks.

A handler reads: parse, prepare, call the engine, translate. It raises from `errors`; `egress` decides what the client sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from dynamo.trtllm.egress import Chunk, Context
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, Prompt, Step, StepLogprobs, Usage
from dynamo.trtllm.request import Request
from dynamo.trtllm.transfer.port import Offer, Transfer


class HandlerBase(ABC):
    """A role's handler. Holds no state of single requests."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self._engine = engine
        self._info = info

    @abstractmethod
    def generate(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        """Serve one request: yield response chunks in Dynamo's `LLMEngineOutput` form, the last with `finish_reason`."""

    def stats(self) -> Mapping[str, float]:
        """Gauges of this role for the metrics page."""
        return {}

    async def drained(self) -> None:
        """Return when nothing that other workers still need is held here."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Free what the role holds."""

    def _canary(self, request: Request, context: Context) -> AsyncGenerator[Step, None]:
        """Answer a health check from the engine alone, in every role: nothing is handed over that nobody would fetch."""
        return self._engine.generate(engine_request(request, Prompt(request.token_ids), context))


@contextmanager
def withdrawn_on_failure(offers: list[Offer]) -> Iterator[None]:
    """Withdraw what `offers` holds by then if the block fails or is closed: the reply that names them did not leave."""
    try:
        yield
    except BaseException:
        for offer in offers:
            offer.release()
        raise


def engine_request(request: Request, prompt: Prompt, context: Context) -> EngineRequest:
    """The engine's view of a parsed request whose prompt is ready."""
    return EngineRequest(
        request_id=context.id(),
        prompt=prompt,
        sampling=request.sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        dp_rank=request.dp_rank,
        trace_headers=context.trace_headers(),
        media_hashes=request.media_hashes if prompt.media else (),
    )


def to_chunk(step: Step) -> Chunk:
    """Translate one engine step. Runs once per token: the plain case builds one dict and nothing else."""
    if step.finish is None and step.logprobs is None:
        return {"token_ids": step.token_ids, "index": 0}
    chunk: Chunk = {"token_ids": step.token_ids, "index": 0}
    if step.logprobs is not None:
        add_logprobs(chunk, step.logprobs)
    if step.finish is not None:
        chunk["finish_reason"] = step.finish
        if step.stop_reason is not None:
            chunk["stop_reason"] = step.stop_reason
    if step.usage is not None:
        chunk["completion_usage"] = usage_dict(step.usage)
    return chunk


def add_logprobs(chunk: Chunk, logprobs: Sequence[StepLogprobs]) -> None:
    """Put log probabilities into a chunk, one entry per token, ranks from 1."""
    chunk["log_probs"] = [position.chosen.logprob for position in logprobs]
    if any(position.top for position in logprobs):
        chunk["top_logprobs"] = [
            [{"rank": t.rank, "token_id": t.token_id, "token": None, "logprob": t.logprob} for t in position.top]
            for position in logprobs
        ]


def usage_dict(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def transfer_stats(transfer: Transfer) -> dict[str, float]:
    """The transfer's counters under their names on the metrics page."""
    return {f"transfer_{name}": value for name, value in asdict(transfer.stats()).items()}
