"""What a source tree says, in the groups of the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.source.fields import (
    FieldFact,
    class_fields,
    parameters,
    public_members,
    takes_anything,
)
from dynamo.trtllm.engines.tensorrt_llm.source.models import ModelSource, read_models
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Found, SourceTree

ARGUMENTS = "LLM arguments"
_ARGUMENT_CLASSES = ("TorchLlmArgs", "LlmArgs", "BaseLlmArgs")
_FIELDS = {
    "SamplingParams": ("SamplingParams", "sampling_params.py"),
    "GuidedDecodingParams": ("GuidedDecodingParams", "sampling_params.py", "llmapi/guided_decoding.py"),
    "DisaggregatedParams": ("DisaggregatedParams", "disaggregated_params.py"),
}
_CALLS = {
    "LLM.generate_async": ("LLM", "generate_async", "llmapi/llm.py"),
    "LLM.preprocess": ("LLM", "preprocess", "llmapi/llm.py"),
    "MultimodalEncoder": ("MultimodalEncoder", "__init__", "llmapi/mm_encoder.py"),
    "MultimodalEncoder.generate_async": ("MultimodalEncoder", "generate_async", "llmapi/mm_encoder.py"),
}


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """`groups`: group -> name -> default. A group whose file or class is not in the tree is missing from
    it."""

    version: str | None
    groups: Mapping[str, Mapping[str, Any]]
    choices: Mapping[str, tuple[Any, ...]]
    models: tuple[ModelSource, ...]
    unreadable: Mapping[str, str]


def read_facts(tree: SourceTree) -> SourceFacts:
    """Read everything that the record holds of a release."""
    groups: dict[str, Mapping[str, Any]] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    arguments = find_arguments(tree)
    if arguments is not None:
        _read_arguments(tree, arguments, groups, choices)
    for group, (name, *paths) in _FIELDS.items():
        found = tree.find(name, *paths)
        if found is not None:
            groups[group] = {n: fact.default for n, fact in class_fields(tree, found).items()}
    for group, (owner, name, path) in _CALLS.items():
        found = tree.find(owner, path)
        method = tree.method(found, name) if found is not None else None
        given = parameters(method) if method is not None else {}
        if method is not None and not takes_anything(given):
            groups[group] = given
        elif method is None and found is not None and name == "preprocess":
            groups[group] = {}
    llm = tree.find("LLM", "llmapi/llm.py")
    if llm is not None:
        groups["LLM methods"] = dict.fromkeys(public_members(tree, llm))
    return SourceFacts(
        version=tree.version,
        groups=groups,
        choices=choices,
        models=read_models(tree),
        unreadable=dict(tree.unreadable),
    )


def find_arguments(tree: SourceTree) -> Found | None:
    """The class of the PyTorch backend's constructor arguments, under the names it has had."""
    return next(
        (found for name in _ARGUMENT_CLASSES if (found := tree.find(name, "llmapi/llm_args.py"))), None
    )


def _read_arguments(
    tree: SourceTree,
    arguments: Found,
    groups: dict[str, Mapping[str, Any]],
    choices: dict[str, tuple[Any, ...]],
) -> None:
    top = class_fields(tree, arguments)
    groups[ARGUMENTS] = {name: fact.default for name, fact in top.items()}
    choices.update(_choices("", top))
    for name, fact in top.items():
        if fact.configuration is not None:
            nested = class_fields(tree, fact.configuration)
            groups[name] = {field: inner.default for field, inner in nested.items()}
            choices.update(_choices(f"{name}.", nested))


def _choices(prefix: str, facts: Mapping[str, FieldFact]) -> dict[str, tuple[Any, ...]]:
    return {f"{prefix}{name}": fact.choices for name, fact in facts.items() if fact.choices}
