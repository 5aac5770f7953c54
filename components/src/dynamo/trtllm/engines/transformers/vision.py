"""The vision towers of the Qwen-VL families on a GPU: fewer and larger kernels, and no waiting between
layers.

The towers cut their attention by lengths that they read from the device in every layer. Each reading waits
for all that was launched, so the device stands still while the next layer is launched, and nothing can come
between the layers. The lengths are known on the host: given there (`derived`), a pass is launched in one
go. `quicken` changes how the layers compute, with the same weights and the same formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from dynamo.trtllm.engines.transformers.fusion import does_the_same, kernels_for, random_like

_PLANNED_FROM = 256
"""Calls for one shape, one for each layer and image, from which on cuDNN may plan it."""
_MOST_SHAPES = 4096


def derived(tower: Any, grid: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """What `tower` would derive of `grid` [items, 3] (temporal patches, height and width in patches), on
    the host.

    By the names of the tower's keyword arguments. Boundaries of attention stay on the host, where they are
    read; what the layers compute with is on `device`.
    """
    merge = tower.spatial_merge_size
    found = {
        "position_ids": moved(get_vision_position_ids(grid, merge), device),
        "cu_seqlens": get_vision_cu_seqlens(grid),
    }
    if hasattr(tower, "window_size"):
        index, bounds = get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": moved(index, device), "cu_window_seqlens": bounds}
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        found |= {"interp_indices": moved(indices, device), "interp_weights": moved(weights, device)}
    return found


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the host, on `device`; to a GPU without waiting for what it has to do before."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def quicken(tower: torch.nn.Module) -> int:
    """Give modules of `tower` forwards of fewer kernels, in place, where they compute the same. Returns how
    many changed.
    """
    changed = 0
    with torch.inference_mode():
        for module in tower.modules():
            for check, forward in _replacements(module):
                if does_the_same(lambda c=check, f=forward: c(f), check(module)):  # type: ignore[misc]
                    module.forward = forward
                    changed += 1
                    break
    return changed


def _replacements(module: Any) -> Iterator[tuple[Callable[[Any], torch.Tensor], Any]]:
    """Forwards to try for `module`, the best first, each with what computes something by a forward."""
    name = type(module).__name__
    if name.endswith("VisionAttention") and _has(module, "qkv", "proj"):
        kernels = kernels_for(module.qkv.weight.device)
        for turn in (_turned,) if kernels is None else (kernels.rotary, _turned):
            yield partial(_attended, module), _Attention(module, turn)
    elif name.endswith("PatchEmbed") and isinstance(getattr(module, "proj", None), torch.nn.Conv3d):
        yield partial(_embedded, module.proj), _PatchEmbedding(module.proj)
    elif name.endswith("Mlp") and type(getattr(module, "act", None)).__name__ == "QuickGELUActivation":
        kernels = kernels_for(module.fc1.weight.device)
        if kernels is not None:
            yield partial(_fed, module.fc1), _FeedForward(module, kernels.quick_gelu)


def _has(module: Any, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), torch.nn.Linear) for name in names) and hasattr(
        module, "num_heads"
    )


class _FeedForward:
    """The forward of a feed-forward with one kernel between its two products."""

    def __init__(self, module: Any, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._first, self._second, self._activate = module.fc1, module.fc2, activate

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._second(self._activate(self._first(hidden_states)))  # type: ignore[no-any-return]


class _Attention:
    """The forward of a vision attention: both turns of the rotary embedding at once, items of one length in
    one call.

    `turn` is `_turned` or does the same.
    """

    def __init__(self, module: Any, turn: Callable[..., torch.Tensor]) -> None:
        self._qkv, self._proj, self._turn = module.qkv, module.proj, turn
        self._heads, self._scale = module.num_heads, module.scaling

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **unused: Any,
    ) -> torch.Tensor:
        """`hidden_states` [patches, width] of items that end at `cu_seqlens`; angles are [patches, head's
        width].
        """
        patches = hidden_states.shape[0]
        qkv = self._qkv(hidden_states).view(patches, 3, self._heads, -1)
        turned = self._turn(qkv[:, :2], *position_embeddings)
        parts = (turned[:, 0], turned[:, 1], qkv[:, 2])
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        if len(set(lengths)) == 1:
            shape = (len(lengths), lengths[0], self._heads, -1)
            output = self._attend(*(part.reshape(shape) for part in parts)).reshape(patches, -1)
        else:
            items = zip(*(part.split(lengths) for part in parts), strict=True)
            output = torch.cat([self._attend(*(part[None] for part in item))[0] for item in items]).reshape(
                patches, -1
            )
        return self._proj(output)  # type: ignore[no-any-return]

    def _attend(self, *parts: torch.Tensor) -> torch.Tensor:
        """Attention of [items, patches, heads, dim]."""
        query, key, value = (part.transpose(1, 2) for part in parts)
        with _unplanned(query.shape) if query.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, scale=self._scale).transpose(1, 2)


_calls: Counter[torch.Size] = Counter()


def _unplanned(shape: torch.Size) -> AbstractContextManager[None]:
    """Keeps attention of shapes that are seldom seen from cuDNN, which takes 45 ms for its plan of a new
    shape.

    It is a third faster than the others, so that a plan pays after some images.
    """
    _calls[shape] += 1
    if _calls[shape] > _PLANNED_FROM:
        return nullcontext()
    if len(_calls) > _MOST_SHAPES:
        _calls.clear()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _turned(parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of `parts` [patches, 2, heads, dim], computed in float32: two kernels for each
    half.
    """
    half, output = parts.shape[-1] // 2, torch.empty_like(parts)
    cos, sin = cos[:, None, None].float(), sin[:, None, None].float()
    low, high = parts[..., :half], parts[..., half:]
    torch.addcmul(low * cos[..., :half], high, -sin[..., :half], out=output[..., :half])
    torch.addcmul(high * cos[..., half:], low, sin[..., half:], out=output[..., half:])
    return output


class _PatchEmbedding:
    """A convolution whose kernel covers a patch once, as the product that it is."""

    def __init__(self, convolution: Any) -> None:
        self._weight, self._bias = convolution.weight.flatten(1), convolution.bias

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states.to(self._weight.dtype), self._weight, self._bias)


def _attended(module: Any, attention: Any) -> torch.Tensor:
    """What `attention`, a forward of `module`, makes of random patches of two items and of one."""
    weight = module.qkv.weight
    hidden = random_like(weight, 12, weight.shape[1])
    angles = random_like(weight, 12, weight.shape[0] // 3 // module.num_heads // 2).float().repeat(1, 2)
    found = [
        attention(hidden, cu_seqlens=torch.tensor(ends), position_embeddings=(angles.cos(), angles.sin()))
        for ends in ((0, 4, 12), (0, 12))
    ]
    return torch.cat(found)


def _embedded(convolution: Any, embedding: Any) -> torch.Tensor:
    """What `embedding` makes of random patches."""
    return embedding(random_like(convolution.weight, 6, convolution.weight[0].numel()))  # type: ignore[no-any-return]


def _fed(first: Any, feed_forward: Any) -> torch.Tensor:
    """What `feed_forward` makes of random values."""
    return feed_forward(random_like(first.weight, 6, first.weight.shape[1]))  # type: ignore[no-any-return]
