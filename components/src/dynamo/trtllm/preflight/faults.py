"""The rules a configuration must keep, each a function that yields one sentence per fault.

Cheap and pure: reads JSON files of the model and asks whether packages are there,
imports no engine and loads nothing. The worker runs them at every start, `--check` prints what they find.
"""

from __future__ import annotations

import difflib
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata, util
from typing import Any

from dynamo.trtllm.config import EngineKind, Modality, WorkerConfig
from dynamo.trtllm.engine_flags import DEFAULT_ENGINE_ARGS
from dynamo.trtllm.engines.tensorrt_llm.arguments import needs_transceiver
from dynamo.trtllm.engines.tensorrt_llm.record import (
    PAIRED_WITH_DYNAMO,
    RECORD,
    ModelFacts,
    Release,
    find_model_facts,
)
from dynamo.trtllm.multimodal.kinds.registry import KINDS, in_words
from dynamo.trtllm.preflight.engine_rules import find_engine_faults
from dynamo.trtllm.preflight.files import find_file_faults
from dynamo.trtllm.preflight.shape import ModelShape, find_shape
from dynamo.trtllm.roles import a_role
from dynamo.trtllm.utils.engine_args import find_wrong, show
from dynamo.trtllm.utils.layers import Layer, find_value, merge_layers, nested, origin_of, without

NIXL_MACHINES = ("x86_64", "aarch64")
DEFAULT_MAX_NUM_TOKENS = 8192
"""TensorRT-LLM's own default of `max_num_tokens`."""

Rule = Callable[[WorkerConfig, "ModelShape | None"], Iterator[str]]


def find_faults(config: WorkerConfig) -> list[str]:
    """Everything that would keep the worker from serving as configured,
    each in one sentence that says what to change."""
    shape, usable = find_shape(config.engine.model_path), without_wrong_values(config)
    return [
        *wrong_values(config),
        *wrong_kinds(config),
        *(sentence for rule in RULES for sentence in rule(usable, shape)),
    ]


def without_wrong_values(config: WorkerConfig) -> WorkerConfig:
    """`config` with the default in the place of every engine argument of the wrong kind,
    so that the rest can be checked too."""
    args: Mapping[str, Any] = config.engine.args
    for dotted, _, _ in find_wrong(args):
        default = find_value(DEFAULT_ENGINE_ARGS, dotted)
        args = without(args, dotted)
        if default is not None:
            args, _ = merge_layers([Layer("", args), Layer("", nested(dotted, default))])
    return replace(config, engine=replace(config.engine, args=args))


def wrong_kinds(config: WorkerConfig) -> Iterator[str]:
    """One sentence for each name among the limits that is no kind of media."""
    for name in config.media.limits:
        if name not in KINDS:
            yield f"--limit-mm-per-prompt: {name[:40]!r} is no kind of media; there are {in_words(KINDS)}"


def wrong_values(config: WorkerConfig) -> Iterator[str]:
    """One sentence for each engine argument whose value is of the wrong kind or out of range."""
    for dotted, value, wanted in find_wrong(config.engine.args):
        yield f"{dotted} {show(value)} ({origin_of(config.engine.origins, dotted)}) must be {wanted}"
    if config.engine.kind is EngineKind.DOUBLE:
        from dynamo.trtllm.engines.double import find_script_faults

        yield from find_script_faults(config.engine.double_script)


def release_to_check() -> Release | None:
    """The record of the installed TensorRT-LLM, or of the targeted release where none is installed.

    None when a release is installed that the record does not hold: it is asked itself when the engine starts.
    """
    try:
        return RECORD.get(metadata.version("tensorrt_llm"))
    except metadata.PackageNotFoundError:
        return RECORD[PAIRED_WITH_DYNAMO]


def facts_of(shape: ModelShape | None) -> ModelFacts | None:
    """What TensorRT-LLM does with the model;
    None for a multimodal architecture that the record does not list."""
    if shape is None:
        return None
    facts = find_model_facts([shape.architecture])
    return None if shape.has_vision and "I" not in facts.modalities else facts


def longest_prompt(config: WorkerConfig, shape: ModelShape | None) -> tuple[int, str] | None:
    """Most tokens of an expanded prompt that this worker's KV transfer must hold,
    and the argument that says so."""
    args = config.engine.args
    length = args.get("max_seq_len")
    bounds = [(length, "max_seq_len")] if isinstance(length, int) else []
    if not bounds and shape is not None and shape.max_positions:
        bounds.append((shape.max_positions, "the model's context length, since max_seq_len is not set"))
    if config.role.prefills and not args.get("enable_chunked_prefill"):
        bounds.append(
            (
                args.get("max_num_tokens") or DEFAULT_MAX_NUM_TOKENS,
                "max_num_tokens, since enable_chunked_prefill is off",
            )
        )
    return min(bounds, key=lambda bound: int(bound[0])) if bounds else None


def _said(config: WorkerConfig, dotted: str) -> str:
    """`name value (origin)` of an engine argument."""
    return f"{dotted} {find_value(config.engine.args, dotted)} ({origin_of(config.engine.origins, dotted)})"


def _parallel(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    args = config.engine.args
    names = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size")
    if config.engine.kind is EngineKind.TRANSFORMERS:
        for name in names:
            if (args.get(name) or 1) != 1:
                yield f"{_said(config, name)} must be 1 for the portable engine: it runs on one device"
    if config.engine.kind is not EngineKind.TENSORRT_LLM:
        return
    tensor, experts = int(args.get(names[0]) or 1), args.get(names[2])
    if isinstance(experts, int) and tensor % experts:
        yield f"{_said(config, names[2])} does not divide {_said(config, names[0])}: choose one that does"
    stages = args.get(names[1]) or 1
    if shape is not None and stages > shape.layers:
        yield (
            f"{shape.architecture} has {shape.layers} layers, fewer than {_said(config, names[1])}: "
            "use at most so many"
        )
    if shape is None or not config.role.runs_language_model or args.get("enable_attention_dp"):
        return
    usable = [
        size
        for size in range(1, shape.heads + 1)
        if shape.heads % size == 0 and _kv_heads_fit(shape.kv_heads, size)
    ]
    advice = f"use {', '.join(map(str, usable[:-1]))} or {usable[-1]}, or set enable_attention_dp"
    if shape.heads % tensor:
        yield (
            f"{shape.architecture} has {shape.heads} attention heads, "
            f"which {_said(config, names[0])} does not divide: {advice}"
        )
    if not _kv_heads_fit(shape.kv_heads, tensor):
        yield (
            f"{shape.architecture} has {shape.kv_heads} KV heads, "
            f"which {_said(config, names[0])} neither divides nor is a multiple of: {advice}"
        )


def _kv_heads_fit(kv_heads: int, tensor: int) -> bool:
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


def _kv_transfer(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    if config.engine.kind is not EngineKind.TENSORRT_LLM or not config.role.moves_kv_caches:
        return
    facts = facts_of(shape)
    if shape is not None and facts is not None and not facts.disaggregates:
        yield (
            f"TensorRT-LLM does not split {shape.architecture} over prefill and decode workers: "
            "serve it aggregated"
        )
    backend = find_value(config.engine.args, "cache_transceiver_config.backend")
    if not backend:
        yield needs_transceiver(config.role)
    elif str(backend).upper() in ("NIXL", "DEFAULT") and platform.machine() != "x86_64":
        yield (
            f"{_said(config, 'cache_transceiver_config.backend')} moves KV caches by NIXL, which "
            f"TensorRT-LLM supports on x86_64 only and this is {platform.machine()}: set it to UCX on "
            "prefill and decode"
        )
    buffer, longest = (
        find_value(config.engine.args, "cache_transceiver_config.max_tokens_in_buffer"),
        longest_prompt(config, shape),
    )
    if isinstance(buffer, int) and longest is not None and buffer < longest[0]:
        yield (
            f"{_said(config, 'cache_transceiver_config.max_tokens_in_buffer')} is below the longest "
            f"expanded prompt, {longest[0]} tokens by {longest[1]}: raise it to at least that"
        )


def _modality(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    if shape is None or config.model.modality is not Modality.MULTIMODAL:
        return
    if config.engine.kind is EngineKind.TENSORRT_LLM:
        facts = facts_of(shape)
        if shape.has_audio and not shape.has_vision:
            yield (
                f"{shape.architecture} takes audio, which this worker serves with --engine transformers only"
            )
        elif facts is not None and "I" not in facts.modalities:
            yield f"{shape.architecture} takes no images: use --modality text, or another model"
    if config.engine.kind is EngineKind.TRANSFORMERS:
        from dynamo.trtllm.engines.transformers.families import FAMILIES, supported_names

        if not shape.takes_media:
            yield f"{shape.architecture} takes no media: use --modality text, or another model"
        elif shape.model_type not in FAMILIES:
            yield (
                f"the portable engine takes media with {supported_names()} only, "
                f"not with {shape.architecture}"
            )


def _encoding(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    args, encoder = config.engine.args, config.peers.encode_endpoint
    if config.role.runs_language_model and args.get("load_format") == "vision_only":
        yield (
            f"{_said(config, 'load_format')} leaves the text model out, "
            "so only an encode worker can use it: remove it"
        )
    if encoder is not None and encoder == config.runtime.endpoint:
        yield f"--encode-endpoint {encoder} is this worker's own endpoint: give that of the encode worker"
    if (
        config.role.prefills
        and config.model.modality is Modality.MULTIMODAL
        and encoder is None
        and args.get("disable_mm_encoder")
    ):
        yield (
            f"{_said(config, 'disable_mm_encoder')} leaves nobody to encode images: "
            "add --encode-endpoint with an encode worker, or remove it"
        )
    facts = facts_of(shape)
    if (
        config.engine.kind is not EngineKind.TENSORRT_LLM
        or shape is None
        or facts is None
        or "I" not in facts.modalities
    ):
        return
    if facts.encodes_apart or facts.attaches_embeddings:
        return
    if not config.role.runs_language_model:
        yield (
            f"TensorRT-LLM cannot encode images of {shape.architecture} in a worker of their own: "
            "leave the encode worker out, prefill and aggregated workers encode them"
        )
    elif encoder is not None:
        yield (
            f"TensorRT-LLM takes no embeddings for {shape.architecture} from an encode worker: "
            "remove --encode-endpoint"
        )


def _nixl(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    moved = []
    if not config.role.runs_language_model or config.peers.encode_endpoint is not None:
        moved.append("embeddings")
    if config.role.moves_kv_caches and config.engine.kind is not EngineKind.TENSORRT_LLM:
        moved.append("KV caches")
    if not moved or config.transfer.backend != "nixl":
        return
    what = f"{a_role(config.role)} moves {' and '.join(moved)} by NIXL"
    if sys.platform != "linux" or platform.machine() not in NIXL_MACHINES:
        yield (
            f"{what}, which runs on Linux on {' or '.join(NIXL_MACHINES)}, "
            f"not on {sys.platform} on {platform.machine()}"
        )
    elif util.find_spec("nixl") is None:
        yield f"{what}, which is not installed here: run `pip install nixl`"


def _engine_arguments(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    release, block = release_to_check(), "kv_cache_config.tokens_per_block"
    size = find_value(config.engine.args, block)
    if config.engine.kind is EngineKind.TENSORRT_LLM and size and (size == 1 or size & (size - 1)):
        yield f"{_said(config, block)} must be a power of two above 1 for TensorRT-LLM, for instance 32"
    if config.engine.kind is EngineKind.DOUBLE or release is None:
        return
    for key, value in config.engine.args.items():
        if key not in release.llm_arguments and value is not None:
            yield _unknown(config, release, key, key, release.llm_arguments)
            continue
        fields = release.nested.get(key)
        if fields is None or not isinstance(value, Mapping):
            continue
        for name in value:
            if name not in fields:
                yield _unknown(config, release, f"{key}.{name}", name, fields)
    speculative = config.engine.args.get("speculative_config")
    if isinstance(speculative, Mapping) and not isinstance(speculative.get("decoding_type"), str):
        yield (
            "speculative_config needs a decoding_type, by which TensorRT-LLM knows its other keys: "
            "add it, or remove it all"
        )
    for dotted, accepted in release.choices.items():
        value = find_value(config.engine.args, dotted)
        known = [str(choice).lower() for choice in accepted]
        if value is not None and str(value).lower() not in known:
            words = ", ".join(str(choice) for choice in accepted if choice is not None)
            yield f"{_said(config, dotted)} must be one of {words}"


def _unknown(config: WorkerConfig, release: Release, dotted: str, name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    origin = origin_of(config.engine.origins, dotted)
    advice = f"did you mean {near[0]}?" if near else "remove it"
    if "." in name:
        advice = (
            "a name with a dot is none in YAML, "
            f"write {name.rpartition('.')[2]} below {name.rpartition('.')[0]}"
        )
    return f"TensorRT-LLM {release.version} does not know the engine argument {dotted} ({origin}): {advice}"


RULES: tuple[Rule, ...] = (
    find_file_faults,
    _modality,
    _parallel,
    _kv_transfer,
    _encoding,
    _nixl,
    _engine_arguments,
    find_engine_faults,
)
