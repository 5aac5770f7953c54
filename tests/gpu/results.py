#!/usr/bin/env python3
"""Writes RESULTS.md and its plot from what serving.py stored and what pytest said.

usage: results.py RESULTS.json TESTS.txt OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GENERATE = "#8c8c8c"
OURS = ("#76b900", "#3d6f00")
BARS = (
    ("ITL of one request, aggregated", "at most 6.5 ms", lambda r: (_load(r, "1 picture")["itl_ms"], 6.5)),
    ("ITL of 64 at once, aggregated", "at most 10 ms", lambda r: (_load(r, "64 at once")["itl_ms"], 10.0)),
    (
        "tokens per second of 64 while they decode, 64 over their ITL",
        "at least 6,000",
        lambda r: (6000.0, 64e3 / _load(r, "64 at once")["itl_ms"]),
    ),
    (
        "`generate` over ours, per token",
        "at least 2.5",
        lambda r: (2.5, r["generate_ms"] / _load(r, "1 picture")["itl_ms"]),
    ),
    (
        "TTFT of one picture of 1,369 tokens",
        "at most 100 ms",
        lambda r: (_load(r, "1 picture")["ttft_ms"], 100.0),
    ),
    (
        "gaps between tokens of running streams in a burst, p99 over p99 alone",
        "at most 2",
        lambda r: (r["settings"][0]["gaps"]["burst_p99_ms"] / r["settings"][0]["gaps"]["idle_p99_ms"], 2.0),
    ),
)


def _load(result: dict[str, Any], name: str) -> dict[str, Any]:
    """A load of the first setting, by how its name begins."""
    return next(load for load in result["settings"][0]["loads"] if load["load"].startswith(name))


def page(result: dict[str, Any], tests: str, plot: str) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    lines = [
        "# One GPU, the whole graph",
        "",
        "Made by `tests/gpu/graph.sh`: Dynamo's frontend, this package's workers and NIXL on one GPU, with a"
        " random model of Qwen2-VL-7B's shape in bfloat16 and a vocabulary of 512 tokens, each of them whole"
        " characters."
        " Machine: " + machine + ".",
        "",
        (
            "TTFT (time to first token) and ITL (mean gap between the tokens of a request after that) are "
            "medians over requests, measured at the client, the first round left out; tokens/s count a "
            "whole round, prompts included. A large picture has 1036 x 1036 pixels, which are 1,369 "
            "tokens, a small one 224 x 224 and 64 tokens. Every picture is new. All workers of a "
            "deployment share the GPU. Deployments that are not in the table were not measured in this run."
        ),
        "",
        *_loads(result),
        "",
        *_bars(result),
        "",
        *_gaps(result),
        "",
        *_stages(result),
        "",
        "The tests of this folder, on the same machine:",
        "",
        "```",
        tests,
        "```",
        "",
        f"![ITL and TTFT of each deployment]({plot})",
        "",
    ]
    return "\n".join(lines)


def _loads(result: dict[str, Any]) -> list[str]:
    lines = ["| deployment | load | TTFT ms | ITL ms | tokens/s |", "| --- | --- | --- | --- | --- |"]
    for setting in result["settings"]:
        for load in setting["loads"]:
            numbers = f"{load['ttft_ms']:.0f} | {load['itl_ms']:.2f} | {load['tokens_per_s']:.0f}"
            lines.append(f"| {setting['name']} | {load['load']} | {numbers} |")
    generate = result["generate_ms"]
    return [
        *lines,
        "| Transformers' `generate`, eager, same model | 1 picture |"
        f" | {generate:.2f} | {1e3 / generate:.0f} |",
    ]


def _bars(result: dict[str, Any]) -> list[str]:
    lines = ["| asked for | bar | seen |", "| --- | --- | --- |"]
    for name, bar, values in BARS:
        low, high = values(result)
        seen = high if bar.startswith("at least") else low
        lines.append(f"| {name} | {bar} | {seen:.2f}, {'kept' if low <= high else 'missed'} |")
    return lines


def _gaps(result: dict[str, Any]) -> list[str]:
    lines = [
        "Gaps in ms between the tokens of four text streams, alone and while eight requests with four large"
        " pictures each arrive (a burst):",
        "",
        "| deployment | median alone | p99 alone | median in the burst | p99 in the burst | longest in it |"
        " TTFT of the burst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting in result["settings"]:
        if "gaps" in setting:
            lines.append(
                f"| {setting['name']} | {' | '.join(f'{value:.1f}' for value in setting['gaps'].values())} |"
            )
    return lines


def _stages(result: dict[str, Any]) -> list[str]:
    lines = [
        "Where the time to first token of one large picture goes, means in ms of ten requests, from the"
        " workers' metrics. What is left to the client's figure is the frontend's and the way between the"
        " processes; a worker's wait for another holds the other's time:",
        "",
    ]
    for setting in result["settings"]:
        if "stages" in setting:
            parts = ", ".join(f"{name} {value:.1f}" for name, value in setting["stages"].items())
            lines += [f"- {setting['name']}: {parts}"]
    return lines


def draw(result: dict[str, Any], out: Path) -> None:
    """ITL alone and at 64, and TTFT of one and five pictures, by deployment."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = [setting["name"] for setting in result["settings"]]
    for axis, key, title, picked in (
        (axes[0], "itl_ms", "ITL, ms (lower is better)", ("1 picture", "64 at once, small picture")),
        (axes[1], "ttft_ms", "TTFT, ms (lower is better)", ("1 picture", "5 pictures")),
    ):
        for at, load in enumerate(picked):
            values = [
                next(each[key] for each in s["loads"] if each["load"] == load) for s in result["settings"]
            ]
            places = [i + 0.4 * at - 0.2 for i in range(len(names))]
            bars = axis.barh(places, values, height=0.38, color=OURS[at], label=load)
            axis.bar_label(bars, fmt="%.1f" if key == "itl_ms" else "%.0f", padding=3, fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(title)
        axis.margins(x=0.3)
    axes[0].axvline(result["generate_ms"], color=GENERATE, linestyle="--", label="`generate`, 1 picture")
    axes[1].set_yticklabels([])
    for axis in axes:
        axis.legend(fontsize=8, loc="upper right")
    figure.suptitle(
        f"{result['machine']['card']}, Qwen2-VL-7B's shape in bfloat16, through Dynamo's frontend"
    )
    figure.savefig(out, dpi=110)


def main() -> None:
    stored, tests, out = (Path(argument) for argument in sys.argv[1:])
    result = json.loads(stored.read_text())
    draw(result, out / "results.png")
    (out / "RESULTS.md").write_text(page(result, tests.read_text().strip(), "results.png"))


if __name__ == "__main__":
    main()
