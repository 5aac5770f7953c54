"""Engine arguments: from the worker's configuration to the keyword arguments
of the installed `LLM` or `MultimodalEncoder`.

Merging of defaults, files and flags has happened; here a key is checked against the installed release,
its value is spelled as the library wants it, and what the worker decides itself is filled in.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from dynamo.trtllm.config import EngineConfig, Modality, Role
from dynamo.trtllm.engines.tensorrt_llm.library import Library, nested_default, nested_fields
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.roles import a_role

logger = logging.getLogger(__name__)

EVENT_BUFFER_SIZE = 100_000
"""KV cache events that the engine keeps for the publisher before it drops the oldest."""
KV_TRANSFER_TIMEOUT_MS = 60_000
"""How long prefill keeps a request's KV cache for decode, where the release's own default is for ever."""
PYTHON_BACKENDS = ("NIXL", "DEFAULT")
_ALWAYS_ACCEPTED = frozenset({"backend"})
_STRIPPED = ("num_postprocess_workers", "postprocess_tokenizer_dir")
"""Post-processing in other processes replaces the output objects that the adapter reads."""
_ENCODER_KEYS = frozenset(
    {"trust_remote_code", "tensor_parallel_size", "dtype", "max_batch_size", "max_num_tokens", "load_format",
     "revision", "model_kwargs", "gpus_per_node", "checkpoint_format", "enable_attention_dp",
     "cuda_graph_config"}
)  # fmt: skip
"""What an encoder can make use of; keys about decoding and KV caches in a shared file are left out."""


def llm_arguments(config: EngineConfig, library: Library) -> dict[str, Any]:
    """Keyword arguments for `LLM`. Raises `StartupError` naming the key
    and the release when one is not known."""
    args = _checked(config.args, library)
    args["model"] = config.model_path
    args["skip_tokenizer_init"] = _skip_tokenizer(config, args)
    _fit_runtime(args, library)
    if config.role.moves_kv_caches:
        _require_transceiver(config.role, args, library)
        if config.role.prefills:
            _disable_overlap(args, library)
    if config.publish_metrics and "enable_iter_perf_stats" in library.argument_fields:
        args.setdefault("enable_iter_perf_stats", True)
    if config.publish_kv_events and config.role.prefills:
        _enable_events(args, library)
    return args


def encoder_arguments(config: EngineConfig, library: Library) -> dict[str, Any]:
    """Keyword arguments for `MultimodalEncoder`."""
    args = _checked(config.args, library)
    ignored = sorted(set(args) - _ENCODER_KEYS - {"backend"})
    if ignored:
        logger.info("An encoder has no use for the engine arguments %s", ", ".join(ignored))
    return {
        "model": config.model_path,
        **{k: v for k, v in args.items() if k in _ENCODER_KEYS and v is not None},
    }


def _checked(raw: Mapping[str, Any], library: Library) -> dict[str, Any]:
    args = {key: _plain(value) for key, value in raw.items() if key not in _STRIPPED and key != "model"}
    known = set(library.argument_fields) | _ALWAYS_ACCEPTED
    for key in [k for k in args if k not in known]:
        if args[key] is not None:
            raise StartupError(_unknown(key, key, known, library.version))
        del args[key]
    for key, value in args.items():
        fields = nested_fields(library.argument_fields.get(key))
        if fields is not None and isinstance(value, dict):
            for name in value:
                if name not in fields:
                    raise StartupError(_unknown(f"{key}.{name}", name, fields, library.version))
    return _spelled(args, library)


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _unknown(dotted: str, name: str, known: Iterable[str], version: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"TensorRT-LLM {version} does not know the engine argument {dotted}{hint}"


def _spelled(args: dict[str, Any], library: Library) -> dict[str, Any]:
    """Values of a fixed set in the library's own upper or lower case."""
    for dotted, accepted in library.record.choices.items():
        section, _, name = dotted.rpartition(".")
        holder = args.get(section) if section else args
        value = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(value, str) and value not in accepted:
            spelled = next((a for a in accepted if isinstance(a, str) and a.lower() == value.lower()), None)
            holder[name] = value if spelled is None else spelled
    return args


def _skip_tokenizer(config: EngineConfig, args: Mapping[str, Any]) -> bool:
    """Ids come from the frontend, so only images and grammars need the engine's own tokenizer."""
    if config.modality is Modality.MULTIMODAL or args.get("guided_decoding_backend") is not None:
        return False
    return bool(args.get("skip_tokenizer_init", True))


def needs_transceiver(role: Role) -> str:
    """What to say to a prefill or decode worker without a way for its KV caches."""
    return (
        f"{a_role(role)} moves KV caches and needs cache_transceiver_config.backend in its engine "
        "configuration, the same on prefill and decode, for instance NIXL"
    )


def _require_transceiver(role: Role, args: Mapping[str, Any], library: Library) -> None:
    section = args.get("cache_transceiver_config")
    backend = section.get("backend") if isinstance(section, dict) else getattr(section, "backend", None)
    if isinstance(section, dict) and backend:
        _limit_waiting(section, library)
    if not backend:
        raise StartupError(needs_transceiver(role))


def _fit_runtime(args: Mapping[str, Any], library: Library) -> None:
    """The Python transceiver moves caches by NIXL only,
    so another backend means the C++ one where nothing was said."""
    section, name = args.get("cache_transceiver_config"), "transceiver_runtime"
    known = nested_fields(library.argument_fields.get("cache_transceiver_config")) or ()
    backend = section.get("backend") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not backend or name not in known or backend in PYTHON_BACKENDS:
        return
    if section.get(name) == "PYTHON":
        raise StartupError(
            f"cache_transceiver_config.backend {backend} needs transceiver_runtime: CPP beside it on "
            f"TensorRT-LLM {library.version}, whose Python transceiver takes NIXL or DEFAULT only; set "
            "both alike on prefill and decode"
        )
    if section.get(name) is None:
        section[name] = "CPP"


def _limit_waiting(section: dict[str, Any], library: Library) -> None:
    """Where the release would keep a prefilled request's KV cache
    for ever if decode never came, an end is set."""
    field, name = library.argument_fields.get("cache_transceiver_config"), "kv_transfer_timeout_ms"
    if name in (nested_fields(field) or ()) and nested_default(field, name) is None:
        section.setdefault(name, KV_TRANSFER_TIMEOUT_MS)


def _disable_overlap(args: dict[str, Any], library: Library) -> None:
    """A context-only request gains nothing from the overlap scheduler, and 1.2.1 refuses it."""
    refused = library.record.behaviours["context_only with the overlap scheduler"][0] != "allowed"
    if not args.setdefault("disable_overlap_scheduler", True) and refused:
        raise StartupError(
            f"a prefill worker on TensorRT-LLM {library.version} needs disable_overlap_scheduler: true"
        )


def _enable_events(args: dict[str, Any], library: Library) -> None:
    if "kv_cache_config" not in library.argument_fields:
        return
    cache = args.setdefault("kv_cache_config", {})
    if isinstance(cache, dict):
        if cache.get("enable_block_reuse") is False:
            logger.warning(
                "KV cache events need kv_cache_config.enable_block_reuse, which is off: none are published"
            )
            return
        if not cache.get("event_buffer_max_size"):
            cache["event_buffer_max_size"] = EVENT_BUFFER_SIZE


def events_enabled(args: Mapping[str, Any]) -> bool:
    """True when an engine built with `args` reports KV cache events."""
    cache = args.get("kv_cache_config")
    return (
        isinstance(cache, dict)
        and bool(cache.get("event_buffer_max_size"))
        and cache.get("enable_block_reuse") is not False
    )
