"""README against the code: every flag stands in it, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo.trtllm.config import PeerConfig, TransferConfig
from dynamo.trtllm.utils.flags import FLAGS, OTHER_VARIABLES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "tests/README.md", "launch/README.md", "engine_configs/README.md"]


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_each_flag_stands_in_the_readme(name: str) -> None:
    assert re.search(rf"`{re.escape(name)}[`= ]", README), f"{name} is missing from README.md"


@pytest.mark.parametrize("name", sorted(flag.plain for flag in FLAGS.values() if flag.plain))
def test_each_plain_variable_stands_in_the_readme(name: str) -> None:
    assert f"`{name}`" in README


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES))
def test_each_other_variable_stands_in_the_readme(name: str) -> None:
    assert name in README


def test_the_readmes_flags_are_flags_of_the_worker() -> None:
    table = README.partition("| flag | variable")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(--[a-z-]+)", table)) - {"--store-kv", "--use-nixl-connect", "--migration-limit"}
    also = {each for flag in FLAGS.values() for each in flag.also}
    assert (
        named - set(FLAGS) - also - {"--check", "--against", "--engine-report", "--live", "--gpu-memory-gb", "--trtllm"} == set()
    )


def test_the_readmes_deadlines_are_the_defaults() -> None:
    assert f"| {PeerConfig.timeout_s:g} s | longest wait for another worker" in README
    assert f"| 256, {TransferConfig.time_to_live_s:g} s |" in README


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_and_pictures_lead_to_files(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", path.read_text())
    targets = [link for pair in links for link in pair if link and not link.startswith(("http://", "https://", "#", "mailto:"))]
    missing = [target for target in targets if not (path.parent / target.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_of_this_repository_that_a_document_names_exist(document: str) -> None:
    named = re.findall(r"`(?:\./)?((?:launch|tests|engine_configs|components)/[A-Za-z0-9_./-]+)`", (ROOT / document).read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
