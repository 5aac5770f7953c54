"""What the benchmarks share: medians with their spread, bars that pass or fail,
and how both are printed, stored and drawn.

Rounds of a benchmark alternate between what it compares, so a ratio is taken inside each round:
a busy spell of the machine then falls on both sides of it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 140
_PACKAGES = ("ai-dynamo", "nixl", "torch", "transformers")
COLOURS = {"ours": "#76b900", "other": "#8c8c8c", "second": "#3d6f00", "limit": "#c0392b"}


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` measurements."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Raises `statistics.StatisticsError` when there are none."""
    if len(values) < 2:
        only = statistics.median(values)
        return Spread(only, only, only, len(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of the quotients, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


@dataclass(frozen=True)
class Bar:
    """A limit that the median of the rounds' ratios is held against."""

    name: str
    ratio: Spread
    limit: float
    at_least: bool

    @property
    def held(self) -> bool:
        return self.ratio.median >= self.limit if self.at_least else self.ratio.median <= self.limit

    def line(self) -> str:
        """One line of rich markup."""
        verdict = "[green]PASS[/]" if self.held else "[bold red]FAIL[/]"
        word = "at least" if self.at_least else "at most"
        return f"{verdict} {self.name}: {show(self.ratio)} (bar: {word} {self.limit:g})"


def show(value: Spread, digits: int = 2, unit: str = "") -> str:
    """`median (quartile to quartile)`, without the quartiles of a single measurement."""
    text = f"{value.median:,.{digits}f}{unit}"
    return text if value.count < 2 else f"{text} ({value.low:,.{digits}f} to {value.high:,.{digits}f})"


def new_console() -> Console:
    """A console that is wide enough for the tables, also into a file."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def add_common_options(parser: ArgumentParser) -> None:
    """Options of every benchmark that reports through `finish`."""
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks-out"), help="folder of the JSON file and the image"
    )
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 also when a bar fails")


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """A progress display with counts and elapsed time."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as shown:
        yield shown


def machine() -> dict[str, Any]:
    """Where it ran: enough to tell runs apart, nothing that names the machine."""
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def finish(
    console: Console, out: Path, name: str, results: Mapping[str, Any], bars: Sequence[Bar], *, no_bars: bool
) -> int:
    """Print the bars and write `NAME.json`. Returns the exit status: 1 when a bar failed and bars count."""
    for bar in bars:
        console.print(bar.line(), highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "machine": machine(),
        **results,
        "bars": [{**asdict(bar), "held": bar.held} for bar in bars],
    }
    (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    console.print(
        f"written: {out / name}.json, {out / name}.png; load of the machine {machine()['load']}",
        highlight=False,
    )
    return 0 if no_bars or all(bar.held for bar in bars) else 1


def new_figure(panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, panels, figsize=(5.6 * panels, 4.8), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=13, fontweight="bold")
    for axes in grid[0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure, list(grid[0])


def draw_bars(
    axes: Axes,
    values: Sequence[Spread],
    colours: Sequence[str],
    *,
    at: Sequence[float],
    width: float = 0.6,
    digits: int = 1,
    notes: Sequence[str] = (),
    label: str | None = None,
) -> None:
    """Medians as bars with quartiles as whiskers, each with its value and a note;
    call `fit` when all are drawn."""
    medians = [value.median for value in values]
    errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
    whiskers = {"ecolor": "#404040", "elinewidth": 1.0, "capsize": 3.0}
    axes.bar(at, medians, width, color=list(colours), yerr=errors, error_kw=whiskers, label=label)
    for number, (place, value) in enumerate(zip(at, values, strict=True)):
        text = f"{value.median:,.{digits}f}" + (f"\n{notes[number]}" if notes and notes[number] else "")
        axes.annotate(
            text, (place, value.median), (0, 0), textcoords="offset points", ha="center", gid=f"{value.high}"
        )


def fit(axes: Axes, top: float) -> None:
    """Scale to `top` with some air, and put each bar's text at its foot,
    or above its whisker where the bar is too low."""
    axes.set_ylim(0, top * 1.15)
    for text in axes.texts:
        if text.get_gid() is None:
            continue
        height, high = float(text.xy[1]), float(text.get_gid() or 0)  # type: ignore[attr-defined]
        inside = height > 0.25 * top
        text.xy = (text.xy[0], 0.03 * top if inside else high)  # type: ignore[attr-defined]
        text.set(va="bottom", color="white" if inside else "black", fontweight="bold", fontsize=9)


def draw_limit(axes: Axes, height: float, left: float, right: float, text: str) -> None:
    """A dashed line at `height` that says what it stands for, at its left end."""
    axes.hlines(height, left, right, colors=COLOURS["limit"], linestyles="dashed", linewidth=1.2)
    axes.annotate(
        text,
        (left, height),
        (0, 3),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=8,
        color=COLOURS["limit"],
    )


def save(figure: Figure, path: Path) -> None:
    """Write the image, and forget the figure."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
