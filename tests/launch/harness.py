"""Launch scripts as processes: what they print, what they run, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
DEADLINE_S = 60.0
# What the scripts read; a test sets what it needs.
SCRIPT_VARIABLES = (
    "MODEL_PATH",
    "SERVED_MODEL_NAME",
    "MODALITY",
    "ENGINE",
    "ALLOWED_LOCAL_MEDIA_PATH",
    "MAX_FILE_SIZE_MB",
)
SCRIPT_PREFIXES = (
    "DYN",
    "NUM_",
    "AGG_",
    "PREFILL_",
    "DECODE_",
    "ENCODE_",
    "LAUNCH_",
    "FAKE_",
    "CUDA_",
    "OMP_",
    "PYTHONPATH",
)


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls until `condition` is true; fails naming `what`."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s:g} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not count."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def script_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without anything that the scripts read, plus `settings`."""
    read = {name for name in os.environ if name in SCRIPT_VARIABLES or name.startswith(SCRIPT_PREFIXES)}
    return {name: value for name, value in os.environ.items() if name not in read} | dict(settings)


def run_script(
    name: str, *arguments: str, cwd: Path = ROOT, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs a launch script to its end."""
    return subprocess.run(
        [LAUNCH / name, *arguments],
        cwd=cwd,
        env=script_environment(settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@dataclass(frozen=True)
class Running:
    """A launch script at work over the stand-in, whose processes note themselves in the folder `pids`."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def pids(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "pids").iterdir())

    def pid_of(self, words: str) -> int:
        """The process whose command line holds `words`."""
        return next(int(path.name) for path in (self.folder / "pids").iterdir() if words in path.read_text())

    def wait_ready(self) -> None:
        wait_until(lambda: "ready: " in self.output or self.process.poll() is not None, "the ready line")
        assert self.process.poll() is None, self.output + self.errors

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def leftovers(self) -> list[int]:
        return [pid for pid in self.pids if alive(pid)]
