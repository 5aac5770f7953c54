"""A launch script over a stand-in for Dynamo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launch.harness import LAUNCH, Running, script_environment
from processes.cluster import free_port


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "fake_dynamo.py"} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def start(tmp_path: Path, fake_python: Path) -> Iterator[Callable[..., Running]]:
    """Starts a launch script over the stand-in; whatever is left of it after the test is killed."""
    started: list[Running] = []
    (tmp_path / "pids").mkdir()
    (tmp_path / "tmp").mkdir()

    def start(name: str, *arguments: str, **settings: str) -> Running:
        port = free_port()
        defaults = {
            "DYNAMO_PYTHON": str(fake_python),
            "DYN_HTTP_PORT": str(port),
            "ENGINE": "double",
            "MODEL_PATH": "some-model",
            "FAKE_PIDS": str(tmp_path / "pids"),
            "TMPDIR": str(tmp_path / "tmp"),
        }
        with open(tmp_path / "stdout", "wb") as output, open(tmp_path / "stderr", "wb") as errors:
            process = subprocess.Popen(
                [LAUNCH / name, *arguments],
                env=script_environment(defaults | settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        started.append(Running(process, tmp_path, port))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()
        for pid in running.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
