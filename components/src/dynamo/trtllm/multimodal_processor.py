"""From a parsed request to engine inputs: parts -> media items -> the expanded prompt.

The frontend's token ids are the prompt; each image placeholder in them is replaced in place by what its image expands to. There
must be as many placeholders as images, so a literal placeholder in a user's text cannot happen unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from dynamo.trtllm.core import Context, EncodedImage, MediaItem, PlacedMedia, Prompt, TokenBudget
from dynamo.trtllm.engines.port import EngineInfo
from dynamo.trtllm.errors import ClientFault, PartFault, require_room
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.multimodal.parts import MediaPart


class MediaSource(Protocol):
    """Where media items come from: this worker itself, or an encode worker."""

    async def load(self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None) -> list[MediaItem]: ...
    def stats(self) -> Mapping[str, float]: ...
    async def close(self) -> None: ...


class MultimodalProcessor:
    """Prepares prompts for one engine. Holds no state of requests."""

    def __init__(self, info: EngineInfo, media: MediaSource) -> None:
        self._info = info
        self._media = media

    async def prepare(self, request: Request, context: Context | None = None) -> Prompt:
        """The prompt of `request` with its media in place.

        Raises `ClientFault`, naming the part at fault, and `LimitFault` when the expanded prompt leaves no room for output.
        """
        placeholder = self._info.image_placeholder_id
        places = request.token_ids.count(placeholder) if placeholder is not None else 0
        budget = TokenBudget(len(request.token_ids) - places, self._info.context_length)
        self._require_room(budget, places)
        if not request.media:
            _check_places(places, 0)
            return Prompt(request.token_ids)
        if placeholder is None:
            first = request.media[0]
            raise PartFault(first.position, "this worker serves a text model and takes no images", kind=first.kind)
        if all(part.kind == "image" for part in request.media):
            _check_places(places, len(request.media))
        items = await self._media.load(request.media, budget, context)
        prompt = expand(request.token_ids, placeholder, items, request.text)
        self._require_room(budget, len(prompt.token_ids) - budget.text_tokens)
        return prompt

    @staticmethod
    def _require_room(budget: TokenBudget, media_tokens: int) -> None:
        require_room(budget.total(media_tokens), budget.context_length, with_images=media_tokens > 0)

    def stats(self) -> Mapping[str, float]:
        return self._media.stats()

    async def close(self) -> None:
        await self._media.close()


def expand(token_ids: Sequence[int], placeholder: int, items: Sequence[MediaItem], text: str | None = None) -> Prompt:
    """Replace the placeholders of `token_ids`, one for each of `items` in order, by the items' expansions.

    An item without an expansion (a decoded image, which its engine expands itself) keeps its placeholder.
    """
    ids: list[int] = []
    placed: list[PlacedMedia] = []
    remaining = iter(items)
    for token in token_ids:
        if token != placeholder:
            ids.append(token)
            continue
        item = next(remaining)
        expansion = item.token_ids if isinstance(item, EncodedImage) else (placeholder,)
        placed.append(PlacedMedia(item, len(ids), len(expansion)))
        ids.extend(expansion)
    return Prompt(tuple(ids), tuple(placed), text)


def _check_places(places: int, images: int) -> None:
    if places != images:
        raise ClientFault(
            f"the prompt has {places} image placeholders for {images} images; the text must not contain the model's placeholder"
        )
