"""What the supervisor of the launch scripts does for the multi-node ones:
the order of the end, and commands for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch.harness import LAUNCH
from processes.cluster import free_port

SUPERVISOR = LAUNCH / "lib" / "supervise.py"


def shell(script: str) -> list[str]:
    return ["3", "bash", "-c", script]


def test_processes_that_outlive_the_others_end_last_and_then_the_last_command_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    until_told = f"trap 'echo $0 ended >>{log}; exit 0' TERM; touch {tmp_path}/$0; sleep infinity & wait"
    command = [
        sys.executable,
        str(SUPERVISOR),
        "--url",
        f"http://127.0.0.1:{free_port()}",
        "--model",
        "m",
        "--outlive",
        "service",
    ]
    for label in ("service", "worker"):
        command += ["--start", label, "4", "bash", "-c", until_told, label]
    both_are_up = f"until [[ -e {tmp_path}/service && -e {tmp_path}/worker ]]; do sleep 0.05; done; exit 3"
    command += ["--start", "first", *shell(both_are_up), "--finally", *shell(f"echo finally >>{log}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "launch: first ended with status 3, ending the rest" in done.stderr
    assert log.read_text().splitlines() == ["worker ended", "service ended", "finally"]


def test_processes_are_asked_to_end_by_a_command_with_their_labels(tmp_path: Path) -> None:
    log = tmp_path / "log"
    gate = tmp_path / "gate"
    stop = ["4", "bash", "-c", f'echo asked "$@" >>{log}; touch {gate}', "stop"]
    wait = f"trap 'echo TERM >>{log}' TERM; until [[ -e {gate} ]]; do sleep 0.05; done"
    command = [sys.executable, str(SUPERVISOR), "--url", f"http://127.0.0.1:{free_port()}", "--model", "m"]
    command += ["--start", "worker", *shell(wait), "--start", "first", *shell("exit 3"), "--stop", *stop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert log.read_text() == "asked worker first\n"
