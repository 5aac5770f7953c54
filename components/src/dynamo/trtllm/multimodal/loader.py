"""Media parts to media items, on this worker: fetch, inspect, decode, and encode where the engine encodes apart.

The steps live in their own modules; this one orders them, and keeps the content-addressed cache that saves the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.core import Context, DecodedImage, MediaItem, MediaShape, TokenBudget
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import LimitFault, require_room
from dynamo.trtllm.multimodal import decoders
from dynamo.trtllm.multimodal.blocking import all_or_none, run_blocking
from dynamo.trtllm.multimodal.cache import ContentCache
from dynamo.trtllm.multimodal.decode import ImageHeader, check_header, digest_of
from dynamo.trtllm.multimodal.embedding_files import load_embedding_file
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.parts import EmbeddingFile, MediaPart, Source, at_part, classify

_INSPECT_INLINE_BYTES = 64 * 1024
"""Hashing and reading the header of so little takes less than a hand-over to a thread."""


@dataclass(frozen=True)
class Inspected:
    """Fetched media before anything expensive was done with it. `tokens` is its expansion's length, where known."""

    part: MediaPart
    source: Source
    data: bytes
    digest: str
    header: ImageHeader | None
    tokens: int


class MediaLoader:
    """Loads the parts of requests. Shared by requests: the fetcher with its bounds, and the cache."""

    def __init__(self, engine: Engine, info: EngineInfo, config: MediaConfig, modality: Modality) -> None:
        self._engine = engine
        self._encodes = info.encodes_apart
        self._config = config
        self._modality = modality
        self._fetcher = Fetcher(config)
        self._cache: ContentCache[MediaItem] = ContentCache(config.cache_bytes, nbytes)
        if modality is Modality.MULTIMODAL:
            decoders.start_decoder()

    async def load(self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None) -> list[MediaItem]:
        """The items of `parts`, in order; all or none. Equal sources are loaded once.

        Raises `ClientFault` (naming the part where one is at fault) before anything is fetched for what is refused by its text
        alone, and before anything is decoded or encoded for what exceeds a limit.
        """
        sources = self.classify(parts)
        contents = await self._fetcher.fetch_all(list(zip(parts, sources, strict=True)))
        inspected: dict[Source, Inspected] = {}
        for part, source, data in zip(parts, sources, contents, strict=True):
            if source not in inspected:
                inspected[source] = await self._inspect(part, source, data)
        media_tokens = sum(inspected[source].tokens for source in sources)
        require_room(budget.total(media_tokens), budget.context_length, with_images=media_tokens > 0)
        items = await all_or_none([self._item(each) for each in inspected.values()])
        found = dict(zip(inspected, items, strict=True))
        return [found[source] for source in sources]

    def classify(self, parts: Sequence[MediaPart]) -> list[Source]:
        """What the parts refer to. Raises `ClientFault` for parts, or a number of parts, that this worker does not take."""
        sources = [classify(part, self._config, self._modality) for part in parts]
        if len(parts) > self._config.max_images:
            raise LimitFault(f"the request holds {len(parts)} images; this worker takes at most {self._config.max_images}")
        return sources

    def stats(self) -> Mapping[str, float]:
        return {**{f"cache_{name}": value for name, value in self._cache.stats().items()}, **decoders.stats()}

    async def close(self) -> None:
        await self._fetcher.close()

    async def _inspect(self, part: MediaPart, source: Source, data: bytes) -> Inspected:
        with at_part(part):
            if len(data) <= _INSPECT_INLINE_BYTES:
                digest, header = self._digest_and_header(source, data)
            else:
                digest, header = await run_blocking(self._digest_and_header, source, data)
            tokens = self._engine.media_tokens(MediaShape("image", (header.width, header.height))) if header is not None else 0
            return Inspected(part, source, data, digest, header, tokens or 0)

    def _digest_and_header(self, source: Source, data: bytes) -> tuple[str, ImageHeader | None]:
        header = None if isinstance(source, EmbeddingFile) else check_header(data, self._config)
        return digest_of(data), header

    async def _item(self, media: Inspected) -> MediaItem:
        with at_part(media.part):
            if isinstance(media.source, EmbeddingFile):
                return await self._cache.get_or_compute(f"embeddings:{media.digest}", lambda: self._embeddings(media))
            return await self._cache.get_or_compute(f"image:{media.digest}", lambda: self._image(media))

    async def _image(self, media: Inspected) -> MediaItem:
        assert media.header is not None
        image = await decoders.decode_apart(media.data, media.header, self._config)
        decoded = DecodedImage(media.digest, image)
        return (await self._engine.encode([decoded]))[0] if self._encodes else decoded

    async def _embeddings(self, media: Inspected) -> MediaItem:
        assert isinstance(media.source, EmbeddingFile)
        loaded = await run_blocking(load_embedding_file, media.data, media.source.suffix, self._config.max_file_bytes)
        return self._engine.adopt_embeddings(media.part.kind, media.digest, loaded.tensors, loaded.auxiliary)


def nbytes(item: MediaItem) -> int:
    """Memory that `item` takes in a cache."""
    return item.nbytes
