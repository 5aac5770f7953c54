"""Which modules do without the engines' libraries, NIXL and torch:
blocked in a process of its own, and read in the source."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dynamo.trtllm as package

ROOT = Path(package.__file__).parent
NAME = "dynamo.trtllm"

NEED_TRANSFORMERS = {
    f"{NAME}.engines.transformers.{name}"
    for name in (
        *(
            "attention",
            "batch",
            "graphs",
            "encoder",
            "engine",
            "intake",
            "loading",
            "prompts",
            "runner",
            "scheduler",
        ),
        *("verify", "video", "vision", "audio", "media", "worker"),
    )
}
NEED_TORCH = {
    *NEED_TRANSFORMERS,
    *(
        f"{NAME}.engines.transformers.{name}"
        for name in ("cache", "sampling", "sequence", "state", "fusion", "grammars")
    ),
    *(
        f"{NAME}.engines.transformers.{name}"
        for name in ("rows", "static_cache", "device_sampling", "interleave")
    ),
    *(f"{NAME}.demo.{name}" for name in ("batches", "evaluation", "forward", "recipes", "train")),
    *(f"{NAME}.demo.audio.{name}" for name in ("batches", "evaluation")),
    *(f"{NAME}.engines.transformers.{name}" for name in ("causal", "kernels", "positions")),
    *(f"{NAME}.transfer.{name}" for name in ("board", "layout", "reader", "sender")),
}
DEMO_WITH_TRANSFORMERS = (
    *("demo/recipes.py", "demo/evaluation.py"),
    *("demo/audio/batches.py", "demo/audio/evaluation.py"),
)
PROGRAM = """
import importlib, sys
blocked, modules = sys.argv[1].split(","), sys.argv[2].split(",")
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked by the test", name=name)
sys.meta_path.insert(0, Blocked())
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(module, error)
"""


def all_modules() -> set[str]:
    found = {each.name for each in pkgutil.walk_packages(package.__path__, f"{NAME}.")}
    return {each for each in found if not each.startswith((f"{NAME}.__main__", f"{NAME}.tests"))}


def complaints(blocked: str, modules: set[str]) -> str:
    """What a new process says that imports `modules` while the libraries in `blocked` cannot be found."""
    command = [sys.executable, "-c", PROGRAM, blocked, ",".join(sorted(modules))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parents[1])}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, env=environment
    ).stdout


def test_a_worker_and_its_command_line_import_without_torch_nixl_and_any_engines_library() -> None:
    assert len(all_modules() - NEED_TORCH) > 60
    assert complaints("torch,nixl,transformers,tensorrt_llm", all_modules() - NEED_TORCH) == ""


def test_what_computes_with_torch_imports_without_nixl_and_any_engines_library() -> None:
    assert (
        complaints("nixl,transformers,tensorrt_llm", (NEED_TORCH - NEED_TRANSFORMERS) & all_modules()) == ""
    )


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The top-level package of each import in a file,
    and whether it is carried out when the file is imported."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name.partition(".")[0], at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level and child.module:
                yield child.module.partition(".")[0], at_import
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or typing_only
            yield from walk(child, at_import and not inside)

    return walk(ast.parse(path.read_text()), True)


@cache
def all_imports() -> list[tuple[str, str, bool]]:
    """File below the package, imported library, and whether that happens when the file is imported."""
    return [
        (str(path.relative_to(ROOT)), *each) for path in sorted(ROOT.rglob("*.py")) for each in imports(path)
    ]


def importers(library: str, *, when_imported: bool | None = None) -> set[str]:
    """Files that import `library` anywhere, or only those that do so at once or never at once."""
    return {
        path
        for path, name, at_import in all_imports()
        if name == library and when_imported in (None, at_import)
    }


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("tensorrt_llm", ("engines/tensorrt_llm/",)),
        ("transformers", ("engines/transformers/", *DEMO_WITH_TRANSFORMERS)),
        ("nixl", ("transfer/",)),
    ],
)
def test_a_library_is_imported_only_where_the_map_of_the_code_says(
    library: str, allowed: tuple[str, ...]
) -> None:
    assert {each for each in importers(library) if not each.startswith(allowed)} == set()


def test_nixl_and_tensorrt_llm_are_imported_only_inside_functions() -> None:
    assert importers("nixl", when_imported=True) == set()
    assert importers("tensorrt_llm", when_imported=True) == set()
    assert importers("nixl", when_imported=False) != set()


def test_only_what_needs_torch_imports_it_at_once() -> None:
    named = {
        f"{NAME}.{each.removesuffix('.py').replace('/', '.')}"
        for each in importers("torch", when_imported=True)
    }
    assert named <= NEED_TORCH
