"""Names of ours in backquotes, in docstrings, comments and the documents, are names that the code has."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "components" / "src" / "dynamo" / "trtllm"
FOLDERS = ("components", "launch", "tests", "engine_configs")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"{each}/README.md" for each in FOLDERS[1:])]
_DOTTED = re.compile(r"`([A-Z]\w*)\.(\w+)(?:\([^`]*\))?`")
_FILE = re.compile(r"`((?:[\w-]+/)*[a-z_]\w*\.(?:py|sh))`")
_THEIRS = ("_torch/", "executor/", "inputs/", "llmapi/")
"""Where the files of TensorRT-LLM lie that docstrings cite."""


def members_of(tree: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.AnnAssign, ast.Assign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


@pytest.fixture(scope="module")
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Members and bases of the package's classes by name; classes of one name are taken together."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name][0].update(members_of(node))
                found[node.name][1].update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    return dict(found)


def texts() -> Iterator[tuple[str, str]]:
    for path in [*(ROOT / name for name in DOCUMENTS), *sorted(PACKAGE.rglob("*.py"))]:
        yield str(path.relative_to(ROOT)), path.read_text()


def test_a_member_of_a_class_that_prose_names_is_there(
    classes: dict[str, tuple[set[str], set[str]]],
) -> None:
    def may_have(name: str, member: str) -> bool:
        if name not in classes:
            return True
        members, bases = classes[name]
        return member in members or any(may_have(base, member) for base in bases)

    named = [(where, *found) for where, text in texts() for found in _DOTTED.findall(text)]
    assert len(named) > 20
    assert [each for each in named if not may_have(*each[1:])] == []


def test_a_file_that_prose_names_is_there() -> None:
    there = [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.[ps][yh]")]
    there += [str(path) for path in ROOT.glob("*.py")]
    named = [(where, file) for where, text in texts() for file in _FILE.findall(text)]
    assert len(named) > 50
    missing = [
        (where, file)
        for where, file in named
        if not file.startswith(_THEIRS) and not any(each.endswith(f"/{file}") for each in there)
    ]
    assert missing == []
