"""Which addresses a client's URL may lead to: Dynamo's list, and what passes it although it reaches the same
places.

Dynamo's list (`is_blocked_ip`) holds private, loopback, link-local and reserved ranges. IPv6 forms that carry
an IPv4 address inside (NAT64, 6to4) are judged by it; ranges that are not global, Teredo and the like are
refused altogether.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.helpers import proxies_from_env
from dynamo.common.http.url_validator import is_blocked_ip
from yarl import URL

from dynamo.trtllm.multimodal.names import AddressInfo, Lookups

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_REFUSED_NETWORKS = tuple(map(ipaddress.IPv6Network, ("64:ff9b:1::/48", "2001::/32", "fec0::/10", "::/96")))
_INTERNAL_NAMES = frozenset(
    {
        "localhost",
        "localhost.localdomain",
        "ip6-localhost",
        "ip6-loopback",
        "metadata",
        "metadata.google.internal",
        "metadata.goog",
        "kubernetes.default",
        "kubernetes.default.svc",
    }
)
_INTERNAL_ENDINGS = (".localhost", ".svc.cluster.local")


class BlockedAddress(OSError):
    """A name led to an address that clients may not reach."""


def is_blocked(text: str) -> bool:
    """True when `text` is an IP address, IPv6 zone allowed, that a client's URL may not lead to."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if is_blocked_ip(str(address)) or not address.is_global:
        return True
    if isinstance(address, IPv4Address):
        return False
    inner = _embedded_ipv4(address)
    return any(address in network for network in _REFUSED_NETWORKS) or (
        inner is not None and is_blocked(str(inner))
    )


def _embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address inside a NAT64 (RFC 6052) or 6to4 (RFC 3056) address."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour


def is_address(text: str) -> bool:
    """True when `text` is an IP address, IPv6 zone allowed, and no name."""
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def is_internal_name(host: str) -> bool:
    """True for names that mean this machine or a cloud's metadata service, whatever a name server says about
    them.
    """
    return host in _INTERNAL_NAMES or host.endswith(_INTERNAL_ENDINGS)


def is_among(host: str, allowed: Sequence[str]) -> bool:
    """True when `host`, as a URL has it, is one of `allowed`: `example.com` is that host alone,
    `*.example.com` and `.example.com` any host below it. Names in other alphabets are compared as DNS writes
    them (RFC 5891); ports do not count.
    """
    name = _as_dns(host)
    for each in allowed:
        below = each.removeprefix("*")
        if name.endswith("." + _as_dns(below[1:])) if below.startswith(".") else name == _as_dns(each):
            return True
    return False


def _as_dns(host: str) -> str:
    bare = host.strip("[]").rstrip(".")
    try:
        return (URL.build(scheme="http", host=bare).raw_host or "").lower()
    except ValueError:
        return bare.lower()


class CheckedResolver(AbstractResolver):
    """Resolves names, also for the connections themselves, so an answer that changes after an earlier check
    gains nothing.

    One blocked address among the answers refuses the name (Dynamo's own resolver would go on with the
    others). The operator's own egress proxies may have any address; whether they are used at all is decided
    by Dynamo's client.
    """

    def __init__(self, *, allow_internal: bool) -> None:
        self._lookups = Lookups()
        self._allow_internal = allow_internal
        self._proxies = frozenset(proxy.proxy.host for proxy in proxies_from_env().values())

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of `host`. Raises `BlockedAddress`, `OSError` when there are none, and `Overloaded`."""
        answers = [_result(host, answer) for answer in await self._lookups.find(host, port, family)]
        checked = not self._allow_internal and host not in self._proxies
        if checked and any(is_blocked(answer["host"]) for answer in answers):
            raise BlockedAddress("a blocked address is among the answers")
        return answers

    async def close(self) -> None:
        """Nothing is held."""


def _result(host: str, answer: AddressInfo) -> ResolveResult:
    """One answer of `getaddrinfo` as aiohttp takes it; a scope (RFC 4007) is part of a link-local address."""
    family, _, proto, _, address = answer
    scope = f"%{address[3]}" if family == socket.AF_INET6 and address[3] else ""
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(
        hostname=host,
        host=f"{address[0].partition('%')[0]}{scope}",
        port=address[1],
        family=family,
        proto=proto,
        flags=numeric,
    )
