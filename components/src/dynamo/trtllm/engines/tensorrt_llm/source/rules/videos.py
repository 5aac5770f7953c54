"""Rules of videos: what the models whose videos are served do with frames that were chosen before."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dynamo.trtllm.engines.tensorrt_llm.record import nearest_release
from dynamo.trtllm.engines.tensorrt_llm.source.models import MODEL_FILES, read_processors
from dynamo.trtllm.engines.tensorrt_llm.source.rules.rule import Rule, since_13
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Found, SourceTree, dotted

_COUNT = "get_num_tokens_per_video"
_MEASURED = frozenset({"video_grid_thw", "processed_item_metadata"})
"""Parameters of `_COUNT` in which the processor's own measure comes: the later name is of 1.4."""
NOTHING = "no model whose videos are served"
AS_RECORDED = "as recorded"


def _videos(tree: SourceTree) -> str | None:
    """Recorded models whose videos are served, and what their input processor lacks for it."""
    if not tree.modules(MODEL_FILES):
        return None
    record, _ = nearest_release(tree.version or "")
    served = {name for name, facts in record.videos.items() if facts.served}
    found = {
        model.architecture: list(_lacking(tree, processor))
        for model, processor in read_processors(tree)
        if model.architecture in served and processor is not None
    }
    wrong = [f"{name} {', '.join(lacks)}" for name, lacks in found.items() if lacks]
    return "; ".join(wrong) or (AS_RECORDED if found else NOTHING)


def _lacking(tree: SourceTree, processor: Found) -> Iterator[str]:
    prepare, count = tree.method(processor, "_preprocess"), tree.method(processor, _COUNT)
    nodes = list(ast.walk(prepare.node)) if prepare is not None else []
    calls = [n for n in nodes if isinstance(n, ast.Call) and dotted(n.func).endswith("processor")]
    if not any(keyword.arg == "video_metadata" for call in calls for keyword in call.keywords):
        yield "drops the times of frames"
    if not any(isinstance(n, ast.Constant) and n.value == "do_sample_frames" for n in nodes):
        yield "does not hear that frames are chosen"
    arguments = count.node.args if count is not None and isinstance(count.node, ast.FunctionDef) else None
    names = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)} if arguments is not None else set()
    if not names & _MEASURED:
        yield "does not count by the processor's measure"


RULES = (
    Rule(
        name="chosen-frames",
        relies="the models whose videos are served take the frames and the times of VideoData, sample no "
        "more where do_sample_frames is False, and count a video's tokens by what the processor made of it",
        file="_torch/models/modeling_qwen3vl.py",
        seen=f"video_metadata and do_sample_frames in _preprocess, and the parameters of {_COUNT}",
        breaks="a model sees other frames than were chosen or other times, or one video's KV cache blocks "
        "answer for another",
        accepted=(AS_RECORDED, NOTHING),
        look=_videos,
        expected=since_13(NOTHING, AS_RECORDED),
        source="V-qwen3, V-reg",
    ),
)
