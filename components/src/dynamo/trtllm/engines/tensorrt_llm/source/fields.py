"""Fields of pydantic and dataclass configurations, parameters of functions: names, defaults and accepted
values."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record import MADE, REQUIRED
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Found, Module, SourceTree, dotted

_CONSTRUCTORS = {"Field", "field", "Parameter"}
_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


@dataclass(frozen=True)
class FieldFact:
    """One field. `configuration` names the class of its value when that is one class of the tree that has
    fields itself."""

    default: Any
    choices: tuple[Any, ...] = ()
    configuration: Found | None = None


def class_fields(tree: SourceTree, found: Found) -> dict[str, FieldFact]:
    """Fields of a class, inherited ones first, under their aliases where they have one."""
    facts: dict[str, FieldFact] = {}
    for owner in reversed(tree.bases(found)):
        for name, node in _assignments(owner):
            facts[_alias(node) or name] = FieldFact(
                _default(node.value),
                tuple(_choices(tree, owner.module, node.annotation)),
                _configuration(tree, owner.module, node.annotation),
            )
    return facts


def parameters(found: Found) -> dict[str, Any]:
    """Parameters of a function without `self` and `cls` -> default; `*args` and `**kwargs` under their
    names with stars."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        return {}
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    without = len(positional) - len(spec.defaults)
    values: list[ast.expr | None] = [*[None] * without, *spec.defaults]
    facts = {arg.arg: _literal(value) for arg, value in zip(positional, values, strict=True)}
    if spec.vararg is not None:
        facts[f"*{spec.vararg.arg}"] = REQUIRED
    facts |= {arg.arg: _literal(value) for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)}
    if spec.kwarg is not None:
        facts[f"**{spec.kwarg.arg}"] = REQUIRED
    return {name: default for name, default in facts.items() if name not in ("self", "cls")}


def takes_anything(found: Mapping[str, Any]) -> bool:
    """True: parameters are `*args, **kwargs` and nothing else, so names say nothing of what the function
    takes."""
    return bool(found) and all(name.startswith("*") for name in found)


def public_members(tree: SourceTree, found: Found) -> list[str]:
    """Names of public methods and properties of a class and of what it inherits from."""
    names = {
        node.name
        for owner in tree.bases(found)
        for node in owner.node.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")
    }
    return sorted(names)


def _assignments(owner: Found) -> Iterator[tuple[str, ast.AnnAssign]]:
    for node in owner.node.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        private = node.target.id.startswith("_") or (
            node.value is not None and dotted(node.value) == "PrivateAttr"
        )
        constant = (
            dotted(node.annotation).rpartition(".")[2] == "ClassVar" or node.target.id == "model_config"
        )
        if not private and not constant:
            yield node.target.id, node


def _alias(node: ast.AnnAssign) -> str | None:
    if not isinstance(node.value, ast.Call):
        return None
    given = next((k.value for k in node.value.keywords if k.arg == "alias"), None)
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None


def _default(value: ast.expr | None) -> Any:
    """Default of a field from what is assigned to it: a value, or a call such as `Field(default=...)`."""
    if not isinstance(value, ast.Call) or dotted(value).rpartition(".")[2] not in _CONSTRUCTORS:
        return _literal(value)
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    if "default_factory" in given:
        return MADE
    first = given.get("default", value.args[0] if value.args else None)
    return (
        REQUIRED
        if first is None or (isinstance(first, ast.Constant) and first.value is ...)
        else _literal(first)
    )


def _literal(value: ast.expr | None) -> Any:
    if value is None:
        return REQUIRED
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return MADE


def _choices(tree: SourceTree, module: Module, annotation: ast.expr) -> Iterator[Any]:
    """Accepted values of a field: those of `Literal` and of enums, and None where it may be left out."""
    parts = list(_parts(tree, module, annotation))
    values = [v for part in parts for v in _literal_values(part)]
    values += [v for part in parts for v in _enum_values(tree, module, part)]
    yield from dict.fromkeys(values)
    if values and any(isinstance(part, ast.Constant) and part.value is None for part in parts):
        yield None


def _literal_values(part: ast.expr) -> Iterator[Any]:
    if isinstance(part, ast.Subscript) and dotted(part).rpartition(".")[2] == "Literal":
        inside = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
        yield from (value.value for value in inside if isinstance(value, ast.Constant))


def _enum_values(tree: SourceTree, module: Module, part: ast.expr) -> Iterator[str]:
    """Values of a string enum, names of any other, in lower case where they are names in capitals."""
    if not isinstance(part, (ast.Name, ast.Attribute)):
        return
    found = tree.resolve(dotted(part).rpartition(".")[2], module)
    if found is None or not any(
        dotted(base).rpartition(".")[2] in _ENUMS
        for owner in tree.bases(found)
        if isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases
    ):
        return
    for node in found.node.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value)
            yield value if isinstance(value, str) else node.targets[0].id.lower()


def _parts(tree: SourceTree, module: Module, annotation: ast.expr, depth: int = 8) -> Iterator[ast.expr]:
    """The members of a union, `Optional` and `Annotated`; names of aliases are followed in their file."""
    if depth == 0:
        return
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    name = dotted(annotation).rpartition(".")[2]
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        for side in (annotation.left, annotation.right):
            yield from _parts(tree, module, side, depth - 1)
    elif isinstance(annotation, ast.Subscript) and name in ("Optional", "Union", "Annotated"):
        inside = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        for part in inside[:1] if name == "Annotated" else inside:
            yield from _parts(tree, module, part, depth - 1)
        if name == "Optional":
            yield ast.Constant(None)
    elif isinstance(annotation, ast.Name) and (alias := module.value(annotation.id)) is not None:
        yield from _parts(tree, module, alias, depth - 1)
    else:
        yield annotation


def _configuration(tree: SourceTree, module: Module, annotation: ast.expr) -> Found | None:
    """The one class with fields that a value of this annotation is; None when there is none or there are
    several."""
    found: list[Found] = []
    for part in _parts(tree, module, annotation):
        name = dotted(part).rpartition(".")[2] if isinstance(part, (ast.Name, ast.Attribute)) else ""
        target = tree.resolve(name, module) if name else None
        if (
            target is not None
            and isinstance(target.node, ast.ClassDef)
            and any(True for _ in _own_fields(tree, target))
        ):
            found.append(target)
    return found[0] if len(found) == 1 else None


def _own_fields(tree: SourceTree, found: Found) -> Iterator[str]:
    for owner in tree.bases(found):
        yield from (name for name, _ in _assignments(owner))
