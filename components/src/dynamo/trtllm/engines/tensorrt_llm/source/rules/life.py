"""Rules of the engine's life: how a dead engine is noticed, and what its KV cache events hold."""

from __future__ import annotations

import ast

from dynamo.trtllm.engines.tensorrt_llm.source.rules.rule import COMPLETE, Rule, in_all, lacking, since_13
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Module, SourceTree

_EVENT = ("block_hash", "parent_hash", "tokens", "token_id", "block_hashes")
_NOTED, _ASKED = "noted and asked", "asked only"


def _health(tree: SourceTree) -> str | None:
    """How the death of an engine can be seen."""
    llm, executor = tree.find("LLM", "llmapi/llm.py"), tree.module("executor/executor.py")
    if llm is None or executor is None:
        return None
    asked = tree.method(llm, "_check_health") is not None or "check_health" in _names(executor)
    noted = "_fatal_error" in _names(executor)
    if not asked and not noted:
        return "neither noted nor asked"
    return _NOTED if asked and noted else _ASKED if asked else "noted only"


def _executor(tree: SourceTree) -> str | None:
    module = tree.module("llmapi/llm.py")
    if module is None:
        return None
    return "_executor" if "_executor" in _names(module) else "another name"


def _events(tree: SourceTree) -> str | None:
    found = tree.find("KVCacheEventSerializer", "_utils.py")
    if found is None:
        return None
    words = {
        n.value for n in ast.walk(found.node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    return lacking(_EVENT, words)


def _names(module: Module) -> set[str]:
    """Attributes, functions and variables that a file mentions."""
    nodes = [n for statement in module.body for n in ast.walk(statement)]
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return attributes | {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


RULES = (
    Rule(
        name="health",
        relies="a dead engine is seen: the executor notes a fatal error, or answers when it is asked",
        file="llmapi/llm.py, executor/executor.py",
        seen="LLM._check_health, and check_health and _fatal_error of the executor",
        breaks="a dead worker stays in discovery until a request is silent for the stall timeout",
        accepted=(_NOTED, _ASKED, "noted only"),
        look=_health,
        expected=since_13(_ASKED, _NOTED),
        source="M121, S-llm, dyn",
    ),
    Rule(
        name="executor-attribute",
        relies="LLM keeps its executor in _executor",
        file="llmapi/llm.py",
        seen="the attribute _executor",
        breaks="a dead worker stays in discovery until a request is silent for the stall timeout",
        accepted=("_executor",),
        look=_executor,
        expected=in_all("_executor"),
        source="M121, S-llm",
    ),
    Rule(
        name="kv-event-fields",
        relies="KV cache events name blocks and tokens by " + ", ".join(_EVENT),
        file="_utils.py",
        seen="words in the class KVCacheEventSerializer",
        breaks="KV-aware routing knows nothing of this worker's cache",
        accepted=(COMPLETE,),
        look=_events,
        expected=in_all(COMPLETE),
        source="S-ker",
    ),
)
