"""One GET of one client-chosen URL over Dynamo's HTTP client, with redirects followed here so that every hop
is checked.

Dynamo's client brings timeouts, the byte cap while reading, connection reuse and the rule about egress
proxies; `addresses` decides about names and addresses, `url_text` keeps a URL's bytes. Failures leave this
module as `FetchError`, in our words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp
from dynamo.common.http import AiohttpClient, HttpConfigurationError
from dynamo.common.http.base import collect_capped
from dynamo.common.http.url_validator import UrlValidationError
from yarl import URL

from dynamo.trtllm import PROJECT_URL, __version__
from dynamo.trtllm.errors import WorkerError
from dynamo.trtllm.multimodal.addresses import (
    BlockedAddress,
    CheckedResolver,
    is_address,
    is_among,
    is_blocked,
    is_internal_name,
)
from dynamo.trtllm.multimodal.content_encoding import Body, FetchError, inflate, larger_than
from dynamo.trtllm.multimodal.names import NameTimeout
from dynamo.trtllm.multimodal.url_text import NotWebUrl, parse_url

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 3
"""As Dynamo's own."""
USER_AGENT = f"dynamo-trtllm/{__version__} (+{PROJECT_URL})"
"""Some hosts refuse a client that names no contact."""

BLOCKED = "its url is blocked by this worker's policy: only public hosts may be fetched"
NOT_ALLOWED = "its url is on a host that this worker does not fetch from"
NOT_ALLOWED_REDIRECT = "the media host redirects to a host that this worker does not fetch from"
NOT_RESOLVED = "the name of the media host cannot be resolved"
NAME_TIMED_OUT = "no name server answered about the media host in time"
TIMED_OUT = "the media host did not deliver in time"
INVALID_REDIRECT = "the media host redirects to an invalid URL"

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_READ_BYTES = 1 << 16


class MediaHttpClient(AiohttpClient):
    """Dynamo's client with our resolver and without shared cookies. One per `Fetcher`; use `get`, then
    `close`.
    """

    def __init__(self, *, allow_internal: bool, allowed_hosts: Sequence[str] = ()) -> None:
        """`allowed_hosts`: the only ones that are asked, where there are any; see `is_among`."""
        super().__init__()
        self._allowed_hosts = tuple(allowed_hosts)
        self._allow_internal = allow_internal
        self._names = CheckedResolver(allow_internal=allow_internal)

    async def get(self, url: str, *, timeout_s: float, max_bytes: int, accept: str = "*/*") -> bytes:
        """The body behind `url`, its content encodings undone. `accept` says which types are asked for.

        Raises `FetchError`, `Overloaded`, and `WorkerError` where the deployment's proxy forbids every fetch.
        """
        target = await self._check(url)
        for _ in range(MAX_REDIRECTS + 1):
            body, location = await self._hop(target, timeout_s, max_bytes, accept)
            if body is not None:
                return await inflate(body, max_bytes)
            target = await self._check(location, target)
        raise FetchError(f"the media host redirects more than {MAX_REDIRECTS} times")

    async def _check(self, text: str, base: URL | None = None) -> URL:
        """What `text` leads to, with a host that the policy allows. The same `URL` is then asked for, so none
        is read twice.
        """
        try:
            target = parse_url(text, base)
        except NotWebUrl as error:
            raise FetchError("the media host redirects to something other than http or https") from error
        except ValueError as error:
            raise FetchError("its url is not a valid URL" if base is None else INVALID_REDIRECT) from error
        host = target.raw_host or ""
        if self._allowed_hosts and not is_among(host, self._allowed_hosts):
            raise FetchError(NOT_ALLOWED if base is None else NOT_ALLOWED_REDIRECT)
        if self._allow_internal:
            return target
        if is_blocked(host) or is_internal_name(host):
            raise FetchError(BLOCKED)
        if is_address(host):
            return target
        try:
            await self._names.resolve(host)
        except OSError as error:
            raise FetchError(_name_fault(error)) from error
        except UnicodeError as error:
            raise FetchError("its url is not a valid URL") from error
        return target

    async def _hop(self, url: URL, timeout_s: float, max_bytes: int, accept: str) -> tuple[Body | None, str]:
        """One request without redirects: the body, or where it leads. aiohttp itself tries a lost connection
        once more.
        """
        if not self._allow_internal:
            await self._require_proxy_trust(url)
        session = await self._get_session(self._allow_internal)
        try:
            async with session.get(
                url,
                timeout=self._effective_timeout(timeout_s),
                allow_redirects=False,
                headers={"Accept": accept},
            ) as response:
                location = response.headers.get("Location", "")
                if response.status in _REDIRECTS and location:
                    return None, location
                if response.status >= 400:
                    raise FetchError(f"the media host answered {response.status}")
                if (response.content_length or 0) > max_bytes:
                    raise FetchError(larger_than(max_bytes))
                chunks = response.content.iter_chunked(_READ_BYTES)
                return Body(
                    await collect_capped(chunks, "", max_bytes),
                    response.headers.getall("Content-Encoding", []),
                ), ""
        except asyncio.TimeoutError as error:
            raise FetchError(TIMED_OUT) from error
        except aiohttp.ClientError as error:
            raise _connection_fault(error) from error
        except UrlValidationError as error:
            raise FetchError(larger_than(max_bytes)) from error

    async def _require_proxy_trust(self, url: URL) -> None:
        try:
            await self._require_trusted_egress_proxy(str(url))
        except HttpConfigurationError as error:
            logger.error("media cannot be fetched: %s applies to them and is not trusted", "an egress proxy")
            raise WorkerError(
                "this worker cannot fetch media: its egress proxy is not marked as trusted"
            ) from error

    def _build_session(self, allow_private_ips: bool) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            resolver=self._names,
            keepalive_timeout=self._config.keepalive_timeout,
            use_dns_cache=False,
        )
        # Cookies of one request's host must not travel with another's; what is compressed is inflated here,
        # within the limit.
        return aiohttp.ClientSession(
            connector=connector,
            trust_env=True,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": USER_AGENT},
        )


def host_of(url: str) -> str:
    """The key under which downloads from one host are counted."""
    return (urlsplit(url).netloc.rpartition("@")[2]).lower()


def _name_fault(error: OSError) -> str:
    if isinstance(error, BlockedAddress):
        return BLOCKED
    return NAME_TIMED_OUT if isinstance(error, NameTimeout) else NOT_RESOLVED


def _connection_fault(cause: aiohttp.ClientError) -> FetchError:
    """What a client reads when no answer came; `cause` is aiohttp's own exception."""
    if isinstance(cause, aiohttp.ClientConnectorDNSError):
        return FetchError(_name_fault(cause.os_error))
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return FetchError("the TLS certificate of the media host is not valid")
    if isinstance(cause, aiohttp.ClientSSLError):
        return FetchError("no TLS connection to the media host could be made")
    if isinstance(cause, aiohttp.ClientConnectorError):
        refused = isinstance(cause.os_error, ConnectionRefusedError)
        return FetchError(
            "the media host refused the connection" if refused else "the media host cannot be reached"
        )
    if isinstance(cause, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        return FetchError("the media host closed the connection without an answer")
    if isinstance(cause, aiohttp.InvalidURL):
        return FetchError("its url is not a valid URL")
    if isinstance(cause, aiohttp.ClientPayloadError):
        return FetchError("the media host ended the download before it was complete")
    return FetchError("the media host did not answer in valid HTTP")
