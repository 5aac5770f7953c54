"""Stands in for a Python with Dynamo: `DYNAMO_PYTHON` of the launch tests.

`-m dynamo.frontend` lists the model when FAKE_WORKERS workers have registered in DYN_FILE_KV, and on /health
all that have; `-m dynamo.trtllm` registers there and waits. FAKE_<ROLE> changes the workers of a role:
exit:N ends with status N at once, exit-ready:N when the file FAKE_GATE appears, late registers only then,
stubborn ignores SIGTERM. Each process notes its id in FAKE_PIDS. FAKE_REASONS are reasons, with semicolons
between them, that the frontend gives in its log for not listing the model FAKE_GROUP, as Dynamo's does.
Anything else goes to the real Python.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def frontend() -> None:
    registered, wanted = Path(os.environ["DYN_FILE_KV"]), int(os.environ.get("FAKE_WORKERS", "1"))

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            workers = sorted(registered.glob("worker-*"))
            listed = [{"id": workers[0].read_text()}] if len(workers) >= wanted else []
            answer = {"data": listed, "instances": [{"instance_id": worker.name} for worker in workers]}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    complain()
    address = option("--http-host", "127.0.0.1"), int(option("--http-port", "0"))
    ThreadingHTTPServer(address, Models).serve_forever(poll_interval=0.05)


def complain() -> None:
    """Log lines of Dynamo 1.6's frontend about a model that it cannot serve, in colour as on a terminal."""
    name = os.environ.get("FAKE_GROUP", "some-model")
    dim, plain = "\x1b[2m", "\x1b[0m"
    source = f"{dim}dynamo_llm::discovery::controller{plain}{dim}:{plain}"
    start = f"{dim}2026-12-01T02:02:24.487513Z{plain} \x1b[33m WARN{plain} {source}"

    def field(name: str, value: str) -> str:
        return f"\x1b[3m{name}{plain}{dim}={plain}{value}"

    for attempt, reason in enumerate(filter(None, os.environ.get("FAKE_REASONS", "").split(";")), 1):
        group = field("group", f'["{name}","[\\"dynamo\\",\\"aggregated\\"]"]')
        told = f"{group} {field('attempt', str(attempt))} {field('error', json.dumps(reason))}"
        print(f"{start} Model materialization failed; scheduling retry {told}", flush=True)


def wait_for_gate() -> None:
    while not Path(os.environ["FAKE_GATE"]).exists():
        time.sleep(0.02)


def worker() -> None:
    role = option("--disaggregation-mode", "agg")
    print(f"hello from {role}", flush=True)
    behaviour, _, status = os.environ.get(f"FAKE_{role.upper()}", "").partition(":")
    if behaviour == "exit":
        sys.exit(int(status))
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "late":
        wait_for_gate()
    name = option("--served-model-name", option("--model-path", ""))
    partial = Path(os.environ["DYN_FILE_KV"], f"partial-{os.getpid()}")
    partial.write_text(name)
    partial.rename(partial.with_name(f"worker-{os.getpid()}"))
    if behaviour == "exit-ready":
        wait_for_gate()
        sys.exit(int(status))
    threading.Event().wait()


def main() -> None:
    module = sys.argv[2] if sys.argv[1:2] == ["-m"] else ""
    if module in {"dynamo.frontend", "dynamo.trtllm"}:
        Path(os.environ["FAKE_PIDS"], str(os.getpid())).write_text(" ".join(sys.argv))
        frontend() if module == "dynamo.frontend" else worker()
    elif sys.argv[1:2] == ["-c"] and "find_spec" in sys.argv[2]:
        sys.exit(0)
    else:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


main()
