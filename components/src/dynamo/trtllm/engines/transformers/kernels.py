"""Kernels that do in one pass over memory what PyTorch does in several, for a CUDA device; written in
Triton.

Each gives what PyTorch's own operations give, rounded after the same steps. Triton compiles them when they
are first called, for which it needs a C compiler. Where that fails, or values differ, the callers' checks
keep PyTorch's operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _silu_product(out, both, width, total, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < total
    row, column = at // width, at % width
    gate = tl.load(both + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=inside).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (active * up).to(out.dtype.element_ty), mask=inside)


def silu_product(both: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `both` [..., 2 * width], contiguous, gate and then up: [..., width]."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    _silu_product[(triton.cdiv(out.numel(), _BLOCK),)](out, both, width, out.numel(), _BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _quick_gelu(out, values, total, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < total
    value = tl.load(values + at, mask=inside)
    scaled = (1.702 * value.to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-scaled))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (value.to(tl.float32) * share).to(out.dtype.element_ty), mask=inside)


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """`values * sigmoid(1.702 * values)`; `values` are contiguous."""
    out = torch.empty_like(values)
    _quick_gelu[(triton.cdiv(out.numel(), _BLOCK),)](out, values, out.numel(), _BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_products(a, b, c, d, kind: tl.constexpr, staged: tl.constexpr):  # type: ignore[no-untyped-def]
    """`a * b + c * d`; `staged` rounds the products to `kind` first."""
    left, right = a * b, c * d
    if staged:
        left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    return (left + right).to(kind)


@triton.jit  # type: ignore[untyped-decorator]
def _rotary(  # type: ignore[no-untyped-def]
    out,
    values,
    cos,
    sin,
    parts,
    heads,
    half,
    row_stride,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
    staged: tl.constexpr,
):
    """A program for each row and part: all its heads."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    head, at = tl.arange(0, head_block)[:, None], tl.arange(0, half_block)[None, :]
    inside = (head < heads) & (at < half)
    source = values + row * row_stride + (part * heads + head) * 2 * half + at
    low = tl.load(source, mask=inside).to(tl.float32)
    high = tl.load(source + half, mask=inside).to(tl.float32)
    angle, in_angle = row * 2 * half + at, at < half
    low_cos = tl.load(cos + angle, mask=in_angle).to(tl.float32)
    high_cos = tl.load(cos + angle + half, mask=in_angle).to(tl.float32)
    low_sin = tl.load(sin + angle, mask=in_angle).to(tl.float32)
    high_sin = tl.load(sin + angle + half, mask=in_angle).to(tl.float32)
    target = out + ((row * parts + part) * heads + head) * 2 * half + at
    kind = out.dtype.element_ty
    tl.store(target, _sum_of_products(low, low_cos, -high, low_sin, kind, staged), mask=inside)
    tl.store(target + half, _sum_of_products(high, high_cos, low, high_sin, kind, staged), mask=inside)


def rotary(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, staged: bool = False) -> torch.Tensor:
    """The rotary embedding of `values` [rows, parts, heads, dim] by angles [rows, dim], computed in
    float32; contiguous.

    `values` may be the first parts of longer rows; each row is contiguous. `staged` rounds where PyTorch
    does that computes in the type of `values`.
    """
    rows, parts, heads, dim = values.shape
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    _rotary[(rows * parts,)](
        out,
        values,
        cos.contiguous(),
        sin.contiguous(),
        parts,
        heads,
        dim // 2,
        values.stride(0),
        triton.next_power_of_2(heads),
        triton.next_power_of_2(dim // 2),
        staged,
    )
    return out
