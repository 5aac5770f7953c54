"""Embeddings that come from elsewhere: what the portable engine adopts and refuses,
and that they answer like their image."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm.core import DecodedImage, EncodedMedia
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.errors import ClientFault
from engines.contract import generate, place, request
from engines.families import WITH_IMAGES, make_tiny_engine, noise_image, save_tiny_model

IDS = tuple(range(21, 29))
HIDDEN = 64


@dataclass
class Subject:
    family: str
    engine: TransformersEngine
    encoded: EncodedMedia


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(family)) for family in WITH_IMAGES}


async def _subject(directories: Mapping[str, Path], family: str) -> Subject:
    engine = make_tiny_engine(directories[family], family)
    await engine.start()
    (encoded,) = await engine.encode([DecodedImage("image", noise_image(3, 84, 56))])
    return Subject(family, engine, encoded)


@pytest_asyncio.fixture(params=list(WITH_IMAGES))
async def subject(request: pytest.FixtureRequest, directories: dict[str, Path]) -> AsyncIterator[Subject]:
    subject = await _subject(directories, request.param)
    yield subject
    await subject.engine.close()


@pytest_asyncio.fixture
async def qwen(directories: dict[str, Path]) -> AsyncIterator[TransformersEngine]:
    subject = await _subject(directories, "qwen2_vl")
    yield subject.engine
    await subject.engine.close()


@pytest.mark.asyncio
async def test_the_embeddings_of_an_image_give_the_answer_of_the_image(subject: Subject) -> None:
    stored = {name: tensor[None].double().clone() for name, tensor in subject.encoded.tensors.items()}
    extras = {key: torch.tensor([value]) for key, value in subject.encoded.extras.items()}
    adopted = subject.engine.adopt_embeddings("image", "file", stored, extras)
    assert adopted.token_ids == subject.encoded.token_ids
    answers = []
    for item in (subject.encoded, adopted):
        ids, media = place(IDS, [item], IDS)
        answers.append(
            (
                await generate(subject.engine, request(ids, media=media, max_tokens=12, ignore_eos=True))
            ).token_ids
        )
    assert answers[0] == answers[1]


@pytest.mark.asyncio
async def test_all_levels_of_embeddings_are_needed(directories: dict[str, Path]) -> None:
    subject = await _subject(directories, "qwen3_vl")
    try:
        assert sorted(subject.encoded.tensors) == ["features", "features.1", "features.2"]
        for missing in subject.encoded.tensors:
            rest = {name: tensor for name, tensor in subject.encoded.tensors.items() if name != missing}
            with pytest.raises(ClientFault, match=f"3 levels.*{missing}"):
                subject.engine.adopt_embeddings("image", "file", rest, subject.encoded.extras)
        uneven = {**subject.encoded.tensors, "features.1": subject.encoded.tensors["features.1"][:-1]}
        with pytest.raises(ClientFault, match="same number of rows"):
            subject.engine.adopt_embeddings("image", "file", uneven, subject.encoded.extras)
    finally:
        await subject.engine.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("features", "extras", "words"),
    [
        (torch.zeros(2, 4, HIDDEN), {}, "batch of 2"),
        (torch.zeros(4, HIDDEN + 1), {}, "64"),
        (torch.zeros(4), {}, "64"),
        (torch.zeros(1, 1, 4, HIDDEN), {}, "64"),
        (torch.zeros(0, HIDDEN), {}, "64"),
        (torch.zeros(4, HIDDEN, dtype=torch.int8), {}, "floating point, not int8"),
        (torch.zeros(4, HIDDEN, dtype=torch.complex64), {}, "floating point"),
        (torch.full((4, HIDDEN), torch.nan), {}, "finite"),
        (torch.full((4, HIDDEN), 1e300, dtype=torch.float64), {}, "finite"),
        (torch.zeros(6, HIDDEN), {}, "image_grid_thw"),
        (torch.zeros(6, HIDDEN), {"image_grid_thw": [1, 4, 4]}, "does not fit 6 rows"),
        (torch.zeros(4, HIDDEN), {"image_grid_thw": [2, 4, 2]}, "does not fit 4 rows"),
        (torch.zeros(4, HIDDEN), {"image_grid_thw": [1, 16, 1]}, "does not fit 4 rows"),
        (torch.zeros(4, HIDDEN), {"image_grid_thw": [[1, 4, 4], [1, 4, 4]]}, "3 integers"),
        (torch.zeros(4, HIDDEN), {"image_grid_thw": [1, 4, 4.0]}, "3 integers"),
        (torch.zeros(2049, HIDDEN), {}, "2049.*2048"),
    ],
)
async def test_embeddings_that_do_not_fit_are_refused_in_words(
    qwen: TransformersEngine, features: torch.Tensor, extras: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClientFault, match=words):
        qwen.adopt_embeddings("image", "file", {"features": features}, extras)


@pytest.mark.asyncio
async def test_a_square_needs_no_grid(qwen: TransformersEngine) -> None:
    adopted = qwen.adopt_embeddings(
        "image", "file", {"features": torch.zeros(9, HIDDEN, dtype=torch.bfloat16)}, {}
    )
    assert adopted.extras == {"image_grid_thw": [1, 6, 6]}
    assert len(adopted.token_ids) == 9
    assert adopted.tensors["features"].dtype == torch.float32
    with pytest.raises(ClientFault, match="features is missing"):
        qwen.adopt_embeddings("image", "file", {"other": torch.zeros(9, HIDDEN)}, {})


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["llava", "gemma3"])
async def test_models_with_one_image_size_take_no_other_number_of_rows(
    directories: dict[str, Path], family: str
) -> None:
    subject = await _subject(directories, family)
    try:
        with pytest.raises(ClientFault, match="4 rows of embeddings per image, not 5"):
            subject.engine.adopt_embeddings("image", "file", {"features": torch.zeros(5, HIDDEN)}, {})
    finally:
        await subject.engine.close()


@pytest.mark.asyncio
async def test_rows_with_breaks_need_the_size_of_the_image(directories: dict[str, Path]) -> None:
    subject = await _subject(directories, "mistral3")
    try:
        with pytest.raises(ClientFault, match="image_sizes"):
            subject.engine.adopt_embeddings("image", "file", {"features": torch.zeros(6, HIDDEN)}, {})
        sizes = {"image_sizes": [56, 84]}
        adopted = subject.engine.adopt_embeddings(
            "image", "file", {"features": torch.zeros(6, HIDDEN)}, sizes
        )
        assert adopted.token_ids == (7, 7, 7, 11, 7, 7, 7, 10)
    finally:
        await subject.engine.close()
