"""Which encode worker is asked for an item.

By rendezvous hash of the item's reference, so that one image is encoded once in a cluster; the next one in
its order serves when the first is gone or has too much to do.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dynamo.trtllm.multimodal.parts import MediaPart

_SPARE_CALLS = 4
_HASHED_ENDS = 4096
"""Characters at both ends of a reference that choose its instance;
a long data URL would hold up the event loop."""


class Placement:
    """Orders instances for an item. Shared by requests: the calls under way, by instance."""

    def __init__(self) -> None:
        self._calls: Counter[int] = Counter()

    @property
    def calls(self) -> int:
        """Calls under way, to all instances together."""
        return self._calls.total()

    def order(self, instances: Sequence[int], part: MediaPart) -> list[int]:
        """`instances`, best first: by rendezvous hash, those that carry much more than their share last.

        What has a uuid goes by that and nothing else, since a later request
        with the uuid alone has to find the same instance.
        """
        reference = part.url if part.uuid is None else json.dumps([part.tenant, part.kind, part.uuid])
        ends = f"{len(reference)} {reference[:_HASHED_ENDS]} {reference[-_HASHED_ENDS:]}"
        digest = hashlib.sha256(ends.encode(errors="surrogatepass")).digest()
        ranked = sorted(
            instances, key=lambda each: hashlib.sha256(digest + each.to_bytes(8, "little")).digest()
        )
        if part.uuid is not None:
            return ranked
        share = sum(self._calls[each] for each in instances) / max(1, len(instances))
        return sorted(ranked, key=lambda each: self._calls[each] > 2 * share + _SPARE_CALLS)

    @contextmanager
    def call(self, instance: int) -> Iterator[None]:
        """While it is open, one more call to `instance` is under way."""
        self._calls[instance] += 1
        try:
            yield
        finally:
            self._calls[instance] -= 1
            if not self._calls[instance]:
                del self._calls[instance]
