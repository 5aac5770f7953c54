"""Registered multimodal models: decorators, class flags and placeholder maps of `_torch/models`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dynamo.trtllm.engines.tensorrt_llm.source.tree import Found, SourceTree, dotted

MODEL_FILES = "_torch/models/modeling_*.py"
FAST_PATH = "supports_token_id_mm_expansion"
SPLIT = "support_multimodal_disaggregated"
_REGISTER, _NAME = "register_input_processor", "register_auto_model"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """One model class with an input processor."""

    architecture: str
    """The name in `architectures` of a model's config.json, else the name of the class."""
    model_type: str | None
    file: str
    processor: str
    splits: bool
    """True: decorated, or derived from a class that is, so that prefill takes an encode worker's
    embeddings."""
    fast_path: bool
    """True: its input processor expands token ids and never tokenizes again."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Modality -> what the library writes once per item."""
    methods: frozenset[str] = frozenset()
    """Methods of the input processor, inherited ones included."""


def read_models(tree: SourceTree) -> tuple[ModelSource, ...]:
    """All registered models, in order of their files."""
    return tuple(model for model, _ in read_processors(tree))


def read_processors(tree: SourceTree) -> Iterator[tuple[ModelSource, Found | None]]:
    """Each registered model and the class of its input processor, where that is in the tree."""
    for module in tree.modules(MODEL_FILES):
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                calls = {dotted(d).rpartition(".")[2]: d for d in node.decorator_list}
                registered = calls.get(_REGISTER)
                if isinstance(registered, ast.Call):
                    yield from _models(tree, Found(module, node), registered)


def _models(
    tree: SourceTree, model: Found, registered: ast.Call
) -> Iterator[tuple[ModelSource, Found | None]]:
    given = {keyword.arg: keyword.value for keyword in registered.keywords}
    name = (
        dotted(registered.args[0]) if registered.args else dotted(given.get("processor_cls", registered.func))
    )
    processor = tree.resolve(name, model.module)
    model_type = _string(given.get("model_type", registered.args[1] if len(registered.args) > 1 else None))
    for architecture in _architectures(model) or [model.node.name]:
        source = ModelSource(
            architecture=architecture,
            model_type=model_type,
            file=model.module.path,
            processor=name,
            splits=any(_decorated(owner) for owner in tree.bases(model)),
            fast_path=processor is not None and class_flag(tree, processor, FAST_PATH) is True,
            placeholders=_placeholders(tree, model, given.get("placeholder_metadata")),
            methods=frozenset(_methods(tree, processor)),
        )
        yield source, processor


def _decorated(model: Found) -> bool:
    node = model.node
    return isinstance(node, ast.ClassDef) and any(
        dotted(d).rpartition(".")[2] == SPLIT for d in node.decorator_list
    )


def class_flag(tree: SourceTree, found: Found, name: str) -> object:
    """The value of a class attribute, the nearest in the line of inheritance; `"method"` for a function;
    None for none."""
    for owner in tree.bases(found):
        for node in owner.node.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return "method"
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
                return value.value if isinstance(value, ast.Constant) else "expression"
    return None


def _architectures(model: Found) -> list[str]:
    node = model.node
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    names = [
        _string(d.args[0])
        for d in decorators
        if isinstance(d, ast.Call) and dotted(d).endswith(_NAME) and d.args
    ]
    return [name for name in names if name is not None]


def _methods(tree: SourceTree, processor: Found | None) -> Iterator[str]:
    for owner in tree.bases(processor) if processor is not None else ():
        yield from (n.name for n in owner.node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _placeholders(tree: SourceTree, model: Found, metadata: ast.expr | None) -> dict[str, str]:
    """The placeholder map in `MultimodalPlaceholderMetadata(...)`, which may stand under a name of its
    own."""
    if isinstance(metadata, ast.Name):
        metadata = model.module.value(metadata.id)
    if not isinstance(metadata, ast.Call):
        return {}
    given = next((k.value for k in metadata.keywords if k.arg == "placeholder_map"), None)
    if not isinstance(given, ast.Dict):
        return {}
    pairs = ((_string(key), _string(value)) for key, value in zip(given.keys, given.values, strict=True))
    return {key: value for key, value in pairs if key is not None and value is not None}


def _string(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
