#!/usr/bin/env python3
"""CPU that a worker adds per output token and per request, beside the floor: an empty handler that pushes.

usage: worker_cost.py [--model-path DIR] [--rounds N ...] [LABEL=COMMAND ...]

Each worker stands behind a frontend of its own; all run at once and are loaded in turn. A round loads a
worker with long answers and then with answers of one token, and reads the CPU clock of its process before and
after: the second load gives the cost of a request, the first, less that, the cost of a token. Compares this
project's worker with `--engine double` to `empty_worker.py`; each LABEL=COMMAND (shell words; `{model}` and
`{name}` are replaced) adds another worker that serves the same model by that name. Prints a table, writes
`worker_cost.json` and `worker_cost.png`, and exits with 1 when ours costs more than 1.5 floors per token.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

from benchmarks import report  # noqa: E402
from dynamo.trtllm.model_files import DEMO_DIRECTORY, DEMO_MODEL  # noqa: E402
from processes.cluster import Cluster  # noqa: E402

FLOOR, OURS = "empty push handler", "this project, double"
TOKEN_LIMIT = 1.5
PROMPT = "red circle on blue"
REQUESTS_OF_ONE_TOKEN = 4
"""For each request with a long answer, since one of a single token costs so little."""


@dataclass(frozen=True)
class Cost:
    """What one round found, worker CPU only."""

    token_us: float
    request_us: float
    tokens_per_s: float


@dataclass(frozen=True)
class Subject:
    """A running worker behind its frontend."""

    label: str
    url: str
    name: str
    pid: int


def cpu_seconds(pid: int) -> float:
    """CPU time of a whole process, ended threads included, in nanosecond steps (Linux:
    clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def commands(options: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """Every worker's command by its label; the floor comes first."""
    double = [
        "-m",
        "dynamo.trtllm",
        "--engine",
        "double",
        "--model-path",
        model,
        "--served-model-name",
        options.name,
    ]
    found = {
        FLOOR: [sys.executable, str(Path(__file__).with_name("empty_worker.py")), model, options.name],
        OURS: [sys.executable, *double],
    }
    for extra in options.workers:
        label, _, command = extra.partition("=")
        found[label] = [word.format(model=model, name=options.name) for word in shlex.split(command)]
    return found


def start(stack: ExitStack, label: str, command: Sequence[str], name: str) -> Subject:
    """Start `command` behind a frontend of its own, ended with `stack`."""
    cluster = stack.enter_context(Cluster(model=name))
    cluster.frontend(env={"DYN_LOG": "error"})
    worker = cluster.start("worker", command, {"DYN_LOG": "error"})
    try:
        cluster.wait_listed()
    except AssertionError as error:
        raise SystemExit(f"{label}: {error}\n{worker.text()[-2000:]}") from None
    return Subject(label, cluster.url, name, worker.pid)


async def load(
    session: aiohttp.ClientSession, subject: Subject, requests: int, tokens: int, concurrency: int
) -> int:
    """Ask `requests` times for `tokens` tokens, `concurrency` at a time. Returns how many tokens came."""
    body = {"model": subject.name, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    slots = asyncio.Semaphore(concurrency)

    async def one() -> int:
        async with slots, session.post(f"{subject.url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            if reply.status != 200:
                raise SystemExit(f"{subject.label}: status {reply.status}: {answer}")
            return int(answer["usage"]["completion_tokens"])

    return sum(await asyncio.gather(*(one() for _ in range(requests))))


async def measure(
    session: aiohttp.ClientSession, subject: Subject, requests: int, tokens: int, concurrency: int
) -> Cost:
    """One round of one worker."""
    many = requests * REQUESTS_OF_ONE_TOKEN
    start_cpu = cpu_seconds(subject.pid)
    await load(session, subject, many, 1, concurrency)
    after_short, wall = cpu_seconds(subject.pid), time.perf_counter()
    came = await load(session, subject, requests, tokens, concurrency)
    wall = time.perf_counter() - wall
    long_cpu = cpu_seconds(subject.pid) - after_short
    per_request = (after_short - start_cpu) / many
    per_token = (long_cpu - per_request * requests) / (came - requests)
    return Cost(per_token * 1e6, per_request * 1e6, came / wall)


async def run_rounds(
    subjects: Sequence[Subject], options: argparse.Namespace, console: Console
) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {subject.label: [] for subject in subjects}
    with report.progress(console) as shown:
        task = shown.add_task("measuring", total=options.rounds * len(subjects))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            for subject in subjects:
                await load(session, subject, 2 * options.concurrency, options.tokens, options.concurrency)
            for number in range(options.rounds):
                for subject in subjects if number % 2 == 0 else subjects[::-1]:
                    shown.update(task, description=f"round {number + 1}: {subject.label}")
                    cost = await measure(
                        session, subject, options.requests, options.tokens, options.concurrency
                    )
                    costs[subject.label].append(cost)
                    shown.advance(task)
    return costs


def ratio_to_floor(costs: Mapping[str, Sequence[Cost]], label: str, field: str) -> report.Spread:
    """`field` of `label` over the floor's, round by round."""
    return report.ratios([getattr(c, field) for c in costs[label]], [getattr(c, field) for c in costs[FLOOR]])


def spread_of(costs: Sequence[Cost], field: str) -> report.Spread:
    return report.spread([getattr(cost, field) for cost in costs])


def show(console: Console, costs: Mapping[str, Sequence[Cost]]) -> None:
    table = Table(title="worker CPU, median (quartiles)")
    for column in ("worker", "us per token", "of the floor", "us per request", "of the floor", "tokens/s"):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for label, rounds in costs.items():
        table.add_row(
            label,
            report.show(spread_of(rounds, "token_us")),
            report.show(ratio_to_floor(costs, label, "token_us")),
            report.show(spread_of(rounds, "request_us"), 0),
            report.show(ratio_to_floor(costs, label, "request_us")),
            report.show(spread_of(rounds, "tokens_per_s"), 0),
        )
    console.print(table)


def plot(path: Path, costs: Mapping[str, Sequence[Cost]]) -> None:
    figure, panels = report.new_figure(2, "CPU of the worker process over an engine that computes nothing")
    labels = list(costs)
    colours = [report.COLOURS["ours" if label == OURS else "other"] for label in labels]
    for axes, field, unit, digits in (
        (panels[0], "token_us", "per output token, µs of CPU", 1),
        (panels[1], "request_us", "per request, µs of CPU", 0),
    ):
        values = [spread_of(costs[label], field) for label in labels]
        notes = [
            "" if label == FLOOR else f"{ratio_to_floor(costs, label, field).median:.2f}x" for label in labels
        ]
        report.draw_bars(axes, values, colours, at=range(len(labels)), digits=digits, notes=notes)
        axes.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels])
        axes.set_ylabel(unit)
        report.fit(axes, max(*(value.high for value in values), TOKEN_LIMIT * values[0].median))
    floor = spread_of(costs[FLOOR], "token_us").median
    report.draw_limit(
        panels[0], TOKEN_LIMIT * floor, -0.5, len(labels) - 0.5, f"bar: {TOKEN_LIMIT} times the empty handler"
    )
    panels[0].set_title("per token")
    panels[1].set_title("per request")
    report.save(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workers", nargs="*", metavar="LABEL=COMMAND", help="further workers to compare")
    parser.add_argument(
        "--model-path", default=DEMO_MODEL, help="a directory with tokenizer and chat template, or `demo`"
    )
    parser.add_argument("--name", default="model", help="the name under which all workers serve")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=128, help="requests with long answers in a round")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a long answer, at least 2")
    parser.add_argument("--concurrency", type=int, default=16)
    report.add_common_options(parser)
    options = parser.parse_args()
    for extra in options.workers:
        if "=" not in extra:
            parser.error(f"{extra!r} is not LABEL=COMMAND")
    if options.tokens < 2:
        parser.error("--tokens must be at least 2")
    return options


def main() -> int:
    options = parse()
    console = report.new_console()
    model = (
        str(DEMO_DIRECTORY) if options.model_path == DEMO_MODEL else str(Path(options.model_path).resolve())
    )
    with ExitStack() as stack:
        subjects = []
        for label, command in commands(options, model).items():
            console.print(f"starting: {label}", highlight=False)
            subjects.append(start(stack, label, command, options.name))
        costs = asyncio.run(run_rounds(subjects, options, console))
    show(console, costs)
    ratio = ratio_to_floor(costs, OURS, "token_us")
    bar = report.Bar(
        "the worker's CPU per token, as a multiple of an empty handler's", ratio, TOKEN_LIMIT, at_least=False
    )
    plot(options.out / "worker_cost.png", costs)
    results = {"rounds": {label: [vars(cost) for cost in rounds] for label, rounds in costs.items()}}
    return report.finish(console, options.out, "worker_cost", results, [bar], no_bars=options.no_bars)


if __name__ == "__main__":
    sys.exit(main())
