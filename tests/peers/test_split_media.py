"""Which parts go to an encode worker and which stay: by what the engine takes of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dynamo.trtllm.core import Context, TokenBudget
from dynamo.trtllm.engines.port import MediaInput
from dynamo.trtllm.multimodal.parts import MediaPart
from dynamo.trtllm.peers.split_media import SplitMedia

BUDGET = TokenBudget(1, 100)


class Place:
    """A source of media whose items are its own name and the part's url;
    `known` are the uuids that it keeps."""

    def __init__(self, name: str, known: Sequence[str] = ()) -> None:
        self.name = name
        self.known = known
        self.asked = 0
        self.closed = False

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[Any]:
        assert parts
        self.asked += 1
        return [(self.name, part.kind, part.url or part.uuid) for part in parts]

    def knows(self, part: MediaPart) -> bool:
        return part.uuid in self.known

    def stats(self) -> Mapping[str, float]:
        return {"cache_hits": 1.0, self.name: 2.0}

    async def close(self) -> None:
        self.closed = True


def taken(**kinds: str) -> dict[str, MediaInput]:
    """For each kind what the engine takes of it: embeddings that were `encoded`, those of `files`."""
    return {
        kind: MediaInput(placeholder_id=at, takes_encoded="encoded" in what, takes_files="files" in what)
        for at, (kind, what) in enumerate(kinds.items())
    }


def split(known: Sequence[str] = (), **kinds: str) -> tuple[SplitMedia, Place, Place]:
    here, apart = Place("here", known), Place("apart")
    return SplitMedia(here, apart, taken(**kinds)), here, apart  # type: ignore[arg-type]


def part(kind: str, url: str, position: int = 1, uuid: str | None = None) -> MediaPart:
    return MediaPart(position, kind, url, uuid)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("what", "image", "file"),
    [
        ("encoded files", "apart", "apart"),
        ("encoded", "apart", "apart"),
        ("files", "here", "apart"),
        ("", "here", "here"),
    ],
)
async def test_a_part_goes_where_the_engine_takes_its_embeddings_from(
    what: str, image: str, file: str
) -> None:
    media, _, _ = split(image=what)
    parts = [
        part("image", "https://h/a.png"),
        part("image", "file:///t/e.pt", 2),
        part("image", "https://h/b.png", 3),
    ]
    assert [place for place, _, _ in await media.load(parts, BUDGET)] == [image, file, image]


@pytest.mark.asyncio
async def test_each_kind_goes_its_own_way_and_all_come_back_in_the_requests_order() -> None:
    media, here, apart = split(image="files", video="encoded")
    parts = [
        part("video", "v"),
        part("image", "i"),
        part("image", "file:///t/e.pt", 2),
        part("video", "w", 2),
    ]
    assert await media.load(parts, BUDGET) == [
        ("apart", "video", "v"),
        ("here", "image", "i"),
        ("apart", "image", "file:///t/e.pt"),
        ("apart", "video", "w"),
    ]
    assert (here.asked, apart.asked) == (1, 1)


@pytest.mark.asyncio
async def test_a_place_without_parts_is_not_asked() -> None:
    media, here, apart = split(image="files", video="encoded")
    await media.load([part("image", "i")], BUDGET)
    await media.load([part("video", "v")], BUDGET)
    assert (here.asked, apart.asked) == (1, 1)


@pytest.mark.asyncio
async def test_a_uuid_alone_goes_where_its_content_goes_or_went() -> None:
    media, _, _ = split(["kept"], image="files", video="encoded")
    parts = [
        part("image", "file:///t/e.pt", 1, "file"),
        part("image", "", 2, "file"),
        part("image", "", 3, "kept"),
        part("image", "", 4, "elsewhere"),
        part("video", "", 1, "kept"),
    ]
    places = [place for place, _, _ in await media.load(parts, BUDGET)]
    assert places == ["apart", "apart", "here", "apart", "apart"]


@pytest.mark.asyncio
async def test_both_places_are_counted_together_and_closed() -> None:
    media, here, apart = split(image="files")
    assert media.stats() == {"cache_hits": 2.0, "here": 2.0, "apart": 2.0}
    await media.close()
    assert (here.closed, apart.closed) == (True, True)
