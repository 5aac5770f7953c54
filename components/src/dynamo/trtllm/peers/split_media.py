"""Media of an engine that takes some of them from encode workers and encodes the others in this worker.

A kind that an encode worker encodes for it goes there whole;
of another kind only embedding files do, which lie there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.trtllm import metrics
from dynamo.trtllm.core import Context, MediaItem, TokenBudget
from dynamo.trtllm.engines.port import MediaInput
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal.parts import MediaPart, names_embedding_file
from dynamo.trtllm.peers.encode import RemoteEncoder


class SplitMedia:
    """Loads each part here or through encode workers, as the engine takes its kind (`taken`)."""

    def __init__(self, here: MediaLoader, apart: RemoteEncoder, taken: Mapping[str, MediaInput]) -> None:
        self._here = here
        self._apart = apart
        self._taken = taken

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[MediaItem]:
        """As `RemoteEncoder.load`; a request with media of both places gets all of them, in its order."""
        sent = {(part.kind, part.uuid): names_embedding_file(part) for part in parts if part.url}
        goes_apart = [self._is_apart(part, sent) for part in parts]
        apart = [part for part, goes in zip(parts, goes_apart, strict=True) if goes]
        here = [part for part, goes in zip(parts, goes_apart, strict=True) if not goes]
        from_apart = iter(await self._apart.load(apart, budget, context) if apart else ())
        from_here = iter(await self._here.load(here, budget, context) if here else ())
        return [next(from_apart if goes else from_here) for goes in goes_apart]

    def _is_apart(self, part: MediaPart, sent: Mapping[tuple[str, str | None], bool]) -> bool:
        """A part that is its uuid alone goes where its content goes (`sent`), or went before."""
        taken = self._taken[part.kind]
        if taken.takes_encoded or not taken.takes_files:
            return taken.takes_encoded
        if part.uuid is None or part.url:
            return names_embedding_file(part)
        found = sent.get((part.kind, part.uuid))
        return not self._here.knows(part) if found is None else found

    def stats(self) -> metrics.Readings:
        return metrics.merged(self._here.stats(), self._apart.stats())

    async def close(self) -> None:
        await self._here.close()
        await self._apart.close()
