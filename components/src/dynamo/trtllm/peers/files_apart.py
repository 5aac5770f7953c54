"""Media of a model whose pictures are encoded where the prompt is, while embedding files lie on an encode worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.trtllm.core import Context, MediaItem, TokenBudget
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal.parts import MediaPart, names_embedding_file
from dynamo.trtllm.peers.encode import RemoteEncoder


class FilesApart:
    """Loads pictures here, and embedding files through encode workers."""

    def __init__(self, here: MediaLoader, files: RemoteEncoder) -> None:
        self._here = here
        self._files = files

    async def load(self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None) -> list[MediaItem]:
        """As `RemoteEncoder.load`; a request with pictures and files gets both, in its order."""
        sent = {(part.kind, part.uuid): names_embedding_file(part) for part in parts if part.url}
        files = [part for part in parts if self._is_apart(part, sent)]
        pictures = [part for part in parts if part not in files]
        loaded = await self._files.load(files, budget, context) if files else []
        loaded += await self._here.load(pictures, budget, context) if pictures else []
        by_position = {part.position: item for part, item in zip([*files, *pictures], loaded, strict=True)}
        return [by_position[part.position] for part in parts]

    def _is_apart(self, part: MediaPart, sent: Mapping[tuple[str, str | None], bool]) -> bool:
        """Whether `part` is a file. One that is its uuid alone goes where its content goes (`sent`), or went before."""
        if part.uuid is None or part.url:
            return names_embedding_file(part)
        found = sent.get((part.kind, part.uuid))
        return not self._here.knows(part) if found is None else found

    def stats(self) -> Mapping[str, float]:
        files = self._files.stats()
        return {**files, **{name: value + files.get(name, 0.0) for name, value in self._here.stats().items()}}

    async def close(self) -> None:
        await self._here.close()
        await self._files.close()
