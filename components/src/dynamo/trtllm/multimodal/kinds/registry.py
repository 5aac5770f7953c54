"""The kinds of media, each with one line, in the order in which a request's parts are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import LimitFault
from dynamo.trtllm.multimodal.kinds.audio import AudioKind
from dynamo.trtllm.multimodal.kinds.image import ImageKind
from dynamo.trtllm.multimodal.kinds.kind import MediaKind
from dynamo.trtllm.multimodal.kinds.video import VideoKind

_ALL: tuple[MediaKind, ...] = (
    ImageKind(),
    VideoKind(),
    AudioKind(),
)
KINDS: Mapping[str, MediaKind] = {kind.name: kind for kind in _ALL}


def plural_of(kind: str) -> str:
    """`kind` in words that follow a number or "no": "images"."""
    return KINDS[kind].plural if kind in KINDS else kind


def in_words(names: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    found = list(names)
    return f" {last} ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def require_counts(kinds: Iterable[str], config: MediaConfig) -> None:
    """Raise `LimitFault` for more items of a kind than one request may hold. `kinds` has one entry for each
    item.
    """
    for kind, count in Counter(kinds).items():
        limit = config.limit_of(kind)
        if count > limit:
            held = f"{count} {plural_of(kind) if count > 1 else kind}"
            raise LimitFault(f"the request holds {held}; this worker takes at most {limit}")
