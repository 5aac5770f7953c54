"""An image server on loopback for process tests:
serves the demo's drawn images and counts who asked for what."""

from __future__ import annotations

import base64
import io
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dynamo.trtllm.demo.pictures import Picture, draw


def data_url(picture: Picture) -> str:
    """The image as a PNG in a data URL."""
    return "data:image/png;base64," + base64.b64encode(png(picture)).decode()


def png(picture: Picture) -> bytes:
    """The image as a PNG file."""
    sink = io.BytesIO()
    picture.image.save(sink, "PNG")
    return sink.getvalue()


class ImageServer:
    """`/picture/SEED.png` is the demo generator's image of that seed; `pages` holds other bodies by path.

    `hits` counts whole GETs by path: the frontend looks at each image's first bytes by a range request,
    which is not counted. A whole GET of a path in `gates` is answered when its event is set.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.hits: Counter[str] = Counter()
        self.pages: dict[str, bytes] = {}
        self.gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def image_url(self, seed: int) -> str:
        return f"{self.url}/picture/{seed}.png"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        probe = request.headers.get("Range")
        if probe is None:
            with self._lock:
                self.hits[path] += 1
            if path in self.gates:
                self.gates[path].wait()
        found = self._find(path)
        if found is None:
            request.send_error(404)
            return
        body = found
        if probe is None:
            request.send_response(200)
        else:
            last = min(int(probe.rpartition("-")[2] or len(body)), len(body) - 1)
            request.send_response(206)
            request.send_header("Content-Range", f"bytes 0-{last}/{len(body)}")
            body = body[: last + 1]
        request.send_header("Content-Type", "image/png")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker that asked was killed
            request.wfile.write(body)

    def _find(self, path: str) -> bytes | None:
        name = path.removeprefix("/picture/").removesuffix(".png")
        return png(draw(int(name))) if name.isdigit() else self.pages.get(path)


@contextmanager
def image_server() -> Iterator[ImageServer]:
    """A running server, ended with the block."""
    state: list[ImageServer] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state[0].answer(self)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.append(ImageServer(server.server_address[1]))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state[0]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
