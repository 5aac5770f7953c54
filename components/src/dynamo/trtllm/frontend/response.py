"""What goes back to the frontend: an engine's steps as chunks in Dynamo's `LLMEngineOutput` form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.trtllm.core import Step, StepLogprobs, Tokens, Usage

Chunk = dict[str, Any]
Output = Step | Tokens | Chunk
"""What a role's stream yields: the engine's own steps,
or a chunk where the role has more to say than a step holds."""


def to_chunk(step: Output) -> Chunk:
    """Translate one engine step. Runs once per token: the plain case builds one dict and nothing else."""
    if isinstance(step, list):
        return {"token_ids": step, "index": 0}
    if isinstance(step, dict):
        return step
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
            [
                {"rank": t.rank, "token_id": t.token_id, "token": None, "logprob": t.logprob}
                for t in position.top
            ]
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
