"""What prefill tells decode, as JSON and tensors:
TensorRT-LLM's `DisaggregatedParams` taken apart and put together again.

Bytes become base64, logprobs become lists, logits and handles that work on one host only stay behind. mRoPE
positions leave as tensors, which our transfer carries to any host. Decode may run another release: fields
that it does not have are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.engines.port import EngineState
from dynamo.trtllm.engines.tensorrt_llm import private
from dynamo.trtllm.engines.tensorrt_llm.library import Library
from dynamo.trtllm.errors import EngineFault

if TYPE_CHECKING:
    import torch

SCHEMA = 1
_MROPE = {
    "mrope_position_ids": "mrope_position_ids_handle",
    "mrope_position_deltas": "mrope_position_deltas_handle",
}
MROPE_TENSORS = tuple(_MROPE)
_DELTAS = "mrope_position_deltas"
_WAYS_TO_THE_CACHE = ("opaque_state", "ctx_info_endpoint")
_NOT_SENT = frozenset({"request_type", "multimodal_embedding_handles", "first_gen_logits", *_MROPE.values()})


def pack_state(library: Library, params: Any, positions: Sequence[torch.Tensor] = ()) -> EngineState:
    """State of a context stage whose `DisaggregatedParams` are `params`.

    `positions` are its mRoPE ids and deltas where they are known here;
    otherwise those behind the handles of `params`.

    `meta` is JSON; `tensors` holds int64 `mrope_position_ids` `[3, 1, tokens]` and int32
    `mrope_position_deltas` `[1, 1]` of models that need them. The C++ transceiver tells decode where to
    fetch in `opaque_state`, the Python one in `ctx_info_endpoint`, and its state may be empty. Raises
    `EngineFault` when neither is there.
    """
    if params is None or not any(getattr(params, name, None) for name in _WAYS_TO_THE_CACHE):
        raise EngineFault("the engine returned nothing that decode could continue from")
    fields: dict[str, Any] = {}
    for name in sorted(library.disaggregated_fields - _NOT_SENT):
        value = getattr(params, name, None)
        if value is not None:
            fields[name] = _to_json(name, value)
    tensors = dict(zip(MROPE_TENSORS, positions, strict=False))
    for name, handle_field in _MROPE.items():
        handle = getattr(params, handle_field, None)
        if handle is not None and not positions:
            tensors[name] = private.open_handle(handle)
    meta = {"engine": "tensorrt_llm", "schema": SCHEMA, "release": library.version, "params": fields}
    return EngineState(meta, tensors)


def unpack_state(library: Library, state: EngineState) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """`DisaggregatedParams` for decode, and the tensors that must live
    until the engine has opened its handles."""
    meta = state.meta
    if (
        meta.get("engine") != "tensorrt_llm"
        or meta.get("schema") != SCHEMA
        or not isinstance(meta.get("params"), Mapping)
    ):
        raise EngineFault("the prefill worker's state is not one that this engine understands")
    known = library.disaggregated_fields - _NOT_SENT
    fields = {
        name: _from_json(library, name, value) for name, value in meta["params"].items() if name in known
    }
    keep: list[torch.Tensor] = []
    if all(name in state.tensors for name in _MROPE):
        for name, handle_field in _MROPE.items():
            tensor = state.tensors[name].clone()
            if name == _DELTAS:
                # what the model's cache of them holds; another kind fails its forward pass
                tensor = tensor.int()
            keep.append(tensor)
            fields[handle_field] = private.make_handle(tensor)
    fields = {name: value for name, value in fields.items() if value is not None}
    return library.disaggregated_params(request_type="generation_only", **fields), tuple(keep)


def discard(*params: Any, prepared: Any = None) -> None:
    """Free what the handles in `params`, and in inputs that the library has prepared, point to:
    the request goes no further."""
    fields = ("multimodal_embedding_handles", *_MROPE.values())
    found = [getattr(each, name, None) for each in params for name in fields]
    found.append(getattr(getattr(prepared, "multimodal_params", None), "multimodal_data", None))
    private.discard_handles(found)


def first_logprobs(params: Any) -> list[Any]:
    """Entries for the first tokens, as the context stage left them for decode;
    empty where the release has none."""
    return list(getattr(params, "first_gen_log_probs", None) or ())


def _to_json(name: str, value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(bytes(value)).decode("ascii")}
    if name == "first_gen_log_probs":
        return [_logprob_row(entry) for entry in value]
    if name == "schedule_style":
        return int(value)
    if isinstance(value, (list, tuple)):
        return [_to_json(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(k): _to_json(name, v) for k, v in value.items()}
    return value


def _logprob_row(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return float(entry)
    return [[int(token), float(p.logprob), p.rank] for token, p in entry.items()]


def _from_json(library: Library, name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"])
    if name == "first_gen_log_probs":
        make = library.logprob
        if make is None:
            return None
        return [
            {int(token): make(logprob=logprob, rank=rank) for token, logprob, rank in row}
            if isinstance(row, list)
            else row
            for row in value
        ]
    return value
