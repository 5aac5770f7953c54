"""Starting the library's engine, and what a started one is, by what it says itself where it does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynamo.trtllm.config import EngineConfig, Modality
from dynamo.trtllm.engines.frame_options import FRAME_OPTIONS
from dynamo.trtllm.engines.port import EngineInfo, MediaInput, ProcessorOption
from dynamo.trtllm.engines.tensorrt_llm import private
from dynamo.trtllm.engines.tensorrt_llm.library import Library
from dynamo.trtllm.engines.tensorrt_llm.model import ModelDescription
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.frame_rules import QWEN3_VL

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 8192
DEFAULT_BLOCK_SIZE = 32


def require_servable(config: EngineConfig, model: ModelDescription) -> None:
    """What the record knows cannot work is refused before anything is loaded."""
    facts, name = model.facts, model.architecture
    if config.role.moves_kv_caches and not facts.disaggregates:
        raise StartupError(
            f"TensorRT-LLM does not split {name} over prefill and decode workers: serve it aggregated"
        )
    if config.role.runs_language_model:
        return
    if not facts.encodes_apart and not facts.attaches_embeddings:
        raise StartupError(
            f"TensorRT-LLM cannot encode images of {name or 'this model'} in a worker of their own: "
            "leave the encode worker out, prefill and aggregated workers encode them"
        )
    if facts.encodes_apart and not private.handles_supported():
        raise StartupError(
            "this TensorRT-LLM release cannot hand embeddings to another process: leave the encode worker out"
        )


def construct(library: Library, make: Any, args: Mapping[str, Any]) -> Any:
    """Load the model, on the calling thread. Everything that goes wrong is told as one sentence."""
    if make is None:
        raise StartupError(
            f"TensorRT-LLM {library.version} has no MultimodalEncoder: leave the encode worker out"
        )
    try:
        return make(**args)
    except Exception as error:
        raise StartupError(f"TensorRT-LLM {library.version} {_construction_fault(error)}") from error


def _construction_fault(error: BaseException) -> str:
    """In words of one line. What goes wrong in a rank comes as the cause of an exception that says
    nothing."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return _construction_fault(error.__cause__)
    errors = getattr(error, "errors", None)
    if callable(errors):
        found = errors()
        if found:
            name = ".".join(str(part) for part in found[0].get("loc", ()))
            return f"refused the engine argument {name}: {found[0].get('msg', 'not valid')}"
    lines = str(error).strip().splitlines()
    return f"could not load the model: {lines[0] if lines else type(error).__name__}"


def describe_engine(
    library: Library, llm: Any, config: EngineConfig, args: Mapping[str, Any], model: ModelDescription
) -> EngineInfo:
    """Facts of a started `LLM`."""
    built = getattr(llm, "args", None)
    capacity = _capacity(llm)
    cache = args.get("kv_cache_config")
    block_size = capacity.get("tokensPerBlock") or (
        cache.get("tokens_per_block") if isinstance(cache, dict) else None
    )
    takes_images = config.modality is Modality.MULTIMODAL and config.role.reads_media
    ranks = (_first(args.get("tensor_parallel_size")) or 1) if args.get("enable_attention_dp") else 1
    if ranks > 1 and library.scheduling_params is None:
        logger.warning(
            "TensorRT-LLM %s cannot be told which attention-DP rank serves a request", library.version
        )
    return EngineInfo(
        context_length=_first(
            getattr(built, "max_seq_len", None), args.get("max_seq_len"), model.max_positions
        )
        or DEFAULT_CONTEXT_LENGTH,
        kv_block_size=_first(block_size) or DEFAULT_BLOCK_SIZE,
        total_kv_blocks=_first(capacity.get("maxNumBlocks")),
        max_num_seqs=_first(getattr(built, "max_batch_size", None), args.get("max_batch_size")) or 2048,
        max_num_batched_tokens=_first(getattr(built, "max_num_tokens", None), args.get("max_num_tokens"))
        or 8192,
        media=_media(library, model, takes_encoded=_takes_encoded(llm, model)) if takes_images else {},
        refusals=_refusals(library, model) if takes_images else {},
        hidden_size=model.hidden_size if model.facts.attaches_embeddings else None,
        data_parallel_size=ranks,
        extras={"tensorrt_llm": library.version},
    )


def describe_encoder(library: Library, config: EngineConfig, model: ModelDescription) -> EngineInfo:
    """Facts of a worker of the encode role, with an encoder or for embedding files only."""
    return EngineInfo(
        context_length=model.max_positions or DEFAULT_CONTEXT_LENGTH,
        kv_block_size=DEFAULT_BLOCK_SIZE,
        total_kv_blocks=None,
        max_num_seqs=int(config.args.get("max_batch_size") or 1),
        max_num_batched_tokens=int(config.args.get("max_num_tokens") or DEFAULT_CONTEXT_LENGTH),
        media={"image": image} if (image := _images(model, encodes=model.facts.encodes_apart)) else {},
        refusals=_refusals(library, model, apart=True),
        hidden_size=model.hidden_size,
        extras={"tensorrt_llm": library.version},
    )


def _takes_encoded(llm: Any, model: ModelDescription) -> bool:
    """Whether `llm` takes images that an encode worker encoded: it is asked, where it can tell."""
    takes_handles = private.takes_handles(llm) is not False and private.handles_supported()
    return model.facts.encodes_apart and takes_handles


def _media(library: Library, model: ModelDescription, *, takes_encoded: bool) -> dict[str, MediaInput]:
    """What an engine with a language model takes."""
    media = {}
    if (image := _images(model, takes_encoded=takes_encoded)) is not None:
        media["image"] = image
    if model.video_placeholder_id is not None and "video" not in _refusals(library, model):
        rule = replace(QWEN3_VL, temporal_patch_size=model.frames_together)
        media["video"] = MediaInput(
            placeholder_id=model.video_placeholder_id, rule=rule, options=FRAME_OPTIONS
        )
    return media


def _refusals(library: Library, model: ModelDescription, *, apart: bool = False) -> dict[str, str]:
    """Why no videos are taken, with the model's class and the release; nothing where they are. `apart`: on an
    encode worker."""
    facts = library.record.video_facts(model.architecture, model.facts)
    why = facts.why_not_apart if apart else facts.why_not
    if not why and library.video_data is None:
        why = "it has no VideoData"
    if not why:
        return {}
    release, name = f"TensorRT-LLM {library.version}", model.architecture or "this model"
    where = " on an encode worker" if apart and facts.served else ""
    return {"video": f"videos of {name} are not served with {release}{where}: {why}"}


def _images(
    model: ModelDescription, *, encodes: bool = False, takes_encoded: bool = False
) -> MediaInput | None:
    if model.placeholder_id is None:
        return None
    options: dict[str, ProcessorOption] = {}
    if model.facts.sizes_images:
        most = model.row_pixels * (model.max_positions or DEFAULT_CONTEXT_LENGTH)
        pixels = ProcessorOption(least=model.row_pixels, most=most)
        options = {"min_pixels": pixels, "max_pixels": pixels}
    return MediaInput(
        placeholder_id=model.placeholder_id,
        encodes=encodes,
        takes_encoded=takes_encoded,
        takes_files=model.facts.attaches_embeddings,
        options=options,
    )


def _capacity(llm: Any) -> Mapping[str, Any]:
    read = getattr(llm, "get_kv_cache_capacity", None)
    if not callable(read):
        return {}
    try:
        return dict(read() or {})
    except Exception as error:
        logger.info("The engine does not tell its KV cache's size: %s", error)
        return {}


def _first(*values: Any) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
