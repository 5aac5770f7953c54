"""From a parsed request to engine inputs: parts -> media items -> the expanded prompt.

The frontend's token ids are the prompt; each placeholder in them is replaced in place by what its item of
media expands to. There must be as many placeholders of each kind as items of it, so a literal placeholder in
a user's text cannot happen unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from dynamo.trtllm.core import Context, EncodedMedia, MediaItem, PlacedMedia, Prompt, TokenBudget
from dynamo.trtllm.engines.port import EngineInfo, EngineRequest
from dynamo.trtllm.errors import ClientFault, PartFault, require_room
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.metrics import Readings, Stage
from dynamo.trtllm.multimodal.kinds.registry import KINDS, in_words, plural_of
from dynamo.trtllm.multimodal.options import options_by_kind
from dynamo.trtllm.multimodal.parts import MediaPart
from dynamo.trtllm.stages import measured

_UNSEEN = "; ".join(
    f"without other media beside it no worker gets {part}: send it as {kind.part_type}, with a data URL"
    for kind in KINDS.values()
    for part in kind.message_parts
)
"""What a placeholder may stand for that `served_template` has written for a part which the frontend drops."""


class MediaSource(Protocol):
    """Where media items come from: this worker itself, or an encode worker."""

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[MediaItem]: ...
    def stats(self) -> Readings: ...
    async def close(self) -> None: ...


class MultimodalProcessor:
    """Prepares prompts for one engine. Holds no state of requests."""

    def __init__(self, info: EngineInfo, media: MediaSource) -> None:
        self._info = info
        self._media = media
        self._placeholders = {kind: taken.placeholder_id for kind, taken in info.media.items()}

    async def prepare(self, request: Request, context: Context | None = None) -> EngineRequest:
        """What the engine is asked: `request.engine_request`, its media in their places in the prompt.

        Raises `ClientFault`, naming the part at fault, and `LimitFault` when the expanded prompt leaves no
        room for output.
        """
        asked = request.engine_request
        token_ids = asked.prompt.token_ids
        places = {kind: token_ids.count(token) for kind, token in self._placeholders.items()}
        taken = sum(places.values())
        budget = TokenBudget(len(token_ids) - taken, self._info.context_length)
        self._require_room(budget, taken)
        self._require_taken(request)
        given = [part.kind for part in request.media]
        for kind, count in places.items():
            _check_places(kind, count, given.count(kind), alone=not given)
        parts = request.media
        if request.processor_options:
            options = options_by_kind(request.processor_options, self._info.media)
            parts = tuple(replace(part, options=options[part.kind]) for part in parts)
        if not parts:
            return asked
        items = await self._media.load(parts, budget, context)
        with measured(Stage.PREPARE):
            prompt = expand(token_ids, self._placeholders, items, asked.prompt.text)
        self._require_room(budget, len(prompt.token_ids) - budget.text_tokens)
        return replace(asked, prompt=prompt)

    def _require_taken(self, request: Request) -> None:
        """Refuse a part of a kind that the engine does not take."""
        for part in request.media:
            if part.kind in self._placeholders:
                continue
            taken = in_words(plural_of(kind) for kind in self._placeholders) or "text"
            lacking = f"the model {request.model} takes no {plural_of(part.kind)} on this worker"
            why = self._info.refusals.get(part.kind)
            message = f"{lacking}{f' ({why})' if why else ''}; it takes {taken} only"
            raise PartFault(part.position, message, kind=part.kind)

    @staticmethod
    def _require_room(budget: TokenBudget, media_tokens: int) -> None:
        require_room(budget.total(media_tokens), budget.context_length, with_media=media_tokens > 0)

    def stats(self) -> Readings:
        return self._media.stats()

    async def close(self) -> None:
        await self._media.close()


def expand(
    token_ids: Sequence[int],
    placeholders: Mapping[str, int],
    items: Sequence[MediaItem],
    text: str | None = None,
) -> Prompt:
    """Replace the placeholders of `token_ids` by the expansions of `items`: those of each kind in the order
    of its items.

    `placeholders` are the kinds' ids. An item without an expansion (decoded media, which the engine expands
    itself) keeps its placeholder.
    """
    ids: list[int] = []
    placed: list[PlacedMedia] = []
    remaining = {
        token: iter([item for item in items if item.kind == kind]) for kind, token in placeholders.items()
    }
    for token in token_ids:
        waiting = remaining.get(token)
        if waiting is None:
            ids.append(token)
            continue
        item = next(waiting)
        expansion = item.token_ids if isinstance(item, EncodedMedia) else (token,)
        placed.append(PlacedMedia(item, len(ids), len(expansion)))
        ids.extend(expansion)
    return Prompt(tuple(ids), tuple(placed), text)


def _check_places(kind: str, places: int, items: int, *, alone: bool) -> None:
    """`alone`: the request holds no media that a worker could see."""
    if places == items:
        return
    why = "the text must not contain the model's placeholder"
    if places < items:
        why = "the model's chat template has to write one for each"
    elif alone:
        why += f"; {_UNSEEN}"
    raise ClientFault(f"the prompt has {places} {kind} placeholders for {items} {kind} parts; {why}")
