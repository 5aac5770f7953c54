"""A prompt with its media, in the form that the installed release takes.

The engine gets decoded images or embeddings, never a URL. The port's prompt may come expanded; the library expands placeholders
itself, so each image goes back to the one placeholder that the chat template wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.trtllm.engines.port import DecodedImage, EncodedImage, Prompt
from dynamo.trtllm.engines.tensorrt_llm import mrope, private
from dynamo.trtllm.engines.tensorrt_llm.library import Library
from dynamo.trtllm.engines.tensorrt_llm.record import ModelFacts
from dynamo.trtllm.errors import ClientFault, EngineFault

if TYPE_CHECKING:
    import torch


class EngineInputs(NamedTuple):
    """What `generate_async` gets, and fields for the `DisaggregatedParams` beside it.

    `keep` holds tensors that handles point to: copies, since a handle shares memory, that live as long as the request.
    """

    inputs: dict[str, Any]
    special_tokens: bool = True
    disaggregated: Mapping[str, Any] | None = None
    keep: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Builds engine inputs for one model on one release."""

    library: Library
    facts: ModelFacts
    placeholder_id: int | None
    hidden_size: int | None

    def build(self, prompt: Prompt, uuids: Sequence[str] = ()) -> EngineInputs:
        """Raises `ClientFault` for media that this model or release cannot take."""
        if not prompt.media:
            return EngineInputs(inputs={"prompt_token_ids": list(prompt.token_ids)})
        if self.placeholder_id is None:
            raise ClientFault("this model takes no images")
        items = [media.item for media in prompt.media]
        images = [item.image for item in items if isinstance(item, DecodedImage)]
        encoded = [item for item in items if isinstance(item, EncodedImage)]
        if images and encoded:
            raise ClientFault("pictures and precomputed embeddings cannot be mixed in one request to this model")
        return self._images(prompt, images, uuids) if images else self._encoded(prompt, encoded)

    def _images(self, prompt: Prompt, images: list[Any], uuids: Sequence[str]) -> EngineInputs:
        by_ids = self.library.takes_ids_beside_images or prompt.text is None
        inputs = self._prompt(prompt, by_ids)
        inputs["multi_modal_data"] = {"image": images}
        if by_ids and len(uuids) == len(images) and self.library.takes_ids_beside_images:
            inputs["multi_modal_uuids"] = {"image": list(uuids)}
        return EngineInputs(inputs=inputs, special_tokens=by_ids)

    def _encoded(self, prompt: Prompt, encoded: list[EncodedImage]) -> EngineInputs:
        if self.facts.encodes_apart and private.handles_supported():
            return self._by_handles(prompt, encoded)
        if not self.facts.attaches_embeddings:
            raise ClientFault("this model takes no precomputed embeddings")
        if prompt.text is None:
            raise ClientFault("precomputed embeddings need the rendered prompt beside its token ids")
        inputs = self._prompt(prompt, by_ids=False)
        inputs["multi_modal_embeddings"] = {"image": [item.tensors["features"] for item in encoded]}
        return EngineInputs(inputs=inputs, special_tokens=False)

    def _by_handles(self, prompt: Prompt, encoded: list[EncodedImage]) -> EngineInputs:
        by_ids = self.library.takes_ids_beside_images or prompt.text is None
        keep = [_features(item).clone() for item in encoded]
        fields: dict[str, Any] = {
            "multimodal_embedding_handles": [private.make_handle(tensor) for tensor in keep],
            "multimodal_hashes": [_hash_words(item.digest) for item in encoded],
        }
        if self.facts.mrope:
            ids, deltas = self._mrope(prompt, encoded)
            keep += [ids, deltas]
            fields["mrope_position_ids_handle"] = private.make_handle(ids)
            fields["mrope_position_deltas_handle"] = private.make_handle(deltas)
        return EngineInputs(inputs=self._prompt(prompt, by_ids), special_tokens=by_ids, disaggregated=fields, keep=tuple(keep))

    def _prompt(self, prompt: Prompt, by_ids: bool) -> dict[str, Any]:
        return {"prompt_token_ids": self.unexpanded(prompt)} if by_ids else {"prompt": prompt.text}

    def unexpanded(self, prompt: Prompt) -> list[int]:
        """Token ids with one placeholder for each image, whatever stands there now."""
        assert self.placeholder_id is not None
        ids: list[int] = []
        at = 0
        for media in prompt.media:
            ids += prompt.token_ids[at : media.start]
            ids.append(self.placeholder_id)
            at = media.start + media.length
        ids += prompt.token_ids[at:]
        return ids

    def _mrope(self, prompt: Prompt, encoded: Sequence[EncodedImage]) -> tuple[torch.Tensor, torch.Tensor]:
        placed: list[tuple[int, mrope.Grid]] = []
        grown = 0
        for media, item in zip(prompt.media, encoded, strict=True):
            grid = item.extras.get("grid")
            if not isinstance(grid, (list, tuple)) or len(grid) != 3:
                raise EngineFault("the encode worker did not say how an image is laid out")
            placed.append((media.start + grown, (int(grid[0]), int(grid[1]), int(grid[2]))))
            grown += len(item.token_ids) - media.length
        return mrope.positions(len(prompt.token_ids) + grown, placed)


def adopt(
    facts: ModelFacts, placeholder_id: int | None, hidden_size: int | None, digest: str, features: Any, extras: Mapping[str, Any]
) -> EncodedImage:
    """An `EncodedImage` of `features`, `[tokens, hidden]` or `[1, tokens, hidden]`, that came from a file."""
    if not facts.attaches_embeddings or placeholder_id is None:
        raise ClientFault("this model takes no precomputed embeddings")
    if features.dim() == 3 and features.shape[0] == 1:
        features = features[0]
    if features.dim() != 2 or features.shape[0] < 1 or (hidden_size is not None and features.shape[1] != hidden_size):
        wanted = hidden_size if hidden_size is not None else "hidden size"
        raise ClientFault(f"embeddings must be [tokens, {wanted}] for this model, not {list(features.shape)}")
    return EncodedImage(digest, {"features": features}, (placeholder_id,) * int(features.shape[0]), dict(extras))


def _features(item: EncodedImage) -> torch.Tensor:
    """Deepstack levels lie side by side in one row, as the library's encoder writes them."""
    if set(item.tensors) != {"features"}:
        raise ClientFault("these embeddings were not made by this model's encoder")
    return item.tensors["features"]


def _hash_words(digest: str) -> list[int]:
    """Eight signed 32-bit numbers that name an image's content, so that its KV cache blocks can be reused."""
    raw = hashlib.sha256(digest.encode()).digest()
    return [int.from_bytes(raw[i : i + 4], "big", signed=True) for i in range(0, 32, 4)]
