"""Deciding what a media part refers to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.errors import PartFault
from dynamo.trtllm.multimodal.parts import (
    DataSource,
    EmbeddingFile,
    HttpSource,
    MediaFile,
    MediaPart,
    Source,
    classify,
    describe,
    reference_of,
)

CONFIG = MediaConfig(allowed_local_path=Path("/tmp"), local_files=True, max_file_bytes=1 << 20)


def image(url: object) -> MediaPart:
    return MediaPart(2, "image", url)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("https://host/a.png", HttpSource("https://host/a.png")),
        ("HTTP://HOST:8080/a?b=c.pt#d", HttpSource("HTTP://HOST:8080/a?b=c.pt")),
        (" https://host/a.png\n", HttpSource("https://host/a.png")),
        ("https://host/图片 1.png", HttpSource("https://host/图片 1.png")),
        ("data:image/png;base64,AAAA", DataSource("image/png", "AAAA", True)),
        ("DATA:image/PNG;charset=x;BASE64,A\nA", DataSource("image/png", "A\nA", True)),
        ("data:,%89", DataSource("", "%89", False)),
        ("data:binary/octet-stream;base64,AAAA", DataSource("binary/octet-stream", "AAAA", True)),
        ("data:text/plain;base64,AAAA", DataSource("text/plain", "AAAA", True)),
        ("data:<script>,AAAA", DataSource("<script>", "AAAA", False)),
        ("data:;base64,AAAA", DataSource("", "AAAA", True)),
        ("file:///tmp/X.PT", EmbeddingFile("/tmp/X.PT", ".pt")),
        ("file://localhost/tmp/a%20b.safetensors", EmbeddingFile("/tmp/a b.safetensors", ".safetensors")),
        ("file:///tmp/x.pth?sig=1#y", EmbeddingFile("/tmp/x.pth", ".pth")),
        ("/tmp/x.bin", EmbeddingFile("/tmp/x.bin", ".bin")),
        ("/tmp/image.png.pt", EmbeddingFile("/tmp/image.png.pt", ".pt")),
        ("relative/x.pt", EmbeddingFile("relative/x.pt", ".pt")),
        ("file:///tmp/a.pt.png", MediaFile("/tmp/a.pt.png")),
    ],
)
def test_a_url_is_understood_by_its_scheme_and_the_suffix_of_its_path(url: str, source: Source) -> None:
    assert classify(image(url), CONFIG) == source


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "image 2: its url is empty"),
        ("  \n", "image 2: its url is empty"),
        (None, "image 2: its url is missing or not a string"),
        (7, "image 2: its url is missing or not a string"),
        ({"url": "x"}, "image 2: its url is missing or not a string"),
        ("https://", "image 2: its url is not a valid URL"),
        ("https://host:99999/x", "image 2: its url is not a valid URL"),
        ("https://[::1/x", "image 2: its url is not a valid URL"),
        ("https://ho st/x", "image 2: its url is not a valid URL"),
        ("https://host/" + "a" * 8200, "image 2: its url is longer than 8192 characters"),
        ("s3://bucket/a.png", "image 2: url scheme 's3' is not supported; use http, https, data or file"),
        ("ftp://host/a.png", "image 2: url scheme 'ftp' is not supported; use http, https, data or file"),
        ("C:\\x.png", "image 2: url scheme 'c' is not supported; use http, https, data or file"),
        ("data:image/png;base64", "image 2: its data URL has no comma before the data"),
        ("data:image/png;base64," + "A" * (4 << 20), "image 2: larger than this worker's limit of 1 MiB"),
        ("file://host/tmp/x.pt", "image 2: a file URL must not name a host; write file:///path"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_words_that_name_the_part(url: object, words: str) -> None:
    with pytest.raises(PartFault) as caught:
        classify(image(url), CONFIG)
    assert caught.value.message == words


@pytest.mark.parametrize("suffix", [".pt", ".PTH", ".bin", ".safetensors", ".p%74", ".pt?sig=1"])
def test_embedding_files_are_never_fetched_over_http(suffix: str) -> None:
    with pytest.raises(PartFault, match=r"embedding files are not fetched over http"):
        classify(image(f"https://host/photo{suffix}"), CONFIG)


def test_image_files_need_a_directory_that_was_allowed_explicitly() -> None:
    with pytest.raises(PartFault, match="only when the worker's allowed local media path is set explicitly"):
        classify(image("file:///tmp/a.png"), MediaConfig())
    assert classify(image("file:///tmp/a.pt"), MediaConfig()) == EmbeddingFile("/tmp/a.pt", ".pt")


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_every_kind_comes_from_the_web_from_a_data_url_and_from_an_allowed_file(kind: str) -> None:
    def source(url: str) -> Source:
        return classify(MediaPart(1, kind, url), CONFIG)

    found = source("https://host/a.pt?b#c")
    assert found == HttpSource("https://host/a.pt?b")
    assert isinstance(found, HttpSource)
    assert found.accept.startswith(f"{kind}/*,")
    assert source(f"data:{kind}/x;base64,AAAA") == DataSource(f"{kind}/x", "AAAA", True)
    assert source("file:///tmp/a.x") == MediaFile("/tmp/a.x")


@pytest.mark.parametrize(("kind", "plural"), [("video", "videos"), ("audio", "audio")])
def test_files_of_another_kind_are_refused_in_words_that_name_it(kind: str, plural: str) -> None:
    with pytest.raises(PartFault) as caught:
        classify(MediaPart(3, kind, "file:///tmp/a.x"), MediaConfig())
    assert caught.value.message == (
        f"{kind} 3: {kind} files are served only when the worker's allowed local media path is set explicitly"
    )
    with pytest.raises(PartFault) as caught:
        classify(MediaPart(3, kind, "file:///tmp/a.pt"), CONFIG)
    assert caught.value.message == f"{kind} 3: embedding files do not stand for {plural}"


def test_a_kind_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(PartFault) as caught:
        classify(MediaPart(1, "smell", "https://host/a"), CONFIG)
    assert caught.value.message == "smell 1: this worker takes no smell; it serves images, videos and audio"
    assert caught.value.position == 1


def test_a_text_worker_says_that_it_takes_no_images() -> None:
    with pytest.raises(PartFault, match="image 2: this worker takes no images; it serves text alone"):
        classify(image("https://host/a.png"), CONFIG, Modality.TEXT)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://user:secret@host:81/a.png?token=1#x", "https://host:81/a.png"),
        ("data:image/png;base64," + "A" * 1000, "data:image/png (1022 characters)"),
        ("/tmp/x.pt", "/tmp/x.pt"),
        (None, "(not a string)"),
        ("https://[broken", "(not a URL)"),
        ("https://host/a\nb", "https://host/ab"),
    ],
)
def test_a_described_url_holds_neither_credentials_nor_query_nor_payload(url: object, text: str) -> None:
    assert describe(url) == text


def test_a_described_url_is_at_most_100_characters_and_no_repr_shows_a_payload() -> None:
    for url in ("https://host/" + "a" * 5000, "data:" + "b" * 5000, "data:image/png," + "c" * 5000):
        assert len(describe(url)) <= 100
    part = image("data:image/png;base64,SECRET")
    assert "SECRET" not in repr(part) + repr(classify(part, CONFIG))


@pytest.mark.parametrize(
    ("url", "reference"),
    [
        (" https://host/a.png?b=c#top\n", "https://host/a.png?b=c"),
        ("HTTPS://host/a.png#a?b#c", "HTTPS://host/a.png"),
        ("https://host/a%23b.png", "https://host/a%23b.png"),
        ("data:image/png;base64,AA#A", "data:image/png;base64,AA#A"),
        ("file:///tmp/a%23b.pt", "file:///tmp/a%23b.pt"),
    ],
)
def test_two_urls_that_differ_in_a_fragment_or_in_space_around_them_are_one_reference(
    url: str, reference: str
) -> None:
    assert reference_of(url) == reference
