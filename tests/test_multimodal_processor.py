"""From a request to its prompt: placeholders become expansions in order,
and what does not fit is refused first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.core import (
    Context,
    DecodedImage,
    EncodedMedia,
    MediaItem,
    PlacedMedia,
    Prompt,
    TokenBudget,
)
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.engines.port import EngineInfo, MediaInput
from dynamo.trtllm.errors import ClientFault, LimitFault, PartFault
from dynamo.trtllm.frontend.request import Request, parse_request
from dynamo.trtllm.multimodal.parts import MediaPart
from dynamo.trtllm.multimodal_processor import MultimodalProcessor, expand
from fakes import FakeContext, raw_request
from media_parts import IMAGE_TOKENS, PLACEHOLDER, GatedEngine, loader_over, png_url, write_embeddings

CLIP_PLACEHOLDER = 8
UNSEEN = "without other media beside it no worker gets input_audio: send it as audio_url, with a data URL"


class Source:
    """A media source with ready items; `asked` holds what it was asked for."""

    def __init__(self, *items: MediaItem) -> None:
        self.items = list(items)
        self.asked: list[tuple[Sequence[MediaPart], TokenBudget, Context | None]] = []
        self.closed = False

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[MediaItem]:
        self.asked.append((parts, budget, context))
        return self.items

    def stats(self) -> Mapping[str, float]:
        return {metrics.MEDIA_CACHE_MISSES: len(self.asked)}

    async def close(self) -> None:
        self.closed = True


PLACES = {"image": PLACEHOLDER, "video": CLIP_PLACEHOLDER}


def image(digest: str, *token_ids: int) -> EncodedMedia:
    return EncodedMedia("image", digest, {}, token_ids)


def info(context_length: int = 100, placeholder: int | None = PLACEHOLDER) -> EngineInfo:
    return EngineInfo(
        context_length=context_length,
        kv_block_size=32,
        total_kv_blocks=None,
        max_num_seqs=1,
        max_num_batched_tokens=100,
        media={} if placeholder is None else {"image": MediaInput(placeholder_id=placeholder)},
    )


def request(*token_ids: int, urls: Sequence[str] = (), **options: Any) -> Request:
    return parse_request(raw_request(*token_ids, images=tuple(urls), **options), FakeContext())


def test_each_placeholder_becomes_its_own_images_tokens_in_order() -> None:
    a, b = image("a", 50, 51), image("b", 60)
    assert expand((1, PLACEHOLDER, 2, PLACEHOLDER, 3), PLACES, [a, b], "text") == Prompt(
        (1, 50, 51, 2, 60, 3), (PlacedMedia(a, 1, 2), PlacedMedia(b, 4, 1)), "text"
    )


def test_an_expansion_that_holds_the_placeholder_itself_is_not_expanded_again() -> None:
    a, b = image("a", PLACEHOLDER, PLACEHOLDER), image("b", PLACEHOLDER)
    prompt = expand((PLACEHOLDER, PLACEHOLDER), PLACES, [a, b])
    assert prompt.token_ids == (PLACEHOLDER,) * 3
    assert [(each.item.digest, each.start, each.length) for each in prompt.media] == [
        ("a", 0, 2),
        ("b", 2, 1),
    ]


def test_a_decoded_image_keeps_its_placeholder() -> None:
    from PIL import Image

    decoded = DecodedImage("d", Image.new("RGB", (1, 1)))
    assert expand((1, PLACEHOLDER), PLACES, [decoded]) == Prompt(
        (1, PLACEHOLDER), (PlacedMedia(decoded, 1, 1),)
    )


def test_items_of_two_kinds_are_placed_where_each_kinds_placeholders_stand() -> None:
    first, second, clip = image("a", 50, 51), image("b", 60), EncodedMedia("video", "c", {}, (70, 71, 72))
    prompt = expand((1, CLIP_PLACEHOLDER, PLACEHOLDER, 2, PLACEHOLDER), PLACES, [first, second, clip])
    assert prompt.token_ids == (1, 70, 71, 72, 50, 51, 2, 60)
    assert prompt.media == (PlacedMedia(clip, 1, 3), PlacedMedia(first, 4, 2), PlacedMedia(second, 7, 1))
    assert prompt.positions() == (1, 1, 2)


@pytest.mark.asyncio
async def test_a_request_without_media_asks_no_source() -> None:
    source, asked = Source(), request(1, 2)
    assert await MultimodalProcessor(info(), source).prepare(asked) is asked.engine_request
    assert asked.engine_request.prompt == Prompt((1, 2))
    assert source.asked == []


@pytest.mark.asyncio
async def test_the_source_is_told_how_much_of_the_context_the_text_takes() -> None:
    source, context = Source(image("a", 5, 6), image("b", 7)), FakeContext()
    asked = request(1, PLACEHOLDER, 2, PLACEHOLDER, urls=["u", "v"], extra_args={"formatted_prompt": "hi"})
    prompt = (await MultimodalProcessor(info(), source).prepare(asked, context)).prompt
    assert (prompt.token_ids, prompt.text) == ((1, 5, 6, 2, 7), "hi")
    assert source.asked == [(asked.media, TokenBudget(2, 100), context)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("token_ids", "urls", "places"),
    [((1, PLACEHOLDER), [], 1), ((1, PLACEHOLDER, PLACEHOLDER), ["u"], 2), ((1, 2), ["u"], 0)],
    ids=["literal alone", "literal beside an image", "none for an image"],
)
async def test_placeholders_and_images_must_be_as_many(
    token_ids: tuple[int, ...], urls: list[str], places: int
) -> None:
    source = Source()
    with pytest.raises(ClientFault) as caught:
        await MultimodalProcessor(info(), source).prepare(request(*token_ids, urls=urls))
    literal, missing = (
        "the text must not contain the model's placeholder",
        "the model's chat template has to write one for each",
    )
    assert caught.value.message == (
        f"the prompt has {places} image placeholders for {len(urls)} image parts; "
        f"{(literal if urls else f'{literal}; {UNSEEN}') if places else missing}"
    )
    assert source.asked == []


@pytest.mark.asyncio
async def test_a_prompt_that_is_too_long_already_is_refused_before_the_source_is_asked() -> None:
    source = Source()
    with pytest.raises(LimitFault) as caught:
        await MultimodalProcessor(info(3), source).prepare(request(1, 2, PLACEHOLDER, urls=["u"]))
    assert caught.value.message == "the prompt has 3 tokens with its media; the context length is 3"
    with pytest.raises(LimitFault) as caught:
        await MultimodalProcessor(info(3), source).prepare(request(1, 2, 3))
    assert caught.value.message == "the prompt has 3 tokens; the context length is 3"
    assert source.asked == []


@pytest.mark.asyncio
async def test_a_prompt_that_its_images_make_too_long_is_refused_naming_both_counts() -> None:
    source = Source(image("a", *range(10, 18)))
    with pytest.raises(LimitFault) as caught:
        await MultimodalProcessor(info(10), source).prepare(request(1, PLACEHOLDER, 2, urls=["u"]))
    assert caught.value.message == "the prompt has 10 tokens with its media; the context length is 10"
    fitting = await MultimodalProcessor(info(11), source).prepare(request(1, PLACEHOLDER, 2, urls=["u"]))
    assert len(fitting.prompt.token_ids) == 10


@pytest.mark.asyncio
async def test_a_placeholder_of_a_part_that_no_worker_gets_is_explained() -> None:
    taken = {"audio": MediaInput(placeholder_id=PLACEHOLDER, takes_encoded=True, encodes=True)}
    hearing = replace(info(), media=taken)
    asked = parse_request({"token_ids": [1, PLACEHOLDER]}, FakeContext())
    with pytest.raises(ClientFault) as caught:
        await MultimodalProcessor(hearing, Source()).prepare(asked)
    assert caught.value.message == (
        "the prompt has 1 audio placeholders for 0 audio parts; "
        f"the text must not contain the model's placeholder; {UNSEEN}"
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
async def test_an_engine_without_media_refuses_them_before_any_is_fetched(kind: str) -> None:
    source = Source()
    raw = {"model": "m", "token_ids": [1], "multi_modal_data": {kind: [{"Url": "u"}]}}
    with pytest.raises(PartFault) as caught:
        await MultimodalProcessor(info(placeholder=None), source).prepare(parse_request(raw, FakeContext()))
    name = kind.removesuffix("_url")
    plural = {"image": "images", "video": "videos", "audio": "audio"}[name]
    assert (
        caught.value.message == f"{name} 1: the model m takes no {plural} on this worker; it takes text only"
    )
    assert source.asked == []


@pytest.mark.asyncio
async def test_a_part_of_a_kind_that_the_engine_does_not_take_is_refused_and_named_among_its_kind() -> None:
    source = Source()
    data = {"image_url": [{"Url": "u"}], "video_url": [{"Url": "v"}]}
    raw = {"model": "m", "token_ids": [1, PLACEHOLDER], "multi_modal_data": data}
    with pytest.raises(PartFault) as caught:
        await MultimodalProcessor(info(), source).prepare(parse_request(raw, FakeContext()))
    assert caught.value.message == "video 1: the model m takes no videos on this worker; it takes images only"
    told = replace(info(), refusals={"video": "the library X 2.1 cannot tell two of them apart"})
    with pytest.raises(PartFault) as caught:
        await MultimodalProcessor(told, source).prepare(parse_request(raw, FakeContext()))
    assert caught.value.message == (
        "video 1: the model m takes no videos on this worker (the library X 2.1 cannot tell two of them "
        "apart); it takes images only"
    )
    assert source.asked == []


@pytest.mark.asyncio
async def test_images_and_embedding_files_are_placed_where_they_were_sent(tmp_path: Path) -> None:
    engine = GatedEngine()
    loader = await loader_over(engine, allowed_local_path=tmp_path)
    processor = MultimodalProcessor(await engine.start(), loader)
    urls = [png_url(1), write_embeddings(tmp_path, "e.pt", 2), png_url(2)]
    prompt = (
        await processor.prepare(request(1, PLACEHOLDER, 2, PLACEHOLDER, PLACEHOLDER, 3, urls=urls))
    ).prompt
    assert prompt.token_ids == (1, *[PLACEHOLDER] * IMAGE_TOKENS, 2, *[PLACEHOLDER] * (2 + IMAGE_TOKENS), 3)
    assert [(each.start, each.length) for each in prompt.media] == [(1, 4), (6, 2), (8, 4)]
    assert len({each.item.digest for each in prompt.media}) == 3
    assert processor.stats()[metrics.MEDIA_CACHE_ENTRIES] == 3
    await processor.close()


@pytest.mark.asyncio
async def test_closing_the_processor_closes_its_source() -> None:
    source = Source()
    processor = MultimodalProcessor(info(), source)
    assert processor.stats() == {metrics.MEDIA_CACHE_MISSES: 0}
    await processor.close()
    assert source.closed


@pytest.mark.asyncio
async def test_the_double_without_a_placeholder_is_such_an_engine() -> None:
    engine = DoubleEngine(EngineConfig(kind=EngineKind.DOUBLE))
    assert (await engine.start()).placeholder_id("image") is None
