"""Loading parts on this worker: limits before work, one computation per content,
order kept, faults that name their part."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.core import DecodedImage, EncodedMedia, TokenBudget
from dynamo.trtllm.errors import ClientFault, LimitFault, PartFault
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.loader import MediaLoader, nbytes
from dynamo.trtllm.multimodal.parts import MediaPart
from fakes import cancelled, outcome, until
from media_parts import (
    HIDDEN,
    IMAGE_TOKENS,
    PLACEHOLDER,
    ROOMY,
    GatedEngine,
    loader_over,
    named,
    parts,
    png_url,
    taking_images,
    write_embeddings,
)


class CountingFetcher(Fetcher):
    """Counts the sources that it is asked for."""

    count = 0

    async def fetch_all(self, items: Sequence[Any]) -> list[bytes]:
        self.count += len(items)
        return await super().fetch_all(items)


async def counted(engine: GatedEngine, **config: Any) -> tuple[MediaLoader, CountingFetcher]:
    """A loader and what it fetches with."""
    fetcher = CountingFetcher(MediaConfig(**config))
    return await loader_over(engine, fetcher=fetcher, **config), fetcher


@pytest.mark.asyncio
async def test_images_become_embeddings_in_order() -> None:
    engine = GatedEngine()
    loader = await loader_over(engine)
    one, two = await loader.load(parts(png_url(1), png_url(2)), ROOMY)
    assert isinstance(one, EncodedMedia)
    assert isinstance(two, EncodedMedia)
    assert set(engine.encoded) == {one.digest, two.digest}
    assert one.token_ids == (PLACEHOLDER,) * IMAGE_TOKENS
    assert one.tensors["features"].shape == (IMAGE_TOKENS, HIDDEN)
    assert one.digest != two.digest
    await loader.close()


@pytest.mark.asyncio
async def test_an_image_that_a_request_holds_twice_is_loaded_once_and_counts_twice(tmp_path: Path) -> None:
    engine = GatedEngine()
    loader = await loader_over(engine, allowed_local_path=tmp_path, cache_bytes=0)
    file = write_embeddings(tmp_path, "e.pt", 3)
    twice = parts(png_url(1), file, png_url(2), png_url(1), file, png_url(1))
    digests = [item.digest for item in await loader.load(twice, ROOMY)]
    assert digests == [*digests[:3], *digests[:2], digests[0]]
    assert sorted(engine.encoded) == sorted({digests[0], digests[2]})
    with pytest.raises(LimitFault, match=f"the prompt has {1 + 3 * IMAGE_TOKENS} tokens"):
        await loader.load(parts(*[png_url(1)] * 3), TokenBudget(1, 3 * IMAGE_TOKENS))


@pytest.mark.asyncio
async def test_an_engine_that_encodes_itself_is_given_decoded_images() -> None:
    engine = GatedEngine()
    info = taking_images(await engine.start(), encodes=False)
    loader = await loader_over(engine, info=info)
    (item,) = await loader.load(parts(png_url(7, size=3)), ROOMY)
    assert isinstance(item, DecodedImage)
    assert (item.image.size, item.image.getpixel((0, 0)), nbytes(item)) == ((3, 3), (7, 7, 7), 36)
    assert engine.encoded == []


@pytest.mark.asyncio
async def test_images_and_embedding_files_mixed_keep_their_order(tmp_path: Path) -> None:
    loader = await loader_over(GatedEngine(), allowed_local_path=tmp_path)
    three, five = write_embeddings(tmp_path, "a.pt", 3), write_embeddings(tmp_path, "b.pt", 5)
    items = await loader.load(parts(three, png_url(1), five, png_url(2), three), ROOMY)
    assert [len(item.token_ids) for item in items if isinstance(item, EncodedMedia)] == [
        3,
        IMAGE_TOKENS,
        5,
        IMAGE_TOKENS,
        3,
    ]
    assert items[0] is items[4]


@pytest.mark.asyncio
async def test_too_many_images_are_refused_before_any_is_fetched() -> None:
    loader, fetches = await counted(GatedEngine(), max_images=2)
    with pytest.raises(LimitFault, match="the request holds 3 images; this worker takes at most 2"):
        await loader.load(parts(png_url(1), png_url(2), png_url(3)), ROOMY)
    assert fetches.count == 0


@pytest.mark.asyncio
async def test_each_kind_has_a_limit_of_its_own() -> None:
    loader, fetches = await counted(GatedEngine(), max_images=4, limits={"image": 1, "video": 0})
    with pytest.raises(LimitFault, match="the request holds 2 images; this worker takes at most 1"):
        await loader.load(parts(png_url(1), png_url(2)), ROOMY)
    loader = await loader_over(
        GatedEngine(placeholder_ids={"image": PLACEHOLDER, "video": 8}), limits={"video": 0}
    )
    with pytest.raises(LimitFault, match="the request holds 1 video; this worker takes at most 0"):
        await loader.load([MediaPart(1, "video", "https://x/y")], ROOMY)
    with pytest.raises(LimitFault, match="the request holds 17 images; this worker takes at most 16"):
        await loader.load(parts(*map(png_url, range(17))), ROOMY)
    assert fetches.count == 0


@pytest.mark.asyncio
async def test_a_part_that_its_text_condemns_is_refused_before_any_is_fetched() -> None:
    loader, fetches = await counted(GatedEngine())
    with pytest.raises(PartFault, match="image 2: url scheme 'ftp' is not supported"):
        await loader.load(parts(png_url(1), "ftp://x/y"), ROOMY)
    with pytest.raises(PartFault, match=r"audio 1: this worker's model takes no audio$"):
        await loader.load([MediaPart(1, "audio", "https://x/y")], ROOMY)
    engine = GatedEngine()
    told = replace(await engine.start(), refusals={"audio": "X 2.1 cannot"})
    with pytest.raises(PartFault, match=r"audio 1: this worker's model takes no audio \(X 2.1 cannot\)$"):
        await (await loader_over(engine, info=told)).load([MediaPart(1, "audio", "https://x/y")], ROOMY)
    assert fetches.count == 0


@pytest.mark.asyncio
async def test_a_text_worker_takes_no_images() -> None:
    loader = await loader_over(GatedEngine(), Modality.TEXT)
    with pytest.raises(PartFault, match="image 1: this worker takes no images; it serves text alone"):
        await loader.load(parts(png_url(1)), ROOMY)


@pytest.mark.asyncio
async def test_a_prompt_too_long_with_its_images_is_refused_with_both_counts_before_any_is_encoded() -> None:
    engine = GatedEngine()
    loader = await loader_over(engine)
    both = parts(png_url(1), png_url(2))
    with pytest.raises(LimitFault) as caught:
        await loader.load(both, TokenBudget(7, 15))
    assert caught.value.message == "the prompt has 15 tokens with its media; the context length is 15"
    assert engine.encoded == []
    assert len(await loader.load(both, TokenBudget(7, 16))) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "bad", ["data:image/png;base64," + base64.b64encode(b"no image").decode(), "data:image/png,"]
)
async def test_one_bad_part_is_named_and_none_of_the_others_is_encoded(bad: str) -> None:
    engine = GatedEngine()
    loader = await loader_over(engine)
    with pytest.raises(PartFault) as caught:
        await loader.load(parts(png_url(1), png_url(2), bad), ROOMY)
    assert caught.value.position == 3
    assert engine.encoded == []


@pytest.mark.asyncio
async def test_embeddings_that_do_not_fit_the_model_name_their_part(tmp_path: Path) -> None:
    loader = await loader_over(GatedEngine(), allowed_local_path=tmp_path)
    import torch

    torch.save(torch.ones(2, 5), tmp_path / "wide.pt")
    with pytest.raises(PartFault) as caught:
        await loader.load(parts(png_url(1), f"file://{tmp_path / 'wide.pt'}"), ROOMY)
    assert caught.value.message == "image 2: embeddings must be [tokens, 8] for this model, not [2, 5]"


@pytest.mark.asyncio
async def test_a_missing_file_does_not_name_the_servers_path(tmp_path: Path) -> None:
    loader = await loader_over(GatedEngine(), allowed_local_path=tmp_path)
    with pytest.raises(PartFault) as caught:
        await loader.load(parts(f"file://{tmp_path / 'none.pt'}"), ROOMY)
    assert caught.value.message == "image 1: not a readable file inside the allowed directory"


@pytest.mark.asyncio
async def test_the_same_image_is_encoded_once_at_a_time_and_then_kept() -> None:
    engine = GatedEngine()
    engine.gate = asyncio.Event()
    loader = await loader_over(engine)
    first = asyncio.create_task(loader.load(parts(png_url(1)), ROOMY))
    await engine.encoding.wait()
    other_name = png_url(1).replace("image/png", "image/x-png")
    second = asyncio.create_task(loader.load(parts(png_url(1), other_name), ROOMY))
    await until(lambda: loader.stats()[metrics.MEDIA_CACHE_HITS] == 2)
    engine.gate.set()
    (kept,) = await first
    assert await second == [kept, kept]
    assert await loader.load(parts(png_url(1)), ROOMY) == [kept]
    assert len(engine.encoded) == 1
    assert loader.stats()[metrics.MEDIA_CACHE_MISSES] == 1


@pytest.mark.asyncio
async def test_a_client_that_leaves_does_not_take_the_image_from_another() -> None:
    engine = GatedEngine()
    engine.gate = asyncio.Event()
    loader = await loader_over(engine)
    leaving = asyncio.create_task(loader.load(parts(png_url(1)), ROOMY))
    await engine.encoding.wait()
    staying = asyncio.create_task(loader.load(parts(png_url(1)), ROOMY))
    await until(lambda: loader.stats()[metrics.MEDIA_CACHE_HITS] == 1)
    await cancelled(leaving)
    engine.gate.set()
    assert len(await staying) == 1
    assert len(engine.encoded) == 1


@pytest.mark.asyncio
async def test_a_failure_is_not_kept_in_the_cache() -> None:
    class Failing(GatedEngine):
        async def encode(self, images: Sequence[DecodedImage]) -> list[EncodedMedia]:
            if not self.encoded:
                self.encoded.append("failed")
                raise ClientFault("no")
            return await super().encode(images)

    loader = await loader_over(Failing())
    error = await outcome(loader.load(parts(png_url(1)), ROOMY))
    assert isinstance(error, PartFault)
    assert error.message == "image 1: no"
    assert len(await loader.load(parts(png_url(1)), ROOMY)) == 1


@pytest.mark.asyncio
async def test_a_uuid_alone_is_the_content_that_came_with_it_and_fetches_nothing(tmp_path: Path) -> None:
    engine = GatedEngine()
    loader, fetches = await counted(engine, allowed_local_path=tmp_path)
    picture, file = await loader.load(
        [named("u", png_url(1)), named("f", write_embeddings(tmp_path, "e.pt", 3), position=2)], ROOMY
    )
    fetches.count = 0
    found = await loader.load([named("f"), named("u", position=2), named("f", position=3)], ROOMY)
    assert [each is item for each, item in zip(found, (file, picture, file), strict=True)] == [True] * 3
    assert (fetches.count, len(engine.encoded)) == (0, 1)
    with pytest.raises(LimitFault, match=f"the prompt has {1 + IMAGE_TOKENS + 3} tokens with its media"):
        await loader.load([named("u"), named("f", position=2)], TokenBudget(1, IMAGE_TOKENS + 4))


@pytest.mark.asyncio
async def test_a_uuid_that_names_nothing_here_is_refused_before_anything_is_fetched() -> None:
    loader, fetches = await counted(GatedEngine())
    await loader.load([named("u", png_url(1), "ours")], ROOMY)
    fetches.count = 0
    for stranger in (named("v", "", "ours"), named("u", "", "theirs"), named("u", "", None)):
        with pytest.raises(PartFault) as caught:
            await loader.load([*parts(png_url(9)), replace(stranger, position=2)], ROOMY)
        assert caught.value.message == (
            "image 2: its uuid is not known here, or its content is no longer kept; "
            "send the content with it again"
        )
    assert fetches.count == 0


@pytest.mark.asyncio
async def test_content_that_left_the_cache_leaves_its_uuid_unknown() -> None:
    size = IMAGE_TOKENS * HIDDEN * 4
    loader = await loader_over(GatedEngine(), cache_bytes=size)
    await loader.load([named("u", png_url(1))], ROOMY)
    await loader.load([named("u")], ROOMY)
    await loader.load(parts(png_url(2)), ROOMY)
    with pytest.raises(
        PartFault, match="image 1: its uuid is not known here, or its content is no longer kept"
    ):
        await loader.load([named("u")], ROOMY)


@pytest.mark.asyncio
async def test_content_wins_over_what_its_uuid_named_before_however_it_is_prepared() -> None:
    engine = GatedEngine()
    loader = await loader_over(engine)
    (old,) = await loader.load([named("u", png_url(1))], ROOMY)
    (new,) = await loader.load([named("u", png_url(2), tokens=7)], ROOMY)
    assert (old.digest != new.digest, len(engine.encoded)) == (True, 2)
    with pytest.raises(PartFault, match="image 1: its uuid is not known here"):
        await loader.load([named("u")], ROOMY)  # the old content was prepared like this, and is in the cache
    assert await loader.load([named("u", tokens=7)], ROOMY) == [new]


@pytest.mark.asyncio
async def test_content_that_cannot_be_loaded_leaves_its_uuid_as_it_was() -> None:
    loader = await loader_over(GatedEngine())
    (good,) = await loader.load([named("u", png_url(1))], ROOMY)
    with pytest.raises(PartFault):
        await loader.load([named("u", "data:image/png;base64,AAAA")], ROOMY)
    assert await loader.load([named("u")], ROOMY) == [good]


@pytest.mark.asyncio
async def test_one_uuid_names_one_content_within_a_request() -> None:
    engine = GatedEngine()
    loader = await loader_over(engine)
    alone, sent = await loader.load([named("u"), named("u", png_url(1), position=2)], ROOMY)
    assert alone is sent
    engine.encoded.clear()
    with pytest.raises(PartFault) as caught:
        await loader.load([named("v", png_url(3)), named("v", png_url(4), position=2)], ROOMY)
    assert caught.value.message == "image 2: its uuid names another content in the same request"
    assert engine.encoded == []


@pytest.mark.asyncio
async def test_options_of_the_processor_are_part_of_an_items_name() -> None:
    engine = GatedEngine()
    loader = await loader_over(engine)
    lengths = {}
    for options in ({}, {"tokens": 7}, {"tokens": 8}, {"tokens": 7}, {}):
        (item,) = await loader.load([replace(parts(png_url(1))[0], options=options)], ROOMY)
        assert isinstance(item, EncodedMedia)
        lengths[item.digest] = len(item.token_ids)
    assert sorted(lengths.values()) == [IMAGE_TOKENS, 7, 8]
    assert len(engine.encoded) == 3
    with pytest.raises(LimitFault, match="the prompt has 9 tokens with its media"):
        await loader.load([replace(parts(png_url(1))[0], options={"tokens": 8})], TokenBudget(1, 9))


@pytest.mark.asyncio
async def test_no_processor_prepares_an_embedding_file(tmp_path: Path) -> None:
    loader = await loader_over(GatedEngine(), allowed_local_path=tmp_path)
    url = write_embeddings(tmp_path, "e.pt", 3)
    await loader.load([named("u", url)], ROOMY)
    for part in (named("u", url, tokens=7), named("u", tokens=7)):
        with pytest.raises(
            PartFault, match="image 1: no processor prepares an embedding file: leave out mm_processor_kwargs"
        ):
            await loader.load([part], ROOMY)


@pytest.mark.asyncio
async def test_an_engine_that_is_given_decoded_images_finds_them_by_their_uuid_too() -> None:
    engine = GatedEngine()
    info = await engine.start()
    taken = {kind: replace(each, encodes=False) for kind, each in info.media.items()}
    loader = await loader_over(engine, info=replace(info, media=taken))
    (sent,) = await loader.load([named("u", png_url(7), tokens=5)], ROOMY)
    (found,) = await loader.load([named("u", tokens=5)], ROOMY)
    assert isinstance(found, DecodedImage)
    assert (found is sent, found.options) == (True, {"tokens": 5})
    assert engine.encoded == []
