"""A tree of TensorRT-LLM's source: files parsed by `ast`, names followed through imports. Nothing is
executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "tensorrt_llm"
VERSION_FILE = "version.py"
_MAX_HOPS = 8
"""Re-exports that are followed from the file that uses a name to the file that defines it."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One parsed file; `path` is relative to the package, with forward slashes."""

    path: str
    body: tuple[ast.stmt, ...]

    def define(self, name: str) -> Definition | None:
        """The class or function `name` at the top of the file; the last one, as Python would have it."""
        found = [
            node
            for node in _flat(self.body)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        ]
        return found[-1] if found else None

    def value(self, name: str) -> ast.expr | None:
        """What is assigned to `name` at the top of the file."""
        found: ast.expr | None = None
        for node in _flat(self.body):
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == name for t in node.targets
            ):
                found = node.value
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == name
            ):
                found = node.value
        return found

    def imports(self) -> Iterator[tuple[str, str, int, str]]:
        """`(local name, module, level, name there)` of each `from ... import ...` at the top of the file."""
        for node in _flat(self.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield alias.asname or alias.name, node.module or "", node.level, alias.name


@dataclass(frozen=True)
class Found:
    """A definition and the file it stands in."""

    module: Module
    node: Definition


class SourceTree:
    """The package directory `tensorrt_llm` of a checkout or an installation."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.unreadable: dict[str, str] = {}
        """File -> why it could not be parsed."""
        self._parsed: dict[str, Module | None] = {}

    @classmethod
    def open(cls, path: Path) -> SourceTree:
        """The tree at `path`: the package itself, or a directory that holds it. Raises `ValueError` when
        there is none."""
        for package in (path, path / PACKAGE):
            if (package / VERSION_FILE).is_file() or (package / "llmapi").is_dir():
                return cls(package.resolve())
        raise ValueError(
            f"{path} holds no source of TensorRT-LLM: give a checkout of it, or the directory of the "
            f"installed package, "
            f"which has a {VERSION_FILE} and a folder llmapi"
        )

    @property
    def version(self) -> str | None:
        """`__version__` as the tree has it."""
        module = self.module(VERSION_FILE)
        value = module.value("__version__") if module is not None else None
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None

    def module(self, path: str) -> Module | None:
        """The parsed file at `path`; None when there is none or it is no Python that this interpreter can
        parse."""
        if path not in self._parsed:
            self._parsed[path] = self._parse(path)
        return self._parsed[path]

    def modules(self, pattern: str) -> list[Module]:
        """All files that match the glob `pattern`, in order of their names."""
        paths = sorted(self.package.glob(pattern))
        found = (self.module(path.relative_to(self.package).as_posix()) for path in paths)
        return [module for module in found if module is not None]

    def find(self, name: str, *paths: str) -> Found | None:
        """The class or function `name`, in the first of `paths` that defines or imports it."""
        for path in paths:
            module = self.module(path)
            found = self.resolve(name, module) if module is not None else None
            if found is not None:
                return found
        return None

    def resolve(self, name: str, module: Module, hops: int = _MAX_HOPS) -> Found | None:
        """The definition that `name` stands for in `module`, through its imports."""
        node = module.define(name)
        if node is not None:
            return Found(module, node)
        if hops == 0:
            return None
        for local, target, level, original in module.imports():
            if local in (name, "*"):
                for path in self._files(module.path, target, level):
                    imported = self.module(path)
                    wanted = name if local == "*" else original
                    found = self.resolve(wanted, imported, hops - 1) if imported is not None else None
                    if found is not None:
                        return found
        return None

    def bases(self, found: Found) -> list[Found]:
        """`found` and the classes it inherits from within the tree, nearest first."""
        line, pending = [found], [found]
        while pending:
            current = pending.pop(0)
            if not isinstance(current.node, ast.ClassDef):
                continue
            for base in current.node.bases:
                name = dotted(base).rpartition(".")[2]
                parent = self.resolve(name, current.module) if name else None
                if parent is not None and all(parent.node is not known.node for known in line):
                    line.append(parent)
                    pending.append(parent)
        return line

    def method(self, found: Found, name: str) -> Found | None:
        """The method `name` of a class or of what it inherits from."""
        for owner in self.bases(found):
            for node in owner.node.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                    return Found(owner.module, node)
        return None

    def _files(self, importer: str, target: str, level: int) -> Iterator[str]:
        """Files that `from <level dots><target> import ...` in `importer` may mean."""
        parts = target.split(".") if target else []
        if level == 0:
            if parts[:1] != [PACKAGE]:
                return
            parts = parts[1:]
        else:
            folder = importer.split("/")[:-1]
            parts = [*folder[: len(folder) - (level - 1)], *parts]
        joined = "/".join(parts)
        yield f"{joined}.py" if joined else "__init__.py"
        yield f"{joined}/__init__.py" if joined else "__init__.py"

    def _parse(self, path: str) -> Module | None:
        file = self.package / path
        if not file.is_file():
            return None
        try:
            parsed = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            self.unreadable[path] = str(error)
            return None
        return Module(path, tuple(parsed.body))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, of the called one in a call, of the subscripted one in `Generic[T]`;
    else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def _flat(body: tuple[ast.stmt, ...] | list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top of a file, those below `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _flat([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            yield from _flat(
                [*node.body, *(s for handler in node.handlers for s in handler.body), *node.orelse]
            )
