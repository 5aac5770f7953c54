"""Embeddings from a file, in the form that the library takes for the model: a tensor, or Llama 4's
dictionary.

Llama 4 writes special tokens between an image's rows (tile separators, begin and end), so its engine needs to
know them: `image_special_tokens` are their ids, `image_special_token_offsets` their places in the image's
expansion, counted from 0. Source: `attach_multimodal_embeddings` of `_torch/models/modeling_llama.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.core import EncodedMedia
from dynamo.trtllm.engines.embedding_shape import rows_of_one_item
from dynamo.trtllm.engines.tensorrt_llm.record import ModelFacts
from dynamo.trtllm.errors import ClientFault

if TYPE_CHECKING:
    import torch

TOKENS, OFFSETS = "image_special_tokens", "image_special_token_offsets"
OLDER_TOKENS, OLDER_OFFSETS = "special_tokens", "image_token_offsets"
"""Names in the guide to which such files were first written."""
FROM_FILE = "embedding_file"
"""Key of `EncodedMedia.extras`: the embeddings came from a file and not from this release's own encoder."""
DICTIONARY_MODELS = frozenset({"Llama4ForConditionalGeneration"})
"""Architectures that take a dictionary of the three keys and nothing else."""


def adopt(
    facts: ModelFacts,
    architecture: str | None,
    placeholder_id: int | None,
    hidden_size: int | None,
    digest: str,
    features: torch.Tensor,
    extras: Mapping[str, Any],
) -> EncodedMedia:
    """An `EncodedMedia` of `features`, `[tokens, hidden]` or `[1, tokens, hidden]`, that came from a file.

    Raises `ClientFault` when the model takes none, for another shape, and for special tokens that do not fit
    the rows.
    """
    if not facts.attaches_embeddings or placeholder_id is None:
        raise ClientFault("this model takes no precomputed embeddings")
    features = rows_of_one_item("embeddings", features, hidden_size)
    rows = int(features.shape[0])
    ids = [placeholder_id] * rows
    told: dict[str, Any] = {**extras, FROM_FILE: True}
    if architecture in DICTIONARY_MODELS:
        tokens, offsets = special_tokens(extras, rows)
        ids += [placeholder_id] * len(tokens)
        for token, offset in zip(tokens, offsets, strict=True):
            ids[offset] = token
        told = {TOKENS: tokens, OFFSETS: offsets, FROM_FILE: True}
    return EncodedMedia("image", digest, {"features": features}, tuple(ids), told)


def special_tokens(extras: Mapping[str, Any], rows: int) -> tuple[list[int], list[int]]:
    """Ids and places of an image's special tokens, from a file's further keys. Raises `ClientFault` when
    they are not whole."""
    tokens = _integers(extras, TOKENS if TOKENS in extras else OLDER_TOKENS)
    if tokens is None:
        raise ClientFault(
            f"embeddings for this model need the keys {TOKENS} and {OFFSETS} beside mm_embeddings"
        )
    offsets = _integers(extras, OFFSETS)
    if offsets is None:
        offsets = _places_beside(extras.get(OLDER_OFFSETS), rows, len(tokens))
    if offsets is None:
        raise ClientFault(f"embeddings for this model need the key {OFFSETS} beside {TOKENS}")
    length = rows + len(tokens)
    if len(offsets) != len(tokens):
        raise ClientFault(
            f"the embedding file has {len(tokens)} {TOKENS} and {len(offsets)} {OFFSETS}; "
            "there must be as many"
        )
    if len(set(offsets)) != len(offsets) or not all(0 <= offset < length for offset in offsets):
        raise ClientFault(
            f"{OFFSETS} must be different places from 0 to {length - 1}: "
            f"{rows} rows and {len(tokens)} special tokens"
        )
    return tokens, offsets


def engine_form(item: EncodedMedia) -> Any:
    """One item of `multi_modal_embeddings["image"]`."""
    features = item.tensors["features"]
    if TOKENS not in item.extras:
        return features
    return {"mm_embeddings": features, TOKENS: list(item.extras[TOKENS]), OFFSETS: list(item.extras[OFFSETS])}


def _integers(extras: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of integers, also one in a list of its own, as a tensor with a first dimension of one image
    becomes."""
    value = extras.get(name)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    ):
        raise ClientFault(f"{name} of the embedding file must be a list of integers from 0 up")
    return list(value)


def _places_beside(ranges: Any, rows: int, count: int) -> list[int] | None:
    """Places of `count` special tokens, from where the image's rows are: `[start, end)` each, as the older
    key tells.

    They are told apart only if the ranges hold exactly the rows, within rows and special tokens together.
    """
    if ranges is None:
        return None
    pairs = ranges if isinstance(ranges, Sequence) else ()
    if all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair) for pair in pairs
    ):
        held = list(chain.from_iterable(range(start, min(end, rows + count)) for start, end in pairs))
        if (
            len(held) == len(set(held)) == rows
            and min(held) >= 0
            and all(end <= rows + count for _, end in pairs)
        ):
            return sorted(set(range(rows + count)) - set(held))
    raise ClientFault(
        f"{OLDER_OFFSETS} of the embedding file must be [start, end] pairs that hold its {rows} rows within "
        f"{rows + count} places; or name the special tokens' places in {OFFSETS}"
    )
