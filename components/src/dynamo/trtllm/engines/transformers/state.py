"""What prefill hands to decode: keys and values of the prompt, and the few numbers that go with them.

`k` and `v` are [layers, kv_heads, tokens, dim], contiguous, in the cache's dtype. Penalties and stop
conditions are not in it: decode rebuilds them from the token ids. The seed is, so that an unseeded request
goes on with the stream it began.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamo.trtllm.engines.port import EngineState
from dynamo.trtllm.engines.transformers.cache import CacheShape
from dynamo.trtllm.errors import EngineFault

STATE_SCHEMA = 1
_ENGINE = "transformers"


def pack_state(keys: torch.Tensor, values: torch.Tensor, rope_delta: int, seed: int) -> EngineState:
    """The state of one prompt; copies only what is not contiguous yet."""
    meta: dict[str, Any] = {
        "engine": _ENGINE,
        "schema": STATE_SCHEMA,
        "tokens": int(keys.shape[2]),
        "dtype": str(keys.dtype).removeprefix("torch."),
        "rope_delta": rope_delta,
        "seed": seed,
    }
    return EngineState(meta, {"k": keys.contiguous(), "v": values.contiguous()})


def unpack_state(
    state: EngineState, shape: CacheShape, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Keys, values, rope delta and seed of a prompt of `tokens` tokens.
    Raises `EngineFault` when they do not fit this model."""
    meta = state.meta
    if meta.get("engine") != _ENGINE or meta.get("schema") != STATE_SCHEMA:
        raise EngineFault(
            "the prefill worker's state is not one that this engine understands; "
            "run the same release everywhere"
        )
    delta, seed = meta.get("rope_delta"), meta.get("seed")
    if type(delta) is not int or abs(delta) > tokens or type(seed) is not int or meta.get("tokens") != tokens:
        raise EngineFault("the prefill worker's state does not belong to this prompt")
    expected = {
        "k": (shape.layers, shape.kv_heads, tokens, shape.key_dim),
        "v": (shape.layers, shape.kv_heads, tokens, shape.value_dim),
    }
    for name, dims in expected.items():
        tensor = state.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != dims or tensor.dtype != shape.dtype:
            raise EngineFault(
                "the prefill worker's KV cache does not fit this model; "
                "serve the same model and dtype everywhere"
            )
    return state.tensors["k"], state.tensors["v"], delta, seed
