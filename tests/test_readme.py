"""README against the code: its tables of flags are the declarations, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo.trtllm.utils.flag_table import with_flag_table
from dynamo.trtllm.utils.flags import OTHER_VARIABLES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "launch/README.md",
    "engine_configs/README.md",
]


def test_the_tables_of_flags_are_made_from_the_declarations() -> None:
    assert with_flag_table(README) == README, "run: python -m dynamo.trtllm.utils.flag_table README.md"


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES))
def test_each_other_variable_stands_in_the_readme(name: str) -> None:
    assert name in README


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_and_images_lead_to_files(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", path.read_text())
    targets = [
        link
        for pair in links
        for link in pair
        if link and not link.startswith(("http://", "https://", "#", "mailto:"))
    ]
    missing = [target for target in targets if not (path.parent / target.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_of_this_repository_that_a_document_names_exist(document: str) -> None:
    named = re.findall(
        r"`(?:\./)?((?:launch|tests|engine_configs|components)/[A-Za-z0-9_./-]+)`",
        (ROOT / document).read_text(),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []
