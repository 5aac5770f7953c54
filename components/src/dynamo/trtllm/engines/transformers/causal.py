"""Causal attention of the end of a prompt to all of it, without a mask, where the device has a kernel for
that.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F


def continued(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last tokens' queries: of unequal lengths, this kernel takes the ends as one
    place.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, 0.0, True, scale=scale)[0]  # type: ignore[no-any-return]


@cache
def continues_unmasked(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the last tokens of a prompt can attend to all of it without a mask: found out by computing it
    both ways.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or key_dim != value_dim:
        return False
    generator = torch.Generator(device="cpu").manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, key_dim, generator=generator).to(device, dtype)
        for heads, tokens in ((4, 24), (2, 80), (2, 80))
    )
    seen = torch.ones(24, 80, dtype=torch.bool, device=device).tril_(80 - 24)
    expected = F.scaled_dot_product_attention(
        query.float(),
        key.float().repeat_interleave(2, 1),
        value.float().repeat_interleave(2, 1),
        attn_mask=seen,
    )
    try:
        computed = continued(query, key, value, key_dim**-0.5).float()
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((computed - expected).abs().max() <= 3e-2)
