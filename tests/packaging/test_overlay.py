"""The distribution beside `ai-dynamo` in one environment:
which package is imported, by wheel, by checkout, and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = "dynamo_trtllm_overlay/"
ORIGIN = "import importlib.util as u, sys; print(u.find_spec(sys.argv[1]).origin)"


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of this one behind its own,
    but not this one's `.pth` files."""

    folder: Path
    uv: str

    @property
    def site(self) -> Path:
        return (
            self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        )

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """The output of this environment's Python with `arguments`, which must succeed."""
        return _run(str(self.folder / "bin" / "python"), *arguments, cwd=cwd or self.folder)

    def install(self, *arguments: str) -> None:
        _run(
            self.uv,
            "pip",
            "install",
            "--offline",
            "--no-deps",
            "--python",
            str(self.folder / "bin" / "python"),
            *arguments,
        )

    def uninstall(self) -> None:
        _run(self.uv, "pip", "uninstall", "--python", str(self.folder / "bin" / "python"), "dynamo-trtllm")

    def origin(self, module: str) -> Path:
        """The file that a module would be imported from."""
        return Path(self.run("-c", ORIGIN, module).strip())


def _run(*command: str, cwd: Path = ROOT) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}
    }
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    """The uv that the set-up uses."""
    return _run("bash", "-c", "source launch/lib/setup.sh && setup_find_uv").strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    return next(folder.glob("dynamo_trtllm-*-py3-none-any.whl"))


@pytest.fixture
def environment(tmp_path: Path, uv: str) -> Environment:
    made = Environment(tmp_path / "environment", uv)
    venv.create(made.folder, symlinks=True)
    (made.site / "zz_base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


def test_the_wheel_brings_the_whole_package_and_nothing_into_the_shared_namespace(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    listed = _run("git", "ls-files", "components/src/dynamo/trtllm").split()
    packed = {name.removeprefix(OVERLAY) for name in names if name.startswith(OVERLAY)}
    assert {name.removeprefix("components/src/") for name in listed} <= packed
    assert {name.split("/")[0] for name in names} == {
        "dynamo_trtllm_overlay",
        "dynamo_trtllm_overlay.pth",
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
    }
    assert "Requires-Python: <3.13,>=3.10" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert not [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch<")]


def test_an_installed_wheel_goes_before_the_package_of_ai_dynamo_and_uninstalling_gives_it_back(
    environment: Environment, wheel: Path
) -> None:
    theirs = environment.origin("dynamo.trtllm")
    frontend = environment.origin("dynamo.frontend")
    assert theirs.is_relative_to(sysconfig.get_path("purelib"))

    environment.install(str(wheel))
    assert str(environment.site / OVERLAY / "dynamo" / "trtllm") in environment.run(
        "-m", "dynamo.trtllm", "--version"
    )
    assert environment.origin("dynamo.trtllm.config").is_relative_to(environment.site / OVERLAY)
    assert environment.origin("dynamo.frontend") == frontend
    assert (
        environment.origin("dynamo.common")
        == environment.origin("dynamo.frontend").parents[1] / "common" / "__init__.py"
    )

    environment.uninstall()
    assert environment.origin("dynamo.trtllm") == theirs
    assert not list(environment.site.glob("*overlay*"))


def test_an_editable_install_goes_before_the_package_of_ai_dynamo_until_it_is_uninstalled(
    environment: Environment,
) -> None:
    theirs = environment.origin("dynamo.trtllm")

    environment.install("--no-build-isolation", "--editable", str(ROOT))
    assert (
        environment.origin("dynamo.trtllm")
        == ROOT / "components" / "src" / "dynamo" / "trtllm" / "__init__.py"
    )
    assert (
        environment.run(
            "-c", "import sys; print(sum(p.endswith('components/src') for p in sys.path))"
        ).strip()
        == "1"
    )

    environment.uninstall()
    assert environment.origin("dynamo.trtllm") == theirs


def test_plain_pytest_runs_in_an_environment_with_both_packages(
    environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    environment.install(str(wheel))
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_any.py").write_text("def test_truth():\n    assert True\n")
    printed = environment.run("-m", "pytest", cwd=project)
    assert "1 passed" in printed.splitlines()[-1]


SIDECAR = "dynamo.trtllm.sidecar"
BESIDE_THE_SIDECAR = """
import importlib.util as u
import dynamo.trtllm.sidecar as sidecar
import dynamo.trtllm.config as config
publisher = u.find_spec("dynamo.trtllm.publisher")
print(callable(sidecar.main), "dynamo_trtllm_overlay" in config.__file__, publisher)
"""


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "checkout"])
def test_the_sidecar_of_ai_dynamo_runs_as_if_it_were_alone(
    environment: Environment, wheel: Path, editable: bool
) -> None:
    alone = environment.run("-m", SIDECAR, "--help")
    assert "--model-path" in alone
    environment.install(*(["--no-build-isolation", "--editable", str(ROOT)] if editable else [str(wheel)]))
    assert environment.run("-m", SIDECAR, "--help") == alone


def test_the_sidecar_imported_brings_no_other_module_of_their_package(
    environment: Environment, wheel: Path
) -> None:
    environment.install(str(wheel))
    assert environment.run("-c", BESIDE_THE_SIDECAR).split() == ["True", "True", "None"]


def test_the_sidecars_own_imports_of_dynamo_trtllm_are_theirs_when_it_runs(
    environment: Environment, wheel: Path
) -> None:
    theirs = environment.site / "dynamo" / "trtllm"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").touch()
    (theirs / "only_theirs.py").write_text("WORD = 'theirs'\n")
    (theirs / "config.py").write_text("WORD = 'and not ours'\n")
    (theirs / "sidecar.py").write_text(
        "import sys\n"
        "from dynamo.trtllm import config, only_theirs\n"
        "def main():\n"
        "    print(only_theirs.WORD, config.WORD, *sys.argv[1:])\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    environment.install(str(wheel))
    assert environment.run("-m", SIDECAR, "--port", "1").strip() == "theirs and not ours --port 1"
