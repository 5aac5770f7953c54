"""An aggregated worker with the portable engine and the demo model behind the real frontend,
asked about images."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageCms

from dynamo.trtllm.demo.pictures import draw
from image_files import encoded
from processes.cluster import Answer, Cluster, Managed
from processes.media import ImageServer, image_server, png

QUESTION = "Describe the image"
CONTEXT_LENGTH = 2048


@pytest.fixture(scope="module")
def server() -> Iterator[ImageServer]:
    with image_server() as server:
        server.pages["/page"] = b"<!doctype html><html><body>no picture</body></html>"
        server.pages["/cut.png"] = png(draw(3))[:-200]
        server.pages["/noise.png"] = bytes(range(20))
        yield server


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[Cluster]:
    with Cluster(env={"DYN_MM_ALLOW_INTERNAL": "1", "ALLOWED_LOCAL_MEDIA_PATH": str(directory)}) as cluster:
        cluster.frontend()
        yield cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Managed:
    worker = cluster.worker(
        "--engine", "transformers", "--modality", "multimodal", "--max-seq-len", str(CONTEXT_LENGTH),
        "--limit-mm-per-prompt", "image=4,audio=0", "--allowed-media-domains", "127.0.0.1"
    )
    cluster.wait_listed()
    return worker


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(cluster: Cluster, *urls: str, question: str = QUESTION, **options: Any) -> Answer:
    content = [{"type": "text", "text": question}, *(picture(url) for url in urls)]
    return cluster.chat(content, **{"max_tokens": 160, **options})


def test_the_guides_request_is_answered_with_the_caption_and_counts_image_tokens(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    answer = ask(cluster, server.image_url(1), stream=False)
    assert (answer.status, answer.text, answer.finish_reason) == (200, draw(1).caption, "stop")
    words = cluster.chat([{"type": "text", "text": QUESTION}], max_tokens=2)
    width, height = draw(1).image.size
    assert answer.usage["prompt_tokens"] - words.usage["prompt_tokens"] >= (width // 28) * (height // 28)


def test_the_streamed_answer_is_the_same_and_ends_with_usage(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    unary = ask(cluster, server.image_url(2))
    streamed = ask(cluster, server.image_url(2), stream=True, stream_options={"include_usage": True})
    assert streamed.text == unary.text == draw(2).caption
    assert streamed.usage["prompt_tokens"] == unary.usage["prompt_tokens"]
    assert streamed.usage["completion_tokens"] == unary.usage["completion_tokens"]


def test_thirty_two_images_at_once_are_each_answered_with_their_own_caption(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    seeds = range(100, 132)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda seed: ask(cluster, server.image_url(seed)), seeds))
    assert [a.status for a in answers] == [200] * 32
    alone = [ask(cluster, server.image_url(seed)).text for seed in seeds]
    assert [a.text for a in answers] == alone
    assert sum(a.text == draw(seed).caption for a, seed in zip(answers, seeds, strict=True)) >= 31


def test_the_same_image_by_url_data_url_and_file_gets_the_same_answer(
    cluster: Cluster, worker: Managed, server: ImageServer, directory: Path
) -> None:
    data = png(draw(5))
    (directory / "five.png").write_bytes(data)
    inline = "data:image/png;base64," + base64.b64encode(data).decode()
    texts = [
        ask(cluster, url).text for url in (server.image_url(5), inline, (directory / "five.png").as_uri())
    ]
    assert texts == [draw(5).caption] * 3


def swapped(image: Image.Image) -> tuple[Image.Image, bytes]:
    """`image` with red and blue exchanged, and a colour profile that exchanges them back."""
    red, green, blue = image.split()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profile = profile.replace(b"rXYZ", b"tmp!").replace(b"bXYZ", b"rXYZ").replace(b"tmp!", b"bXYZ")
    return Image.merge("RGB", (blue, green, red)), profile


def with_a_megabyte_of_text(data: bytes) -> bytes:
    body = b"zTXtworkflow\0\0" + zlib.compress(b"x" * 1_100_000)
    return (
        data[:33] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + data[33:]
    )


def test_files_of_other_kinds_get_the_caption_of_their_image(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    image = draw(5).image
    mirrored, profile = swapped(image)
    mirrored.putalpha(255)
    plain = base64.b64encode(png(draw(5))).decode()
    server.pages["/text.png"] = with_a_megabyte_of_text(png(draw(5)))
    server.pages["/profile.png"] = encoded(mirrored, "PNG", icc_profile=profile)
    server.pages["/pages.tiff"] = encoded(
        image, "TIFF", save_all=True, append_images=[draw(9).image], compression="tiff_lzw"
    )
    urls = [server.url + path for path in ("/text.png", "/profile.png", "/pages.tiff?sig=%3A%2F")]
    urls.append("data:binary/octet-stream;base64," + plain)
    assert [ask(cluster, url).text for url in urls] == [draw(5).caption] * 4


def test_a_jpeg_of_thousands_of_passes_is_refused_while_others_are_answered(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    data = encoded(draw(3).image.resize((2000, 2000)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    server.pages["/passes.jpg"] = data[:last] + data[last:-2] * 3000 + data[-2:]
    with ThreadPoolExecutor(8) as pool:
        attacks = [pool.submit(ask, cluster, server.url + "/passes.jpg") for _ in range(8)]
        answers = [ask(cluster, server.image_url(seed)) for seed in (1, 2)]
        refused = [attack.result() for attack in attacks]
    assert [answer.text for answer in answers] == [draw(1).caption, draw(2).caption]
    assert {answer.status for answer in refused} == {400}
    assert {
        "image 1: the JPEG goes over its pixels more often than this worker does" in a.message
        for a in refused
    } == {True}


def test_images_keep_the_order_in_which_they_were_sent(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    first, second = server.image_url(6), server.image_url(7)
    forward = ask(cluster, first, second, question="Describe the pictures in order.")
    backward = ask(cluster, second, first, question="Describe the pictures in order.")
    assert forward.text.index(draw(6).colour) < forward.text.rindex(draw(7).colour)
    assert forward.text != backward.text


def test_an_image_of_an_earlier_turn_is_seen(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    messages = [
        {"role": "user", "content": [picture(server.image_url(8)), {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": draw(8).caption},
        {"role": "user", "content": "What colour is the background?"},
    ]
    answer = cluster.chat(None, messages=messages, max_tokens=32)
    assert (answer.status, draw(8).background in answer.text) == (200, True)


def test_an_image_without_words_and_words_without_an_image_are_answered(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    assert cluster.chat([picture(server.image_url(9))], max_tokens=32).status == 200
    greeting = cluster.chat("hello", max_tokens=64)
    assert greeting.status == 200
    assert greeting.text.endswith((".", "!", "?"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/missing.png", "404"),
        ("/page", "HTML"),
        ("/cut.png", "image 1"),
        ("/noise.png", "image 1"),
    ],
)
def test_a_bad_image_is_a_400_in_our_words(
    cluster: Cluster, worker: Managed, server: ImageServer, path: str, words: str, stream: bool
) -> None:
    answer = ask(cluster, server.url + path, stream=stream)
    assert answer.status == 400
    assert words in answer.message
    assert "image 1: " in answer.message
    for secret in ("127.0.0.1", "/tmp", "0x", "PIL", "Traceback", "aiohttp"):
        assert secret not in answer.message
    assert ask(cluster, server.image_url(1)).status == 200


def test_the_second_image_is_named_when_it_is_the_bad_one_and_nothing_is_answered_without_it(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    answer = ask(cluster, server.image_url(1), server.url + "/missing.png")
    assert (answer.status, "image 2: " in answer.message) == (400, True)


def test_more_images_than_the_limit_are_refused_before_any_is_fetched(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    server.hits.clear()
    answer = ask(cluster, *(server.image_url(200 + i) for i in range(5)))
    assert answer.status == 400
    assert "5 images" in answer.message
    assert "at most 4" in answer.message
    # An earlier test's request may still be fetching what it was refused for.
    assert not {f"/picture/{200 + i}.png" for i in range(5)} & set(server.hits)


def test_a_prompt_too_long_with_its_images_is_refused_with_both_counts_before_anything_is_encoded(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    def text_tokens(words: int) -> int:
        return int(cluster.chat("hello " * words, max_tokens=1).usage["prompt_tokens"])

    few, many = text_tokens(10), text_tokens(110)
    words = (CONTEXT_LENGTH - 20 - few) * 100 // (many - few)
    before = worker.metrics()["dynamo_trtllm_engine_encoded_images_total"]
    answer = ask(cluster, *(server.image_url(300 + i) for i in range(4)), question="hello " * words)
    assert answer.status == 400
    assert f"the context length is {CONTEXT_LENGTH}" in answer.message
    assert re.search(r"the prompt has 2\d\d\d tokens", answer.message)
    assert worker.metrics()["dynamo_trtllm_engine_encoded_images_total"] == before


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "audio_url", "audio_url": {"url": "https://example.com/x.mp3"}}, "audio"),
    ],
)
def test_audio_is_refused_in_words(
    cluster: Cluster, worker: Managed, part: dict[str, Any], words: str
) -> None:
    answer = cluster.chat([{"type": "text", "text": "hi"}, part], max_tokens=4)
    assert (answer.status, words in answer.message) == (400, True)


def test_only_the_allowed_hosts_are_fetched_from(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    answer = ask(cluster, server.image_url(1).replace("127.0.0.1", "localhost"))
    assert (answer.status, answer.message) == (
        400,
        "image 1: its url is on a host that this worker does not fetch from",
    )


def test_detail_changes_nothing_and_options_of_the_processor_do(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    def asked(detail: str | None, **options: Any) -> Answer:
        part = {"type": "image_url", "image_url": {"url": server.image_url(1), "detail": detail}}
        return cluster.chat([{"type": "text", "text": QUESTION}, part], max_tokens=20, **options)

    plain = asked(None)
    for detail in ("low", "high", "auto"):
        assert (asked(detail).text, asked(detail).usage) == (plain.text, plain.usage)
    # 186 x 116 pixels: 7 x 4 rows of features, or 2 x 1
    few = asked(None, mm_processor_kwargs={"max_pixels": 4 * 784})
    assert (few.status, few.usage["prompt_tokens"] - plain.usage["prompt_tokens"]) == (200, 2 - 28)
    refused = asked(None, mm_processor_kwargs={"max_pixel": 784})
    assert (refused.status, refused.message) == (
        400,
        (
            "mm_processor_kwargs: max_pixel is not known; this model knows fps, max_frames, "
            "max_pixels, min_frames, min_pixels, num_frames and size"
        ),
    )


def test_sound_beside_an_image_is_refused_by_name_and_place(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    content = [{"type": "text", "text": QUESTION}, picture(server.image_url(1)), sound]
    answer = cluster.chat(content, max_tokens=4)
    words = "audio 1: the model demo takes no audio on this worker; it takes images and videos only"
    assert (answer.status, answer.message) == (400, words)
    alone = cluster.chat([content[0], sound], max_tokens=4)
    unseen = "without other media beside it no worker gets input_audio: send it as audio_url, with a data URL"
    assert (alone.status, alone.message.partition("placeholder; ")[2]) == (400, unseen)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "audio": {"id": "audio_1"}}]
    spoken = cluster.chat(None, messages=[*turns, {"role": "user", "content": content[:2]}], max_tokens=4)
    assert (spoken.status, spoken.message.partition(";")[0]) == (
        400,
        "message 2: an answer's audio is not supported",
    )


def test_a_literal_placeholder_in_the_text_is_refused(
    cluster: Cluster, worker: Managed, server: ImageServer
) -> None:
    answer = ask(cluster, server.image_url(1), question="what is <|image_pad|> here?")
    assert (answer.status, "placeholder" in answer.message) == (400, True)
    assert cluster.chat("what is <|image_pad|>?", max_tokens=4).status == 400


def test_a_file_outside_the_allowed_directory_is_refused_as_if_it_were_missing(
    cluster: Cluster, worker: Managed, directory: Path
) -> None:
    messages = {
        ask(cluster, url).message for url in ("file:///etc/hostname", (directory / "nothing.png").as_uri())
    }
    assert len(messages) == 1
    assert "allowed directory" in messages.pop()


def test_private_addresses_are_refused_unless_the_operator_allows_them(server: ImageServer) -> None:
    with Cluster() as cluster:
        # so that our worker's own policy is what answers
        cluster.frontend(env={"DYN_MM_ALLOW_INTERNAL": "1"})
        cluster.worker("--engine", "transformers", "--modality", "multimodal")
        cluster.wait_listed()
        server.hits.clear()
        answer = ask(cluster, server.image_url(1))
        assert answer.status == 400
        assert "127.0.0.1" not in answer.message
        assert not server.hits
        refused = ask(cluster, "file:///tmp/x.png")
        assert (refused.status, "allowed local media path" in refused.message) == (400, True)
