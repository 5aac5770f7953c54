"""`mm_processor_kwargs` against what a model knows: each kind gets its own, and nothing else passes."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.trtllm.engines.port import MediaInput, ProcessorOption
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.options import options_by_kind

PIXELS = ProcessorOption(least=784, most=7840)
MEDIA = {
    "image": MediaInput(
        placeholder_id=1,
        options={"max_pixels": PIXELS, "size": ProcessorOption(fields={"longest_edge": PIXELS})},
    ),
    "video": MediaInput(
        placeholder_id=2,
        options={"max_pixels": PIXELS, "fps": ProcessorOption(least=0.1, most=60, whole=False)},
    ),
    "audio": MediaInput(placeholder_id=3),
}
KNOWN = "this model knows fps, max_pixels and size"


def test_each_kind_gets_the_keys_that_it_knows() -> None:
    given = {"size": {"longest_edge": 800}, "fps": 2, "max_pixels": 1000.0}
    found = options_by_kind(given, MEDIA)
    assert found == {
        "image": {"max_pixels": 1000, "size": {"longest_edge": 800}},
        "video": {"fps": 2.0, "max_pixels": 1000},
        "audio": {},
    }
    assert repr(found["video"]) == "{'fps': 2.0, 'max_pixels': 1000}"


def test_a_null_is_as_good_as_a_missing_key() -> None:
    assert options_by_kind({"fps": None, "max_pixels": None, "bits": None}, MEDIA) == {
        "image": {},
        "video": {},
        "audio": {},
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_pixel": 800}, f"mm_processor_kwargs: max_pixel is not known; {KNOWN}"),
        ({"images_kwargs": {}}, f"mm_processor_kwargs: images_kwargs is not known; {KNOWN}"),
        ({"a b": 1}, f"mm_processor_kwargs: a key is not known; {KNOWN}"),
        ({"x" * 41: 1}, f"mm_processor_kwargs: a key is not known; {KNOWN}"),
        (
            {"max_pixels": "800"},
            "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840",
        ),
        ({"max_pixels": True}, "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840"),
        (
            {"max_pixels": [800]},
            "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840",
        ),
        (
            {"max_pixels": 783},
            "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840, not 783",
        ),
        (
            {"max_pixels": 900.5},
            "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840, not 900.5",
        ),
        (
            {"max_pixels": 1e300},
            "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840",
        ),
        (
            {"max_pixels": 10**400},
            "mm_processor_kwargs: max_pixels must be a whole number between 784 and 7840",
        ),
        ({"fps": 61}, "mm_processor_kwargs: fps must be a number between 0.1 and 60, not 61"),
        ({"fps": float("nan")}, "mm_processor_kwargs: fps must be a number between 0.1 and 60"),
        ({"size": 800}, "mm_processor_kwargs: size must be an object"),
        (
            {"size": {"longest_edge": 1}},
            "mm_processor_kwargs: size: longest_edge must be a whole number between 784 and 7840, not 1",
        ),
        (
            {"size": {"height": 1}},
            "mm_processor_kwargs: size: height is not known; this model knows longest_edge",
        ),
    ],
)
def test_what_the_model_does_not_know_is_refused_in_words_that_name_the_key(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClientFault) as caught:
        options_by_kind(given, MEDIA)
    assert caught.value.message == words


def test_a_model_without_options_says_so() -> None:
    for media in ({}, {"image": MediaInput(placeholder_id=1)}):
        with pytest.raises(ClientFault) as caught:
            options_by_kind({"fps": 1}, media)
        assert caught.value.message == "mm_processor_kwargs: fps is not known; this model knows no such keys"
