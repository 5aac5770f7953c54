"""The set-up of .venv: what it runs, when it does nothing, and how it fails.
Stand-ins for uv and python3 note their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.harness import DEADLINE_S, ROOT, wait_until

SYSTEM_TOOLS = (
    *("bash", "cat", "chmod", "cp", "cut", "dirname", "flock", "grep"),
    *("ln", "mkdir", "rm", "sed", "sha256sum", "sh", "touch"),
)
UV = """#!/bin/sh
[ "$1" = --version ] || echo "uv $*" >>"$CALLS"
case "$1 $2" in
    "venv "*)
        mkdir -p "$SETUP_TARGET/bin" && touch "$SETUP_TARGET/bin/python"
        chmod +x "$SETUP_TARGET/bin/python"
        until [ -z "$GATE" ] || [ -e "$GATE" ]; do :; done ;;
    "pip install") [ -z "$UV_FAILS" ] ;;
esac
"""
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") [ -z "$NO_VENV" ] && mkdir -p "$3/bin" && ln -s "$0" "$3/bin/python" ;;
    "-m pip")
        echo "pip $*" >>"$CALLS"
        [ -z "$NO_PIP" ] || exit 1
        [ "$3" = install ] || exit 0
        folder=$(dirname "$0"); [ "$5" != --target ] || folder=$6/bin
        mkdir -p "$folder" && cp "$UV_SOURCE" "$folder/uv" ;;
    "-c "*) exit "${WRONG_VERSION:-0}" ;;
esac
"""


class Checkout:
    """A copy of what the set-up reads, with stand-ins for uv (when asked for) and python3 on PATH."""

    def __init__(self, folder: Path, with_uv: bool) -> None:
        self.root = folder / "checkout"
        self.tools = folder / "tools"
        self.calls_file = folder / "calls"
        self.calls_file.touch()
        (self.root / "launch" / "lib").mkdir(parents=True)
        for name in ("launch/lib/setup.sh", "requirements.lock", "pyproject.toml", "hatch_build.py"):
            shutil.copy(ROOT / name, self.root / name)
        self.tools.mkdir()
        for tool in SYSTEM_TOOLS:
            (self.tools / tool).symlink_to(str(shutil.which(tool)))
        self._tool(folder / "uv-source", UV)
        self._tool(self.tools / "python3", PYTHON)
        if with_uv:
            self._tool(self.tools / "uv", UV)
        self.environment = {
            "PATH": str(self.tools),
            "HOME": str(folder),
            "CALLS": str(self.calls_file),
            "SETUP_TARGET": str(self.root / ".venv"),
            "UV_SOURCE": str(folder / "uv-source"),
        }

    @staticmethod
    def _tool(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return [line.replace(str(self.root), "ROOT") for line in self.calls_file.read_text().splitlines()]

    def start(self, **settings: str) -> subprocess.Popen[str]:
        command = [str(self.root / "launch" / "lib" / "setup.sh")]
        environment = self.environment | settings
        return subprocess.Popen(
            command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, **settings: str) -> tuple[int, str]:
        process = self.start(**settings)
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output


@pytest.fixture
def make(tmp_path: Path) -> Callable[[bool], Checkout]:
    return lambda with_uv: Checkout(tmp_path, with_uv)


def test_the_first_run_makes_the_environment_from_the_pins_and_this_checkout(
    make: Callable[[bool], Checkout],
) -> None:
    checkout = make(True)
    status, output = checkout.run()
    assert status == 0, output
    assert checkout.calls == [
        f"uv venv --quiet --allow-existing --python {checkout.tools}/python3 ROOT/.venv",
        "uv pip install --python ROOT/.venv/bin/python --no-deps -r ROOT/requirements.lock",
        (
            "uv pip install --quiet --python ROOT/.venv/bin/python --no-deps "
            "--no-build-isolation --editable ROOT"
        ),
    ]


def test_a_second_run_does_nothing_until_the_pins_change(make: Callable[[bool], Checkout]) -> None:
    checkout = make(True)
    checkout.run()
    status, output = checkout.run()
    assert (status, len(checkout.calls)) == (0, 3)
    assert output == f"set-up: {checkout.root}/.venv is up to date\n"
    with open(checkout.root / "requirements.lock", "a") as lock:
        lock.write("one-more==1.0\n")
    assert (checkout.run()[0], len(checkout.calls)) == (0, 6)


def test_a_checkout_that_was_moved_is_set_up_again(make: Callable[[bool], Checkout]) -> None:
    checkout = make(True)
    checkout.run()
    moved = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.root = moved
    assert (checkout.run(SETUP_TARGET=f"{moved}/.venv")[0], len(checkout.calls)) == (0, 6)


def test_a_failed_installation_is_told_in_words_and_tried_again_next_time(
    make: Callable[[bool], Checkout],
) -> None:
    checkout = make(True)
    status, output = checkout.run(UV_FAILS="1")
    assert status == 1
    assert output.splitlines()[-1].startswith(
        "set-up: packages could not be installed (see above): is a package index reachable"
    )
    assert checkout.run()[0] == 0


def test_two_runs_at_the_same_time_install_once(make: Callable[[bool], Checkout], tmp_path: Path) -> None:
    checkout, gate = make(True), tmp_path / "gate"
    first = checkout.start(GATE=str(gate))
    wait_until(lambda: checkout.calls, "the first call of uv")
    second = checkout.start(GATE=str(gate))
    assert second.stdout is not None
    assert second.stdout.readline() == "set-up: waiting for another set-up of this checkout\n"
    gate.touch()
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert len(checkout.calls) == 3


def test_without_uv_it_is_installed_under_the_environment(make: Callable[[bool], Checkout]) -> None:
    checkout = make(False)
    status, output = checkout.run()
    assert status == 0, output
    assert checkout.calls[0] == "pip -m pip install --quiet uv"
    assert os.access(checkout.root / ".venv" / "uv" / "bin" / "uv", os.X_OK)
    assert len(checkout.calls) == 4


def test_without_uv_and_without_the_venv_module_pip_installs_it_to_a_folder(
    make: Callable[[bool], Checkout],
) -> None:
    checkout = make(False)
    status, output = checkout.run(NO_VENV="1")
    assert status == 0, output
    assert "pip -m pip install --quiet --target ROOT/.venv/uv uv" in checkout.calls


def test_without_uv_venv_and_pip_it_says_what_to_install(make: Callable[[bool], Checkout]) -> None:
    status, output = make(False).run(NO_VENV="1", NO_PIP="1")
    assert status == 1
    assert (
        "set-up: needs uv, or a python3 with the venv or pip module (on Debian: apt-get install python3-venv)"
        in output
    )


def test_a_python_of_another_version_is_left_to_uv_to_replace(make: Callable[[bool], Checkout]) -> None:
    checkout = make(True)
    assert checkout.run(WRONG_VERSION="1")[0] == 0
    assert checkout.calls[0] == "uv venv --quiet --allow-existing --python 3.12 ROOT/.venv"
