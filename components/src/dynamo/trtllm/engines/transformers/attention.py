"""The attention of the text model, registered with Transformers under `ATTENTION_NAME`.

One query per row is the hot path: the query heads that share a K/V head are folded into the query
dimension, so that the cached keys and values are read where they lie instead of being repeated per head.
Longer queries go to PyTorch's fused attention. Registering no mask function makes the model take the
masks of `cache` as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from dynamo.trtllm.engines.transformers.causal import continued, continues_unmasked

ATTENTION_NAME = "dynamo_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [rows, heads, n, d] over `key` and `value` [rows, kv_heads, tokens, d].

    `attention_mask` is additive, [rows or 1, 1, n, tokens]; None means: the queries are those of the last
    `n` tokens, and causal; fewer than `tokens`, but more than one, only where `continues_unmasked` allows
    it. Returns [rows, n, heads, value_d]. Raises `NotImplementedError` for attention sinks and position
    biases.
    """
    if unused.get("s_aux") is not None or unused.get("position_bias") is not None:
        raise NotImplementedError("attention sinks and position biases")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1 or softcap is not None:
        return _by_hand(query, key, value, attention_mask, scale, softcap), None
    causal = attention_mask is None
    if causal and continues_unmasked(query.device, query.dtype, query.shape[3], value.shape[3]):
        # Also for a whole prompt: what PyTorch would choose on Hopper plans for 45 ms at every new length.
        return continued(query, key, value, scale).transpose(1, 2).contiguous(), None
    if query.is_cuda and not causal and query.shape[1] != key.shape[1]:
        # Masked grouped attention has no fused CUDA kernel.
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    rows, heads, n, dim = query.shape
    groups = heads // key.shape[1]
    if mask is None and n > 1:
        lowest, tokens = torch.finfo(query.dtype).min, key.shape[2]
        mask = torch.full((n, tokens), lowest, dtype=query.dtype, device=query.device).triu_(1 + tokens - n)
    if mask is not None and n > 1:
        mask = mask.repeat(1, 1, groups, 1) if mask.dim() == 4 else mask.repeat(groups, 1)
    weights = torch.matmul(query.mul(scale).reshape(rows, -1, groups * n, dim), key.transpose(2, 3))
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights += mask
    weights = torch.softmax(weights, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).view(rows, heads, n, -1).transpose(1, 2)


def register() -> None:
    """Make `ATTENTION_NAME` known to Transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, grouped_attention)
