"""Fewer and larger kernels for the text model on a GPU, with the same weights and the same formulas.

A step that decodes a few tokens is bound by reading weights and by the number of kernels. Projections of
one input become one product over one weight, of which each projection keeps its part as a view; RMS norms
become PyTorch's own kernel. Works on the modules that Transformers' decoders share, found by name and
checked by value; others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def fuse(text_model: torch.nn.Module) -> int:
    """Fuse what can be fused in `text_model`, in place. Returns how many modules changed."""
    changed = 0
    for module in text_model.modules():
        for names in _PROJECTIONS:
            parts = [getattr(module, name, None) for name in names]
            if _can_be_one(parts):
                _Product([part for part in parts if isinstance(part, torch.nn.Linear)])
                changed += len(parts)
        if _is_rms_norm(module):
            module.forward = _Norm(module)
            changed += 1
    return changed


def _can_be_one(parts: Sequence[Any]) -> bool:
    if any(type(part) is not torch.nn.Linear for part in parts):
        return False
    inputs = {(p.in_features, p.bias is None, p.weight.dtype, p.weight.device) for p in parts}
    return len(inputs) == 1


class _Product:
    """Several linear layers of one input as one: the first that is called computes the outputs of all."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self._weight = torch.cat([layer.weight.data for layer in layers])
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        rest: Any = list(zip(torch.split(self._weight, self._sizes), self._split_bias(), strict=True))
        for index, (layer, (weight, bias)) in enumerate(zip(layers, rest, strict=True)):
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                layer.bias = torch.nn.Parameter(bias, requires_grad=False)
            layer.forward = _Part(self, index)  # type: ignore[method-assign]

    def _split_bias(self) -> Sequence[torch.Tensor | None]:
        return [None] * len(self._sizes) if self._bias is None else torch.split(self._bias, self._sizes)

    def part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """The output of layer `index` for the input `values`."""
        if values is not self._input or index not in self._parts:
            self._input = values
            output = F.linear(values, self._weight, self._bias)
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
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.dtype not in _NORM_TOLERANCE:
        return False
    generator = torch.Generator(device="cpu").manual_seed(0)
    values = torch.randn(4, weight.shape[0], generator=generator).to(weight.device, weight.dtype)
    with torch.inference_mode():
        expected, computed = module(values).float(), _Norm(module)(values).float()
    return bool(((expected - computed).abs() <= _NORM_TOLERANCE[weight.dtype] * (1 + expected.abs())).all())
