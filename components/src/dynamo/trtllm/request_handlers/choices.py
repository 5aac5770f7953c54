"""Several choices of one request (`n`): one prompt is computed,
then each choice goes on by itself, and all leave together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from dynamo.trtllm.core import Step, Tokens
from dynamo.trtllm.engines.port import Engine, EngineRequest, EngineState
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.frontend.response import Chunk, Output, to_chunk

_LOGPROBS = ("log_probs", "logprobs")
Answer = AsyncGenerator[Output, None]
Watch = Callable[[Answer], Awaitable[Answer]]
"""Ends one choice's answer at the request's stop strings."""


def answers_of(request: Request, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """Of all choices' `chunks` those that are given back:
    as they come, or the best ones when all have ended."""
    return (
        chunks
        if request.best_choices is None
        else _best(request.best_choices, chunks, request.shows_logprobs)
    )


def require_forks(engine: Engine, request: EngineRequest) -> None:
    """Raises `ClientFault` when the engine cannot continue a prefilled prompt as often as `request` asks."""
    if request.choices > 1 and not engine.forks:
        raise ClientFault("n must be 1: this deployment's engine continues a prefilled prompt once")


async def generate_all(engine: Engine, request: EngineRequest, watch: Watch) -> AsyncGenerator[Chunk, None]:
    """All choices of `request`, whose prompt is prepared, from one engine."""
    if not engine.forks:
        answers: list[Answer] = [engine.generate(_choice(request, index)) for index in range(request.choices)]
        async with aclosing(_side_by_side(answers, watch)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    prefilled = await engine.prefill(request)
    async with aclosing(continue_all(engine, request, prefilled.first, prefilled.state, watch)) as chunks:
        async for chunk in chunks:
            yield chunk


async def continue_all(
    engine: Engine, request: EngineRequest, first: Step, state: EngineState | None, watch: Watch
) -> AsyncGenerator[Chunk, None]:
    """All choices of a request that was prefilled to `state`; `first` is the first token of the first choice.

    `state` is released when every choice has ended.
    Without one, which ends no prefill of several choices, there is one choice.
    """
    answers: list[Answer] = [_first_choice(engine, _choice(request, 0), first, state)]
    if state is not None:
        answers += [
            engine.decode(_choice(request, index), None, state) for index in range(1, request.choices)
        ]
    try:
        async with aclosing(_side_by_side(answers, watch)) as chunks:
            async for chunk in chunks:
                yield chunk
    finally:
        if state is not None:
            state.release()


def _choice(request: EngineRequest, index: int) -> EngineRequest:
    """Choice `index` as a request of its own. The seed counts on:
    choice i answers as a request with `seed + i`."""
    seed = request.sampling.seed
    sampling = request.sampling
    if seed is not None and index:
        sampling = replace(sampling, seed=(seed + index) % (1 << 64))
    return replace(request, request_id=f"{request.request_id}-{index}", sampling=sampling, choices=1)


async def _first_choice(
    engine: Engine, request: EngineRequest, first: Step, state: EngineState | None
) -> AsyncGenerator[Step | Tokens, None]:
    yield first
    if first.finish is None and state is not None:
        async with aclosing(engine.decode(request, first, state)) as steps:
            async for step in steps:
                yield step


async def _best(
    count: int, chunks: AsyncGenerator[Chunk, None], shows_logprobs: bool
) -> AsyncGenerator[Chunk, None]:
    """The `count` choices whose tokens have the highest mean log probability,
    best first, each whole in one chunk."""
    whole: dict[int, Chunk] = {}
    async with aclosing(chunks):
        async for chunk in chunks:
            answer = whole.setdefault(chunk["index"], {"token_ids": [], "log_probs": [], "top_logprobs": []})
            for name, value in chunk.items():
                answer[name] = [*answer[name], *value] if isinstance(value, (list, tuple)) else value
    ranked = sorted(whole.values(), key=lambda answer: -_mean(answer["log_probs"]))
    for index, answer in enumerate(ranked[:count]):
        kept = (
            name for name in answer if answer[name] != [] and (shows_logprobs or not name.endswith(_LOGPROBS))
        )
        yield {"token_ids": [], **{name: answer[name] for name in kept}, "index": index}


def _mean(logprobs: Sequence[float]) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


async def _side_by_side(answers: Sequence[Answer], watch: Watch) -> AsyncGenerator[Chunk, None]:
    """The chunks of all `answers` as they come, each with its choice's index. A failure of one ends all."""
    queue: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, answer, watch, queue)) for index, answer in enumerate(answers)]
    tally, running = _Tally(), len(pumps)
    try:
        while running:
            index, output = await queue.get()
            if output is None:
                running -= 1
                continue
            if isinstance(output, BaseException):
                raise output
            yield {**tally.counted(output, is_last=running == 1), "index": index}
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, answer: Answer, watch: Watch, queue: asyncio.Queue[Any]) -> None:
    """Put what `answer` brings into `queue`, its last step together with None, or what it failed with."""
    ends: list[Output | None] = [None]
    try:
        async with aclosing(await watch(answer)) as outputs:
            async for output in outputs:
                if isinstance(output, Step) and output.finish is not None:
                    ends.insert(0, output)
                else:
                    queue.put_nowait((index, output))
    except Exception as error:
        queue.put_nowait((index, error))
        return
    for end in ends:
        queue.put_nowait((index, end))


class _Tally:
    """Usage of all choices: said with the first chunk,
    for the frontend to count on from, and with the last one."""

    def __init__(self) -> None:
        self._is_open = False
        self._completion = 0
        self._cached = 0

    def counted(self, output: Output, is_last: bool) -> Chunk:
        """`output` as a chunk; `is_last` says that all other choices have ended."""
        if not isinstance(output, Step) or output.usage is None:
            return to_chunk(output)
        self._cached = max(self._cached, output.usage.cached_tokens)
        usage = output.usage._replace(cached_tokens=self._cached)
        is_said = not self._is_open
        if output.finish is not None:
            self._completion += usage.completion_tokens
            usage, is_said = usage._replace(completion_tokens=self._completion), is_last
        self._is_open = self._is_open or is_said
        return to_chunk(output._replace(usage=usage if is_said else None))
