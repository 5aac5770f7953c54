"""Helpers for the engine port's contract suite: requests, and reading a stream to its end; media as they
arrive from another worker."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dynamo.trtllm.core import (
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    EncodedMedia,
    MediaShape,
    PlacedMedia,
    Prompt,
    Sampling,
    Step,
    StepLogprobs,
    Tokens,
    Usage,
)
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest


@dataclass
class Subject:
    """A started engine and what the suite must know to ask it something."""

    engine: Engine
    info: EngineInfo
    text_ids: tuple[int, ...]
    """A prompt without media that the model takes."""
    images: Sequence[DecodedImage] = ()
    """Images of different sizes; empty where the engine takes none."""
    videos: Sequence[DecodedVideo] = ()
    """Likewise."""
    restart: Callable[[], Awaitable[Engine]] | None = None
    supports: frozenset[str] = frozenset({"sampling", "prefill", "top_logprobs"})


def shape_of(item: DecodedMedia) -> MediaShape:
    """How large an image or a video is, as a worker says it before it is encoded."""
    if isinstance(item, DecodedVideo):
        frames, height, width, _ = item.frames.shape
        return MediaShape("video", (frames, width, height))
    assert isinstance(item, DecodedImage)
    return MediaShape("image", item.image.size)


@dataclass
class Output:
    """A finished request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[StepLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop_reason: Any = None
    usage: Usage | None = None
    steps: int = 0


def request(
    ids: Sequence[int], *, media: Sequence[PlacedMedia] = (), request_id: str = "r", **sampling: Any
) -> EngineRequest:
    """A request with the given prompt and sampling fields."""
    return EngineRequest(
        request_id=request_id, prompt=Prompt(tuple(ids), tuple(media)), sampling=Sampling(**sampling)
    )


def as_step(output: Step | Tokens) -> Step:
    """The whole step, where only its token ids came."""
    return Step(output) if isinstance(output, list) else output


async def steps_of(stream: AsyncGenerator[Step | Tokens, None]) -> list[Step]:
    """Everything that comes, each as a whole step."""
    return [as_step(output) async for output in stream]


def add(output: Output, step: Step | Tokens) -> None:
    """Add one step; fails when anything follows the end."""
    assert output.finish is None, "a step followed the final one"
    step = as_step(step)
    output.token_ids.extend(step.token_ids)
    output.logprobs.extend(step.logprobs or ())
    output.steps += 1
    if step.finish is not None:
        output.finish, output.stop_reason, output.usage = step.finish, step.stop_reason, step.usage


async def generate(engine: Engine, each: EngineRequest) -> Output:
    """Run context and generation in one engine."""
    output = Output()
    async with aclosing(engine.generate(each)) as steps:
        async for step in steps:
            add(output, step)
    assert output.finish is not None, "the stream ended without a final step"
    return output


async def split(engine: Engine, each: EngineRequest) -> Output:
    """Run context and generation as prefill and decode do, the state passed on as it is."""
    prefilled = await engine.prefill(each)
    output = Output()
    add(output, prefilled.first)
    follow = EngineRequest(
        request_id=each.request_id, prompt=Prompt(prefilled.prompt_token_ids), sampling=each.sampling
    )
    if output.finish is not None:
        if prefilled.state is not None:
            engine.abandon(follow, prefilled.state)
        return output
    assert prefilled.state is not None
    async with aclosing(engine.decode(follow, prefilled.first, prefilled.state)) as steps:
        async for step in steps:
            add(output, step)
    prefilled.state.release()
    return output


def place(
    ids: Sequence[int], encoded: Sequence[EncodedMedia], tail: Sequence[int]
) -> tuple[tuple[int, ...], tuple[PlacedMedia, ...]]:
    """`ids`, then the images with one more text token between them, then `tail`."""
    out, placed = list(ids), []
    for image in encoded:
        placed.append(PlacedMedia(image, len(out), len(image.token_ids)))
        out.extend(image.token_ids)
        out.append(ids[-1])
    return (*out, *tail), tuple(placed)


def as_it_arrives(item: Any) -> EncodedMedia:
    """An item after its way from an encode worker: extras as JSON, ids and tensors anew."""
    extras = json.loads(json.dumps(dict(item.extras)))
    tensors = {name: tensor.clone() for name, tensor in item.tensors.items()}
    ids = tuple(json.loads(json.dumps(item.token_ids)))
    return EncodedMedia(item.kind, item.digest, tensors, ids, extras)
