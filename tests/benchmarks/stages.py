#!/usr/bin/env python3
"""Where the time to first token goes: stages of E/P/D requests, from the metrics of frontend and workers.

usage: stages.py [--requests N] [--tokens N] [--model-path DIR]

Starts a frontend, an encode, a prefill and a decode worker (portable engine), and asks one streamed request
at a time, each with an image that is new. All four metrics pages are read before and after each request, so
what the sum of a histogram grew by is the duration of that request's stage. The bar: the stages on the way to
the first token account for at least 95 % of the time to first token that the client saw, and for no more than
all of it. What passes between two processes is what the one waited less what the other one took. Prints a
table, writes `stages.json` and `stages.png`, and exits with 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

from benchmarks import report  # noqa: E402
from benchmarks.serving_topologies import OPTIONS, ask, image_url  # noqa: E402
from dynamo.trtllm.metrics import REQUEST_DURATION, STAGE_DURATION, TIME_TO_FIRST_TOKEN  # noqa: E402
from processes.cluster import DEMO_NAME, Cluster  # noqa: E402
from processes.topologies import Deployment, deploy  # noqa: E402

LEAST_SHARE, MOST_SHARE = 0.95, 1.0
WARM_UP = 5
FIRST_SEED = 5000
FRONTEND = "frontend"
ROUND_TRIP = "dynamo_request_plane_roundtrip_ttft_seconds"
PLANE_QUEUE = "dynamo_request_plane_queue_seconds"
FRONTEND_STAGES = "dynamo_frontend_stage_duration_seconds"
FRONTEND_TTFT = "dynamo_frontend_time_to_first_token_seconds"

Key = tuple[str, str, str]
"""Process, metric, and stage where the metric has that label."""
Sums = Mapping[Key, float]


@dataclass(frozen=True)
class Row:
    """One stage on the way: the sum of `plus` less that of `minus`."""

    process: str
    title: str
    plus: tuple[Key, ...]
    minus: tuple[Key, ...] = ()

    def seconds(self, grown: Sums) -> float:
        return sum(grown[key] for key in self.plus) - sum(grown[key] for key in self.minus)


CLIENT: Key = ("client", "time to first token", "")
"""What the client saw; not on any page."""


def stage(process: str, name: str, title: str = "") -> Row:
    """A stage that the process itself tells."""
    metric = FRONTEND_STAGES if process == FRONTEND else STAGE_DURATION.name
    return Row(process, title or name, ((process, metric, name),))


def first(process: str) -> Key:
    return process, TIME_TO_FIRST_TOKEN.name, ""


ROWS: tuple[Row, ...] = (
    Row("between", "client and frontend", (CLIENT,), ((FRONTEND, FRONTEND_TTFT, ""),)),
    stage(FRONTEND, "preprocess"),
    stage(FRONTEND, "route", "route, to prefill and to decode"),
    Row(FRONTEND, "request plane's queue, twice", ((FRONTEND, PLANE_QUEUE, ""),)),
    Row(
        "between",
        "frontend and prefill, and decode",
        ((FRONTEND, ROUND_TRIP, ""),),
        (first("prefill"), first("decode")),
    ),
    stage("prefill", "queue"),
    stage("prefill", "prepare"),
    Row(
        "between",
        "prefill and encode",
        (("prefill", STAGE_DURATION.name, "remote_encode"),),
        (("encode", REQUEST_DURATION.name, ""),),
    ),
    *(
        stage("encode", name)
        for name in ("queue", "prepare", "fetch", "media_decode", "encode", "embedding_handover", "reply")
    ),
    *(stage("prefill", name) for name in ("embedding_handover", "prefill", "kv_handover", "reply")),
    *(stage("decode", name) for name in ("queue", "prepare", "reply")),
)
"""The stages on the way to the first token, in about the order in which a request passes them."""
BESIDE = (stage("decode", "kv_handover"),)
"""Not on that way: decode gives out the first token while it reads the KV cache."""


def sums(process: str, page: str) -> dict[Key, float]:
    """The sum of each histogram on a page, over all labels but `stage`."""
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if family.type == "histogram" and sample.name.endswith(("_sum", "_count")):
                name = family.name if sample.name.endswith("_sum") else sample.name
                key = process, name, sample.labels.get("stage", "")
                found[key] = found.get(key, 0.0) + sample.value
    return found


class Pages:
    """The metrics pages of a deployment."""

    def __init__(self, session: aiohttp.ClientSession, deployment: Deployment) -> None:
        self._session = session
        self._urls = {FRONTEND: deployment.cluster.url}
        for role in deployment.roles:
            self._urls[role] = f"http://127.0.0.1:{deployment.workers[role][0].system_port}"

    async def read(self, requests: int) -> Sums:
        """All sums, once every worker has ended `requests` requests."""
        found: dict[Key, float] = {}
        for process, url in self._urls.items():
            found.update(await self._read(process, url, requests))
        return found

    async def _read(self, process: str, url: str, requests: int) -> Sums:
        name = "dynamo_frontend_request_duration_seconds" if process == FRONTEND else REQUEST_DURATION.name
        for _ in range(1000):
            async with self._session.get(f"{url}/metrics") as reply:
                found = sums(process, await reply.text())
            if found.get((process, f"{name}_count", ""), 0.0) >= requests:
                return found
            await asyncio.sleep(0.01)
        raise RuntimeError(f"{process} has not ended its request")


@dataclass(frozen=True)
class Seen:
    """One request: what the client saw, and what the pages grew by, in seconds."""

    ttft_s: float
    rows_s: tuple[float, ...]
    beside_s: tuple[float, ...]

    @property
    def explained_s(self) -> float:
        return sum(self.rows_s)


async def measure(deployment: Deployment, options: argparse.Namespace, advance: Any) -> list[Seen]:
    """Ask `options.requests` requests, one after the other, after some that warm up."""
    seen = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        pages = Pages(session, deployment)
        before: Sums = {}
        for number in range(WARM_UP + options.requests):
            image = image_url(FIRST_SEED + number)
            latency = await ask(session, deployment.cluster.url, DEMO_NAME, image, options.tokens)
            after = await pages.read(number + 1)
            if number >= WARM_UP:
                seen.append(compare(before, after, latency.ttft_s))
                advance()
            before = after
    return seen


def compare(before: Sums, after: Sums, ttft_s: float) -> Seen:
    """What one request added to the pages."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    grown[CLIENT] = ttft_s
    return Seen(
        ttft_s,
        tuple(row.seconds(grown) for row in ROWS),
        tuple(row.seconds(grown) for row in BESIDE),
    )


def milliseconds(values: Sequence[float]) -> report.Spread:
    return report.spread([value * 1e3 for value in values])


def table(seen: Sequence[Seen]) -> Table:
    shown = Table(title=f"time to first token of {len(seen)} E/P/D requests, ms: median (quartiles)")
    for name in ("where", "stage", "ms", "share"):
        shown.add_column(name, justify="left" if name in ("where", "stage") else "right")
    total = milliseconds([each.ttft_s for each in seen])

    def add(where: str, what: str, values: Sequence[float]) -> None:
        spread = milliseconds(values)
        shown.add_row(where, what, report.show(spread), f"{spread.median / total.median:.1%}")

    for at, row in enumerate(ROWS):
        add(row.process, row.title, [each.rows_s[at] for each in seen])
    shown.add_section()
    add("all", "stages together", [each.explained_s for each in seen])
    add("client", "time to first token", [each.ttft_s for each in seen])
    add("", "of that in no stage", [each.ttft_s - each.explained_s for each in seen])
    shown.add_section()
    for at, row in enumerate(BESIDE):
        add(row.process, f"{row.title}, after the first token is out", [each.beside_s[at] for each in seen])
    return shown


def plot(path: Path, seen: Sequence[Seen]) -> None:
    """Stages as steps from 0 to the time to first token."""
    figure, (axes,) = report.new_figure(
        1, f"Time to first token, E/P/D, one new image ({len(seen)} requests)"
    )
    figure.set_size_inches(9.5, 7.0)
    colours = {
        FRONTEND: "#8c8c8c",
        "between": "#c9a227",
        "encode": "#3d6f00",
        "prefill": "#76b900",
        "decode": "#2f7fb5",
    }
    labelled: set[str] = set()
    start = 0.0
    for at, row in enumerate(ROWS):
        median = milliseconds([each.rows_s[at] for each in seen]).median
        label = None if row.process in labelled else row.process
        labelled.add(row.process)
        axes.barh(at, median, 0.7, left=start, color=colours[row.process], label=label)
        axes.annotate(
            f"{median:.2f}", (start + median, at), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
        start += median
    total = milliseconds([each.ttft_s for each in seen]).median
    axes.axvline(total, color=report.COLOURS["limit"], linestyle="dashed", linewidth=1.2)
    axes.annotate(
        f"seen by the client: {total:.1f} ms",
        (total, -0.9),
        (-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=report.COLOURS["limit"],
    )
    axes.set_yticks(range(len(ROWS)), [f"{row.process}: {row.title}" for row in ROWS], fontsize=8)
    axes.set_ylim(len(ROWS) - 0.4, -1.4)
    axes.set_xlim(0, max(start, total) * 1.1)
    axes.set_xlabel("milliseconds (medians, one after the other)")
    axes.grid(True, axis="x", alpha=0.3)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    report.save(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="demo", help="a directory, or the word `demo`")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4, help="tokens of an answer, at least 2")
    report.add_common_options(parser)
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error("--tokens must be at least 2")
    if options.requests < 1:
        parser.error("--requests must be at least 1")
    return options


def run(options: argparse.Namespace, console: Console) -> list[Seen]:
    with Cluster() as cluster:
        console.print("starting: epd_disagg", highlight=False)
        deployment = deploy("epd_disagg", cluster, options=[*OPTIONS, "--model-path", options.model_path])
        with report.progress(console) as shown:
            task = shown.add_task("asking", total=options.requests)
            return asyncio.run(measure(deployment, options, lambda: shown.advance(task)))


def main() -> int:
    options = parse()
    console = report.new_console()
    seen = run(options, console)
    console.print(table(seen))
    share = report.ratios([each.explained_s for each in seen], [each.ttft_s for each in seen])
    console.print(f"the stages account for {share.median:.1%} of the time to first token", highlight=False)
    bars = [
        report.Bar(
            "share of the client's time to first token that the stages account for",
            share,
            LEAST_SHARE,
            at_least=True,
        ),
        report.Bar(
            "the same share: more than all of it would mean that something counts twice",
            share,
            MOST_SHARE,
            at_least=False,
        ),
    ]
    plot(options.out / "stages.png", seen)
    rounds = [
        {
            "ttft_s": each.ttft_s,
            "stages_s": {
                f"{row.process}: {row.title}": value for row, value in zip(ROWS, each.rows_s, strict=True)
            },
            "beside_s": {
                f"{row.process}: {row.title}": value for row, value in zip(BESIDE, each.beside_s, strict=True)
            },
        }
        for each in seen
    ]
    return report.finish(console, options.out, "stages", {"rounds": rounds}, bars, no_bars=options.no_bars)


if __name__ == "__main__":
    sys.exit(main())
