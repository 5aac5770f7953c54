"""Runs the case suite against a deployment and prints a table and a score; see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cases.files import write_files
from cases.media import MediaServer, media_server
from cases.suite import Case, Result, judge, load_cases, request_body, send
from oracle import deployments
from oracle.deployments import Which
from processes.cluster import Cluster, free_port
from processes.topologies import TOPOLOGIES, deploy

TIMEOUT_S = 60.0
FETCH_TIMEOUT_S = 4.0
"""The worker's own, so that hosts that hang cost seconds."""
AT_ONCE = 4


def run_cases(
    cases: Sequence[Case], url: str, model: str, media: MediaServer, folder: Path, *, answers: bool = True
) -> Iterator[Result]:
    """Every case, whole and streamed, a few at a time; those that count hits run alone."""
    alone = [case for case in cases if case.expect.hits]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        forms = [(case, stream) for case in cases if case not in alone for stream in (False, True)]
        yield from pool.map(lambda form: run_case(*form, url, model, media, folder, answers=answers), forms)
    for case in alone:
        yield run_case(case, False, url, model, media, folder, answers=answers)


def run_case(
    case: Case, stream: bool, url: str, model: str, media: MediaServer, folder: Path, *, answers: bool
) -> Result:
    before = Counter(media.hits)
    body = request_body(case, model, media.url, folder, stream=stream)
    reply = send(url + case.path, body, TIMEOUT_S)
    verdict, reason = judge(case, reply, answers=answers)
    if verdict == "right" and answers:
        asked = {path: media.hits[path] - before[path] for path in case.expect.hits}
        if any(asked[path] > most for path, most in case.expect.hits.items()):
            verdict, reason = "wrong", f"fetched {asked}"
    return Result(
        case.id, case.source, stream, verdict, reply.status, reason, (reply.message or reply.text)[:300]
    )


@contextmanager
def deployment(topology: str, folder: Path, model_path: str = "demo") -> Iterator[str]:
    """The demo model in a topology, on the portable engine; gives the frontend's address."""
    environment = {
        "DYN_MM_ALLOW_INTERNAL": "1",
        "DYN_ENABLE_ANTHROPIC_API": "true",
        "ALLOWED_LOCAL_MEDIA_PATH": str(folder),
        "DYN_TRTLLM_MEDIA_FETCH_TIMEOUT": f"{FETCH_TIMEOUT_S:g}",
    }
    with Cluster(env=environment) as cluster:
        deploy(topology, cluster)
        yield cluster.url


@contextmanager
def over_the_double(which: Which, topology: str, folder: Path) -> Iterator[str]:
    """Dynamo's own component, or this project's, over TensorRT-LLM's double; gives the frontend's address."""
    environment = {
        **deployments.environment("1.3.0rc29"),
        "DYN_MM_ALLOW_INTERNAL": "1",
        "DYN_ENABLE_ANTHROPIC_API": "true",
        "ALLOWED_LOCAL_MEDIA_PATH": str(folder),
        "DYN_MM_LOCAL_PATH": str(folder),  # what theirs calls it
        "DYN_TRTLLM_ALLOWED_LOCAL_MEDIA_PATH": str(folder),
    }
    with tempfile.TemporaryDirectory(prefix="rival-") as scratch, Cluster(env=environment) as cluster:
        model, records = Path(scratch) / "model", Path(scratch) / "records"
        model.mkdir()
        records.mkdir()
        workers = deployments.start(which, topology, cluster, deployments.model_directory(model), records)
        deployments.wait_listed(cluster, workers)
        deployments.wait_answering(cluster, f"{which} {topology}")
        yield cluster.url
        # A deployment that serves no more after the cases is the worst that they can do.
        deployments.wait_answering(cluster, f"{which} {topology}, after the cases")


def report(results: Sequence[Result], console: Console) -> None:
    """What went wrong, one line each, then the score."""
    table = Table(title="cases that are not right", show_lines=False)
    for column in ("case", "form", "verdict", "reason", "shown"):
        table.add_column(column, overflow="fold")
    for each in results:
        if each.verdict != "right":
            table.add_row(
                each.case, "stream" if each.streamed else "whole", each.verdict, each.reason, each.shown[:120]
            )
    if table.row_count:
        console.print(table)
    counts = Counter(each.verdict for each in results)
    console.print(f"{date.today()}: {counts['right']} of {len(results)} right; " + ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("wrong", "worse", "dropped", "leaks")
    ))  # fmt: skip


def _deployments(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, AbstractContextManager[str]]]:
    """What is asked, by name."""
    if options.url is not None:
        yield "running", nullcontext(options.url)
        return
    for topology in list(TOPOLOGIES) if options.topology == "all" else [options.topology]:
        if options.rival:
            yield f"Dynamo's own component, {topology}", over_the_double("theirs", topology, folder)
            yield f"this project, {topology}", over_the_double("ours", topology, folder)
        else:
            yield topology, deployment(topology, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/cases/run", description=__doc__)
    parser.add_argument(
        "--topology", choices=[*TOPOLOGIES, "all"], default="agg", help="what to deploy (default: agg)"
    )
    parser.add_argument(
        "--url", help="ask a deployment that runs already, at this address, instead of starting one"
    )
    parser.add_argument("--model", default="demo", help="the name that requests ask for (default: demo)")
    parser.add_argument(
        "--rival",
        action="store_true",
        help=(
            "ask Dynamo's own component and this project's, both over TensorRT-LLM's double, "
            "which knows no answers: only statuses, the words of errors and that each lives on are judged"
        ),
    )
    parser.add_argument("--quick", action="store_true", help="only the subset that ./tests/run.sh runs")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name holds TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    options = parser.parse_args(arguments)
    console = Console()
    cases = [c for c in load_cases() if (c.quick or not options.quick) and (options.only or "") in c.id]
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory(prefix="cases-") as scratch, media_server(free_port()) as media:
        folder = Path(scratch)
        write_files(folder)
        for name, deployed in _deployments(options, folder):
            console.print(f"{name}: {len(cases)} cases")
            with deployed as url:
                asked = run_cases(cases, url, options.model, media, folder, answers=not options.rival)
                results[name] = list(track(asked, total=2 * len(cases), console=console))
            report(results[name], console)
    if options.json:
        options.json.write_text(
            json.dumps({name: [asdict(r) for r in found] for name, found in results.items()}, indent=1)
        )
    return 0 if all(r.verdict == "right" for found in results.values() for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
