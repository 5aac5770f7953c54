"""What `serving.py` asks a running deployment, and what it measures there: TTFT, ITL and tokens per second.

TTFT is the time from sending a request to its first token; ITL the mean gap between a request's tokens
after that.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

QUESTION = "what is in the picture?"
JPEG_QUALITY = 90
_BEGINNING = 20
"""Tokens of a stream whose gaps are not counted: the prompts of other streams are computed meanwhile."""


@dataclass(frozen=True)
class Load:
    """Requests sent together: `at_once`, with `pictures` pictures each, answered in `tokens` tokens."""

    name: str
    side: int
    """Pixels per side of a picture: 1036 make 1,369 tokens, 224 make 64."""
    pictures: int
    at_once: int
    tokens: int
    rounds: int


LOADS = (
    Load("1 picture", 1036, 1, 1, 128, 6),
    Load("5 pictures", 1036, 5, 1, 32, 4),
    Load("16 at once, small picture", 224, 1, 16, 128, 3),
    Load("64 at once, small picture", 224, 1, 64, 128, 4),
    Load("8 at once, 4 pictures each", 1036, 4, 8, 64, 2),
)


@dataclass(frozen=True)
class Found:
    """Medians over all requests of a load, its first round left out; `tokens_per_s` is the best round's."""

    load: str
    ttft_ms: float
    itl_ms: float
    tokens_per_s: float
    prompt_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gaps:
    """Gaps between tokens of running text streams, alone and while a burst of pictures arrives."""

    idle_median_ms: float
    idle_p99_ms: float
    burst_median_ms: float
    burst_p99_ms: float
    burst_max_ms: float
    burst_ttft_ms: float


def picture(seed: int, side: int) -> Image.Image:
    """Coarse noise, which no cache has seen, `side` pixels a side."""
    noise = np.random.default_rng(seed).integers(0, 255, (side // 4, side // 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((side, side))


def data_url(seed: int, side: int) -> str:
    sink = io.BytesIO()
    picture(seed, side).save(sink, "JPEG", quality=JPEG_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(sink.getvalue()).decode()


@dataclass(frozen=True)
class Times:
    """One streamed answer."""

    sent: float
    tokens: list[float]
    """When each chunk with text arrived."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.tokens[0] - self.sent) * 1e3

    @property
    def itl_ms(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / max(1, self.completion_tokens - 1) * 1e3


class Client:
    """Asks one frontend. Every picture it makes is new."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, first_seed: int = 0) -> None:
        self._session, self._url, self._model = session, url, model
        self._seed = first_seed

    def pictures(self, count: int, side: int) -> list[str]:
        self._seed += count
        return [data_url(self._seed + i, side) for i in range(count)]

    def body(self, urls: Sequence[str], tokens: int) -> bytes:
        """A greedy streamed request of `tokens` tokens. Written before it is timed: with images it takes
        milliseconds.
        """
        content = [
            {"type": "text", "text": QUESTION},
            *({"type": "image_url", "image_url": {"url": u}} for u in urls),
        ]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    async def ask(self, body: bytes, tokens: int) -> Times:
        """Send `body`, which asks for `tokens` tokens. Raises `RuntimeError` for any other answer."""
        sent, arrived, usage = time.perf_counter(), [], {}
        headers = {"Content-Type": "application/json"}
        url = f"{self._url}/v1/chat/completions"
        async with self._session.post(url, data=io.BytesIO(body), headers=headers) as reply:
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    if event.get("choices"):
                        arrived.append(time.perf_counter())
        if usage.get("completion_tokens") != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, got {usage.get('completion_tokens')}")
        return Times(sent, arrived, int(usage["prompt_tokens"]), tokens)

    async def measure(self, load: Load) -> Found:
        times: list[Times] = []
        rates: list[float] = []
        for number in range(load.rounds):
            asked = [
                self.body(self.pictures(load.pictures, load.side), load.tokens) for _ in range(load.at_once)
            ]
            start = time.perf_counter()
            answers = await asyncio.gather(*(self.ask(body, load.tokens) for body in asked))
            if number:
                times += answers
                rates.append(load.at_once * load.tokens / (time.perf_counter() - start))
        return Found(
            load.name,
            statistics.median(t.ttft_ms for t in times),
            statistics.median(t.itl_ms for t in times),
            max(rates),
            times[0].prompt_tokens,
        )

    async def gaps_under_a_burst(self, streams: int = 4, tokens: int = 600) -> Gaps:
        """Text streams alone, then the same while eight requests with four pictures each arrive.

        The first streams warm up. The burst is sent by a thread of its own, so that sending 23 MB does not
        delay the moments at which the streams' tokens are seen to arrive.
        """
        text = self.body((), tokens)
        await asyncio.gather(*(self.ask(text, tokens) for _ in range(streams)))
        idle = await asyncio.gather(*(self.ask(text, tokens) for _ in range(streams)))
        asked = [self.body(self.pictures(4, 1036), 8) for _ in range(8)]
        running = [asyncio.create_task(self.ask(text, tokens)) for _ in range(streams)]
        await asyncio.sleep(0.5)
        start = time.perf_counter()
        burst = await asyncio.to_thread(asyncio.run, _ask_apart(self._url, self._model, asked, 8))
        during = (start, max(t.tokens[0] for t in burst))
        streamed = [await task for task in running]
        return Gaps(
            _percentile(_gaps(idle), 0.5),
            _percentile(_gaps(idle), 0.99),
            _percentile(_gaps(streamed, during), 0.5),
            _percentile(_gaps(streamed, during), 0.99),
            max(_gaps(streamed, during)),
            statistics.median(t.ttft_ms for t in burst),
        )


async def _ask_apart(url: str, model: str, bodies: Sequence[bytes], tokens: int) -> list[Times]:
    """Send `bodies` together, over connections of their own."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        client = Client(session, url, model)
        return list(await asyncio.gather(*(client.ask(body, tokens) for body in bodies)))


def _gaps(times: Sequence[Times], during: tuple[float, float] = (0.0, float("inf"))) -> list[float]:
    """Milliseconds between tokens, of gaps that end within `during`; not while the streams begin."""
    low, high = during
    settled = [t.tokens[_BEGINNING:] for t in times]
    return [(b - a) * 1e3 for each in settled for a, b in itertools.pairwise(each) if low <= b <= high] or [
        0.0
    ]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
