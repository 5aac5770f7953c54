"""Every benchmark runs with tiny sizes and leaves a table, a JSON file and an image;
how fast anything was is not asserted."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import report

HERE = Path(__file__).parent
PNG_LEAST_SIDE = 600


def run(script: str, out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The benchmark's output and its JSON file; it must exit with 0 and draw an image."""
    name = "topologies" if "--topologies" in arguments else Path(script).stem
    command = [sys.executable, str(HERE / script), "--out", str(out), "--no-bars", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with Image.open(out / f"{name}.png") as image:
        assert min(image.size) > PNG_LEAST_SIDE
    return done.stdout, json.loads((out / f"{name}.json").read_text())


def numbers(tree: Any) -> Iterator[float]:
    """All numbers anywhere in `tree`."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from numbers(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from numbers(value)
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield tree


def assert_positive(tree: Any) -> None:
    found = list(numbers(tree))
    assert found
    assert all(math.isfinite(number) and number > 0 for number in found)


def test_serving_compares_the_engine_with_generate_and_a_new_image_with_a_repeated_one(
    tmp_path: Path,
) -> None:
    printed, stored = run("serving.py", tmp_path, "--rounds", "2", "--tokens", "8", "--concurrency", "3")
    assert "Transformers generate, one request" in printed
    assert "same tokens from generate, alone and among 3: 2 of 2 rounds" in printed
    assert [set(each["tokens_per_s"]) for each in stored["engine"]] == [
        {"generate", "one", "many", "guided"}
    ] * 2
    assert [set(each) for each in stored["media"]] == [{"decode", "encode"}] * 2
    assert_positive([each["tokens_per_s"] for each in stored["engine"]])
    assert_positive(stored["media"])
    assert [bar["limit"] for bar in stored["bars"]] == [1.0, 5.0, 1.1, 5.0, 5.0]


def test_serving_measures_first_token_and_gaps_of_each_topology(tmp_path: Path) -> None:
    arguments = ("--topologies", "--only", "agg", "disagg", "--rounds", "1", "--tokens", "4")
    printed, stored = run("serving.py", tmp_path, *arguments)
    assert "TTFT, ms, new image" in printed
    assert set(stored["rounds"]) == {"agg", "disagg"}
    for topology in stored["rounds"].values():
        assert {kind: len(latencies) for kind, latencies in topology.items()} == {"new": 1, "repeated": 1}
        assert_positive(topology)
    assert [(bar["name"], bar["limit"]) for bar in stored["bars"]] == [
        ("time to first token with a new image: EP/D, as a multiple of the aggregated worker's", 1.5)
    ]


def test_stages_shows_where_the_time_to_first_token_goes(tmp_path: Path) -> None:
    printed, stored = run("stages.py", tmp_path, "--requests", "3")
    share = re.search(r"the stages account for ([0-9.]+)% of the time to first token", printed)
    assert share is not None
    print(share[0])
    assert len(stored["rounds"]) == 3
    for each in stored["rounds"]:
        assert_positive(
            {name: value for name, value in each["stages_s"].items() if not name.startswith("between")}
        )
        assert_positive(each["beside_s"])
        inside = sum(value for name, value in each["stages_s"].items() if not name.startswith("between"))
        assert 0 < inside < each["ttft_s"]
    processes = {name.partition(":")[0] for name in stored["rounds"][0]["stages_s"]}
    assert processes == {"between", "frontend", "prefill", "encode", "decode"}
    assert [bar["limit"] for bar in stored["bars"]] == [0.95, 1.0]


def test_a_flood_of_clips_stands_beside_text_requests_alone(tmp_path: Path) -> None:
    sizes = ("--rounds", "1", "--requests", "4", "--clips", "2", "--duration", "8")
    printed, stored = run("flood.py", tmp_path, *sizes)
    assert "text requests of 16 tokens, alone and beside 2 clips at a time" in printed
    (phases,) = stored["rounds"]
    assert [len(phases[name]["requests_s"]) for name in ("alone", "flood")] == [4, 4]
    assert list(phases["flood"]["clips"]) == ["200"]
    assert phases["alone"]["clips"] == {}
    assert [bar["limit"] for bar in stored["bars"]] == [2.0, 2.0]


def test_worker_cost_puts_any_worker_beside_the_empty_handler(tmp_path: Path) -> None:
    extra = f"again={sys.executable} {HERE / 'empty_worker.py'} {{model}} {{name}}"
    sizes = ("--rounds", "2", "--requests", "8", "--tokens", "64", "--concurrency", "4")
    printed, stored = run("worker_cost.py", tmp_path, *sizes, extra)
    assert "us per token" in printed
    assert list(stored["rounds"]) == ["empty push handler", "this project, double", "again"]
    assert_positive(
        [
            [cost["request_us"], cost["tokens_per_s"]]
            for rounds in stored["rounds"].values()
            for cost in rounds
        ]
    )
    assert [bar["limit"] for bar in stored["bars"]] == [1.5]


@pytest.mark.parametrize(
    ("median", "at_least", "held"), [(1.4, False, True), (1.6, False, False), (1.6, True, True)]
)
def test_a_bar_holds_on_its_side_of_the_limit(median: float, at_least: bool, held: bool) -> None:
    bar = report.Bar("ratio", report.Spread(median, 0.1, 9.9, 5), 1.5, at_least)
    assert bar.held is held
    assert ("PASS" in bar.line()) is held


@pytest.mark.parametrize(("no_bars", "status"), [(False, 1), (True, 0)])
def test_a_failed_bar_is_the_exit_status_unless_bars_do_not_count(
    tmp_path: Path, no_bars: bool, status: int
) -> None:
    bar = report.Bar("ratio", report.spread([2.0, 3.0]), 1.5, at_least=False)
    assert (
        report.finish(report.new_console(), tmp_path, "name", {"rounds": [1]}, [bar], no_bars=no_bars)
        == status
    )
    stored = json.loads((tmp_path / "name.json").read_text())
    assert (stored["rounds"], stored["bars"][0]["held"], stored["bars"][0]["ratio"]["median"]) == (
        [1],
        False,
        2.5,
    )


def test_ratios_are_taken_round_by_round() -> None:
    assert report.ratios([2.0, 40.0, 3.0], [1.0, 10.0, 1.0]) == report.Spread(3.0, 2.5, 3.5, 3)
