"""The names that clients give to media (`uuid` of a content part), each with the content that it names on
this worker.

A name holds the digest of a content and never media: those lie in the cache by content, so a name can only
lead to what was computed from the content that was sent last under it. Each tenant (`cache_salt`) has names
of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import NamedTuple

from dynamo.trtllm.multimodal.parts import MediaPart

MAX_NAMES = 1 << 16
"""Most names that are kept; those that were used longest ago are forgotten first."""

UNKNOWN = "its uuid is not known here, or its content is no longer kept; send the content with it again"
PREPARED_OTHERWISE = (
    "the content that its uuid names is not kept as these mm_processor_kwargs prepare it; "
    "send the content with it again"
)
TWO_CONTENTS = "its uuid names another content in the same request"


class NamedContent(NamedTuple):
    """A content by its digest, and whether it is a file of embeddings."""

    digest: str
    is_embedding_file: bool


class Uuids:
    """Names of one worker. Requests share them; one event loop."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, NamedContent] = OrderedDict()

    def find(self, part: MediaPart) -> NamedContent | None:
        """What the uuid of `part` names, for its tenant and kind."""
        key = _key_of(part)
        found = self._names.get(key)
        if found is not None:
            self._names.move_to_end(key)
        return found

    def remember(self, part: MediaPart, content: NamedContent) -> None:
        """From here on the uuid of `part` names `content`, whatever it named before."""
        key = _key_of(part)
        self._names[key] = content
        self._names.move_to_end(key)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)


def _key_of(part: MediaPart) -> bytes:
    """32 bytes for a name, however long its tenant's is."""
    return hashlib.sha256(json.dumps([part.tenant, part.kind, part.uuid]).encode()).digest()
