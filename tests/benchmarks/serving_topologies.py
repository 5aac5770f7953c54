"""Time to first token and inter-token latency of every topology through Dynamo's frontend;
`serving.py --topologies` runs it.

All deployments run at the same time and are asked in turn, one streamed request at a time with one image:
in each round an image that none of them has seen, and one that each has seen before. Images travel as data
URLs: no media server takes part.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import aiohttp

from dynamo.trtllm.demo.pictures import draw
from processes.cluster import Cluster
from processes.topologies import TOPOLOGIES, deploy

KINDS = ("new", "repeated")
QUESTION = "Describe the picture."
IMAGE_SIZE = (336, 336)
REPEATED_SEED = 0
OPTIONS = ("--engine", "transformers", "--modality", "multimodal", "--torch-threads", "1")


@dataclass(frozen=True)
class Latency:
    """One streamed request. `itl_s` is the mean gap between tokens after the first."""

    ttft_s: float
    itl_s: float
    text: str


Latencies = dict[str, dict[str, list[Latency]]]
"""By topology, then by kind of image."""


def start(
    stack: ExitStack, model_path: str, names: Sequence[str], starting: Callable[[str], None]
) -> dict[str, str]:
    """Start the topologies `names`, ended with `stack`; returns their frontends' URLs.
    `starting` is told what is started."""
    urls = {}
    for name in names:
        starting(name)
        cluster = stack.enter_context(Cluster())
        try:
            # The last --model-path counts; the deployment names the demo model first.
            deploy(name, cluster, options=[*OPTIONS, "--model-path", model_path])
        except AssertionError as error:
            raise SystemExit(f"{name}: {error}") from None
        urls[name] = cluster.url
    return urls


@cache
def image_url(seed: int) -> str:
    """The held-out demo image of `seed`, as a data URL."""
    sink = io.BytesIO()
    draw(seed, IMAGE_SIZE).image.save(sink, "PNG")
    return "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()


async def ask(session: aiohttp.ClientSession, url: str, model: str, picture: str, tokens: int) -> Latency:
    """One streamed chat completion of exactly `tokens` tokens about one image."""
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    texts: list[str] = []
    usage: Mapping[str, int] = {}
    start = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("choices"):
                times.append(now)
                texts.append(event["choices"][0]["delta"].get("content") or "")
    if usage.get("completion_tokens") != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {usage.get('completion_tokens')}")
    return Latency(times[0] - start, (times[-1] - times[0]) / (tokens - 1), "".join(texts))


async def measure(
    urls: Mapping[str, str],
    model: str,
    rounds: int,
    tokens: int,
    advance: Callable[[str], None],
    warmup: int = 3,
) -> Latencies:
    """All rounds over all topologies; the order turns with each round.
    Raises when two topologies answer differently."""
    found: Latencies = {name: {kind: [] for kind in KINDS} for name in urls}
    names = list(urls)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for number in range(-warmup, rounds):
            seeds = {"new": 1000 + number, "repeated": REPEATED_SEED}
            turned = names[number % len(names) :] + names[: number % len(names)]
            answers: dict[str, set[str]] = {kind: set() for kind in KINDS}
            for name in turned:
                for kind in KINDS:
                    latency = await ask(session, urls[name], model, image_url(seeds[kind]), tokens)
                    answers[kind].add(latency.text)
                    if number >= 0:
                        found[name][kind].append(latency)
                advance(name)
            if any(len(texts) != 1 for texts in answers.values()):
                raise RuntimeError(f"the topologies gave different answers: {answers}")
    return found


def steps(rounds: int, names: Sequence[str] = tuple(TOPOLOGIES), warmup: int = 3) -> int:
    """How often `measure` calls `advance`."""
    return (rounds + warmup) * len(names)
