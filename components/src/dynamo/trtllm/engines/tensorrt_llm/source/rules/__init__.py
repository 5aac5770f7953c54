"""What the adapter relies on in TensorRT-LLM's source, one named rule each; `judge_all` holds a tree
against all of them."""

from __future__ import annotations

from dynamo.trtllm.engines.tensorrt_llm.source.rules import calls, handover, images, life, videos
from dynamo.trtllm.engines.tensorrt_llm.source.rules.rule import Outcome, Rule, Verdict, judge
from dynamo.trtllm.engines.tensorrt_llm.source.tree import SourceTree

RULES: tuple[Rule, ...] = (*calls.RULES, *handover.RULES, *images.RULES, *videos.RULES, *life.RULES)

__all__ = ["RULES", "Outcome", "Rule", "Verdict", "judge", "judge_all"]


def judge_all(tree: SourceTree, release: str) -> list[Verdict]:
    """The verdict of every rule, in their order."""
    return [judge(rule, tree, release) for rule in RULES]
