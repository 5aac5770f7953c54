"""The question-and-answer client, against a frontend that plays one answer."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dynamo.trtllm.config import AudioLimits
from dynamo.trtllm.demo import ask
from dynamo.trtllm.demo.clips import read_frames
from dynamo.trtllm.multimodal.audio.reading import read_audio


def event(text: str | None = None, usage: dict[str, int] | None = None) -> str:
    choices = [] if text is None else [{"delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n"


@contextmanager
def frontend(status: int, body: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers every request with `body`; yields its URL and the requests it got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_streamed_answer_is_put_together_and_its_usage_kept() -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 2}
    with frontend(200, event("a red ") + event("circle") + event(usage=usage) + "data: [DONE]\n\n") as (
        url,
        requests,
    ):
        answer = ask.ask(url, "demo", "http://host/picture.png", "What is it?")
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("a red circle", 20, 2)
    assert answer.ttft_s > 0
    (request,) = requests
    assert request["messages"][0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "http://host/picture.png"}},
    ]
    assert (request["model"], request["stream"], request["stream_options"]) == (
        "demo",
        True,
        {"include_usage": True},
    )


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (
            400,
            '{"message": "image 1 is not an image", "type": "invalid"}',
            "the frontend answered 400: image 1 is not an image",
        ),
        (503, '{"error": {"message": "no encoder"}}', "the frontend answered 503: no encoder"),
        (500, "", "the frontend answered 500: no reason given"),
        (200, "data: [DONE]\n\n", "the answer was empty"),
        (
            200,
            event("a ") + 'event: error\ndata: {"message": "it broke"}\n\n',
            "the answer broke off: it broke",
        ),
        (200, event("a ") + "event: error\n: it broke\n\n", "the answer broke off: it broke"),
    ],
)
def test_what_goes_wrong_is_told_in_one_sentence(status: int, body: str, sentence: str) -> None:
    with frontend(status, body) as (url, _), pytest.raises(ask.AskError) as raised:
        ask.ask(url, "demo", "http://host/picture.png", "What is it?")
    assert str(raised.value) == sentence


def test_a_frontend_that_is_not_there_is_told_in_one_sentence() -> None:
    with pytest.raises(ask.AskError, match=r"the frontend at http://127\.0\.0\.1:9 could not be reached"):
        ask.ask("http://127.0.0.1:9", "demo", "http://host/picture.png", "What is it?")


def test_the_picture_that_is_drawn_is_a_red_circle_on_blue() -> None:
    path = ask.draw_default("image")
    with Image.open(path) as image:
        assert image.size == ask.PICTURE_SIZE
        red, _, blue = image.convert("RGB").getpixel((0, 0))  # type: ignore[misc]
    assert red < 32
    assert blue > 223


def test_the_clip_that_is_drawn_shows_a_red_circle_on_its_way_to_the_left(tmp_path: Path) -> None:
    path = ask.draw_default("video")
    frames = read_frames(path)
    assert frames.shape == (6, *ask.PICTURE_SIZE, 3)
    redness = frames[..., 0].astype(int) - frames[..., 2]
    places = [float(np.nonzero(each > 100)[1].mean()) for each in redness]
    assert places == sorted(places, reverse=True)
    assert places[0] - places[-1] > 40
    strip = ask.KINDS["video"].show
    assert strip is not None
    with Image.open(strip(path, "a red circle moves to the left.")) as shown:
        assert shown.width > 6 * 112
        assert shown.height > 112
        assert np.asarray(shown.convert("L"))[112:].min() < 80


def test_the_sound_that_is_made_is_three_high_beeps_and_its_waveform_is_shown() -> None:
    path = ask.draw_default("audio")
    sound = read_audio(path.read_bytes(), ask.SOUND_RATE, AudioLimits())
    blocks = np.abs(sound.samples[: len(sound.samples) // 160 * 160].reshape(-1, 160)).max(axis=1)
    loud = blocks > blocks.max() / 2
    assert int((np.diff(np.pad(loud, 1).astype(int)) > 0).sum()) == 3
    frequency = np.abs(np.fft.rfft(sound.samples)).argmax() * ask.SOUND_RATE / len(sound.samples)
    assert 1700 < frequency < 3300
    waveform = ask.KINDS["audio"].show
    assert waveform is not None
    with Image.open(waveform(path, "three high beeps.")) as shown:
        top = np.asarray(shown.convert("L"))[:20]
    inked = (top < 128).any(axis=0)
    assert int((np.diff(np.pad(inked, 1).astype(int)) > 0).sum()) == 3


@pytest.mark.parametrize(
    ("arguments", "image", "video", "audio"),
    [
        ([], None, None, None),
        (["--video"], None, "", None),
        (["--video", "a.mp4"], None, "a.mp4", None),
        (["--image", "a.png"], "a.png", None, None),
        (["--audio"], None, None, ""),
        (["--audio", "a.flac"], None, None, "a.flac"),
    ],
)
def test_a_clip_or_a_sound_is_asked_about_where_one_is_named(
    arguments: list[str], image: str | None, video: str | None, audio: str | None
) -> None:
    options = ask.parse(arguments)
    assert (options.image, options.video, options.audio) == (image, video, audio)


@pytest.mark.parametrize(("kind", "file"), [("video", "clip.mp4"), ("audio", "sound.wav")])
def test_a_question_about_a_clip_or_a_sound_sends_it_as_one(kind: str, file: str) -> None:
    with frontend(200, event("yes")) as (url, bodies):
        assert ask.ask(url, "demo", f"http://host/{file}", "What is it?", kind).text == "yes"
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": f"http://host/{file}"}}
    assert bodies[0]["messages"][0]["content"] == [{"type": "text", "text": "What is it?"}, part]


def test_a_local_picture_is_served_byte_for_byte_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.jpeg"
    path.write_bytes(bytes(range(256)))
    with ask.reachable(str(path)) as (shown, url):
        assert shown == str(path)
        with urllib.request.urlopen(url) as response:
            assert (response.read(), response.headers["Content-Type"]) == (bytes(range(256)), "image/jpeg")
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as response:
            assert (response.read(), response.headers["Content-Length"]) == (b"", "256")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.rpartition("/")[0] + "/other.jpeg")


@pytest.mark.parametrize("url", ["http://host/p.png", "https://host/p.png", "data:image/png;base64,AAAA"])
def test_a_url_is_handed_on_as_it_is(url: str) -> None:
    with ask.reachable(url) as (_, handed_on):
        assert handed_on == url


def test_a_missing_file_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ask.AskError, match="there is no file /"), ask.reachable(str(tmp_path / "none.png")):
        pass
