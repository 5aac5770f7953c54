"""The installed TensorRT-LLM, asked once at start what it can do.

This is the only module that imports public parts of `tensorrt_llm` (`private` imports the others).
Signatures are read from the library itself, so a release that the record does not know is judged by what
it says, not by its number.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record import Release, release_record
from dynamo.trtllm.engines.tensorrt_llm.request_ids import id_maker
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.roles import EngineKind


@dataclass(frozen=True, kw_only=True)
class Library:
    """Classes of the installed release and what their signatures say."""

    version: str
    record: Release
    llm: Any
    sampling_params: Any
    guided_decoding_params: Any
    disaggregated_params: Any
    request_error: type[BaseException]
    argument_fields: Mapping[str, Any]
    """Constructor keys -> pydantic field, as the installed arguments class lists them."""
    generate_parameters: frozenset[str]
    disaggregated_fields: frozenset[str]
    has_preprocess: bool
    """True: input processing can run off the event loop (`LLM.preprocess`)."""
    multimodal_encoder: Any | None
    scheduling_params: Any | None
    logprob: Any | None
    next_request_id: Callable[[], int] | None
    """Makes ids that are unique over prefill workers; None where the release has no `disagg_request_id`."""
    video_data: Any | None
    """`VideoData`, in which the library takes a video's frames."""
    prompt_keys: frozenset[str]
    """Keys of a prompt dictionary, as the release's own types list them."""


def load_library() -> Library:
    """Import TensorRT-LLM. Raises `StartupError` when it is missing or cannot be imported."""
    try:
        root = import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt_llm":
            raise StartupError(EngineKind.TENSORRT_LLM.missing) from error
        raise StartupError(f"TensorRT-LLM is installed but its dependency {error.name} is missing") from error
    except (ImportError, OSError) as error:
        raise StartupError(
            f"TensorRT-LLM is installed but cannot be imported: {_first_line(error)}"
        ) from error
    api = import_module("tensorrt_llm.llmapi")
    version = str(getattr(root, "__version__", "of unknown version"))
    disaggregated = api.DisaggregatedParams
    fields = frozenset(f.name for f in dataclasses.fields(disaggregated))
    llm = root.LLM
    return Library(
        version=version,
        record=release_record(version),
        llm=llm,
        sampling_params=root.SamplingParams,
        guided_decoding_params=api.GuidedDecodingParams,
        disaggregated_params=disaggregated,
        request_error=_find("tensorrt_llm.executor.utils", "RequestError") or RuntimeError,
        argument_fields=_argument_fields(),
        generate_parameters=frozenset(inspect.signature(llm.generate_async).parameters),
        disaggregated_fields=fields,
        has_preprocess=callable(getattr(llm, "preprocess", None)),
        multimodal_encoder=getattr(api, "MultimodalEncoder", None),
        scheduling_params=getattr(api, "SchedulingParams", None)
        or _find("tensorrt_llm.scheduling_params", "SchedulingParams"),
        logprob=_find("tensorrt_llm.executor.result", "Logprob"),
        next_request_id=_request_ids() if "disagg_request_id" in fields else None,
        video_data=_find("tensorrt_llm.inputs", "VideoData"),
        prompt_keys=_prompt_keys(),
    )


def nested_fields(field: Any) -> frozenset[str] | None:
    """Field names of the configuration class that `field` holds; None when it holds none or several."""
    annotation = getattr(field, "annotation", None)
    candidates = [annotation, *typing.get_args(annotation)]
    models = [c for c in candidates if isinstance(getattr(c, "model_fields", None), Mapping)]
    if len(models) != 1:
        return None
    return frozenset(models[0].model_fields)


def _argument_fields() -> Mapping[str, Any]:
    """Fields of the PyTorch backend's arguments class, under the names it has had."""
    for name in ("TorchLlmArgs", "LlmArgs", "BaseLlmArgs"):
        fields = getattr(_find("tensorrt_llm.llmapi.llm_args", name), "model_fields", None)
        if isinstance(fields, Mapping) and fields:
            return fields
    raise StartupError(
        "this TensorRT-LLM release does not say which engine arguments it takes; install 1.2.1 or 1.3.0rc29"
    )


def nested_default(field: Any, name: str) -> Any:
    """Default of `name` in the configuration class that `field` holds; None when it has no such field."""
    annotation = getattr(field, "annotation", None)
    for candidate in (annotation, *typing.get_args(annotation)):
        fields = getattr(candidate, "model_fields", None)
        if isinstance(fields, Mapping) and name in fields:
            return fields[name].default
    return None


def _request_ids() -> Callable[[], int] | None:
    found = _find("tensorrt_llm.llmapi.disagg_utils", "get_global_disagg_request_id")
    return id_maker(found) if callable(found) else None


def _prompt_keys() -> frozenset[str]:
    """All keys of the typed dictionaries that a prompt may be."""
    kinds = (_find("tensorrt_llm.inputs", name) for name in ("TextPrompt", "TokensPrompt"))
    return frozenset(key for kind in kinds for key in getattr(kind, "__annotations__", ()))


def _find(module: str, name: str) -> Any | None:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
