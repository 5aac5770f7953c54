"""A media server on loopback that misbehaves in every way that public hosts do.

A page is a `Page`; what it does beyond serving its body is told by its fields. All hits are counted,
apart from the range requests by which Dynamo's frontend looks at an image's first bytes.
"""

from __future__ import annotations

import gzip
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cases.images import BAD, GOOD, png

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Page:
    """One answer. `length` is the Content-Length that is told: None for the true one, -1 for none at all."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    hang: bool = False
    """The answer never comes."""
    drip_s: float = 0.0
    """Seconds between two bytes."""
    endless: bool = False
    """The body is sent again and again."""
    close: bool = False
    """The connection ends without an answer."""


def pages(url: str) -> dict[str, Page]:
    """All pages by path. `url` is the server's own address."""
    image = Page(png(), headers={"Content-Type": "image/png"})
    return {
        "/picture.png": image,
        "/picture": image,
        "/octets": Page(png(), headers={"Content-Type": "application/octet-stream"}),
        "/no-type": Page(png(), headers={}),
        "/wrong-type": Page(png(), headers={"Content-Type": "text/html"}),
        "/picture.pt?sig=1": image,
        "/photo.jpg": Page(png(), headers={"Content-Type": "image/jpeg"}),
        "/a%40b.png": image,
        "/a%20b.png": image,
        "/%E5%9B%BE.png": image,
        "/x.png?sig=%3A%2F&e=1": image,
        "/x.png?q=%27o%27": image,
        "/x.png?a=b&a=b": image,
        "/plus.png?a=1+1": image,
        "/relative": Page(status=302, headers={"Location": "/picture.png"}),
        "/relative-query": Page(status=302, headers={"Location": "/x.png?q=%27o%27"}),
        "/permanent": Page(status=301, headers={"Location": f"{url}/picture.png"}),
        "/temporary": Page(status=307, headers={"Location": f"{url}/picture.png"}),
        "/twice": Page(status=302, headers={"Location": "/relative"}),
        "/loop": Page(status=302, headers={"Location": "/loop"}),
        "/to-file": Page(status=302, headers={"Location": "file:///etc/passwd"}),
        "/to-ftp": Page(status=302, headers={"Location": "ftp://127.0.0.1/x.png"}),
        "/to-data": Page(status=302, headers={"Location": "data:image/png;base64,AAAA"}),
        "/to-nowhere": Page(status=302, headers={"Location": ""}),
        "/to-nonsense": Page(status=302, headers={"Location": "http://[::1"}),
        "/gzip": Page(gzip.compress(png()), headers={"Content-Encoding": "gzip"}),
        "/x-gzip": Page(gzip.compress(png()), headers={"Content-Encoding": "x-gzip"}),
        "/gzip-twice": Page(gzip.compress(gzip.compress(png())), headers={"Content-Encoding": "gzip, gzip"}),
        "/gzip-bomb": Page(gzip.compress(bytes(100 * MEBIBYTE), 9), headers={"Content-Encoding": "gzip"}),
        "/gzip-broken": Page(b"\x1f\x8b broken", headers={"Content-Encoding": "gzip"}),
        "/unknown-encoding": Page(png(), headers={"Content-Encoding": "rot13"}),
        **_more_redirects(url),
        **_more_encodings(),
        "/too-large": Page(b"", length=200 * MEBIBYTE),
        "/endless": Page(bytes(MEBIBYTE), length=-1, endless=True),
        "/short": Page(png()[:200], length=len(png())),
        "/no-length": Page(png(), length=-1),
        "/hang": Page(hang=True),
        "/drip": Page(png(), drip_s=0.5),
        "/closes": Page(close=True),
        **{
            f"/status/{status}": Page(b"no", status=status)
            for status in (400, 401, 403, 404, 410, 429, 500, 502, 503)
        },
        **{f"/good/{name.replace(' ', '-')}": Page(make()) for name, make in GOOD.items()},
        **{f"/bad/{name.replace(' ', '-')}": Page(make()) for name, make in BAD.items()},
    }


def _more_redirects(url: str) -> dict[str, Page]:
    """Every way to write where a redirect leads."""
    host = url.partition("//")[2]
    locations = {
        "/deep/down/up": (302, "../../picture.png"),
        "/deep/down/beside": (302, "beside.png"),
        "/deep/down/above-all": (302, "../../../../picture.png"),
        "/deep/down/here": (302, "./beside.png"),
        "/see-other": (303, "/picture.png"),
        "/moved-for-good": (308, "/picture.png"),
        "/scheme-relative": (302, f"//{host}/picture.png"),
        "/with-fragment": (302, "/picture.png#top"),
        "/upper-case-scheme": (302, f"HTTP://{host}/picture.png"),
        "/only-a-query": (302, "?sig=%3A%2F&e=1"),
        "/with-a-space": (302, "/a b.png"),
        "/with-space-around": (302, "  /picture.png "),
        "/with-latin": (302, "/b\u00e9.png".encode().decode("latin-1")),
        "/with-credentials": (302, f"http://someone:secret@{host}/picture.png"),
        "/with-plus-and-colon": (302, "/plus.png?a=1+1"),
        "/double-escaped": (302, "/a%2540b.png"),
        "/a-slash-escaped": (302, "/dir%2Fname.png"),
        "/to-javascript": (302, "javascript:alert(1)"),
        "/to-bad-port": (302, "http://127.0.0.1:99999/x.png"),
        "/to-no-host": (302, "http:///picture.png"),
        "/three-hops": (302, "/twice"),
        "/four-hops": (302, "/three-hops"),
    }
    image = Page(png())
    return {
        **{
            path: Page(status=status, headers={"Location": location})
            for path, (status, location) in locations.items()
        },
        **dict.fromkeys(
            (
                "/deep/down/beside.png", "/only-a-query?sig=%3A%2F&e=1", "/b%C3%A9.png", "/a%2540b.png",
                "/dir%2Fname.png", "/a;b=c.png", "/a,b.png", "/a%b.png", "/a%25b.png", "/~x.png",
                "/a%7Eb.png", "/a//b.png", "/%2e%2e/x.png", "/q.png?",
                "/q.png?u=http%3A%2F%2Fh%2F%3Fa%3D1", "/q.png?a=%", "/q.png?a=%25", "/q.png?a[]=1",
                "/q.png?a%5B%5D=1", "/q.png?a|b", "/q.png?a%7Cb", "/q.png?%C3%A9",
            ),
            image,
        ),
        "/without-location": Page(status=302),
        "/not-modified": Page(status=304),
        "/many-choices": Page(png(), status=300),
        "/created": Page(png(), status=201),
        "/no-content": Page(status=204),
        "/redirect-with-a-body": Page(
            b"<html>moved</html>", status=301, headers={"Location": "/picture.png"}
        ),
    }  # fmt: skip


def _more_encodings() -> dict[str, Page]:
    """Content encodings as hosts name and apply them."""
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    encoded = {
        "/deflate": ("deflate", zlib.compress(png())),
        "/deflate-bare": ("deflate", bare.compress(png()) + bare.flush()),
        "/gzip-in-capitals": ("GZIP", gzip.compress(png())),
        "/gzip-and-identity": ("gzip, identity", gzip.compress(png())),
        "/gzip-then-deflate": ("gzip, deflate", zlib.compress(gzip.compress(png()))),
        "/gzip-in-two-members": ("gzip", gzip.compress(png()[:300]) + gzip.compress(png()[300:])),
        "/gzip-with-a-tail": ("gzip", gzip.compress(png()) + b"tail"),
        "/gzip-cut": ("gzip", gzip.compress(png())[:-30]),
        "/gzip-in-name-alone": ("gzip", png()),
        "/gzip-of-nothing": ("gzip", gzip.compress(b"")),
        "/gzip-five-times": ("gzip, gzip, gzip, gzip, gzip", png()),
        "/identity": ("identity", png()),
        "/empty-encoding": ("", png()),
        "/encoding-of-s3": ("aws-chunked", png()),
        "/encoding-of-text": ("utf-8", png()),
        "/encoding-none": ("none", png()),
        "/encoding-with-markup": ("<b>x</b>", png()),
    }
    return {path: Page(body, headers={"Content-Encoding": name}) for path, (name, body) in encoded.items()}


class MediaServer:
    """The pages, and how often each was asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pages = pages(url)
        self.hits: Counter[str] = Counter()
        self.closing = threading.Event()
        self._lock = threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        probe = request.headers.get("Range") is not None
        page = self.pages.get(request.path)
        if not probe:
            with self._lock:
                self.hits[request.path] += 1
        if page is None:
            page = Page(b"no such page", status=404)
        if page.hang:
            self.closing.wait(120)
        if page.hang or page.close:
            request.close_connection = True
            return
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(request, page, probe)

    def _send(self, request: BaseHTTPRequestHandler, page: Page, probe: bool) -> None:
        request.send_response(page.status)
        for name, value in page.headers.items():
            request.send_header(name, value)
        length = len(page.body) if page.length is None else page.length
        if length >= 0:
            request.send_header("Content-Length", str(length))
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        if page.drip_s:
            for at in range(len(page.body)):
                request.wfile.write(page.body[at : at + 1])
                request.wfile.flush()
                if self.closing.wait(page.drip_s):
                    return
        request.wfile.write(page.body)
        while page.endless and not probe and not self.closing.is_set():
            request.wfile.write(page.body)


@contextmanager
def media_server(port: int) -> Iterator[MediaServer]:
    """A running server on loopback, ended with the block."""
    server = MediaServer(f"http://127.0.0.1:{port}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            listening.shutdown()
            thread.join()
