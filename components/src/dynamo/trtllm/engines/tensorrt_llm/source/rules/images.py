"""Rules of images: input processors, embedding handles, positions, embedding files, the encoder."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dynamo.trtllm.engines.tensorrt_llm.record import MODELS
from dynamo.trtllm.engines.tensorrt_llm.source.fields import parameters
from dynamo.trtllm.engines.tensorrt_llm.source.models import (
    FAST_PATH,
    MODEL_FILES,
    SPLIT,
    class_flag,
    read_models,
    read_processors,
)
from dynamo.trtllm.engines.tensorrt_llm.source.rules.rule import COMPLETE, Rule, in_all, lacking, since_13
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Found, SourceTree, dotted

_REGISTRY = "inputs/registry.py"
_BUILDERS = ("build_disagg_prefill_multimodal_inputs", "get_prompt_token_ids")
_SENT = frozenset(
    {"prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_embeddings", "mm_processor_kwargs"}
)
_LLAMA4 = ("image_special_token_offsets", "image_special_tokens", "mm_embeddings")
_ATTACH = "attach_multimodal_embeddings"


def _beside_handles(tree: SourceTree) -> str | None:
    """What the builders of split prompts read of the inputs."""
    keys: set[str] = set()
    seen = False
    for model, processor in read_processors(tree):
        builders = (
            [tree.method(processor, name) for name in _BUILDERS]
            if model.splits and processor is not None
            else []
        )
        for builder in builders:
            if builder is not None:
                seen = True
                keys |= set(_keys(builder, _first(builder)))
    if not seen:
        return None
    unknown = sorted(keys - _SENT)
    return (
        f"also reads {', '.join(unknown)}"
        if unknown
        else "reads prompt"
        if "prompt" in keys
        else "reads the ids"
    )


def _first(function: Found) -> str:
    return next(iter(parameters(function)), "")


def _keys(function: Found, holder: str) -> Iterator[str]:
    """String keys that a function reads of the dictionary in its parameter `holder`."""
    for node in ast.walk(function.node):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and dotted(node.value) == holder:
            key = node.slice
        if isinstance(node, ast.Call) and dotted(node.func) == f"{holder}.get" and node.args:
            key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _deltas(tree: SourceTree) -> str | None:
    """Kind of the cache of mRoPE position deltas."""
    kinds = set()
    for module in tree.modules(MODEL_FILES):
        for node in (n for statement in module.body for n in ast.walk(statement)):
            if _registers(node, "mrope_position_deltas_cache"):
                made = node.args[1] if isinstance(node, ast.Call) and len(node.args) > 1 else None
                given = {k.arg: k.value for k in made.keywords} if isinstance(made, ast.Call) else {}
                kinds.add(dotted(given["dtype"]).rpartition(".")[2] if "dtype" in given else "float32")
    if tree.modules(MODEL_FILES) == []:
        return None
    return ", ".join(sorted(kinds)) or "no cache"


def _registers(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call) or not dotted(node.func).endswith("register_buffer") or not node.args:
        return False
    first = node.args[0]
    return isinstance(first, ast.Constant) and first.value == name


def _fast_path(tree: SourceTree) -> str | None:
    base = tree.find("BaseMultimodalInputProcessor", _REGISTRY)
    if base is None:
        return None
    flag = class_flag(tree, base, FAST_PATH)
    return "none" if flag is None else f"a flag, {flag} by default" if isinstance(flag, bool) else f"a {flag}"


def _split_flag(tree: SourceTree) -> str | None:
    """What the decorator of split models sets on them and on their input processors."""
    found = tree.find(SPLIT, _REGISTRY)
    if found is None:
        return None
    calls = (n for n in ast.walk(found.node) if isinstance(n, ast.Call) and dotted(n.func) == "setattr")
    names = {a.value for call in calls for a in call.args[1:2] if isinstance(a, ast.Constant)}
    assigned = (n for n in ast.walk(found.node) if isinstance(n, ast.Assign))
    names |= {t.attr for node in assigned for t in node.targets if isinstance(t, ast.Attribute)}
    return ", ".join(sorted(map(str, names))) or "nothing"


def _llama4(tree: SourceTree) -> str | None:
    processors = [p for model, p in read_processors(tree) if model.architecture.startswith("Llama4")]
    found = next(
        (m for p in processors if p is not None and (m := tree.method(p, _ATTACH)) is not None), None
    )
    if found is None:
        return None
    keys = {
        node.slice.value
        for node in ast.walk(found.node)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    read = sorted(keys - {"image", "video", "audio", *_SENT})
    return ", ".join(read) or "none"


def _attaches(tree: SourceTree) -> str | None:
    """Recorded models that take embedding files and whose processor has no way for them."""
    models = {m.architecture: m for m in read_models(tree)}
    known = [name for name, facts in MODELS.items() if facts.attaches_embeddings and name in models]
    wrong = [name for name in known if _ATTACH not in models[name].methods]
    return (f"not {', '.join(wrong)}" if wrong else "as recorded") if known else None


def _sizes(tree: SourceTree) -> str | None:
    """Recorded models whose processors take the request's options,
    and whose input processor passes none on."""
    found = {
        model.architecture: processor for model, processor in read_processors(tree) if processor is not None
    }
    known = [name for name, facts in MODELS.items() if facts.sizes_images and name in found]
    wrong = [
        name
        for name in known
        if not any(
            _passes_options(node) for owner in tree.bases(found[name]) for node in ast.walk(owner.node)
        )
    ]
    return (f"not {', '.join(wrong)}" if wrong else "as recorded") if known else None


def _passes_options(node: ast.AST) -> bool:
    """Whether `node` is a call of a processor with `**mm_processor_kwargs`."""
    if not isinstance(node, ast.Call) or not dotted(node.func).endswith("processor"):
        return False
    return any(each.arg is None and dotted(each.value) == "mm_processor_kwargs" for each in node.keywords)


def _splits(tree: SourceTree) -> str | None:
    """Recorded models whose images can be encoded apart, and whose class does not say so."""
    models = {m.architecture: m for m in read_models(tree)}
    known = [name for name, facts in MODELS.items() if facts.encodes_apart and name in models]
    wrong = [name for name in known if not models[name].splits]
    return (f"not {', '.join(wrong)}" if wrong else "as recorded") if known else None


def _placeholders(tree: SourceTree) -> str | None:
    models = {m.architecture: m.placeholders.get("image") for m in read_models(tree)}
    known = {
        name: f.placeholder for name, f in MODELS.items() if f.placeholder is not None and models.get(name)
    }
    wrong = [
        f"{name} writes {models[name]}"
        for name, placeholder in known.items()
        if placeholder not in str(models[name])
    ]
    return ("; ".join(wrong) or "as recorded") if known else None


def _encoder(tree: SourceTree) -> str | None:
    found = tree.find("MultimodalEncoder", "llmapi/mm_encoder.py")
    if found is None:
        return None
    method = tree.method(found, "generate_async")
    if method is None:
        return "without generate_async"
    if isinstance(method.node, ast.AsyncFunctionDef):
        return "generate_async is a coroutine"
    shutdown = ["shutdown"] if tree.method(found, "shutdown") is not None else []
    return lacking(("inputs", "shutdown"), [*parameters(method), *shutdown])


RULES = (
    Rule(
        name="prompt-beside-handles",
        relies="prefill with an encode worker's embeddings reads the text under `prompt`, or the ids, and "
        "nothing else",
        file=MODEL_FILES,
        seen="keys that build_disagg_prefill_multimodal_inputs (1.2: get_prompt_token_ids) reads of its "
        "inputs",
        breaks="every image from an encode worker is a 400",
        accepted=("reads prompt", "reads the ids"),
        look=_beside_handles,
        expected=in_all("reads prompt"),
        source="S-qwen, S-llava, dyn",
    ),
    Rule(
        name="mrope-deltas",
        relies="models keep mRoPE position deltas as int32",
        file=MODEL_FILES,
        seen="dtype of the buffer mrope_position_deltas_cache",
        breaks="disaggregated images with Qwen models fail in the forward pass",
        accepted=("int32", "no cache"),
        look=_deltas,
        expected={"1.3.0rc29": "int32", "1.4.0rc2": "int32"},
        source="S-qwen",
    ),
    Rule(
        name="fast-path-flag",
        relies=f"{FAST_PATH} is a class flag, if there is one, that says whether token ids beside images "
        f"are used as they are",
        file=_REGISTRY,
        seen="the class attribute of BaseMultimodalInputProcessor",
        breaks="prompts with images may be tokenized again, with other ids than the frontend counted",
        accepted=("none", "a flag, False by default", "a flag, True by default"),
        look=_fast_path,
        expected=since_13("none", "a flag, False by default"),
        source="S-reg",
    ),
    Rule(
        name="split-flag",
        relies="an input processor that takes an encode worker's embeddings has support_mm_disagg",
        file=_REGISTRY,
        seen="what the decorator support_multimodal_disaggregated sets",
        breaks="prefill refuses at start to work with an encode worker, though the model could",
        accepted=("support_mm_disagg",),
        look=_split_flag,
        expected=in_all("support_mm_disagg"),
        source="S-reg, S-llm",
    ),
    Rule(
        name="llama4-embeddings",
        relies="Llama 4 takes precomputed embeddings as dictionaries of " + ", ".join(_LLAMA4),
        file="_torch/models/modeling_llama.py",
        seen=f"keys that {_ATTACH} of Llama 4's input processor reads of each image",
        breaks="every embedding file for Llama 4 is a 400",
        accepted=(", ".join(_LLAMA4),),
        look=_llama4,
        expected=in_all(", ".join(_LLAMA4)),
        source="S-l4, dyn",
    ),
    Rule(
        name="embedding-files",
        relies=f"the recorded models that take embedding files have {_ATTACH}",
        file=MODEL_FILES,
        seen="methods of the registered input processors",
        breaks="embedding files for that model are a 400",
        accepted=("as recorded",),
        look=_attaches,
        expected=in_all("as recorded"),
        source="S-l4, S-llava",
    ),
    Rule(
        name="processor-options",
        relies="the recorded models that size images call the model's own processor with the request's "
        "mm_processor_kwargs",
        file=MODEL_FILES,
        seen="a call of a processor with **mm_processor_kwargs in the registered input processors",
        breaks="min_pixels and max_pixels of a request change nothing",
        accepted=("as recorded",),
        look=_sizes,
        expected=in_all("as recorded"),
        source="S-qwen",
    ),
    Rule(
        name="split-models",
        relies="the recorded models that can be encoded apart are decorated so",
        file=MODEL_FILES,
        seen="the decorator support_multimodal_disaggregated",
        breaks="an encode worker starts that prefill never calls, or every image is a 400",
        accepted=("as recorded",),
        look=_splits,
        expected=in_all("as recorded"),
        source="S-qwen, T-mm",
    ),
    Rule(
        name="placeholders",
        relies="the recorded placeholder of an image is part of what the library writes for one",
        file=MODEL_FILES,
        seen="placeholder_map of the registered models",
        breaks="images are not found in the prompt",
        accepted=("as recorded",),
        look=_placeholders,
        expected=in_all("as recorded"),
        source="S-qwen, S-llava, S-l4",
    ),
    Rule(
        name="encoder-methods",
        relies="MultimodalEncoder.generate_async is a plain function of one image's inputs, and the "
        "encoder has shutdown",
        file="llmapi/mm_encoder.py",
        seen="methods of the class MultimodalEncoder and of LLM",
        breaks="encode workers serve no image",
        accepted=(COMPLETE,),
        look=_encoder,
        expected=in_all(COMPLETE),
        source="M121, M29",
    ),
)
