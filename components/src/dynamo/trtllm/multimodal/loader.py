"""Media parts to media items, on this worker: fetch, inspect, decode, and encode where the engine encodes apart.

The steps live in their own modules; this one orders them, and keeps the content-addressed cache that saves the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.core import Context, MediaItem, MediaShape, TokenBudget
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import ClientFault, require_room
from dynamo.trtllm.multimodal.blocking import all_or_none, run_blocking
from dynamo.trtllm.multimodal.cache import ContentCache
from dynamo.trtllm.multimodal.decode import digest_of
from dynamo.trtllm.multimodal.embedding_files import load_embedding_file
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.kinds.kind import MediaKind
from dynamo.trtllm.multimodal.kinds.registry import KINDS, plural_of, require_counts
from dynamo.trtllm.multimodal.parts import EmbeddingFile, MediaPart, Source, at_part, classify

_INSPECT_INLINE_BYTES = 64 * 1024
"""Hashing and reading the header of so little takes less than a hand-over to a thread."""


@dataclass(frozen=True)
class Inspected:
    """Fetched media before anything expensive was done with them.

    `digest` names the content and what is read of it (`rule`); `tokens` is the expansion's length, 0 where it is not known yet.
    """

    part: MediaPart
    source: Source
    data: bytes
    digest: str
    rule: Any
    shape: MediaShape | None
    tokens: int

    @property
    def kind(self) -> MediaKind:
        return KINDS[self.part.kind]


class MediaLoader:
    """Loads the parts of requests. Shared by requests: the fetcher with its bounds, and the cache."""

    def __init__(self, engine: Engine, info: EngineInfo, config: MediaConfig, modality: Modality) -> None:
        self._engine = engine
        self._encodes = info.encodes_apart
        self._takes = info.media
        self._kinds = [KINDS[name] for name in info.media if name in KINDS]
        self._config = config
        self._modality = modality
        self._fetcher = Fetcher(config)
        self._cache: ContentCache[MediaItem] = ContentCache(config.cache_bytes, nbytes)
        if modality is Modality.MULTIMODAL:
            for kind in self._kinds:
                kind.start()

    async def load(self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None) -> list[MediaItem]:
        """The items of `parts`, in order; all or none. Equal sources are loaded once.

        Raises `ClientFault` (naming the part where one is at fault) before anything is fetched for what is refused by its text
        alone, and before anything is decoded or encoded for what exceeds a limit.
        """
        sources = self.classify(parts)
        contents = await self._fetcher.fetch_all(list(zip(parts, sources, strict=True)))
        keys = [(part.kind, source) for part, source in zip(parts, sources, strict=True)]
        inspected: dict[tuple[str, Source], Inspected] = {}
        for part, key, data in zip(parts, keys, contents, strict=True):
            if key not in inspected:
                inspected[key] = await self._inspect(part, key[1], data)
        media_tokens = sum(inspected[key].tokens for key in keys)
        require_room(budget.total(media_tokens), budget.context_length, with_media=media_tokens > 0)
        items = await all_or_none([self._item(each) for each in inspected.values()])
        found = dict(zip(inspected, items, strict=True))
        return [found[key] for key in keys]

    def classify(self, parts: Sequence[MediaPart]) -> list[Source]:
        """What the parts refer to. Raises `ClientFault` for parts, or a number of parts, that this worker does not take."""
        sources = [classify(part, self._config, self._modality) for part in parts]
        for part in parts:
            with at_part(part):
                if part.kind not in self._takes:
                    raise ClientFault(f"this worker's model takes no {plural_of(part.kind)}")
        require_counts((part.kind for part in parts), self._config)
        return sources

    def stats(self) -> Mapping[str, float]:
        found = {f"cache_{name}": float(value) for name, value in self._cache.stats().items()}
        for kind in self._kinds:
            found.update(kind.stats())
        return found

    async def close(self) -> None:
        await self._fetcher.close()

    async def _inspect(self, part: MediaPart, source: Source, data: bytes) -> Inspected:
        with at_part(part):
            if len(data) <= _INSPECT_INLINE_BYTES:
                return self._inspected(part, source, data)
            return await run_blocking(self._inspected, part, source, data)

    def _inspected(self, part: MediaPart, source: Source, data: bytes) -> Inspected:
        if isinstance(source, EmbeddingFile):
            return Inspected(part, source, data, digest_of(data), None, None, 0)
        kind = KINDS[part.kind]
        rule = kind.rule(self._takes[part.kind].rule, {})
        shape = kind.inspect(data, rule, self._config)
        tokens = self._engine.media_tokens(shape) if shape is not None else 0
        return Inspected(part, source, data, _name_of(data, rule), rule, shape, tokens or 0)

    async def _item(self, media: Inspected) -> MediaItem:
        with at_part(media.part):
            if isinstance(media.source, EmbeddingFile):
                key = f"embeddings:{media.part.kind}:{media.digest}"
                return await self._cache.get_or_compute(key, lambda: self._embeddings(media))
            return await self._cache.get_or_compute(f"{media.part.kind}:{media.digest}", lambda: self._decoded(media))

    async def _decoded(self, media: Inspected) -> MediaItem:
        decoded = await media.kind.decode(media.data, media.digest, media.shape, media.rule, self._config)
        return (await self._engine.encode([decoded]))[0] if self._encodes else decoded

    async def _embeddings(self, media: Inspected) -> MediaItem:
        assert isinstance(media.source, EmbeddingFile)
        loaded = await run_blocking(load_embedding_file, media.data, media.source.suffix, self._config.max_file_bytes)
        return self._engine.adopt_embeddings(media.part.kind, media.digest, loaded.tensors, loaded.auxiliary)


def _name_of(data: bytes, rule: Any) -> str:
    """What names the content of `data` and, where there is a rule, what of it is read."""
    content = digest_of(data)
    return content if rule is None else digest_of(f"{content} {rule!r}".encode())


def nbytes(item: MediaItem) -> int:
    """Memory that `item` takes in a cache."""
    return item.nbytes
