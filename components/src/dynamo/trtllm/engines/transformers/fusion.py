"""Fewer and larger kernels for the text model on a GPU, with the same weights and the same formulas.

A step that decodes a few tokens is bound by reading weights and by the number of kernels. Projections of
one input become one product over one weight, of which each projection keeps its part as a view; RMS norms
become PyTorch's own kernel, and gated products one of `kernels`. Works on the modules that Transformers'
decoders share, found by name and checked by value; others stay as they are.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far a replaced forward may be from the model's own, relative to the largest value."""


def fuse(text_model: torch.nn.Module) -> int:
    """Fuse what can be fused in `text_model`, in place. Returns how many modules changed."""
    changed = 0
    for module in text_model.modules():
        for names in _PROJECTIONS:
            parts = [getattr(module, name, None) for name in names]
            if _can_be_one(parts):
                product = _Product([part for part in parts if isinstance(part, torch.nn.Linear)])
                changed += len(parts)
                if names == _PROJECTIONS[1]:
                    changed += _gate(module, product)
        if type(module).__name__.endswith("Attention"):
            _turn_at_once(module)
        if _is_rms_norm(module):
            module.forward = _Norm(module)
            changed += 1
    return changed


@cache
def kernels_for(device: torch.device) -> ModuleType | None:
    """Our own kernels, where `device` runs them."""
    if device.type != "cuda":
        return None
    try:
        from dynamo.trtllm.engines.transformers import kernels
    except ImportError as error:
        logger.info("without Triton some steps take more kernels: %s", error)
        return None
    return kernels


def does_the_same(replacement: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    """Whether `replacement`, which may fail, gives what is `expected`."""
    try:
        computed = replacement()
    except Exception as error:  # a compiler that is missing, a kernel that the device does not run
        logger.warning("a faster way to compute was left out, since it failed", exc_info=error)
        return False
    if expected.shape != computed.shape or expected.dtype != computed.dtype:
        return False
    limit = TOLERANCE.get(expected.dtype, 0.0) * (1 + expected.abs().max().float())
    return bool((expected.float() - computed.float()).abs().max() <= limit)


def random_like(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """The same random numbers each time, of `like`'s type and on its device."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator).to(like.device, like.dtype)


def _gate(module: Any, product: _Product) -> int:
    """Give a gated feed-forward the forward that has one kernel between its two products."""
    down = getattr(module, "down_proj", None)
    kernels = kernels_for(product.weight.device)
    if kernels is None or not isinstance(down, torch.nn.Linear):
        return 0
    forward = _Gated(product, down, kernels.silu_product)
    values = random_like(product.weight, 3, product.weight.shape[1])
    with torch.inference_mode():
        if not does_the_same(lambda: forward(values), module(values)):
            return 0
    module.forward = forward
    return 1


def _turn_at_once(attention: Any) -> None:
    """Let the rotary embedding that `attention`'s module has be one kernel for queries and one for keys, on
    a GPU.

    Decoders find it as a function of the module that they are written in. It is replaced there once, by one
    that gives the same to the bit; whatever it is not made for goes to the model's own.
    """
    weight, dim = (
        getattr(getattr(attention, "o_proj", None), "weight", None),
        getattr(attention, "head_dim", None),
    )
    place = vars(sys.modules[type(attention).__module__])
    own = place.get(_ROTARY)
    if not isinstance(weight, torch.Tensor) or not isinstance(dim, int) or not inspect.isfunction(own):
        return
    kernels = kernels_for(weight.device)
    if kernels is None:
        return
    turn = _Rotary(own, kernels.rotary)
    query, key = (random_like(weight, 2, 5, heads, dim).transpose(1, 2) for heads in (4, 2))
    angles = random_like(weight, 2, 5, dim // 2).repeat(1, 1, 2)
    try:
        expected = own(query, key, angles.cos(), angles.sin())
    except Exception:  # of another shape or meaning
        return
    for at in range(2):
        if not does_the_same(lambda at=at: turn(query, key, angles.cos(), angles.sin())[at], expected[at]):  # type: ignore[misc]
            return
    place[_ROTARY] = turn


class _Rotary:
    """A decoder's `apply_rotary_pos_emb`."""

    def __init__(self, own: Callable[..., Any], kernel: Callable[..., torch.Tensor]) -> None:
        self._own, self._kernel = own, kernel

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [rows, heads, tokens, dim] by angles [rows, tokens, dim]."""
        plain = not rest and not more and cos.dim() == 3 and cos.shape[2] == q.shape[3]
        if not plain or not q.is_cuda or cos.shape[:2] != (q.shape[0], q.shape[2]) or q.dtype != cos.dtype:
            return self._own(q, k, cos, sin, *rest, **more)  # type: ignore[no-any-return]
        flat_cos, flat_sin = cos.reshape(-1, cos.shape[2]), sin.reshape(-1, sin.shape[2])
        return self._turned(q, flat_cos, flat_sin), self._turned(k, flat_cos, flat_sin)

    def _turned(self, values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        by_token = values.transpose(1, 2)
        rows, tokens, heads, dim = by_token.shape
        if by_token.stride()[2:] != (dim, 1) or (
            rows > 1 and by_token.stride(0) != tokens * by_token.stride(1)
        ):
            by_token = by_token.contiguous()
        flat = by_token.as_strided((rows * tokens, 1, heads, dim), (by_token.stride(1), heads * dim, dim, 1))
        return self._kernel(flat, cos, sin, staged=True).view(rows, tokens, heads, dim).transpose(1, 2)


class _Gated:
    """The forward of a feed-forward with SiLU."""

    def __init__(
        self, product: _Product, down: Any, activate: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._product, self._down, self._activate = product, down, activate

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        both = F.linear(hidden_states, self._product.weight, self._product.bias)
        return self._down(self._activate(both))  # type: ignore[no-any-return]


def _can_be_one(parts: Sequence[Any]) -> bool:
    if any(type(part) is not torch.nn.Linear for part in parts):
        return False
    inputs = {(p.in_features, p.bias is None, p.weight.dtype, p.weight.device) for p in parts}
    return len(inputs) == 1


class _Product:
    """Several linear layers of one input as one: the first that is called computes the outputs of all."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight.data for layer in layers])
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        rest: Any = list(zip(torch.split(self.weight, self._sizes), self._split_bias(), strict=True))
        for index, (layer, (weight, bias)) in enumerate(zip(layers, rest, strict=True)):
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                layer.bias = torch.nn.Parameter(bias, requires_grad=False)
            layer.forward = _Part(self, index)  # type: ignore[method-assign]

    def _split_bias(self) -> Sequence[torch.Tensor | None]:
        return [None] * len(self._sizes) if self.bias is None else torch.split(self.bias, self._sizes)

    def part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """The output of layer `index` for the input `values`."""
        if values is not self._input or index not in self._parts:
            self._input = values
            output = F.linear(values, self.weight, self.bias)
            self._parts = dict(enumerate(torch.split(output, self._sizes, -1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


class _Part:
    """The forward of one layer of a product."""

    def __init__(self, product: _Product, index: int) -> None:
        self._product, self._index = product, index

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._product.part(self._index, input)


class _Norm:
    """The forward of an RMS norm."""

    def __init__(self, module: Any) -> None:
        self._weight, self._epsilon = module.weight, module.variance_epsilon

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self._weight.shape, self._weight, self._epsilon)


def _is_rms_norm(module: Any) -> bool:
    """An RMS norm that scales by its weight and nothing else: found out by computing one."""
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.dtype not in TOLERANCE:
        return False
    values = random_like(weight, 4, weight.shape[0])
    with torch.inference_mode():
        expected, computed = module(values).float(), _Norm(module)(values).float()
    return bool(((expected - computed).abs() <= TOLERANCE[weight.dtype] * (1 + expected.abs())).all())
