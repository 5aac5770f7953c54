"""Asks a running frontend one question about one picture, clip or sound: `python -m dynamo.trtllm.demo.ask
--url URL --model NAME`.

A client like any other: it speaks to `/v1/chat/completions` only and knows nothing of workers. A local
file is served from a loopback port, which the deployment has to be allowed to fetch from
(`DYN_MM_ALLOW_INTERNAL=1`).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import mimetypes
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

REMOTE_SCHEMES = ("http://", "https://", "data:")
MAX_TOKENS = 160
PICTURE_SIZE = (224, 224)
SOUND_RATE = 16000


class AskError(Exception):
    """Why there is no answer, in one sentence for the person who asked."""


@dataclass(frozen=True)
class Answer:
    """The text, and how fast it came. `tokens_per_s` counts from the first token on; None for an answer of
    one token."""

    text: str
    ttft_s: float
    tokens_per_s: float | None
    prompt_tokens: int
    completion_tokens: int


def request_body(model: str, media_url: str, prompt: str, kind: str = "image") -> dict[str, Any]:
    """The body of a chat request about one item of `kind`, without streaming."""
    part = f"{kind}_url"
    content = [{"type": "text", "text": prompt}, {"type": part, part: {"url": media_url}}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "stream": False,
        "max_tokens": MAX_TOKENS,
    }


def ask(
    url: str, model: str, media_url: str, prompt: str, kind: str = "image", timeout_s: float = 300.0
) -> Answer:
    """Sends the question to the frontend at `url` and times the streamed answer. Raises AskError."""
    body = request_body(model, media_url, prompt, kind) | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=timeout_s)
    try:
        started = time.monotonic()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        with connection.getresponse() as response:
            if response.status != 200:
                raise AskError(f"the frontend answered {response.status}: {_error_text(response.read())}")
            return _read_answer(_events(response), started)
    except (OSError, http.client.HTTPException) as error:
        raise AskError(f"the frontend at {url} could not be reached or broke off: {error}") from error
    finally:
        connection.close()


def _error_text(body: bytes) -> str:
    try:
        error = json.loads(body)
        return str(error["error"]["message"] if isinstance(error.get("error"), dict) else error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.decode(errors="replace").strip()[:200] or "no reason given"


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises AskError at an error event."""
    failed = False
    for line in lines:
        field, _, value = line.decode().strip().partition(":")
        value = value.strip()
        if field == "event":
            failed = value == "error"
        elif field == "data" and value != "[DONE]":
            event = json.loads(value)
            if failed or "error" in event:
                raise AskError(f"the answer broke off: {_error_text(value.encode())}")
            yield event
        elif failed and not field and value:
            raise AskError(f"the answer broke off: {value}")


def _read_answer(events: Iterable[dict[str, Any]], started: float) -> Answer:
    """Collects the deltas; `started` is the monotonic time of the request in seconds."""
    text, first, last = "", 0.0, 0.0
    usage: dict[str, int] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {}).get("content") or ""
            if delta:
                last = time.monotonic()
                first = first or last
                text += delta
    if not text:
        raise AskError("the answer was empty")
    tokens = usage.get("completion_tokens", 0)
    rate = (tokens - 1) / (last - first) if tokens > 1 and last > first else None
    return Answer(text, first - started, rate, usage.get("prompt_tokens", 0), tokens)


@dataclass(frozen=True)
class Kind:
    """What can be asked about. `draw` writes what `caption` describes into a folder and returns its path;
    `show` writes a picture of a file with a text below it, and returns that picture's path."""

    noun: str
    question: str
    caption: str
    draw: Callable[[Path, str], Path]
    show: Callable[[Path, str], Path] | None = None


def _draw_picture(folder: Path, caption: str) -> Path:
    from dynamo.trtllm.demo.pictures import draw

    picture = next(drawn for seed in count() if (drawn := draw(seed, PICTURE_SIZE)).caption == caption)
    picture.image.save(folder / "picture.png")
    return folder / "picture.png"


def _draw_clip(folder: Path, caption: str) -> Path:
    from dynamo.trtllm.demo.clips import draw_clip, write_mp4

    seed = next(seed for seed in count() if draw_clip(seed, PICTURE_SIZE, frames=1).caption == caption)
    write_mp4(draw_clip(seed, PICTURE_SIZE), folder / "clip.mp4")
    return folder / "clip.mp4"


def _draw_sound(folder: Path, caption: str) -> Path:
    from dynamo.trtllm.demo.audio.sounds import draw_sound, write_sound

    sound = next(drawn for seed in count() if (drawn := draw_sound(seed, SOUND_RATE)).caption == caption)
    write_sound(sound, folder / "sound.wav")
    return folder / "sound.wav"


def _show_frames(path: Path, text: str) -> Path:
    from dynamo.trtllm.demo.clips import film_strip, read_frames

    strip = Path(tempfile.mkdtemp(prefix="dynamo-trtllm-demo-")) / "frames.png"
    film_strip(read_frames(path), text).save(strip)
    return strip


def _show_waveform(path: Path, text: str) -> Path:
    from dynamo.trtllm.config import AudioLimits
    from dynamo.trtllm.demo.audio.waveform import waveform
    from dynamo.trtllm.multimodal.audio.reading import read_audio

    picture = Path(tempfile.mkdtemp(prefix="dynamo-trtllm-demo-")) / "waveform.png"
    sound = read_audio(path.read_bytes(), SOUND_RATE, AudioLimits())
    waveform(sound.samples, text, sound.rate).save(picture)
    return picture


KINDS = {
    "image": Kind("picture", "Describe the image", "a red circle on a blue background.", _draw_picture),
    "video": Kind("clip", "Describe the video", "a red circle moves to the left.", _draw_clip, _show_frames),
    "audio": Kind("sound", "Describe the sound", "three high beeps.", _draw_sound, _show_waveform),
}


def draw_default(kind: str) -> Path:
    """Draws what the kind's `caption` describes into a temporary directory, and returns its path."""
    return KINDS[kind].draw(Path(tempfile.mkdtemp(prefix="dynamo-trtllm-demo-")), KINDS[kind].caption)


@contextlib.contextmanager
def served(path: Path) -> Iterator[str]:
    """Serves one file, and nothing else, on a random loopback port; yields its URL."""
    content = path.read_bytes()
    name = f"/file{path.suffix}"

    class OneFile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(content)

        def do_HEAD(self) -> None:
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            if self.path != name:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", mimetypes.guess_type(name)[0] or "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            # The frontend closes the connection when it has seen a picture's header.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), OneFile)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{name}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def reachable(given: str | None, kind: str = "image") -> Iterator[tuple[str, str]]:
    """Yields how to name the item to a person, and its URL. Raises AskError when there is no such file."""
    if given is not None and given.startswith(REMOTE_SCHEMES):
        yield (given if len(given) <= 200 else f"{given[:80]}..."), given
        return
    path = Path(given).expanduser().absolute() if given else draw_default(kind)
    if not path.is_file():
        raise AskError(f"there is no file {path}")
    with served(path) as url:
        yield str(path), url


def curl_command(url: str, model: str, media_url: str, prompt: str, kind: str = "image") -> str:
    """The same question as a line for a shell."""
    body = json.dumps(request_body(model, media_url, prompt, kind))
    return f'curl {url}/v1/chat/completions -H "Content-Type: application/json" -d {shlex.quote(body)}'


def run(options: argparse.Namespace) -> None:
    """Asks, prints, and with `--keep` goes on serving the file until a signal comes."""
    name = next((name for name in KINDS if getattr(options, name) is not None), "image")
    kind, given = KINDS[name], getattr(options, name)
    prompt = kind.question if options.prompt is None else options.prompt
    with reachable(given, name) as (shown, media_url):
        print(f"{kind.noun}: {shown}", flush=True)
        print(f"question: {prompt}", flush=True)
        answer = ask(options.url, options.model, media_url, prompt, name)
        print(f"time to first token: {answer.ttft_s * 1000:.0f} ms", flush=True)
        rate = "one token only" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.0f} tokens/s"
        tokens = f"{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} generated"
        print(f"speed: {rate} ({tokens})", flush=True)
        if kind.show is not None and Path(shown).is_file():
            print(f"shown with its answer: {kind.show(Path(shown), answer.text.strip())}", flush=True)
        if options.keep:
            curl = curl_command(options.url, options.model, media_url, prompt, name)
            print(f"ask again: {curl}", flush=True)
        print(f"answer: {answer.text.strip()}", flush=True)
        if options.keep:
            signal.sigwait({signal.SIGTERM, signal.SIGINT})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dynamo.trtllm.demo.ask",
        description="Asks one question about one picture, clip or sound.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the frontend (default %(default)s)")
    parser.add_argument("--model", default="demo", help="the model's name (default %(default)s)")
    media = parser.add_mutually_exclusive_group()
    for name, kind in KINDS.items():
        drawn = f"the {kind.noun}; left out, one of {kind.caption[:-1]} is made"
        value: dict[str, Any] = {} if name == "image" else {"nargs": "?", "const": ""}
        media.add_argument(f"--{name}", metavar="PATH_OR_URL", help=drawn, **value)
    questions = ", ".join(kind.question for kind in KINDS.values())
    parser.add_argument("--prompt", metavar="TEXT", help=f"the question (default, by kind: {questions})")
    parser.add_argument(
        "--keep", action="store_true", help="go on serving a local file, and print the line for curl"
    )
    return parser.parse_args(arguments)


def main() -> None:
    try:
        run(parse())
    except AskError as error:
        print(f"ask: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
