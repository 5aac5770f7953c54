"""Asks a running frontend one question about one picture: `python -m dynamo.trtllm.demo.ask --url URL --model
NAME`.

A client like any other: it speaks to `/v1/chat/completions` only and knows nothing of workers. A local
picture is served from a loopback port, which the deployment has to be allowed to fetch from
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

QUESTION = "Describe the image"
CAPTION = "a red circle on a blue background."
"""What the picture shows that is drawn when none is given."""
REMOTE_SCHEMES = ("http://", "https://", "data:")
MAX_TOKENS = 160
PICTURE_SIZE = (224, 224)


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


def request_body(model: str, image_url: str, prompt: str) -> dict[str, Any]:
    """The body of a chat request, without streaming."""
    content = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": image_url}}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "stream": False,
        "max_tokens": MAX_TOKENS,
    }


def ask(url: str, model: str, image_url: str, prompt: str, timeout_s: float = 300.0) -> Answer:
    """Sends the question to the frontend at `url` and times the streamed answer. Raises AskError."""
    body = request_body(model, image_url, prompt) | {
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


def draw_default_picture() -> Path:
    """Draws the picture that `CAPTION` describes into a temporary directory, and returns its path."""
    from dynamo.trtllm.demo.pictures import draw

    picture = next(drawn for seed in count() if (drawn := draw(seed, PICTURE_SIZE)).caption == CAPTION)
    path = Path(tempfile.mkdtemp(prefix="dynamo-trtllm-demo-")) / "picture.png"
    picture.image.save(path)
    return path


@contextlib.contextmanager
def served(path: Path) -> Iterator[str]:
    """Serves one file, and nothing else, on a random loopback port; yields its URL."""
    content = path.read_bytes()
    name = f"/picture{path.suffix}"

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
            # The frontend closes the connection when it has seen the picture's header.
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
def reachable(image: str | None) -> Iterator[tuple[str, str]]:
    """Yields how to name the picture to a person, and its URL. Raises AskError when there is no such file."""
    if image is not None and image.startswith(REMOTE_SCHEMES):
        yield (image if len(image) <= 200 else f"{image[:80]}..."), image
        return
    path = draw_default_picture() if image is None else Path(image).expanduser().absolute()
    if not path.is_file():
        raise AskError(f"there is no file {path}")
    with served(path) as url:
        yield str(path), url


def curl_command(url: str, model: str, image_url: str, prompt: str) -> str:
    """The same question as a line for a shell."""
    body = json.dumps(request_body(model, image_url, prompt))
    return f'curl {url}/v1/chat/completions -H "Content-Type: application/json" -d {shlex.quote(body)}'


def run(options: argparse.Namespace) -> None:
    """Asks, prints, and with `--keep` goes on serving the picture until a signal comes."""
    with reachable(options.image) as (shown, image_url):
        print(f"picture: {shown}", flush=True)
        print(f"question: {options.prompt}", flush=True)
        answer = ask(options.url, options.model, image_url, options.prompt)
        print(f"time to first token: {answer.ttft_s * 1000:.0f} ms", flush=True)
        rate = "one token only" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.0f} tokens/s"
        print(
            f"speed: {rate} ({answer.prompt_tokens} prompt tokens, {answer.completion_tokens} generated)",
            flush=True,
        )
        if options.keep:
            print(
                f"ask again: {curl_command(options.url, options.model, image_url, options.prompt)}",
                flush=True,
            )
        print(f"answer: {answer.text.strip()}", flush=True)
        if options.keep:
            signal.sigwait({signal.SIGTERM, signal.SIGINT})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dynamo.trtllm.demo.ask", description="Asks one question about one picture."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the frontend (default %(default)s)")
    parser.add_argument("--model", default="demo", help="the model's name (default %(default)s)")
    parser.add_argument(
        "--image", metavar="PATH_OR_URL", help=f"the picture; left out, one of {CAPTION[:-1]} is drawn"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", default=QUESTION, help="the question (default %(default)s)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="go on serving a local picture, and print the line for curl"
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
