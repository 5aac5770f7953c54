#!/usr/bin/env python3
"""Changed clips and sounds against real workers: each is answered or refused, and the worker's memory stays.

usage: fuzz_media.py [--files N] [--at-once N] [--seed N]

Starts an aggregated worker of the demo model for clips, and one of a tiny Qwen2-Audio model for sounds. Each
gets `--files` files: whole ones of every kind that is taken, with bytes flipped, runs overwritten, pieces cut
out, doubled or swapped, cut short, or two files joined. A file ends well with a 200 that has an answer, or
with a 4xx in words. At the end the worker answers a whole file as before, with no more memory than after a
fifth of the files and a tenth more. Prints a table and exits with 1 when something else happened.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

from engines.families import save_tiny_model  # noqa: E402
from media.clips import clip  # noqa: E402
from media.sounds import encoded, tone, wav  # noqa: E402
from processes.cluster import DEMO_NAME, Cluster  # noqa: E402
from processes.topologies import Deployment, deploy  # noqa: E402

MOST_GROWTH = 1.1
OPTIONS = ("--engine", "transformers", "--modality", "multimodal", "--torch-threads", "1")
QUICK = {"deadline": "realtime", "cpu-used": "8"}


def whole_clips() -> list[bytes]:
    return [
        clip(12),
        clip(12, container="mov", options={"preset": "ultrafast", "g": "4"}),
        clip(12, muxing={"movflags": "faststart"}),
        clip(12, muxing={"movflags": "frag_keyframe+empty_moov"}),
        clip(12, codec="mpeg4", sound_s=0.4),
        clip(12, container="webm", codec="libvpx-vp9", options=QUICK),
        clip(12, container="webm", codec="libvpx", options=QUICK, sound_s=0.4),
    ]


def whole_sounds() -> list[bytes]:
    wave = tone(0.6, rate=48000)
    return [
        wav(tone(0.5)),
        wav(np.stack([tone(0.5), tone(0.5, hertz=900.0)]), bits=24),
        wav(tone(0.5), bits=32, floating=True),
        encoded(wave, container="flac", codec="flac"),
        encoded(wave, container="mp3", codec="libmp3lame"),
        encoded(wave, container="ogg", codec="libopus"),
        encoded(np.stack([wave, wave]), container="ogg", codec="vorbis", layout="stereo"),
    ]


def changed(data: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """`data` with one kind of damage. Half of it falls into the first 512 bytes, where headers are."""
    at = int(rng.integers(min(512, len(data)) if rng.random() < 0.5 else len(data)))
    length = int(rng.integers(1, 200))
    piece = data[at : at + length]
    kind = int(rng.integers(7))
    if kind == 0:
        flipped = bytearray(data)
        for place in rng.integers(0, len(data), int(rng.integers(1, 20))):
            flipped[place] ^= 1 << int(rng.integers(8))
        return bytes(flipped)
    if kind == 1:
        return data[:at] + rng.bytes(length) + data[at + length :]
    if kind == 2:
        return data[:at] + bytes([0, 255][int(rng.integers(2))] for _ in piece[:4]) + data[at + 4 :]
    if kind == 3:
        return data[:at] + data[at + length :]
    if kind == 4:
        return data[:at] + piece * int(rng.integers(2, 20)) + data[at + length :]
    if kind == 5:
        return data[: max(1, at)]
    return data[:at] + other[int(rng.integers(len(other))) :]


@dataclass
class Outcome:
    """What became of one kind's files."""

    statuses: Counter[int] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory of the worker after each fifth of the files."""

    @property
    def growth(self) -> float:
        return self.memory_mb[-1] / self.memory_mb[0]


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


class Client:
    """Asks one worker about files of one kind."""

    def __init__(self, session: aiohttp.ClientSession, url: str, kind: str) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._kind = kind

    async def ask(self, data: bytes) -> tuple[int, str]:
        """Status, and the answer or the error's words."""
        url = f"data:{self._kind}/x;base64,{base64.b64encode(data).decode()}"
        part = {"type": f"{self._kind}_url", f"{self._kind}_url": {"url": url}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Describe it."}]}]
        body = {
            "model": DEMO_NAME,
            "messages": messages,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with self._session.post(self._url, json=body) as reply:
            found = await reply.json(content_type=None)
        if reply.status == 200:
            return 200, found["choices"][0]["message"]["content"] or ""
        return reply.status, str(found.get("message") or found.get("error") or "")


async def fuzz(
    deployment: Deployment,
    kind: str,
    whole: Sequence[bytes],
    options: argparse.Namespace,
    advance: Callable[[], None],
) -> Outcome:
    rng, outcome = np.random.default_rng(options.seed), Outcome()
    files = [
        changed(*(whole[int(each)] for each in rng.integers(0, len(whole), 2)), rng)
        for _ in range(options.files)
    ]
    pid = deployment.workers["agg"][0].pid
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(session, deployment.cluster.url, kind)
        before = [await client.ask(each) for each in whole]
        outcome.wrong += [f"a whole file: {status} {words}" for status, words in before if status != 200]

        async def one(number: int) -> None:
            status, words = await client.ask(files[number])
            outcome.statuses[status] += 1
            if status != 200:
                outcome.words[words.partition(": ")[2][:60]] += 1
            if not (status == 200 or 400 <= status < 500) or not words:
                outcome.wrong.append(f"file {number}: {status} {words!r}")
            advance()

        fifth = max(1, options.files // 5)
        for start in range(0, options.files, fifth):
            waiting = iter(range(start, min(start + fifth, options.files)))
            await asyncio.gather(*(_all(one, waiting) for _ in range(options.at_once)))
            outcome.memory_mb.append(resident_mb(pid))
        after = [await client.ask(each) for each in whole]
        outcome.wrong += [
            f"a whole file, afterwards: {one} {two}"
            for one, two in zip(before, after, strict=True)
            if one != two
        ]
    if outcome.growth > MOST_GROWTH:
        outcome.wrong.append(f"the worker's memory grew to {outcome.growth:.2f} of what it was")
    return outcome


async def _all(one: Callable[[int], Any], waiting: Any) -> None:
    for number in waiting:
        await one(number)


def table(outcomes: dict[str, Outcome]) -> Table:
    shown = Table(title="changed files")
    for name in ("kind", "answered", "refused", "otherwise", "memory, MB"):
        shown.add_column(name, justify="left" if name == "kind" else "right")
    for kind, each in outcomes.items():
        refused = sum(count for status, count in each.statuses.items() if 400 <= status < 500)
        other = sum(each.statuses.values()) - refused - each.statuses[200]
        memory = " ".join(f"{value:.0f}" for value in each.memory_mb)
        shown.add_row(kind, str(each.statuses[200]), str(refused), str(other), memory)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=500, help="changed files of each kind")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, outcomes = Console(), dict[str, Outcome]()
    with ExitStack() as stack, Progress(console=console) as shown:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tasks = {
            "video": (whole_clips(), "demo"),
            "audio": (whole_sounds(), str(save_tiny_model("qwen2_audio", folder))),
        }
        for kind, (whole, model) in tasks.items():
            task = shown.add_task(kind, total=options.files)
            with Cluster() as cluster:
                deployment = deploy("agg", cluster, options=[*OPTIONS, "--model-path", model])
                work = fuzz(deployment, kind, whole, options, lambda task=task: shown.advance(task))
                outcomes[kind] = asyncio.run(work)
    console.print(table(outcomes))
    wrong = [f"{kind}: {each}" for kind, outcome in outcomes.items() for each in outcome.wrong]
    for kind, outcome in outcomes.items():
        for words, count in outcome.words.most_common(6):
            console.print(f"  {kind}: {count} x {words}", highlight=False, markup=False)
    for each in wrong:
        console.print(each, style="red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
