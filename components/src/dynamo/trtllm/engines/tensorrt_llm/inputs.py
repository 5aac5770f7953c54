"""A prompt with its media, in the form that the loaded model takes.

The engine gets decoded images or embeddings, never a URL. The port's prompt may come expanded; the library
expands placeholders itself, so each image goes back to the one placeholder that the chat template wrote.
Token ids beside images are used only by processors that say so; for the others the library would decode and
tokenize them again, so they get the rendered text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.trtllm.core import DecodedImage, DecodedVideo, EncodedMedia, Prompt
from dynamo.trtllm.engines.port import MediaInput
from dynamo.trtllm.engines.tensorrt_llm import embeddings, mrope, private
from dynamo.trtllm.engines.tensorrt_llm.library import Library
from dynamo.trtllm.engines.tensorrt_llm.model import ModelDescription
from dynamo.trtllm.engines.tensorrt_llm.videos import CHOSEN, engine_form, names_of
from dynamo.trtllm.errors import ClientFault, EngineFault

if TYPE_CHECKING:
    import torch

_PLURALS = {"image": "images", "video": "videos"}
NO_TEXT = "videos and embeddings need the rendered prompt beside its token ids, as Dynamo's frontend sends it"


class EngineInputs(NamedTuple):
    """What `generate_async` gets, and fields for the `DisaggregatedParams` beside it.

    Handles point to `features`, a tensor of each image, and to `positions`, mRoPE ids and deltas of models
    that have them: copies, since a handle shares memory, that live as long as the request.
    """

    inputs: dict[str, Any]
    special_tokens: bool = True
    disaggregated: Mapping[str, Any] | None = None
    features: tuple[torch.Tensor, ...] = ()
    positions: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Builds engine inputs for one loaded model. `front` is what its tokenizer puts in front of a text by
    itself."""

    model: ModelDescription
    placeholders: Mapping[str, int]
    """Kinds of media that the model takes -> the id that stands once for each item."""
    video_data: Any | None
    takes_ids: bool
    takes_handles: bool
    takes_uuids: bool
    front: str

    @classmethod
    def of(
        cls, library: Library, llm: Any, model: ModelDescription, media: Mapping[str, MediaInput]
    ) -> ModelInputs:
        """What `llm`, started by `library`, takes: it is asked, where it can tell."""
        image = media.get("image")
        return cls(
            model=model,
            placeholders={kind: taken.placeholder_id for kind, taken in media.items()},
            video_data=library.video_data,
            takes_ids=private.takes_ids_beside_images(llm),
            takes_handles=image is not None and image.takes_encoded,
            takes_uuids="multi_modal_uuids" in library.prompt_keys,
            front=private.front_of_a_text(llm) if media else "",
        )

    def build(self, prompt: Prompt, uuids: Sequence[str] = ()) -> EngineInputs:
        """Raises `ClientFault` for media that this model or release cannot take."""
        if not prompt.media:
            return EngineInputs(inputs={"prompt_token_ids": list(prompt.token_ids)})
        items = [media.item for media in prompt.media]
        for item in items:
            if item.kind not in self.placeholders:
                raise ClientFault(f"this model takes no {_PLURALS.get(item.kind, item.kind)}")
        videos = [item for item in items if isinstance(item, DecodedVideo)]
        if videos and len(videos) != len(items):
            raise ClientFault("images and videos cannot be mixed in one request to this model")
        if videos:
            return self._videos(prompt, videos, uuids)
        images = [item for item in items if isinstance(item, DecodedImage)]
        encoded = [item for item in items if isinstance(item, EncodedMedia)]
        if images and encoded:
            raise ClientFault(
                "images and precomputed embeddings cannot be mixed in one request to this model"
            )
        if images:
            return self._images(prompt, images, uuids)
        attached = self.model.facts.attaches_embeddings and all(
            embeddings.FROM_FILE in item.extras for item in encoded
        )
        return (
            self._by_handles(prompt, encoded)
            if self.takes_handles and not attached
            else self._attached(prompt, encoded)
        )

    def _images(self, prompt: Prompt, images: Sequence[DecodedImage], uuids: Sequence[str]) -> EngineInputs:
        inputs: dict[str, Any] = {"prompt_token_ids": self.unexpanded(prompt)}
        special_tokens = True
        options = dict(images[0].options)  # one request, so the same for all
        # Beside token ids the library counts an image's rows without asking the processor.
        if prompt.text is not None and (options or not self.takes_ids):
            inputs, special_tokens = self._text(prompt)
        # A None here fails the library's first look at the processor, and hashing stays off for the whole
        # process.
        inputs.update(
            multi_modal_data={"image": [image.image for image in images]}, mm_processor_kwargs=options
        )
        if options:
            uuids = [image.digest for image in images]  # the library's own hash is that of the pixels alone
        if self.takes_uuids and len(uuids) == len(images):
            inputs["multi_modal_uuids"] = {"image": list(uuids)}
        return EngineInputs(inputs=inputs, special_tokens=special_tokens)

    def _videos(self, prompt: Prompt, videos: Sequence[DecodedVideo], uuids: Sequence[str]) -> EngineInputs:
        """The frames are chosen already, and the processor is told so; their times are in the metadata."""
        inputs, special_tokens = self._text(prompt)
        together = self.model.frames_together
        inputs.update(
            multi_modal_data={"video": [engine_form(self.video_data, each, together) for each in videos]},
            mm_processor_kwargs=dict(CHOSEN),
        )
        if self.takes_uuids:
            inputs["multi_modal_uuids"] = {"video": names_of(videos, uuids)}
        return EngineInputs(inputs=inputs, special_tokens=special_tokens)

    def _attached(self, prompt: Prompt, encoded: list[EncodedMedia]) -> EngineInputs:
        if not self.model.facts.attaches_embeddings:
            raise ClientFault("this model takes no precomputed embeddings")
        inputs, special_tokens = self._text(prompt)
        inputs.update(
            multi_modal_embeddings={"image": [embeddings.engine_form(item) for item in encoded]},
            mm_processor_kwargs={},
        )
        return EngineInputs(inputs=inputs, special_tokens=special_tokens)

    def _by_handles(self, prompt: Prompt, encoded: list[EncodedMedia]) -> EngineInputs:
        inputs, special_tokens = self._text(prompt)
        inputs["prompt_token_ids"] = self.unexpanded(prompt)
        features = tuple(_features(item).clone() for item in encoded)
        positions = self._mrope(prompt, encoded) if self.model.facts.mrope else ()
        fields: dict[str, Any] = {
            "multimodal_embedding_handles": [private.make_handle(tensor) for tensor in features],
            "multimodal_hashes": [_hash_words(item.digest) for item in encoded],
        }
        if positions:
            ids, deltas = positions
            fields["mrope_position_ids_handle"] = private.make_handle(ids)
            fields["mrope_position_deltas_handle"] = private.make_handle(deltas)
        return EngineInputs(
            inputs=inputs,
            special_tokens=special_tokens,
            disaggregated=fields,
            features=features,
            positions=positions,
        )

    def _text(self, prompt: Prompt) -> tuple[dict[str, Any], bool]:
        """The rendered prompt, and whether the tokenizer may add special tokens: never a second of those in
        front.

        Most processors add them whatever the request's parameters say, so the rendered ones are what has to
        go.
        """
        if prompt.text is None:
            raise ClientFault(NO_TEXT)
        if self.front and prompt.text.startswith(self.front):
            return {"prompt": prompt.text[len(self.front) :]}, True
        return {"prompt": prompt.text}, False

    def unexpanded(self, prompt: Prompt) -> list[int]:
        """Token ids with one placeholder for each item, whatever stands there now."""
        ids: list[int] = []
        at = 0
        for media in prompt.media:
            ids += prompt.token_ids[at : media.start]
            ids.append(self.placeholders[media.item.kind])
            at = media.start + media.length
        ids += prompt.token_ids[at:]
        return ids

    def _mrope(self, prompt: Prompt, encoded: Sequence[EncodedMedia]) -> tuple[torch.Tensor, torch.Tensor]:
        placed: list[tuple[int, mrope.Grid]] = []
        grown = 0
        for media, item in zip(prompt.media, encoded, strict=True):
            grid = item.extras.get("grid")
            if not isinstance(grid, (list, tuple)) or len(grid) != 3:
                raise EngineFault("the encode worker did not say how an image is laid out")
            placed.append((media.start + grown, (int(grid[0]), int(grid[1]), int(grid[2]))))
            grown += len(item.token_ids) - media.length
        return mrope.positions(len(prompt.token_ids) + grown, placed)


def _features(item: EncodedMedia) -> torch.Tensor:
    """Deepstack levels lie side by side in one row, as the library's encoder writes them."""
    if set(item.tensors) != {"features"}:
        raise ClientFault("these embeddings were not made by this model's encoder")
    return item.tensors["features"]


def _hash_words(digest: str) -> list[int]:
    """Eight signed 32-bit numbers that name an image's content, so that its KV cache blocks can be reused."""
    raw = hashlib.sha256(digest.encode()).digest()
    return [int.from_bytes(raw[i : i + 4], "big", signed=True) for i in range(0, 32, 4)]
