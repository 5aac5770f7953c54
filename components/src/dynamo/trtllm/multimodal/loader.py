"""Media parts to media items, on this worker: fetch, inspect, decode, and encode where the engine encodes
apart.

The steps live in their own modules; this one orders them, and keeps the content-addressed cache that saves
the later ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.core import Context, EncodedMedia, MediaItem, MediaShape, TokenBudget
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import ClientFault, PartFault, require_room
from dynamo.trtllm.metrics import Stage
from dynamo.trtllm.multimodal import uuids
from dynamo.trtllm.multimodal.blocking import all_or_none, run_blocking
from dynamo.trtllm.multimodal.cache import ContentCache
from dynamo.trtllm.multimodal.decode import digest_of
from dynamo.trtllm.multimodal.embedding_files import load_embedding_file
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.kinds.kind import MediaKind
from dynamo.trtllm.multimodal.kinds.registry import KINDS, plural_of, require_counts
from dynamo.trtllm.multimodal.parts import (
    NOT_PREPARED,
    EmbeddingFile,
    Known,
    MediaPart,
    Source,
    at_part,
    classify,
)
from dynamo.trtllm.multimodal.uuids import NamedContent, Uuids
from dynamo.trtllm.stages import measured

_INSPECT_INLINE_BYTES = 64 * 1024
"""Hashing and reading the header of so little takes less than a hand-over to a thread."""


@dataclass(frozen=True)
class Inspected:
    """Fetched media before anything expensive was done with them.

    `content` names the bytes, `digest` the bytes, what is read of them (`rule`) and how they are prepared.
    `tokens` is the expansion's length, 0 where it is not known yet.
    """

    part: MediaPart
    source: Source
    data: bytes
    content: NamedContent
    digest: str
    rule: Any
    shape: MediaShape | None
    tokens: int

    @property
    def kind(self) -> MediaKind:
        return KINDS[self.part.kind]


_Key = tuple[str, Source]
"""What a request may hold several times and is loaded once: a source of a kind."""


class MediaLoader:
    """Loads the parts of requests. Shared by requests: the fetcher with its bounds, and the cache."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        config: MediaConfig,
        modality: Modality,
        fetcher: Fetcher | None = None,
    ) -> None:
        """`fetcher` is what reads sources, by default one of its own; it is closed with the loader."""
        self._engine = engine
        self._takes, self._refusals = info.media, info.refusals
        self._kinds = [KINDS[name] for name in info.media if name in KINDS]
        self._config = config
        self._modality = modality
        self._fetcher = fetcher or Fetcher(config)
        self._uuids = Uuids()
        self._cache: ContentCache[MediaItem] = ContentCache(config.cache_bytes, nbytes)
        if modality is Modality.MULTIMODAL:
            for kind in self._kinds:
                kind.start()

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[MediaItem]:
        """The items of `parts`, in order; all or none. Equal sources are loaded once.

        Raises `ClientFault` (naming the part where one is at fault) before anything is fetched for what is
        refused by its text alone, and before anything is decoded or encoded for what exceeds a limit.
        """
        with measured(Stage.PREPARE):
            sources = self.classify(parts)
            keys = self._keys(parts, sources)
            known = self._known_items(parts, keys)
        sent = [
            (part, source)
            for part, source in zip(parts, sources, strict=True)
            if not isinstance(source, Known)
        ]
        with measured(Stage.FETCH):
            contents = await self._fetcher.fetch_all(sent)
        inspected: dict[_Key, Inspected] = {}
        for (part, source), data in zip(sent, contents, strict=True):
            if (part.kind, source) not in inspected:
                inspected[part.kind, source] = await self._inspect(part, source, data)
        self._require_one_content_each(sent, inspected)
        lengths = {key: each.tokens for key, each in inspected.items()}
        lengths.update((key, _length(item)) for key, item in known.items())
        media_tokens = sum(lengths[key] for key in keys)
        require_room(budget.total(media_tokens), budget.context_length, with_media=media_tokens > 0)
        items = await all_or_none([self._item(each) for each in inspected.values()])
        for part, source in sent:
            if part.uuid is not None:
                self._uuids.remember(part, inspected[part.kind, source].content)
        found = {**known, **dict(zip(inspected, items, strict=True))}
        return [found[key] for key in keys]

    def knows(self, part: MediaPart) -> bool:
        """Whether this worker keeps what the uuid of `part` names."""
        return self._find_known(part)[0] is not None

    def _keys(self, parts: Sequence[MediaPart], sources: Sequence[Source]) -> list[_Key]:
        """What each part stands for: of a uuid alone whose content is sent by another part of the request,
        that content.
        """
        sent = {
            (part.kind, part.uuid): source
            for part, source in zip(parts, sources, strict=True)
            if not isinstance(source, Known)
        }
        return [
            (part.kind, sent.get((part.kind, part.uuid), source) if isinstance(source, Known) else source)
            for part, source in zip(parts, sources, strict=True)
        ]

    def _find_known(self, part: MediaPart) -> tuple[MediaItem | None, str]:
        """The item that the uuid of `part` names, or why there is none."""
        content = self._uuids.find(part)
        if content is None:
            return None, uuids.UNKNOWN
        if content.is_embedding_file and part.options:
            return None, NOT_PREPARED
        rule = KINDS[part.kind].rule(self._takes[part.kind].rule, part.options, self._config)
        item = self._cache.find(_cache_key(part.kind, content, _name_of(content.digest, rule, part.options)))
        return item, uuids.PREPARED_OTHERWISE if part.options else uuids.UNKNOWN

    def _known_items(self, parts: Sequence[MediaPart], keys: Sequence[_Key]) -> dict[_Key, MediaItem]:
        """The items of parts that are their uuids alone. Raises `PartFault` for one that names nothing
        here.
        """
        found: dict[_Key, MediaItem] = {}
        for part, key in zip(parts, keys, strict=True):
            if isinstance(key[1], Known):
                with at_part(part):
                    item, why = self._find_known(part)
                    if item is None:
                        raise ClientFault(why)
                    found[key] = item
        return found

    @staticmethod
    def _require_one_content_each(
        sent: Sequence[tuple[MediaPart, Source]], inspected: Mapping[_Key, Inspected]
    ) -> None:
        named: dict[tuple[str, str], NamedContent] = {}
        for part, source in sent:
            content = inspected[part.kind, source].content
            if part.uuid is not None and named.setdefault((part.kind, part.uuid), content) != content:
                raise PartFault(part.position, uuids.TWO_CONTENTS, kind=part.kind)

    def classify(self, parts: Sequence[MediaPart]) -> list[Source]:
        """What the parts refer to. Raises `ClientFault` for parts, or a number of parts, that this worker
        does not take.
        """
        sources = [classify(part, self._config, self._modality) for part in parts]
        for part in parts:
            with at_part(part):
                if part.kind not in self._takes:
                    why = self._refusals.get(part.kind)
                    lacking = f"this worker's model takes no {plural_of(part.kind)}"
                    raise ClientFault(f"{lacking} ({why})" if why else lacking)
        require_counts((part.kind for part in parts), self._config)
        return sources

    def stats(self) -> metrics.Readings:
        """Nothing where the worker takes no media."""
        if self._modality is Modality.TEXT:
            return {}
        return metrics.merged(self._cache.stats(), *(kind.stats() for kind in self._kinds))

    async def close(self) -> None:
        await self._fetcher.close()

    async def _inspect(self, part: MediaPart, source: Source, data: bytes) -> Inspected:
        with at_part(part), measured(Stage.PREPARE):
            if len(data) <= _INSPECT_INLINE_BYTES:
                return self._inspected(part, source, data)
            return await run_blocking(self._inspected, part, source, data)

    def _inspected(self, part: MediaPart, source: Source, data: bytes) -> Inspected:
        content = NamedContent(digest_of(data), isinstance(source, EmbeddingFile))
        if content.is_embedding_file:
            return Inspected(part, source, data, content, content.digest, None, None, 0)
        kind = KINDS[part.kind]
        rule = kind.rule(self._takes[part.kind].rule, part.options, self._config)
        shape = kind.inspect(data, rule, self._config)
        tokens = self._engine.media_tokens(shape, part.options) if shape is not None else 0
        name = _name_of(content.digest, rule, part.options)
        return Inspected(part, source, data, content, name, rule, shape, tokens or 0)

    async def _item(self, media: Inspected) -> MediaItem:
        with at_part(media.part):
            load = self._embeddings if media.content.is_embedding_file else self._decoded
            key = _cache_key(media.part.kind, media.content, media.digest)
            return await self._cache.get_or_compute(key, lambda: load(media))

    async def _decoded(self, media: Inspected) -> MediaItem:
        with measured(Stage.MEDIA_DECODE):
            decoded = await media.kind.decode(media.data, media.digest, media.shape, media.rule, self._config)
        if media.part.options:
            decoded = replace(decoded, options=media.part.options)
        if not self._takes[media.part.kind].encodes:
            return decoded
        with measured(Stage.ENCODE):
            return (await self._engine.encode([decoded]))[0]

    async def _embeddings(self, media: Inspected) -> MediaItem:
        assert isinstance(media.source, EmbeddingFile)
        with measured(Stage.MEDIA_DECODE):
            suffix, limit = media.source.suffix, self._config.max_file_bytes
            loaded = await run_blocking(load_embedding_file, media.data, suffix, limit)
        return self._engine.adopt_embeddings(media.part.kind, media.digest, loaded.tensors, loaded.auxiliary)


def _name_of(content: str, rule: Any, options: Mapping[str, Any]) -> str:
    """The digest of a content together with what of it is read and how it is prepared, where these are not
    the only way.
    """
    if rule is None and not options:
        return content
    return digest_of(f"{content} {rule!r} {json.dumps(options, sort_keys=True)}".encode())


def _cache_key(kind: str, content: NamedContent, digest: str) -> str:
    return f"embeddings:{kind}:{content.digest}" if content.is_embedding_file else f"{kind}:{digest}"


def _length(item: MediaItem) -> int:
    """Length of an item's expansion, 0 where its engine finds out."""
    return len(item.token_ids) if isinstance(item, EncodedMedia) else 0


def nbytes(item: MediaItem) -> int:
    """Memory that `item` takes in a cache."""
    return item.nbytes
