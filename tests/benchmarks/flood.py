#!/usr/bin/env python3
"""What text requests wait for while clips flood a worker: one aggregated worker, the portable engine.

usage: flood.py [--rounds N] [--requests N] [--clips N] [--duration S] [--model-path DIR]

Each round has two phases. Alone: two clients ask text requests, one after the other. Flood: they do the
same while `--clips` requests at a time, each with a clip that no cache knows, are under way without a pause.
The clip has just the longest duration that a worker takes by default, and the most pixels that it shows the
model. The bar: of the time of a text request, and of the gaps between its tokens, the 99th percentile under
the flood is at most twice that of the same round alone. Prints a table, writes `flood.json` and `flood.png`,
and exits with 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

from benchmarks import report  # noqa: E402
from benchmarks.serving_topologies import OPTIONS  # noqa: E402
from dynamo.trtllm.config import VideoLimits  # noqa: E402
from media.clips import clip, numbered  # noqa: E402
from processes.cluster import DEMO_NAME, Cluster  # noqa: E402
from processes.topologies import deploy  # noqa: E402

MOST_RATIO = 2.0
CLIENTS = 2
TOKENS = 16
PHASES = ("alone", "flood")
SIZE = (1920, 1216)
"""The largest of common shape of which the model may be shown as many frames as it is by default."""
WARM_UP = 5


@dataclass
class Phase:
    """What text clients saw, in seconds, and how the clips were answered."""

    requests_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    clips: Counter[int] = field(default_factory=Counter)
    """By HTTP status."""


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def largest_clip(duration_s: float) -> bytes:
    """A clip of one frame a second, MP4, each frame another one."""
    shapes = [numbered(number, SIZE) for number in range(8)]
    return clip(
        int(duration_s),
        size=SIZE,
        rate=1,
        draw=lambda number: shapes[number % len(shapes)],
        options={"preset": "ultrafast", "bf": "0", "g": "16"},
    )


def never_seen(data: bytes, folder: Path) -> Iterator[str]:
    """Files of the clip, each with another empty box at its end (`free`, ISO/IEC 14496-12): as data URLs the
    flood would keep this process busy, which asks the text requests too.
    """
    for number in itertools.count():
        path = folder / f"{number}.mp4"
        path.write_bytes(data + (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big"))
        yield path.as_uri()


class Load:
    """Asks one worker. Shared by the clients of all phases."""

    def __init__(self, session: aiohttp.ClientSession, url: str, clips: Iterator[str]) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._clips = clips

    async def text(self, into: Phase) -> None:
        """One streamed text request of `TOKENS` tokens."""
        body = {
            "model": DEMO_NAME,
            "messages": [{"role": "user", "content": "Hello, who is there?"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        began, last = perf_counter(), 0.0
        async with self._session.post(self._url, json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"a text request was answered with {reply.status}: {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    now = perf_counter()
                    into.gaps_s += [now - last] if last else []
                    last = now
        into.requests_s.append(perf_counter() - began)

    async def clip(self, into: Phase) -> str:
        """One request with a clip; the answer's body."""
        parts = [
            {"type": "video_url", "video_url": {"url": next(self._clips)}},
            {"type": "text", "text": "Describe the video."},
        ]
        body = {
            "model": DEMO_NAME,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        async with self._session.post(self._url, json=body) as reply:
            words = await reply.text()
            into.clips[reply.status] += 1
            if reply.status >= 500:
                raise RuntimeError(f"a clip was answered with {reply.status}: {words}")
            return words


async def ask_texts(load: Load, requests: int, into: Phase, advance: Callable[[], None]) -> None:
    async def client() -> None:
        for _ in range(requests // CLIENTS):
            await load.text(into)
            advance()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def flooded(load: Load, clips: int, into: Phase, work: Callable[[], Any]) -> None:
    """Do `work` while `clips` requests with a clip are under way; then wait for those that are."""
    over = asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            await load.clip(into)

    flood = [asyncio.create_task(client()) for _ in range(clips)]
    await work()
    over.set()
    await asyncio.gather(*flood)


async def measure(
    url: str, clips: Iterator[str], options: argparse.Namespace, advance: Callable[[], None]
) -> list[dict[str, Phase]]:
    rounds = []
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(session, url, clips)
        warm = Phase()
        await ask_texts(load, WARM_UP * CLIENTS, warm, lambda: None)
        words = await load.clip(warm)
        if not warm.clips[200]:
            raise RuntimeError(f"the clip was refused: {words}")
        for _ in range(options.rounds):
            phases = {name: Phase() for name in PHASES}
            await ask_texts(load, options.requests, phases["alone"], advance)
            flood = phases["flood"]
            await flooded(
                load,
                options.clips,
                flood,
                lambda flood=flood: ask_texts(load, options.requests, flood, advance),
            )
            rounds.append(phases)
    return rounds


def table(rounds: Sequence[dict[str, Phase]], options: argparse.Namespace) -> Table:
    title = f"text requests of {TOKENS} tokens, alone and beside {options.clips} clips at a time, ms"
    shown = Table(title=title)
    for name in ("phase", "request, median", "request, p99", "gap, median", "gap, p99", "clips answered"):
        shown.add_column(name, justify="left" if name == "phase" else "right")
    for name in PHASES:
        phases = [each[name] for each in rounds]
        cells = []
        for values in ([each.requests_s for each in phases], [each.gaps_s for each in phases]):
            for point in (50, 99):
                found = [float(np.percentile(each, point)) * 1e3 for each in values]
                cells.append(report.show(report.spread(found), 1))
        answered = sum((each.clips for each in phases), Counter())
        words = ", ".join(f"{count} with {status}" for status, count in sorted(answered.items()))
        shown.add_row(name, *cells, words or "none")
    return shown


def ratios_of(
    rounds: Sequence[dict[str, Phase]], values: Callable[[Phase], Sequence[float]]
) -> report.Spread:
    over = [p99(values(each["flood"])) for each in rounds]
    return report.ratios(over, [p99(values(each["alone"])) for each in rounds])


def plot(path: Path, rounds: Sequence[dict[str, Phase]], options: argparse.Namespace) -> None:
    """For both phases, which share of text requests and of gaps took at most how long."""
    title = f"Text requests alone, and beside {options.clips} clips of the largest kind at a time"
    figure, panels = report.new_figure(2, title)
    for axes, what, unit in zip(
        panels, ("requests_s", "gaps_s"), ("request", "gap between tokens"), strict=True
    ):
        for name, colour in zip(PHASES, ("ours", "limit"), strict=True):
            values = np.sort([value * 1e3 for each in rounds for value in getattr(each[name], what)])
            axes.plot(
                values, np.arange(1, len(values) + 1) / len(values), color=report.COLOURS[colour], label=name
            )
            axes.plot([p99(values)], [0.99], "o", color=report.COLOURS[colour])
        axes.axhline(0.99, color=report.COLOURS["other"], linestyle="dotted", linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel(f"milliseconds of a {unit} (points: 99th percentile)")
        axes.set_ylabel("share that took at most this long")
        axes.legend(frameon=False, loc="lower right")
    report.save(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="demo", help="a directory, or the word `demo`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="text requests of each phase")
    parser.add_argument("--clips", type=int, default=16, help="clips at a time")
    parser.add_argument(
        "--duration", type=float, default=VideoLimits.max_duration_s, help="length of the clip in seconds"
    )
    report.add_common_options(parser)
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> list[dict[str, Phase]]:
    console.print(f"drawing a clip of {options.duration:g} s, {SIZE[0]} x {SIZE[1]}", highlight=False)
    data = largest_clip(options.duration)
    console.print(f"its file has {len(data) / 1e6:.1f} MB; starting a worker", highlight=False)
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        reading = ("--allowed-local-media-path", folder)
        deploy("agg", cluster, options=[*OPTIONS, "--model-path", options.model_path, *reading])
        clips = never_seen(data, Path(folder))
        with report.progress(console) as shown:
            task = shown.add_task(
                "asking", total=2 * options.rounds * (options.requests // CLIENTS) * CLIENTS
            )
            return asyncio.run(measure(cluster.url, clips, options, lambda: shown.advance(task)))


def main() -> int:
    options = parse()
    console = report.new_console()
    rounds = run(options, console)
    console.print(table(rounds, options))
    bars = [
        report.Bar(
            "99th percentile of a text request's time under the flood, as a multiple of that without it",
            ratios_of(rounds, lambda phase: phase.requests_s),
            MOST_RATIO,
            at_least=False,
        ),
        report.Bar(
            "99th percentile of the gaps between its tokens, likewise",
            ratios_of(rounds, lambda phase: phase.gaps_s),
            MOST_RATIO,
            at_least=False,
        ),
    ]
    plot(options.out / "flood.png", rounds, options)
    stored = [
        {
            name: {"requests_s": phase.requests_s, "gaps_s": phase.gaps_s, "clips": dict(phase.clips)}
            for name, phase in each.items()
        }
        for each in rounds
    ]
    return report.finish(console, options.out, "flood", {"rounds": stored}, bars, no_bars=options.no_bars)


if __name__ == "__main__":
    sys.exit(main())
