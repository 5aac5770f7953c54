"""`mm_processor_kwargs` on the portable engine:
what Transformers' own processor makes of the same keys, for every family."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dynamo.trtllm.core import DecodedImage, MediaShape
from dynamo.trtllm.engines.port import EngineInfo
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.errors import ClientFault
from engines.families import WITH_IMAGES, make_tiny_engine, noise_image, save_tiny_model, saved_processor

CELL = 28 * 28
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIZES = [(60, 200), (300, 120), (33, 40)]


@pytest.fixture(scope="module", params=list(WITH_IMAGES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return request.param, save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest_asyncio.fixture
async def started(saved: tuple[str, Any]) -> AsyncIterator[tuple[str, TransformersEngine, EngineInfo]]:
    family, directory = saved
    engine = make_tiny_engine(directory, family)
    yield family, engine, await engine.start()
    await engine.close()


def asked_of(family: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Options as a client sends them, and the same in the words of the family's processor."""
    if family == "mistral3":
        return [({"size": {"longest_edge": edge}}, {"size": {"longest_edge": edge}}) for edge in (56, 112)]
    low, high = CELL * 2, CELL * 6
    small = {"size": {"shortest_edge": low, "longest_edge": high}}
    large = {"size": {"shortest_edge": high, "longest_edge": CELL * 40}}
    newer_and_older = {"size": {"shortest_edge": low, "longest_edge": CELL * 40}, "max_pixels": high}
    return [({"min_pixels": low, "max_pixels": high}, small), (large, large), (newer_and_older, small)]


@pytest.mark.asyncio
@pytest.mark.parametrize("saved", [*QWEN, "mistral3"], indirect=True)
async def test_an_image_is_prepared_as_transformers_prepares_it_with_the_same_keys(
    saved: tuple[str, Any],
    started: tuple[str, TransformersEngine, EngineInfo],
) -> None:
    family, engine, info = started
    processor = saved_processor(saved[1])
    for number, (options, theirs) in enumerate(asked_of(family)):
        for width, height in SIZES:
            image = noise_image(number, width, height)
            (encoded,) = await engine.encode([DecodedImage("d", image, options=options)])
            prepared = processor(
                text=[processor.image_token], images=[[image]], return_tensors="pt", **theirs
            )
            wanted = (prepared["input_ids"][0] == info.extras["image_token_id"]).sum().item()
            assert encoded.token_ids.count(info.extras["image_token_id"]) == wanted
            assert len(encoded.token_ids) == engine.media_tokens(
                MediaShape("image", (width, height)), options
            )
            for key in encoded.extras:
                assert encoded.extras[key] == prepared[key][0].tolist()


@pytest.mark.asyncio
async def test_a_family_knows_the_keys_that_its_processor_takes_without_changing_the_prompt(
    started: tuple[str, TransformersEngine, EngineInfo],
) -> None:
    family, _, info = started
    known = {name: sorted(option.fields) for name, option in info.media["image"].options.items()}
    if family in QWEN:
        assert known == {"min_pixels": [], "max_pixels": [], "size": ["longest_edge", "shortest_edge"]}
    else:
        assert known == ({"size": ["longest_edge"]} if family == "mistral3" else {})


@pytest.mark.asyncio
@pytest.mark.parametrize("saved", ["qwen2_vl"], indirect=True)
@pytest.mark.parametrize(
    "asked",
    [
        {"min_pixels": CELL * 4, "max_pixels": CELL * 2},
        {"max_pixels": CELL * 2, "size": {"shortest_edge": CELL * 3}},
    ],
)
async def test_more_pixels_at_least_than_at_most_are_refused(
    started: tuple[str, TransformersEngine, EngineInfo], asked: dict[str, Any]
) -> None:
    _, engine, _ = started
    with pytest.raises(ClientFault, match="mm_processor_kwargs ask for more pixels at least than at most"):
        engine.media_tokens(MediaShape("image", (56, 56)), asked)
