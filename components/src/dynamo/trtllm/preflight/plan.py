"""The plan that `--check` prints: what this worker would be, need, load and allow."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace

from dynamo.trtllm.config import MEBIBYTE, EngineKind, Modality, WorkerConfig
from dynamo.trtllm.multimodal.kinds.registry import KINDS, in_words
from dynamo.trtllm.preflight.faults import facts_of, longest_prompt
from dynamo.trtllm.preflight.masking import mask
from dynamo.trtllm.preflight.memory import GpuMemory, MemoryEstimate, size
from dynamo.trtllm.preflight.shape import ModelShape
from dynamo.trtllm.roles import a_role
from dynamo.trtllm.utils.layers import find_value
from dynamo.trtllm.utils.trtllm_utils import dump_engine_args


def render(
    config: WorkerConfig, shape: ModelShape | None, gpu: GpuMemory, memory: MemoryEstimate | None
) -> str:
    """The whole plan as text, one section for each part of the worker."""
    sections = {
        "worker": _worker(config, shape),
        "peers": _peers(config),
        "engine arguments": iter(
            dump_engine_args(replace(config.engine, args=mask(config.engine.args))).splitlines()
        ),
        "media": _media(config),
        "transfers": _transfers(config, shape),
        "memory": _memory(config, shape, gpu, memory),
    }
    return "\n".join(
        f"{title}\n{textwrap.indent(chr(10).join(lines), '  ')}" for title, lines in sections.items()
    )


def _worker(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    yield f"{a_role(config.role)}, {config.model.modality.value}, --engine {config.engine.kind.value}"
    described = (
        f" ({shape.architecture}, {shape.parameters / 1e6:.0f} million parameters, {shape.dtype})"
        if shape
        else ""
    )
    yield f"model {config.model.path}{described}"
    names = ", ".join(config.model.served_names) or config.model.path
    kinds = ", ".join(config.runtime.endpoint_types) or "none"
    yield f"served as {names} for {kinds}"
    yield f"endpoint {config.runtime.endpoint}"
    runtime = config.runtime
    planes = f"request plane {runtime.request_plane}, response plane {runtime.response_plane}"
    yield f"discovery {runtime.discovery_backend}, {planes}, event plane {runtime.event_plane or 'zmq'}"


def _peers(config: WorkerConfig) -> Iterator[str]:
    role = config.role
    if role.other_half is not None:
        again = (
            f"; asks {config.peers.prefill_endpoint} again when one was lost"
            if role.asks_prefill_workers
            else ""
        )
        yield f"needs {a_role(role.other_half)} of the same model{again}"
    if not role.runs_language_model:
        yield "is called by prefill and aggregated workers that name its endpoint"
    if config.peers.encode_endpoint is not None:
        otherwise = (
            "encodes by itself while there is none"
            if config.peers.encode_fallback
            else "answers 503 while there is none"
        )
        yield (
            f"needs an encode worker at {config.peers.encode_endpoint}, "
            f"waits {config.peers.timeout_s:g} s for it, {otherwise}"
        )
    elif role.other_half is None and role.runs_language_model:
        yield "needs none"


def _media(config: WorkerConfig) -> Iterator[str]:
    media = config.media
    if not config.role.reads_media or config.model.modality is Modality.TEXT:
        yield "takes none"
        return
    counts = in_words(f"{media.limit_of(kind)} {kind}" for kind in KINDS)
    yield f"at most {counts} parts, and {media.max_request_bytes / MEBIBYTE:g} MB of media in a request"
    yield f"at most {media.max_file_bytes / MEBIBYTE:g} MB and {media.max_image_pixels} pixels in one image"
    files = "embedding files and media" if media.local_files else "embedding files, no media,"
    yield f"local {files} below {media.allowed_local_path}"
    private = "allowed" if media.allow_internal else "refused"
    at_once = f"{media.max_fetches} at once, {media.fetches_per_host} from one host"
    yield f"downloads end after {media.fetch_timeout_s:g} s, {at_once}, private addresses {private}"
    if media.allowed_hosts:
        yield f"only from {in_words(media.allowed_hosts)}"
    yield f"cache of {media.cache_bytes / MEBIBYTE:g} MB" if media.cache_bytes else "no cache"


def _transfers(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    disaggregated = config.role.moves_kv_caches
    embeddings = not config.role.runs_language_model or config.peers.encode_endpoint is not None
    through = " through host memory" if config.transfer.through_host else ""
    pool = (
        f"NIXL{through}, pool of {config.transfer.pool_bytes / MEBIBYTE:g} MB, "
        f"kept {config.transfer.time_to_live_s:g} s"
    )
    if disaggregated and config.engine.kind is EngineKind.TENSORRT_LLM:
        backend, buffer = (
            find_value(config.engine.args, f"cache_transceiver_config.{name}")
            for name in ("backend", "max_tokens_in_buffer")
        )
        longest = longest_prompt(config, shape)
        room = f"of {buffer} tokens" if buffer else "as the engine chooses"
        fits = f", longest expanded prompt {longest[0]} tokens by {longest[1]}" if longest else ""
        yield f"KV caches by the engine over {backend}, buffer {room}{fits}"
    elif disaggregated:
        yield f"KV caches by {pool}"
    if embeddings:
        yield f"embeddings by {pool}"
    if not (disaggregated or embeddings):
        yield "none"


def _memory(
    config: WorkerConfig, shape: ModelShape | None, gpu: GpuMemory, memory: MemoryEstimate | None
) -> Iterator[str]:
    if shape is None or memory is None:
        yield "unknown: the model's config.json is not on this machine"
        return
    where = f"on each of {memory.gpus} GPUs" if memory.gpus > 1 else "on one device"
    yield f"weights about {size(memory.weights)}, {size(memory.weights_per_gpu)} {where}"
    if not memory.kv_per_token:
        yield "no KV cache"
        return
    yield f"KV cache {memory.kv_per_token} bytes per token, {memory.kv_per_token_and_gpu} {where}"
    if shape.windowed_layers:
        yield (
            f"of which {shape.windowed_layers} of {shape.layers} layers keep "
            f"at most {shape.window} tokens of a request"
        )
    if config.engine.kind is EngineKind.TRANSFORMERS and config.engine.device == "cpu":
        return
    fraction = find_value(config.engine.args, "kv_cache_config.free_gpu_memory_fraction") or 0.9
    room = f"{fraction:g} of what the weights leave of {gpu.gigabytes:.0f} GB"
    yield f"{room} ({gpu.source}) holds at most {memory.kv_tokens} tokens"
    length = config.engine.args.get("max_seq_len") or shape.max_positions
    if length:
        yield f"which is {memory.kv_tokens / length:.1f} requests of {length} tokens"


def find_notes(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    """What is allowed but worth knowing."""
    args, facts = config.engine.args, facts_of(shape)
    if shape is None:
        yield "the model is not on this machine yet, so head counts, modality and memory were not checked"
        return
    length = args.get("max_seq_len")
    if isinstance(length, int) and shape.max_positions and length > shape.max_positions:
        yield f"max_seq_len {length} is above the {shape.max_positions} positions that the model was made for"
    if config.engine.kind is not EngineKind.TENSORRT_LLM:
        return
    if shape.has_vision and facts is None:
        yield (
            f"the record of TensorRT-LLM does not list {shape.architecture}, "
            "so what it can do with images was not checked"
        )
    if (
        facts is not None
        and not config.role.runs_language_model
        and not facts.encodes_apart
        and facts.attaches_embeddings
    ):
        yield (
            f"TensorRT-LLM has no separate encoder for {shape.architecture}: "
            "this worker serves embedding files only"
        )
    reuse = find_value(args, "kv_cache_config.enable_block_reuse")
    if config.role.moves_kv_caches and config.model.modality is Modality.MULTIMODAL and reuse is not False:
        yield (
            "kv_cache_config.enable_block_reuse is on: "
            "TensorRT-LLM 1.2.1 crashes with images on disaggregated workers then"
        )
