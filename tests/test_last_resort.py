"""The end of a process in which something refuses to end: whatever it is, and with which status."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUCK = {
    "the main thread": "threading.Event().wait()",
    "a thread that Python waits for": "threading.Thread(target=threading.Event().wait).start()",
    "a handler at exit": "atexit.register(threading.Event().wait)",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    lines = (
        "import atexit, ctypes, threading",
        "from dynamo.trtllm.last_resort import exit_after",
        "exit_after(0.1)",
        code,
    )
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("code", STUCK.values(), ids=STUCK)
def test_what_refuses_to_end_is_ended_and_the_log_says_so(code: str) -> None:
    done = run(code)
    assert (done.returncode, done.stderr) == (
        71,
        "dynamo.trtllm: not everything ended within 0.1 s, exiting with 71\n",
    )


def test_a_library_that_holds_the_interpreter_is_ended_as_well() -> None:
    done = run("ctypes.PyDLL(None).sleep(600)")
    assert done.returncode == 1
    assert "Timeout (0:00:01" in done.stderr


def test_a_process_that_ends_in_time_keeps_its_status() -> None:
    assert run("raise SystemExit(3)").returncode == 3
