"""Which hosts a client's URL may lead to; no name leaves this process,
since a resolver of the test answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal import names
from dynamo.trtllm.multimodal.addresses import is_among, is_blocked
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.http_client import BLOCKED, NAME_TIMED_OUT, NOT_ALLOWED, NOT_RESOLVED
from dynamo.trtllm.multimodal.parts import HttpSource


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a socket was to be connected to; each attempt is refused."""
    attempts: list[str] = []

    async def refuse(loop: Any, connection: socket.socket, address: tuple[str, int]) -> None:
        attempts.append(address[0])
        raise ConnectionRefusedError(111, "refused by the test")

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_connect", refuse)
    return attempts


def answers(monkeypatch: pytest.MonkeyPatch, *rounds: list[str]) -> None:
    """Let the n-th look-up of any name give the n-th of `rounds`, the last one again and again."""
    asked = 0

    def getaddrinfo(host: str, port: Any, *rest: Any, **keywords: Any) -> list[Any]:
        nonlocal asked
        asked += 1
        found = rounds[min(asked, len(rounds)) - 1]
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]
        tails: list[tuple[int, ...]] = [
            (port or 0, 0, 0) if ":" in address else (port or 0,) for address in found
        ]
        return [
            (kind, socket.SOCK_STREAM, 6, "", (address, *tail))
            for kind, address, tail in zip(kinds, found, tails, strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def fault_of(url: str, **config: Any) -> str:
    fetcher = Fetcher(MediaConfig(**config))
    try:
        with pytest.raises(ClientFault) as caught:
            await fetcher.fetch(HttpSource(url))
        return caught.value.message
    finally:
        await fetcher.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "127.0.0.1:1",
        "127.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[fd00::1]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[64:ff9b::a00:1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[2002:a00:1::]",
        "[2002:7f00:1::1]",
        "[2001:0:1:2::3]",
        "user:password@10.0.0.1",
        "10.0.0.1.",
        "localhost",
        "LOCALHOST.",
        "localhost.localdomain",
        "metadata",
        "METADATA.GOOGLE.INTERNAL.",
        "metadata.google.internal..",
        "kubernetes.default.svc",
        "app.localhost",
        "api.default.svc.cluster.local",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_internal_hosts_are_refused_without_a_connection(
    scheme: str, host: str, connections: list[str]
) -> None:
    assert await fault_of(f"{scheme}://{host}/x.png") == BLOCKED
    assert connections == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "10.0.0.1"],
        ["64:ff9b::a9fe:a9fe"],
        ["8.8.8.8", "64:ff9b::c0a8:1"],
        ["2002:c0a8:101::1"],
        ["::ffff:10.0.0.1"],
        ["fe80::1"],
    ],
)
async def test_one_internal_address_among_the_answers_refuses_the_name(
    found: list[str], connections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, found)
    assert await fault_of("http://images.example/x.png") == BLOCKED
    assert connections == []


@pytest.mark.asyncio
@pytest.mark.parametrize("later", [["127.0.0.1"], ["64:ff9b::7f00:1"], ["8.8.8.8", "127.0.0.1"]])
async def test_a_name_that_answers_with_an_internal_address_the_second_time_is_refused(
    later: list[str], connections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ["8.8.8.8"], later)
    assert await fault_of("http://images.example/x.png") == BLOCKED
    assert connections == []


@pytest.mark.asyncio
async def test_a_public_host_is_connected_to_by_the_address_that_was_checked_over_http_and_https(
    connections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ["8.8.8.8"])
    for url in (
        "http://Images.Example./x.png",
        "https://images.example/x.png",
        "http://8.8.8.8/",
        "http://[64:ff9b::808:808]/",
    ):
        assert await fault_of(url) == "the media host refused the connection"
    assert connections == ["8.8.8.8", "8.8.8.8", "8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.asyncio
async def test_a_name_without_an_address_is_not_called_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, [])
    assert await fault_of("http://images.example/x.png") == NOT_RESOLVED
    assert await fault_of("http://images.example/x.png", allow_internal=True) == NOT_RESOLVED


@pytest.mark.asyncio
async def test_internal_hosts_are_reached_when_the_operator_allows_it(
    connections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ["10.0.0.1"])
    assert (
        await fault_of("http://images.internal/x.png", allow_internal=True)
        == "the media host refused the connection"
    )
    assert connections == ["10.0.0.1"]


@pytest.mark.asyncio
async def test_a_trusted_egress_proxy_may_have_an_internal_address_and_nothing_else_may(
    connections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("DYN_MM_TRUST_EGRESS_PROXY", "1")
    monkeypatch.setenv("no_proxy", "direct.example")
    answers(monkeypatch, ["10.0.0.1"])
    assert await fault_of("http://8.8.8.8/x.png") == "the media host refused the connection"
    assert await fault_of("http://direct.example/x.png") == BLOCKED
    assert connections == ["10.0.0.1"]


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "example", "", "8.8.8.8.8"]
)
def test_public_addresses_and_names_are_not_blocked(address: str) -> None:
    assert not is_blocked(address)


class SilentNames:
    """A name server that says nothing about names in `silent.example` until `speak` is set,
    and knows all others as 8.8.8.8."""

    def __init__(self) -> None:
        self.speak = threading.Event()
        self.asked: list[str] = []
        self._asked_one_more = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def until_asked(self, times: int) -> None:
        while len(self.asked) < times:
            self._asked_one_more.clear()
            await self._asked_one_more.wait()

    def getaddrinfo(self, host: str, port: Any, *rest: Any, **keywords: Any) -> list[Any]:
        self.asked.append(host)
        self._loop.call_soon_threadsafe(self._asked_one_more.set)
        if host.endswith("silent.example"):
            self.speak.wait()
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port or 0))]


@pytest_asyncio.fixture
async def silent_names(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SilentNames]:
    names_ = SilentNames()
    monkeypatch.setattr(socket, "getaddrinfo", names_.getaddrinfo)
    yield names_
    names_.speak.set()


@pytest.mark.asyncio
async def test_names_that_nobody_resolves_hold_up_neither_other_names_nor_the_default_pool(
    silent_names: SilentNames, connections: list[str]
) -> None:
    fetcher = Fetcher(MediaConfig())
    silent = [
        asyncio.create_task(fetcher.fetch(HttpSource(f"http://{n}.silent.example/"))) for n in range(40)
    ]
    try:
        await asyncio.wait_for(silent_names.until_asked(40), 20)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "transferred"), 20) == "transferred"
        assert (
            await asyncio.wait_for(fault_of("http://images.example/x.png"), 20)
            == "the media host refused the connection"
        )
        assert connections == ["8.8.8.8"]
        assert not any(task.done() for task in silent)
    finally:
        silent_names.speak.set()
        faults = await asyncio.gather(*silent, return_exceptions=True)
        await fetcher.close()
    assert {str(fault) for fault in faults} == {NOT_RESOLVED}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "target", ["http://one.silent.example/x.png", "https://two.silent.example:8443/x.png"]
)
async def test_a_silent_name_server_ends_in_a_refusal_at_the_deadline_of_names(
    target: str, silent_names: SilentNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "LOOKUP_TIMEOUT_S", 0.05)
    assert await fault_of(target) == NAME_TIMED_OUT
    assert await fault_of(target, allow_internal=True) == NAME_TIMED_OUT


@pytest.mark.asyncio
async def test_one_silent_name_that_many_ask_for_at_once_is_looked_up_once(silent_names: SilentNames) -> None:
    fetcher = Fetcher(MediaConfig())
    url = "http://same.silent.example/"
    asking = [asyncio.create_task(fetcher.fetch(HttpSource(f"{url}{n}"))) for n in range(8)]
    await silent_names.until_asked(1)
    silent_names.speak.set()
    await asyncio.gather(*asking, return_exceptions=True)
    await fetcher.close()
    assert silent_names.asked == ["same.silent.example"]


@pytest.mark.parametrize(
    ("host", "allowed", "is_in"),
    [
        ("example.com", "example.com", True),
        ("EXAMPLE.com.", "example.com", True),
        ("a.example.com", "example.com", False),
        ("notexample.com", "example.com", False),
        ("example.com.evil.org", "example.com", False),
        ("a.example.com", "*.example.com", True),
        ("b.a.example.com", ".example.com", True),
        ("example.com", "*.example.com", False),
        ("notexample.com", "*.example.com", False),
        ("xn--bcher-kva.example", "b\u00fccher.example", True),
        ("b\u00fccher.example", "xn--bcher-kva.example", True),
        ("93.184.216.34", "93.184.216.34", True),
        ("2606:4700::1111", "[2606:4700::1111]", True),
        ("", "example.com", False),
    ],
)
def test_a_host_is_among_those_that_are_named_and_below_those_with_an_asterisk(
    host: str, allowed: str, is_in: bool
) -> None:
    assert is_among(host, ["other.example", allowed]) is is_in


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "host", ["evil.example", "images.example.evil.example", "images.example@evil.example", "8.8.8.8"]
)
async def test_another_host_than_those_allowed_is_not_even_looked_up(
    monkeypatch: pytest.MonkeyPatch, connections: list[str], host: str
) -> None:
    answers(monkeypatch, ["8.8.8.8"])
    assert await fault_of(f"http://{host}/x.png", allowed_hosts=("images.example",)) == NOT_ALLOWED
    assert connections == []
    reached = await fault_of("http://IMAGES.example:81/x.png", allowed_hosts=("images.example",))
    assert (reached, connections) == ("the media host refused the connection", ["8.8.8.8"])


@pytest.mark.asyncio
async def test_an_allowed_host_may_still_not_lead_to_a_private_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, ["10.0.0.1"])
    assert await fault_of("http://images.example/x.png", allowed_hosts=("images.example",)) == BLOCKED
