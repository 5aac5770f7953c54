"""Fetching over real connections to servers on loopback, well-behaved and not."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tomllib
from aiohttp import web

from dynamo.trtllm import __version__
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault, LimitFault, Overloaded, PartFault, WorkerError
from dynamo.trtllm.multimodal import http_client
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.parts import DataSource, HttpSource, MediaFile, MediaPart, Source, classify

CONFIG = MediaConfig(allow_internal=True, max_file_bytes=200_000, fetch_timeout_s=20.0)
BODY = b"image bytes"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def fetching(config: MediaConfig = CONFIG) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(config)
    try:
        yield fetcher
    finally:
        await fetcher.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """An HTTP server on loopback whose every path is answered by `answer`;
    yields its URL without a slash at the end."""
    application = web.Application()
    application.router.add_route("GET", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that reads a request, writes the next of `answers` as it is and closes;
    the last one is used again."""
    hits: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        hits.append(1)
        writer.write(answers[min(len(hits), len(answers)) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", hits


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def fault_of(url: str, config: MediaConfig = CONFIG) -> str:
    """What the client reads when `url` cannot be fetched."""
    async with fetching(config) as fetcher:
        with pytest.raises(ClientFault) as caught:
            await fetcher.fetch(HttpSource(url))
        return caught.value.message


@pytest.mark.asyncio
async def test_a_body_arrives_whole_and_the_url_encoded_once() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=request.raw_path.encode())

    async with serving(answer) as url, fetching() as fetcher:
        assert await fetcher.fetch(HttpSource(f"{url}/图 1.png?a=%2B#part")) == b"/%E5%9B%BE%201.png?a=%2B"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("/a%40b.png", "/a%40b.png"),
        ("/x.png?sig=%3A%2F&e=1", "/x.png?sig=%3A%2F&e=1"),
        ("/x.png?q=%27o%27", "/x.png?q=%27o%27"),
        ("/%7euser/%E5%9B%be.png?a=%2b+b&c=%20", "/%7euser/%E5%9B%be.png?a=%2b+b&c=%20"),
        ("/a!$&'()*+,;=:@b/~c.png?d=/?:@!$&'()*+,;=", "/a!$&'()*+,;=:@b/~c.png?d=/?:@!$&'()*+,;="),
        ("/a/./b/../c//d.png", "/a/./b/../c//d.png"),
        ("?q=%27", "/?q=%27"),
        ("/100%.png?p=%zz", "/100%25.png?p=%25zz"),
        ("/a b|c.png?x=[1]", "/a%20b%7Cc.png?x=%5B1%5D"),
        ("/图.png#part", "/%E5%9B%BE.png"),
    ],
)
@pytest.mark.parametrize("hop", ["direct", "redirect", "whole-redirect"])
async def test_path_and_query_are_sent_byte_for_byte_as_given_at_every_hop(
    given: str, sent: str, hop: str
) -> None:
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        asked.append(request.split(b" ")[1].decode())
        if asked[-1] == "/go":
            base = url if hop == "whole-redirect" else ""
            writer.write(
                f"HTTP/1.1 302 Found\r\nLocation: {base}{given}\r\nContent-Length: 0\r\n\r\n".encode()
            )
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, fetching() as fetcher:
        assert await fetcher.fetch(HttpSource(url + given if hop == "direct" else url + "/go")) == b"abc"
    expected = "/go" + sent[1:] if hop == "redirect" and given.startswith("?") else sent
    assert asked == ([sent] if hop == "direct" else ["/go", expected])


@pytest.mark.asyncio
async def test_downloads_say_who_asks_and_where_to_complain() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers["User-Agent"])

    async with serving(answer) as url, fetching() as fetcher:
        agent = (await fetcher.fetch(HttpSource(url))).decode()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert agent == f"dynamo-trtllm/{__version__} (+{project['urls']['Homepage']})"


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 429, 500, 503])
async def test_an_error_of_the_host_is_named_by_its_status(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="secret text of the host")

    async with serving(answer) as url:
        assert await fault_of(f"{url}/a.png") == f"the media host answered {status}"


@pytest.mark.asyncio
@pytest.mark.parametrize("drip", [False, True])
async def test_a_host_that_hangs_or_drips_ends_at_the_deadline(drip: bool) -> None:
    release = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if drip:
            await response.prepare(request)
            await response.write(b"x")
        await release.wait()
        return response

    async with serving(answer) as url:
        message = await fault_of(url, replace(CONFIG, fetch_timeout_s=0.2))
        release.set()
    assert message == "the media host did not deliver in time"


@pytest.mark.asyncio
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_while_it_is_read(declared: bool) -> None:
    written = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Length": str(10**9)} if declared else {})
        await response.prepare(request)
        while True:
            await response.write(bytes(65536))
            written += 65536

    async with serving(answer) as url:
        assert await fault_of(url) == "larger than this worker's limit of 0.190735 MiB"
    assert written < 100 << 20


@pytest.mark.asyncio
async def test_a_body_that_inflates_is_measured_inflated() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(bytes(50 << 20)), headers={"Content-Encoding": "gzip"})

    async with serving(answer) as url:
        assert (await fault_of(url)).startswith("larger than this worker's limit")


def _deflated(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "identity": lambda data: data,
    "": lambda data: data,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "X-GZip , identity": gzip.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "deflate": zlib.compress,
    "Deflate": _deflated,
    "deflate, gzip": lambda data: gzip.compress(zlib.compress(data)),
}
for _module, _name in (("zstandard", "zstd"), ("brotli", "br")):
    if importlib.util.find_spec(_module):
        ENCODED[_name] = importlib.import_module(_module).compress


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ENCODED)
async def test_each_content_encoding_is_undone_within_the_limit(name: str) -> None:
    content = b""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=ENCODED[name](content), headers={"Content-Encoding": name})

    async with serving(answer) as url, fetching() as fetcher:
        for content in (BODY * 1000, bytes(CONFIG.max_file_bytes)):
            assert await fetcher.fetch(HttpSource(url)) == content
        content = bytes(CONFIG.max_file_bytes + 1)
        assert await fault_of(url) == "larger than this worker's limit of 0.190735 MiB"
        content = bytes(20 << 20)
        assert await fault_of(url) == "larger than this worker's limit of 0.190735 MiB"


@pytest.mark.asyncio
async def test_members_of_a_gzip_file_are_joined_and_what_follows_is_ignored() -> None:
    async def answer(request: web.Request) -> web.Response:
        body = gzip.compress(b"image ") + gzip.compress(b"bytes") + b"\0\0"
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    async with serving(answer) as url, fetching() as fetcher:
        assert await fetcher.fetch(HttpSource(url)) == BODY


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("encoding", "body", "words"),
    [
        (
            "compress",
            BODY,
            "the media host sends it in the content encoding 'compress', which is not accepted",
        ),
        (
            "<b>",
            BODY,
            "the media host sends it in the content encoding of an unknown name, which is not accepted",
        ),
        ("gzip", BODY, "the media host sends it in a damaged content encoding 'gzip'"),
        (
            "gzip",
            gzip.compress(BODY, mtime=0)[:-9],
            "the media host sends it in a damaged content encoding 'gzip'",
        ),
        ("deflate", b"\xff" * 9, "the media host sends it in a damaged content encoding 'deflate'"),
        (", ".join(["gzip"] * 5), BODY, "the media host compresses it too many times over"),
    ],
)
async def test_an_unknown_or_damaged_content_encoding_is_named(
    encoding: str, body: bytes, words: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Encoding": encoding})

    async with serving(answer) as url:
        assert await fault_of(url) == words


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "words", "tries"),
    [
        (b"", "the media host closed the connection without an answer", 2),
        (b"garbage\r\n\r\n", "the media host did not answer in valid HTTP", 1),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
            "the media host ended the download before it was complete",
            1,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 200001\r\n\r\nabc",
            "larger than this worker's limit of 0.190735 MiB",
            1,
        ),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://[bad\r\n\r\n",
            "the media host redirects to an invalid URL",
            1,
        ),
    ],
)
async def test_a_broken_answer_is_named_and_only_a_lost_connection_is_tried_again(
    answer: bytes, words: str, tries: int
) -> None:
    async with raw_server(answer) as (url, hits):
        assert await fault_of(url) == words
        assert len(hits) == tries


@pytest.mark.asyncio
@pytest.mark.parametrize("encoding", ["none", "UTF-8", "binary", "aws-chunked", "identity"])
async def test_a_content_encoding_that_encodes_nothing_is_passed_over(encoding: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=BODY, headers={"Content-Encoding": encoding})

    async with serving(answer) as url, fetching() as fetcher:
        assert await fetcher.fetch(HttpSource(url)) == BODY


@pytest.mark.asyncio
@pytest.mark.parametrize("host", [f"{'a' * 80}.invalid", f"{'a' * 300}.invalid", "a..invalid"])
async def test_a_host_that_cannot_be_a_name_is_the_clients_fault(host: str) -> None:
    assert await fault_of(f"http://{host}/x.png") in (
        "the name of the media host cannot be resolved",
        "its url is not a valid URL",
    )


@pytest.mark.asyncio
async def test_a_connection_lost_before_the_answer_is_made_up_for_by_one_retry() -> None:
    async with (
        raw_server(b"", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc") as (url, hits),
        fetching() as fetcher,
    ):
        assert await fetcher.fetch(HttpSource(url)) == b"abc"
        assert len(hits) == 2


@pytest.mark.asyncio
async def test_a_refused_connection_a_missing_name_and_a_failed_handshake_are_told_apart() -> None:
    assert await fault_of(f"http://127.0.0.1:{unused_port()}/") == "the media host refused the connection"
    assert await fault_of("http://no-such-host.invalid/") == "the name of the media host cannot be resolved"
    async with raw_server(b"not TLS") as (url, _):
        assert (
            await fault_of(url.replace("http:", "https:"))
            == "no TLS connection to the media host could be made"
        )


@pytest.mark.asyncio
async def test_relative_redirects_are_followed_and_their_number_is_limited() -> None:
    async def answer(request: web.Request) -> web.Response:
        left = int(request.path.strip("/"))
        return (
            web.Response(body=BODY)
            if left == 0
            else web.Response(status=302, headers={"Location": f"/{left - 1}"})
        )

    async with serving(answer) as url:
        async with fetching() as fetcher:
            assert await fetcher.fetch(HttpSource(f"{url}/3")) == BODY
        assert await fault_of(f"{url}/4") == "the media host redirects more than 3 times"


@pytest.mark.asyncio
@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/", "data:image/png,x"])
async def test_a_redirect_to_another_scheme_is_refused(target: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    async with serving(answer) as url:
        assert await fault_of(url) == "the media host redirects to something other than http or https"


@pytest.mark.asyncio
async def test_cookies_of_one_answer_are_not_sent_with_the_next_request() -> None:
    cookies: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        cookies.append(request.headers.get("Cookie"))
        response = web.Response(body=BODY)
        response.set_cookie("session", "1")
        return response

    async with serving(answer) as url, fetching() as fetcher:
        for _ in range(2):
            await fetcher.fetch(HttpSource(url.replace("127.0.0.1", "localhost")))
    assert cookies == [None, None]


def parts_of(*sources: Source) -> list[tuple[MediaPart, Source]]:
    return [(MediaPart(position, "image", "-"), source) for position, source in enumerate(sources, 1)]


@pytest.mark.asyncio
async def test_one_request_gets_its_bytes_in_order_and_each_url_once_but_the_next_request_asks_again(
    tmp_path: Path,
) -> None:
    hits: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        hits.append(request.path)
        return web.Response(body=request.path.encode())

    (tmp_path / "a.png").write_bytes(b"file")
    config = replace(CONFIG, allowed_local_path=tmp_path, local_files=True)
    async with serving(answer) as url, fetching(config) as fetcher:
        a, b = HttpSource(f"{url}/a"), HttpSource(f"{url}/b")
        sources = parts_of(a, b, DataSource("", "data", False), a, MediaFile(f"{tmp_path}/a.png"), a)
        for round_ in (1, 2):
            assert await fetcher.fetch_all(sources) == [b"/a", b"/b", b"data", b"/a", b"file", b"/a"]
            assert sorted(hits) == sorted(["/a", "/b"] * round_)
        assert await fetcher.fetch_all([]) == []


@pytest.mark.asyncio
async def test_the_first_failure_names_its_part_and_ends_the_other_downloads() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def serve_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        assert await reader.read() == b""
        ended.set()
        writer.close()

    async def answer(request: web.Request) -> web.Response:
        await begun.wait()
        return web.Response(status=404)

    slow = await asyncio.start_server(serve_slowly, "127.0.0.1", 0)
    async with slow, serving(answer) as url, fetching() as fetcher:
        sources = parts_of(
            HttpSource(f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}/"), HttpSource(url)
        )
        with pytest.raises(PartFault) as caught:
            await fetcher.fetch_all(sources)
        assert caught.value.message == "image 2: the media host answered 404"
        await asyncio.wait_for(ended.wait(), 10)


@pytest.mark.asyncio
async def test_all_media_of_a_request_together_are_limited() -> None:
    config = replace(CONFIG, max_request_bytes=25)
    async with fetching(config) as fetcher:
        sources = [DataSource("", f"{index:010d}", False) for index in range(3)]
        assert len(await fetcher.fetch_all(parts_of(*sources[:2]))) == 2
        with pytest.raises(LimitFault, match="the media of this request exceed this worker's limit"):
            await fetcher.fetch_all(parts_of(*sources))


@pytest.mark.asyncio
async def test_downloads_from_one_host_take_at_most_a_quarter_of_the_slots_and_all_arrive() -> None:
    running = most = 0
    full = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            full.set()
        await full.wait()
        running -= 1
        return web.Response(body=request.path.encode())

    async with serving(answer) as url, fetching(replace(CONFIG, max_fetches=16)) as fetcher:
        bodies = await asyncio.gather(*(fetcher.fetch(HttpSource(f"{url}/{index}")) for index in range(40)))
        assert bodies == [f"/{index}".encode() for index in range(40)]
    assert most == 4


@pytest.mark.asyncio
async def test_a_download_that_gets_no_slot_in_time_is_an_overload_not_a_fault_of_the_client() -> None:
    release = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        await release.wait()
        return web.Response(body=BODY)

    # The first holds the only slot until its deadline, another one until the deadline after that.
    config = replace(CONFIG, max_fetches=1, fetch_timeout_s=0.1)
    async with serving(answer) as url, fetching(config) as fetcher:
        waiting = [fetcher.fetch(HttpSource(f"{url}/{index}")) for index in range(3)]
        raised = await asyncio.gather(*waiting, return_exceptions=True)
        release.set()
    assert str(raised[0]) == http_client.TIMED_OUT
    assert any("this worker is busy with other downloads" in str(each) for each in raised[1:])
    assert {type(each) for each in raised if not isinstance(each, ClientFault)} == {Overloaded}


@pytest.mark.asyncio
async def test_a_cancelled_download_frees_its_slots() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        begun.set()
        await release.wait()
        return web.Response(body=BODY)

    async with serving(answer) as url, fetching(replace(CONFIG, max_fetches=1)) as fetcher:
        first = asyncio.ensure_future(fetcher.fetch(HttpSource(url)))
        await begun.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        release.set()
        assert await fetcher.fetch(HttpSource(url)) == BODY


@pytest.mark.asyncio
async def test_every_redirect_stays_on_the_allowed_hosts() -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/x.png":
            return web.Response(body=BODY)
        raise web.HTTPFound(str(request.url.with_host("localhost").with_path("/x.png")))

    async with serving(answer) as url:
        async with fetching(replace(CONFIG, allowed_hosts=("127.0.0.1", "localhost"))) as fetcher:
            assert await fetcher.fetch(HttpSource(f"{url}/go")) == BODY
        async with fetching(replace(CONFIG, allowed_hosts=("127.0.0.1",))) as fetcher:
            assert await fetcher.fetch(HttpSource(f"{url}/x.png")) == BODY
            with pytest.raises(ClientFault) as caught:
                await fetcher.fetch(HttpSource(f"{url}/go"))
            assert (
                caught.value.message
                == "the media host redirects to a host that this worker does not fetch from"
            )


@pytest.mark.asyncio
async def test_each_kind_asks_a_server_for_its_own_types() -> None:
    accepted: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        return web.Response(body=BODY)

    async with serving(answer) as url, fetching() as fetcher:
        for kind in ("image", "video", "audio"):
            await fetcher.fetch(classify(MediaPart(1, kind, url), CONFIG))
    assert [each.partition("/")[0] for each in accepted] == ["image", "video", "audio"]


@pytest.mark.asyncio
async def test_an_untrusted_proxy_is_the_operators_fault_and_not_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with fetching(replace(CONFIG, allow_internal=False)) as fetcher:
        with pytest.raises(WorkerError, match="its egress proxy is not marked as trusted") as caught:
            await fetcher.fetch(HttpSource("http://8.8.8.8/"))
        assert not isinstance(caught.value, ClientFault)


@pytest.mark.asyncio
async def test_no_log_line_holds_a_query_or_credentials(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with raw_server(b"") as (url, _):
            message = await fault_of(url.replace("://", "://user:secret@") + "?token=secret")
    assert message == "the media host closed the connection without an answer"
    assert "secret" not in caplog.text + message


@pytest.mark.asyncio
async def test_a_certificate_that_does_not_match_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: Any, **__: Any) -> None:
        error: Any = aiohttp.ClientConnectorCertificateError
        raise error(None, Exception("text of the library"))

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
    assert await fault_of("https://127.0.0.1:9/") == "the TLS certificate of the media host is not valid"
