"""Workers for process tests without the eight seconds of CPU
that importing torch and Transformers takes each of them.

One process imports what every worker imports and then forks a worker for each request: a process of its own,
with its own environment, log and session, that runs a module or a script from there on, as `python` would.
What reads the environment or starts threads when it is imported, as Dynamo's runtime does, is left to the
worker. The launch, packaging and Slurm tests start workers the long way.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

START_DEADLINE_S = 120.0
_LOOK_S = 0.02


def die_with_parent() -> None:
    """In a child: be killed when the process that started it ends, however it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Forked:
    """A forked worker, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class Prefork:
    """The process that forks. It ends with the tests, and its workers with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lock = threading.Lock()
        self._workers: dict[int, Forked] = {}
        self._started: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="prefork", daemon=True).start()

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """`python` with these words (`-m` and a module, or a script,
        then arguments) and exactly this environment.

        Its output goes to `log`. Folders of its `PYTHONPATH` come first, but what is imported already stays.
        """
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps([list(words), dict(environment), str(log)]) + "\n")
            self._process.stdin.flush()
            return self._started.get(timeout=START_DEADLINE_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, status = json.loads(line)
            if status is None:
                self._workers[pid] = Forked(pid)
                self._started.put(self._workers[pid])
            else:
                worker = self._workers.pop(pid)
                worker.returncode = status
                worker.ended.set()


@cache
def prefork() -> Prefork:
    """The one of this test run, started when first asked for."""
    return Prefork()


def run_python(*words: str, timeout_s: float = START_DEADLINE_S) -> None:
    """`python` with these words and this environment, to its end, which has to be a good one."""
    with tempfile.TemporaryDirectory(prefix="prefork-") as folder:
        log = Path(folder, "log")
        status = prefork().start(words, os.environ, log).wait(timeout_s)
        assert status == 0, (
            f"{' '.join(words)} ended with {status}:\n{log.read_text(errors='replace')[-4000:]}"
        )


def _import_all() -> None:
    import torch  # noqa: F401
    from transformers.models.qwen2_vl import modeling_qwen2_vl  # noqa: F401

    from dynamo.trtllm.engines.transformers import engine  # noqa: F401
    from dynamo.trtllm.transfer import nixl  # noqa: F401


def _serve() -> tuple[list[str], dict[str, str], str]:
    """Fork for every line of standard input. Returns only in a child, with what that child is to be."""
    children = 0
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_S if children else None)
        if readable:
            line = _read_line()
            if not line:
                os._exit(0)
            ready, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                die_with_parent()
                os.close(ready)
                os.close(told)
                words, environment, log = json.loads(line)
                return words, environment, log
            os.close(told)
            os.read(ready, 1)
            os.close(ready)
            children += 1
            _tell(pid, None)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children -= 1
            _tell(pid, os.waitstatus_to_exitcode(status))


def _read_line() -> bytes:
    """Unbuffered, so that no child inherits what was meant for the next one."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 65536)
        if not byte:
            return b""
        line += byte
    return line


def _tell(pid: int, status: int | None) -> None:
    os.write(1, (json.dumps([pid, status]) + "\n").encode())


def _become(words: list[str], environment: dict[str, Any], log: str) -> None:
    """In the child: take on the worker's files, environment, import path and arguments, and run it."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((nothing, 0), (sink, 1), (sink, 2)):
        os.dup2(here, there)
    os.close(sink)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of this environment, and not of the process that was forked
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[1:] = [*folders, *(folder for folder in sys.path[1:] if folder not in folders)]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _import_all()
    _become(*_serve())
