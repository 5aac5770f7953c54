"""The forward pass of the demo model over a `Batch`, as few and as large operations as its parts allow.

It computes what `Qwen2VLForConditionalGeneration.forward` computes (a test proves it), with attention over
groups of pictures instead of one picture at a time, no loops over sizes and no waiting for the device. It
uses the model's own submodules and parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .artifacts import IMAGE_MEAN, IMAGE_STD, PATCH
from .batches import Batch

_VISION_ROPE_BASE = 10000.0


class Losses(NamedTuple):
    """The mean cross entropy over the trained tokens, and the share of them predicted right (both scalars on
    the device)."""

    loss: Tensor
    accuracy: Tensor


def losses(model: Any, batch: Batch) -> Losses:
    """Runs `model` (a `Qwen2VLForConditionalGeneration`) over `batch`."""
    scores = answer_logits(model, batch)
    return Losses(F.cross_entropy(scores, batch.targets), (scores.argmax(-1) == batch.targets).float().mean())


def answer_logits(model: Any, batch: Batch) -> Tensor:
    """float32 [T, vocabulary]: the scores at the tokens that predict an answer token."""
    embeddings = model.get_input_embeddings()(batch.ids)
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    flat = flat.index_copy(0, batch.media_at, image_features(model.model.visual, batch).to(flat.dtype))
    hidden = model.model.language_model(
        inputs_embeds=flat.view_as(embeddings), position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    return model.lm_head(hidden.reshape(flat.shape).index_select(0, batch.targets_at)).float()  # type: ignore[no-any-return]


def image_features(visual: Any, batch: Batch) -> Tensor:
    """[N, hidden]: the vision tower's output for all pictures and clips of the batch."""
    hidden = _embed_patches(visual.patch_embed.proj.weight, batch)
    heads = visual.config.num_heads
    cos, sin = _rotation(batch.patch_places, visual.config.embed_dim // heads)
    for block in visual.blocks:
        query, key, value = block.attn.qkv(block.norm1(hidden)).view(len(hidden), 3, heads, -1).unbind(1)
        packed = torch.cat([_rotated(query, cos, sin), _rotated(key, cos, sin), value], dim=-1)
        hidden = hidden + block.attn.proj(_attend(packed, batch))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return visual.merger(hidden)  # type: ignore[no-any-return]


def _embed_patches(weight: Tensor, batch: Batch) -> Tensor:
    """Normalises uint8 patches and projects them.

    Both frames of a still picture are equal, so their weights add up; a clip's second frame adds what differs
    in it.
    """
    hidden = F.linear(_normalised(batch.patches), weight.sum(2).flatten(1))
    difference = _normalised(batch.second_frames) - _normalised(
        batch.patches.index_select(0, batch.seconds_at)
    )
    return hidden.index_add(0, batch.seconds_at, F.linear(difference, weight[:, :, 1].flatten(1)))


def _normalised(patches: Tensor) -> Tensor:
    """float32 [patches, 3 * 14 * 14]"""
    mean = torch.tensor(IMAGE_MEAN, device=patches.device)[:, None]
    std = torch.tensor(IMAGE_STD, device=patches.device)[:, None]
    return ((patches.view(len(patches), 3, PATCH * PATCH).float() / 255 - mean) / std).flatten(1)


def _rotation(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """float32 [P, 1, head_dim] cosine and sine of Qwen2-VL's two-dimensional vision rotary embedding."""
    half = head_dim // 2
    inverse = 1.0 / _VISION_ROPE_BASE ** (torch.arange(0, half, 2, device=places.device).float() / half)
    angles = (places[:, :, None].float() * inverse).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _attend(packed: Tensor, batch: Batch) -> Tensor:
    """Full attention inside every picture; `packed` is [P, heads, 3 * head_dim], the result [P, heads *
    head_dim]."""
    outputs = []
    grouped = torch.split(
        _Reorder.apply(packed, batch.grouped, batch.ungrouped), [group.numel() for group in batch.groups]
    )
    for rows, there in zip(grouped, batch.groups, strict=True):
        query, key, value = rows.view(*there.shape, *rows.shape[1:]).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None, :])
        outputs.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
    return _Reorder.apply(torch.cat(outputs), batch.ungrouped, batch.grouped)  # type: ignore[no-any-return]


class _Reorder(torch.autograd.Function):
    """`rows[there]`, zero where `there` is `len(rows)`; `back` is the inverse, so that the gradient is a
    plain selection too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _selected(rows, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _selected(gradients[0], back), None, None


def _selected(rows: Tensor, index: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]).index_select(0, index)
