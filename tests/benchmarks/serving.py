#!/usr/bin/env python3
"""Serving with the portable engine: how fast it is, what an image costs, and what each topology adds.

usage: serving.py [--model-path DIR] [--rounds N ...]   tokens per second beside Transformers' generate,
                                                        and what an image costs that was sent before
       serving.py --topologies [...]                    TTFT and ITL of agg, disagg, disagg_e_pd, epd_disagg

Everything that is compared runs in one command, in rounds that alternate between the sides; bars are held
against the median of the rounds' ratios. Prints a table, writes JSON and an image (`serving.*` or
`topologies.*`), exits with 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "components" / "src"
sys.path[:0] = [str(TESTS), str(SOURCES)]

from benchmarks import report, serving_topologies  # noqa: E402
from processes.cluster import DEMO_NAME, die_with_parent  # noqa: E402
from processes.topologies import TOPOLOGIES  # noqa: E402

ONE_LIMIT, MANY_LIMIT, REPEATED_LIMIT, TTFT_LIMIT = 1.0, 5.0, 5.0, 1.5
GUIDED_LIMIT = 1.1
ENGINE_SIDES = ("generate", "one", "many", "guided")
BASE = "agg"
HELD_TO_BASE = {"disagg": "EP/D", "epd_disagg": "E/P/D"}
MEDIA_STAGES = {"decode": "fetch + decode", "encode": "fetch + decode + encode"}
MEDIA_BARS = (("decode", "file"), ("encode", "http"))
"""Without the vision tower, the download and base64 outweigh the rest and cannot be saved:
a URL may lead elsewhere next time."""

Rounds = Sequence[Mapping[str, Any]]


def run_child(script: str, arguments: Sequence[str], advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Run a measuring script with one thread for torch,
    and collect the JSON objects that it prints, one a line."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES)}
    found = []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                found.append(json.loads(line))
                advance()
        if process.returncode:
            log.seek(0)
            raise SystemExit(
                f"{script} ended with {process.returncode}:\n{log.read().decode(errors='replace')[-2000:]}"
            )
    return found


def column(rounds: Rounds, *keys: str, scale: float = 1.0) -> list[float]:
    """The number under nested `keys` in each round."""
    values = []
    for each in rounds:
        value: Any = each
        for key in keys:
            value = value[key]
        values.append(float(value) * scale)
    return values


def engine_table(rounds: Rounds, concurrency: int) -> Table:
    table = Table(title="portable engine, one image per request: median (quartiles)")
    for name in ("what", "tokens per second", "ratio", "CPU per token, ms"):
        table.add_column(name, justify="left" if name == "what" else "right")
    generate, one, many, guided = (column(rounds, "tokens_per_s", name) for name in ENGINE_SIDES)
    rows = (
        ("Transformers generate, one request", "generate", generate, None, ""),
        ("portable engine, one request", "one", one, generate, " of generate"),
        (f"portable engine, {concurrency} at once", "many", many, one, " of one request"),
        (
            f"portable engine, {concurrency} at once, with a JSON schema",
            "guided",
            guided,
            many,
            " of those without",
        ),
    )
    for title, key, rate, base, of in rows:
        ratio = "" if base is None else f"{report.show(report.ratios(rate, base))}{of}"
        cpu = report.spread(column(rounds, "cpu_per_token_s", key, scale=1e3))
        table.add_row(title, report.show(report.spread(rate), 0), ratio, report.show(cpu))
    return table


def engine_bars(rounds: Rounds, concurrency: int) -> list[report.Bar]:
    generate, one, many, guided = (column(rounds, "tokens_per_s", name) for name in ENGINE_SIDES)
    per_token = f"time per token with a JSON schema, as a multiple of that without, {concurrency} at once"
    return [
        report.Bar(
            "tokens per second of one request, as a multiple of generate's",
            report.ratios(one, generate),
            ONE_LIMIT,
            at_least=True,
        ),
        report.Bar(
            f"tokens per second of {concurrency} requests at once, as a multiple of one request's",
            report.ratios(many, one),
            MANY_LIMIT,
            at_least=True,
        ),
        report.Bar(per_token, report.ratios(many, guided), GUIDED_LIMIT, at_least=False),
    ]


def media_table(rounds: Rounds) -> Table:
    table = Table(title="loading a 1024 x 768 JPEG in the worker, ms of CPU: median (quartiles)")
    for name in ("steps", "sent as", "new image", "repeated image", "new over repeated"):
        table.add_column(name, justify="left" if name in ("steps", "sent as") else "right")
    for stage, title in MEDIA_STAGES.items():
        for source in rounds[0][stage]:
            new, again = (
                column(rounds, stage, source, kind, "cpu", scale=1e3) for kind in ("new", "repeated")
            )
            cells = [
                report.show(report.spread(new)),
                report.show(report.spread(again)),
                report.show(report.ratios(new, again), 1),
            ]
            table.add_row(title, source, *cells)
    return table


def media_bars(rounds: Rounds) -> list[report.Bar]:
    bars = []
    for stage, source in MEDIA_BARS:
        new, again = (column(rounds, stage, source, kind, "cpu") for kind in ("new", "repeated"))
        name = f"how many times cheaper a repeated image is than a new one ({MEDIA_STAGES[stage]}, {source})"
        bars.append(report.Bar(name, report.ratios(new, again), REPEATED_LIMIT, at_least=True))
    return bars


def plot_engine(path: Path, engine: Rounds, media: Rounds, concurrency: int) -> None:
    figure, (left, right) = report.new_figure(2, "Portable engine on one CPU thread")
    names = ("generate", "one", "many")
    rates = [column(engine, "tokens_per_s", name) for name in names]
    to_generate, to_one = report.ratios(rates[1], rates[0]).median, report.ratios(rates[2], rates[1]).median
    notes = [
        "",
        f"{to_generate:.2f}x generate\n(bar: {ONE_LIMIT:g}x)",
        f"{to_one:.1f}x of one\n(bar: {MANY_LIMIT:g}x)",
    ]
    colours = [report.COLOURS[name] for name in ("other", "ours", "second")]
    spreads = [report.spread(rate) for rate in rates]
    report.draw_bars(left, spreads, colours, at=range(3), digits=0, notes=notes)
    left.set_xticks(
        range(3),
        ["Transformers\ngenerate", "portable engine\n1 request", f"portable engine\n{concurrency} at once"],
    )
    left.set(ylabel="output tokens per second", title="throughput, one image per request")
    report.fit(left, max(s.high for s in spreads))
    plot_media(right, media)
    report.save(figure, path)


def plot_media(axes: Any, rounds: Rounds) -> None:
    """New and repeated image side by side on a logarithmic scale."""
    places = [(stage, source) for stage in MEDIA_STAGES for source in rounds[0][stage]]
    for shift, kind, colour in ((-0.2, "new", "other"), (0.2, "repeated", "ours")):
        values = [report.spread(column(rounds, *place, kind, "cpu", scale=1e3)) for place in places]
        at = [number + shift for number in range(len(places))]
        axes.bar(at, [v.median for v in values], 0.38, color=report.COLOURS[colour], label=f"{kind} image")
        for x, value in zip(at, values, strict=True):
            axes.annotate(
                f"{value.median:.1f}",
                (x, value.median),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    for number, place in enumerate(places):
        new, again = (column(rounds, *place, kind, "cpu") for kind in ("new", "repeated"))
        label = f"{report.ratios(new, again).median:.1f}x"
        top = max(report.spread(column(rounds, *place, "new", "cpu", scale=1e3)).median, 1.0)
        axes.annotate(label, (number, top * 1.6), ha="center", fontsize=10, fontweight="bold")
    axes.set_yscale("log")
    axes.set_ylim(
        0.1,
        5 * max(report.spread(column(rounds, *place, "new", "cpu", scale=1e3)).median for place in places),
    )
    axes.set_xticks(range(len(places)), [source for _, source in places])
    middle = (len(places) // 2 - 1) / 2
    for number, title in enumerate(MEDIA_STAGES.values()):
        x = middle + number * len(places) / 2
        axes.annotate(
            title,
            (x, 0),
            (0, -28),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
        )
    axes.set(ylabel="ms of worker CPU (log scale)", title="loading a 1024 x 768 JPEG, by URL scheme")
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def run_engine(options: argparse.Namespace, console: Console) -> int:
    """Parts one and three: engine speed, and the cost of a repeated image."""
    model = ["--model-path", options.model_path]
    sizes = ["--tokens", str(options.tokens or 256), "--concurrency", str(options.concurrency)]
    with report.progress(console) as shown:
        task = shown.add_task("engine beside generate, rounds", total=options.rounds)
        count = ["--rounds", str(options.rounds)]
        engine = run_child("serving_engine.py", [*model, *count, *sizes], lambda: shown.advance(task))
        other = shown.add_task("new and repeated images, rounds", total=options.rounds)
        media = run_child("serving_media.py", [*model, *count], lambda: shown.advance(other))
    console.print(engine_table(engine, options.concurrency), media_table(media))
    same = sum(bool(each["same_tokens"]) for each in engine)
    console.print(
        f"same tokens from generate, alone and among {options.concurrency}: {same} of {len(engine)} rounds"
    )
    bars = [*engine_bars(engine, options.concurrency), *media_bars(media)]
    plot_engine(options.out / "serving.png", engine, media, options.concurrency)
    return report.finish(
        console, options.out, "serving", {"engine": engine, "media": media}, bars, no_bars=options.no_bars
    )


def milliseconds(latencies: serving_topologies.Latencies, name: str, kind: str, field: str) -> list[float]:
    return [getattr(latency, field) * 1e3 for latency in latencies[name][kind]]


def topology_table(found: serving_topologies.Latencies) -> Table:
    table = Table(
        title=(
            "one streamed request with one image: median (quartiles); "
            "as a multiple of agg's in the same round"
        )
    )
    for name in (
        "topology",
        "TTFT, ms, new image",
        "of agg",
        "TTFT, ms, repeated image",
        "of agg",
        "ITL, ms, new image",
        "ITL, ms, repeated image",
    ):
        table.add_column(name, justify="left" if name == "topology" else "right")
    for name in found:
        cells = []
        for kind in serving_topologies.KINDS:
            ttft = milliseconds(found, name, kind, "ttft_s")
            cells += [report.show(report.spread(ttft), 1), f"{ratio_to_base(found, name, kind).median:.2f}"]
        itl = [
            report.show(report.spread(milliseconds(found, name, kind, "itl_s")), 2)
            for kind in serving_topologies.KINDS
        ]
        table.add_row(name, *cells, *itl)
    return table


def ratio_to_base(found: serving_topologies.Latencies, name: str, kind: str) -> report.Spread:
    """TTFT over that of the aggregated worker, round by round."""
    return report.ratios(milliseconds(found, name, kind, "ttft_s"), milliseconds(found, BASE, kind, "ttft_s"))


def plot_topologies(path: Path, found: serving_topologies.Latencies) -> None:
    figure, panels = report.new_figure(2, "Topologies behind Dynamo's frontend, one image per request")
    names = list(found)
    for axes, field, title, digits in (
        (panels[0], "ttft_s", "time to first token", 0),
        (panels[1], "itl_s", "inter-token latency", 1),
    ):
        highs = []
        for shift, kind, colour in ((-0.2, "new", "ours"), (0.2, "repeated", "second")):
            values = [report.spread(milliseconds(found, name, kind, field)) for name in names]
            notes = [
                f"{ratio_to_base(found, name, kind).median:.2f}x" if field == "ttft_s" else ""
                for name in names
            ]
            at = [number + shift for number in range(len(names))]
            colours = [report.COLOURS[colour]] * len(names)
            report.draw_bars(
                axes, values, colours, at=at, width=0.38, digits=digits, notes=notes, label=f"{kind} image"
            )
            highs += [value.high for value in values]
        axes.set_xticks(range(len(names)), names)
        axes.set(ylabel="milliseconds (median, quartiles)", title=title)
        if field == "ttft_s":
            limit = TTFT_LIMIT * report.spread(milliseconds(found, BASE, "new", field)).median
            report.draw_limit(
                axes, limit, -0.5, len(names) - 0.5, f"bar for a new image: {TTFT_LIMIT} times agg"
            )
            highs.append(limit)
        report.fit(axes, max(highs))
        axes.legend(loc="upper left", frameon=False, fontsize=9, ncols=2)
    report.save(figure, path)


def run_topologies(options: argparse.Namespace, console: Console) -> int:
    """Part two: every topology through the real frontend."""
    rounds, tokens = options.rounds, options.tokens or 32
    with ExitStack() as stack:
        urls = serving_topologies.start(
            stack,
            options.model_path,
            options.only,
            lambda name: console.print(f"starting: {name}", highlight=False),
        )
        with report.progress(console) as shown:
            task = shown.add_task("measuring", total=serving_topologies.steps(rounds, options.only))

            def advance(name: str) -> None:
                shown.update(task, advance=1, description=f"asked: {name}")

            found = asyncio.run(serving_topologies.measure(urls, DEMO_NAME, rounds, tokens, advance))
    console.print(topology_table(found))
    bars = [
        report.Bar(
            f"time to first token with a new image: {title}, as a multiple of the aggregated worker's",
            ratio_to_base(found, name, "new"),
            TTFT_LIMIT,
            at_least=False,
        )
        for name, title in HELD_TO_BASE.items()
        if name in found
    ]
    plot_topologies(options.out / "topologies.png", found)
    rows = {
        name: {kind: [asdict(latency) for latency in found[name][kind]] for kind in found[name]}
        for name in found
    }
    return report.finish(console, options.out, "topologies", {"rounds": rows}, bars, no_bars=options.no_bars)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--topologies", action="store_true", help="measure the topologies instead of the engine"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(TOPOLOGIES), default=list(TOPOLOGIES), help="these topologies"
    )
    parser.add_argument("--model-path", default="demo", help="a directory, or the word `demo`")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--tokens", type=int, help="tokens of an answer, at least 2; 256, with --topologies 32"
    )
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    report.add_common_options(parser)
    options = parser.parse_args()
    if options.tokens is not None and options.tokens < 2:
        parser.error("--tokens must be at least 2")
    if BASE not in options.only:
        options.only = [BASE, *options.only]
    return options


def main() -> int:
    options = parse()
    console = report.new_console()
    return run_topologies(options, console) if options.topologies else run_engine(options, console)


if __name__ == "__main__":
    sys.exit(main())
