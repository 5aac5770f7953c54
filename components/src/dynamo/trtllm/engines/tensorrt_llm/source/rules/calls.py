"""Rules of the calls: constructor, requests, sampling parameters, results."""

from __future__ import annotations

import ast
from collections.abc import Collection

from dynamo.trtllm.engines.tensorrt_llm.source.fields import class_fields, parameters, takes_anything
from dynamo.trtllm.engines.tensorrt_llm.source.rules.rule import COMPLETE, Rule, in_all, lacking, since_13
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Found, SourceTree, dotted

LLM_FILE = "llmapi/llm.py"
_BY_NAME = "model, and other arguments by name"
_OPTIONS = ("inputs", "sampling_params", "streaming", "disaggregated_params")
_PREPARED = ("inputs", "sampling_params", "disaggregated_params")
_SAMPLING = (
    "end_id",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
    "guided_decoding",
    "detokenize",
    "add_special_tokens",
)
_OUTPUT = ("token_ids", "logprobs", "finish_reason", "stop_reason", "disaggregated_params")
_RESULT = ("aresult", "abort", "__aiter__", "__anext__")


def _method(tree: SourceTree, name: str) -> Found | None:
    llm = tree.find("LLM", LLM_FILE)
    return tree.method(llm, name) if llm is not None else None


def _constructor(tree: SourceTree) -> str | None:
    method = _method(tree, "__init__")
    if method is None:
        return None
    found = parameters(method)
    by_name = "model" in found and any(name.startswith("**") for name in found)
    return _BY_NAME if by_name else ", ".join(found)


def _request(tree: SourceTree) -> str | None:
    method = _method(tree, "generate_async")
    return _function_with(_OPTIONS, method) if method is not None else None


def _function_with(wanted: Collection[str], method: Found) -> str | None:
    """The form of a function that must be no coroutine and take `wanted`; None where its parameters say
    nothing."""
    found = parameters(method)
    if isinstance(method.node, ast.AsyncFunctionDef):
        return "a coroutine"
    return None if takes_anything(found) else lacking(wanted, found)


def _preprocess(tree: SourceTree) -> str | None:
    if tree.find("LLM", LLM_FILE) is None:
        return None
    method = _method(tree, "preprocess")
    return "none" if method is None else _function_with(_PREPARED, method)


def _sampling(tree: SourceTree) -> str | None:
    found = tree.find("SamplingParams", "sampling_params.py")
    return lacking(_SAMPLING, class_fields(tree, found)) if found is not None else None


def _output(tree: SourceTree) -> str | None:
    found = tree.find("CompletionOutput", "executor/result.py")
    return lacking(_OUTPUT, class_fields(tree, found)) if found is not None else None


def _result(tree: SourceTree) -> str | None:
    found = tree.find("GenerationResult", "executor/result.py")
    if found is None:
        return None
    return lacking(_RESULT, [name for name in _RESULT if tree.method(found, name) is not None])


def _request_error(tree: SourceTree) -> str | None:
    found = tree.find("RequestError", "executor/utils.py")
    if found is None or not isinstance(found.node, ast.ClassDef):
        return None
    return ", ".join(dotted(base) for base in found.node.bases) or "object"


def _stop_words(tree: SourceTree) -> str | None:
    """What the worker hands to the executor as stop words and as end id."""
    module = tree.module("executor/base_worker.py") or tree.module("executor/worker.py")
    if module is None:
        return None
    calls = (n for statement in module.body for n in ast.walk(statement) if isinstance(n, ast.Call))
    given = ({k.arg: k.value for k in call.keywords} for call in calls)
    keywords = next((found for found in given if {"stop_words", "end_id"} <= set(found)), None)
    if keywords is None:
        return None
    words = "dropped" if _asks_ignore_eos(keywords["stop_words"]) else "kept"
    as_given = any(isinstance(n, ast.Attribute) and n.attr == "end_id" for n in ast.walk(keywords["end_id"]))
    return f"stop words {words}, end id {'as given' if as_given else 'changed'}"


def _asks_ignore_eos(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "ignore_eos" for node in ast.walk(value))


RULES = (
    Rule(
        name="constructor",
        relies="LLM takes the model and all engine arguments by name",
        file=LLM_FILE,
        seen="parameters of LLM.__init__",
        breaks="the worker does not start",
        accepted=(_BY_NAME,),
        look=_constructor,
        expected=in_all(_BY_NAME),
        source="YC, M121, D29",
    ),
    Rule(
        name="request-options",
        relies="LLM.generate_async is a plain function with " + ", ".join(_OPTIONS),
        file=LLM_FILE,
        seen="parameters of LLM.generate_async, and that it is no coroutine",
        breaks="every request ends in a 500",
        accepted=(COMPLETE,),
        look=_request,
        expected=in_all(COMPLETE),
        source="M121, D29",
    ),
    Rule(
        name="preprocess",
        relies="LLM.preprocess, where it exists, is a plain function with " + ", ".join(_PREPARED),
        file=LLM_FILE,
        seen="parameters of LLM.preprocess",
        breaks="every request with an image ends in a 500; without the method, images are processed on "
        "the event loop",
        accepted=(COMPLETE, "none"),
        look=_preprocess,
        expected=since_13("none", COMPLETE),
        source="M121, S-llm",
    ),
    Rule(
        name="sampling-fields",
        relies="SamplingParams has every field that a request may set",
        file="sampling_params.py",
        seen="fields of the dataclass SamplingParams",
        breaks="requests that set a missing one end in a 500",
        accepted=(COMPLETE,),
        look=_sampling,
        expected=in_all(COMPLETE),
        source="M121, D29",
    ),
    Rule(
        name="output-fields",
        relies="CompletionOutput has " + ", ".join(_OUTPUT),
        file="executor/result.py",
        seen="fields of the dataclass CompletionOutput",
        breaks="every answer ends in a 500",
        accepted=(COMPLETE,),
        look=_output,
        expected=in_all(COMPLETE),
        source="YC",
    ),
    Rule(
        name="result-methods",
        relies="a result can be awaited, iterated and aborted: " + ", ".join(_RESULT),
        file="executor/result.py",
        seen="methods of GenerationResult",
        breaks="no answer is read, or cancelled requests run on",
        accepted=(COMPLETE,),
        look=_result,
        expected=in_all(COMPLETE),
        source="YC, M29",
    ),
    Rule(
        name="request-error",
        relies="RequestError, a RuntimeError, fails one request",
        file="executor/utils.py",
        seen="bases of the class RequestError",
        breaks="one failed request may be taken for the engine's death",
        accepted=("RuntimeError", "Exception"),
        look=_request_error,
        expected=in_all("RuntimeError"),
        source="S-exe12, M29",
    ),
    Rule(
        name="stop-words-under-ignore-eos",
        relies="an end id of -1 reaches the executor as it was given, so that a request's own stop tokens "
        "go on to stop it",
        file="executor/base_worker.py",
        seen="the keywords stop_words and end_id where the executor's request is made",
        breaks="a request with ignore_eos does not stop at its own stop tokens",
        accepted=("stop words dropped, end id as given", "stop words kept, end id as given"),
        look=_stop_words,
        expected=since_13("stop words kept, end id as given", "stop words dropped, end id as given"),
        source="S-bw",
    ),
)
