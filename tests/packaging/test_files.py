"""What the repository promises about its dependencies: no registry is named,
pins agree with the metadata, extras stay apart."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "aisimulate"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """The lock's versions that hold for this Python."""
    lines = [
        line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")
    ]
    found = {}
    for line in lines:
        pin, _, marker = line.partition(" ; ")
        name, version = pin.split("==")
        if not marker or Marker(marker).evaluate():
            found[name] = version
    return found


def test_the_lock_holds_plain_pins_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert not [
        line for line in text.splitlines() if not re.fullmatch(r"#.*|[a-z0-9-]+==[\w.]+( ; .+)?", line)
    ]
    assert "://" not in text


def test_no_tracked_text_names_the_host_of_a_package_registry() -> None:
    hosts = ["pypi." + "org", "pythonhosted." + "org", "pypi.nvidia." + "com", "download.pytorch." + "org"]
    found = subprocess.run(
        ["git", "grep", "-I", "-l", "-F", *[word for host in hosts for word in ("-e", host)]],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.stdout == ""


def test_the_pins_satisfy_base_portable_and_test_requirements(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["portable"],
        *project["dependency-groups"]["test"],
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(pins[name], prereleases=True), requirement


def test_every_requirement_of_a_pinned_package_is_pinned_but_the_placeholder(pins: dict[str, str]) -> None:
    missing = set()
    for name in pins:
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                missing |= {canonicalize_name(requirement.name)} - pins.keys()
    assert missing <= {PLACEHOLDER}


def test_the_base_names_neither_engine(project: dict[str, Any]) -> None:
    base = {Requirement(text).name for text in project["project"]["dependencies"]}
    assert not base & {"transformers", "torchvision", "av", "tensorrt-llm", "tensorrt_llm"}
    torch = next(
        Requirement(text) for text in project["project"]["dependencies"] if Requirement(text).name == "torch"
    )
    assert {clause.operator for clause in torch.specifier} == {">="}
    assert project["project"]["optional-dependencies"]["trtllm"] == ["tensorrt-llm==1.3.0rc29"]
