"""A submitted request and how its output object is read.

The library yields one object that it changes in place, with cumulative token ids, so a reader keeps a count
and copies only what is new.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.trtllm.core import Step, StepLogprobs, Usage
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.engines.tensorrt_llm import handoff, mrope, sampling
from dynamo.trtllm.errors import EngineFault

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Submitted(NamedTuple):
    """A request that the engine has. `keep` lives as long as the request: handles point to it."""

    result: Any
    disaggregated: Any = None
    keep: tuple[torch.Tensor, ...] = ()
    positions: tuple[torch.Tensor, ...] = ()
    """mRoPE ids and deltas that were computed for it; empty where the engine computes them itself."""
    expanded: bool = False
    """True: the library expanded the prompt, so its own count of prompt tokens is the right one."""


class Progress(Enum):
    """How far the engine is with a request."""

    SUBMITTED = "no step of it has come"
    RUNNING = "it makes steps"
    OVER = "the engine is done with it: nothing is left to abort"


class Reader:
    """Reads one step of a request from the library's output object, where there is more to it than new
    token ids."""

    def __init__(self, request: EngineRequest, submitted: Submitted, sent: int) -> None:
        self._request = request
        self._submitted = submitted
        self._first = sent
        self._late_stops = sampling.late_stop_ids(request.sampling)
        self._tokens_without_logprobs: int | None = None
        """At the start: decode of some releases has no entry for the first token. None until it is known."""
        self._asks_for_ids_alone = not self._late_stops and request.sampling.logprobs is None
        self._usage_is_due = sent == 0
        """True until the first step, which says what the prompt counts; of a handed-over request prefill's
        does."""
        self.ids_suffice = False
        """True: of a step that is not the last, the new token ids are all there is to pass on.
        The first step always is read."""
        self.progress = Progress.SUBMITTED

    def read(self, output: Any, sent: int) -> Step | None:
        """The step since `sent` tokens; None when it brought nothing to pass on."""
        self.progress, self.ids_suffice = Progress.RUNNING, self._asks_for_ids_alone
        if self._late_stops:
            cut = sampling.find_stop(
                output.token_ids, sent, self._late_stops, self._request.sampling.min_tokens
            )
            if cut is not None:
                return self._stopped(output, sent, cut)
        if output.finish_reason is not None:
            self.progress = Progress.OVER
            return self._last(output, sent)
        new = output.token_ids[sent:]
        if not new:
            self.ids_suffice = self._asks_for_ids_alone and not self._usage_is_due
            return None
        usage = self._usage(len(new)) if self._usage_is_due else None
        self._usage_is_due = False
        return Step(new, self._logprobs(output, new, sent), usage=usage)

    def _stopped(self, output: Any, sent: int, cut: int) -> Step:
        """The final step of a request that the adapter itself ends, before the stop token at index `cut`."""
        finish, stop_reason = sampling.finish_of("stop", output.token_ids[cut], self._request.sampling)
        new = output.token_ids[sent:cut]
        return Step(new, self._logprobs(output, new, sent), finish, stop_reason, self._usage(cut))

    def _last(self, output: Any, sent: int) -> Step:
        """The final step. The ids may have shrunk below what was sent; the token that ended the answer is
        not passed on. Where that is the last one allowed, the library reports the length and leaves it in."""
        ids, options = output.token_ids, self._request.sampling
        last = len(ids) - 1
        if output.finish_reason == "length" and last >= sent and sampling.end_at(ids[last], last, options):
            return self._stopped(output, sent, last)
        finish, stop_reason = sampling.finish_of(output.finish_reason, output.stop_reason, options)
        new = _without_end(self._request, output, ids[sent:], finish)
        return Step(new, self._logprobs(output, new, sent), finish, stop_reason, self._usage(sent + len(new)))

    def _logprobs(self, output: Any, new: list[int], sent: int) -> tuple[StepLogprobs, ...] | None:
        count = self._request.sampling.logprobs
        if count is None:
            return None
        rows = output.logprobs or []
        if self._tokens_without_logprobs is None:
            self._tokens_without_logprobs = max(0, min(self._first, len(output.token_ids) - len(rows)))
        return sampling.step_logprobs(new, rows[sent - self._tokens_without_logprobs :], count)

    def _usage(self, completion_tokens: int) -> Usage:
        result, request = self._submitted.result, self._request
        prompt = result.prompt_token_ids if self._submitted.expanded else request.prompt.token_ids
        return Usage(len(prompt), completion_tokens, cached_tokens(result))


def first_step(
    request: EngineRequest, output: Any, token_ids: list[int], prompt_tokens: int, room: int, params: Any
) -> Step:
    """The first token, and whether it ends the request: the context stage itself always stops after one
    token."""
    options = request.sampling
    if output.finish_reason == "stop":
        finish, stop_reason = sampling.finish_of("stop", output.stop_reason, options)
        return Step((), None, finish, stop_reason, Usage(prompt_tokens, 0))
    if not token_ids:
        raise EngineFault("the engine returned no first token")
    ended = sampling.end_at(token_ids[0], 0, options)
    if ended is not None:
        return Step((), None, *ended, Usage(prompt_tokens, 0))
    rows = None
    if options.logprobs is not None:
        rows = sampling.step_logprobs(
            token_ids, output.logprobs or handoff.first_logprobs(params), options.logprobs
        )
    if room <= len(token_ids):
        return Step(token_ids, rows, "length", None, Usage(prompt_tokens, len(token_ids)))
    return Step(token_ids, rows)


def positions_left(params: Any, submitted: Submitted) -> bool:
    """True: `params` of a finished context stage hold mRoPE handles that its engine made for decode.

    Some releases give back what they were given, which their own ranks have opened by then.
    """
    given, name = submitted.disaggregated, "mrope_position_ids_handle"
    handle = getattr(params, name, None)
    return handle is not None and handle != getattr(given, name, None)


def drop_positions(params: Any, submitted: Submitted) -> None:
    """Free what a context stage made for a decode that does not come."""
    if positions_left(params, submitted):
        handoff.discard(params)


def positions_of_images(
    request: EngineRequest, prompt_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """mRoPE positions of an expanded prompt whose images the engine encoded itself, from the images'
    sizes.

    As `mrope.positions`. Raises `EngineFault` when the prompt did not grow as images make it grow.
    """
    placed: list[tuple[int, mrope.Grid]] = []
    grown = 0
    for media in request.prompt.media:
        start = media.start + grown
        end = start
        while end < len(prompt_ids) and prompt_ids[end] == prompt_ids[start]:
            end += 1
        image = getattr(media.item, "image", None)
        if image is None or end == start:
            raise EngineFault("the engine did not say where an image's tokens are")
        placed.append((start, mrope.grid_of_image(image.width, image.height, end - start)))
        grown += end - start - media.length
    if len(request.prompt.token_ids) + grown != len(prompt_ids):
        raise EngineFault("the engine did not say where an image's tokens are")
    return mrope.positions(len(prompt_ids), placed)


def cached_tokens(result: Any) -> int:
    """Prompt tokens that the engine's cache had."""
    return int(getattr(result, "cached_tokens", 0) or 0)


def abort(result: Any) -> None:
    """Fire and forget. Calling it for a request that is over is not promised to be harmless."""
    try:
        if not result.finished and not result.aborted():
            result.abort()
    except Exception as error:
        logger.debug("Aborting a request failed with %s", type(error).__name__)


def _without_end(request: EngineRequest, output: Any, new: list[int], finish: str) -> list[int]:
    if not new:
        return new
    if finish == "eos" and new[-1] in request.sampling.eos_token_ids:
        return new[:-1]
    if finish == "stop" and new[-1] == output.stop_reason:
        return new[:-1]
    return new
