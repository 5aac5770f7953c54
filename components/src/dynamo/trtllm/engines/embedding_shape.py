"""The one rule of what a tensor of embeddings looks like, for files and for every engine that takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.trtllm.errors import ClientFault

if TYPE_CHECKING:
    import torch


def rows_of_one_item(name: str, tensor: torch.Tensor, hidden_size: int | None = None) -> torch.Tensor:
    """`tensor`, `[tokens, hidden]` or `[1, tokens, hidden]`, as `[tokens, hidden]`; a view of it.

    `name` is what messages call it. Raises `ClientFault` for several items in one tensor, another number
    of dimensions, no numbers at all, and rows that are not `hidden_size` wide where that is known.
    """
    shape, width = list(tensor.shape), "hidden" if hidden_size is None else hidden_size
    if len(shape) not in (2, 3) or 0 in shape:
        raise ClientFault(f"{name} must be [tokens, {width}] or [1, tokens, {width}], not {shape}")
    if len(shape) == 3 and shape[0] != 1:
        raise ClientFault(f"{name} holds a batch of {shape[0]}; send one image per part")
    if hidden_size is not None and shape[-1] != hidden_size:
        raise ClientFault(f"{name} must be [tokens, {width}] for this model, not {shape}")
    return tensor[0] if len(shape) == 3 else tensor
