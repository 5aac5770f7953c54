"""One GET of one client-chosen URL over Dynamo's HTTP client, with redirects followed here so that every hop is checked.

Dynamo's client brings timeouts, the byte cap while reading, connection reuse and the rule about egress proxies; its policy
(`validate_url`) decides about names and addresses. Failures leave this module as `FetchError`, in our words.
"""

from __future__ import annotations

import logging
import socket
from urllib.parse import urlsplit

import aiohttp
from dynamo.common.http import (
    AiohttpClient,
    HttpConfigurationError,
    HttpConnectionError,
    HttpStatusError,
    HttpTimeoutError,
)
from dynamo.common.http.url_validator import UrlValidationError, UrlValidationPolicy, validate_url
from yarl import URL

from dynamo.trtllm.errors import ClientFault, WorkerError
from dynamo.trtllm.multimodal.addresses import BlockedAddress, CheckedResolver, is_blocked

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 3
"""As Dynamo's own."""

BLOCKED = "its url is blocked by this worker's policy: only public hosts may be fetched"
NOT_RESOLVED = "the name of the image host cannot be resolved"
TIMED_OUT = "the image host did not deliver the image in time"


class FetchError(ClientFault):
    """A download failed, by the fault of the URL or of the host behind it."""


class MediaHttpClient(AiohttpClient):
    """Dynamo's client with our resolver and without shared cookies. One per `Fetcher`; use `get`, then `close`."""

    def __init__(self, *, allow_internal: bool) -> None:
        super().__init__()
        self._policy = UrlValidationPolicy(allow_http=True, allow_private_ips=allow_internal)
        self._checked_resolvers: list[CheckedResolver] = []

    async def close(self) -> None:
        """Close sessions and resolvers; a session closes only a resolver that it made itself."""
        await super().close()
        while self._checked_resolvers:
            await self._checked_resolvers.pop().close()

    async def get(self, url: str, *, timeout_s: float, max_bytes: int) -> bytes:
        """The body behind `url`. Raises `FetchError`, or `WorkerError` where the deployment's proxy forbids every fetch."""
        for _ in range(MAX_REDIRECTS + 1):
            target = await self._check(url)
            body, location = await self._hop(target, timeout_s, max_bytes)
            if location is None:
                return body or b""
            url = location
        raise FetchError(f"the image host redirects more than {MAX_REDIRECTS} times")

    async def _check(self, url: str) -> str:
        """`url` in its canonical form, with a host that the policy allows."""
        try:
            parsed = URL(url)
            if parsed.scheme not in ("http", "https"):
                raise FetchError("the image host redirects to something other than http or https")
            host = (parsed.host or "").rstrip(".").lower()
            target = str(parsed.with_host(host).with_fragment(None))
        except ValueError as error:
            raise FetchError("its url is not a valid URL") from error
        if not self._policy.allow_private_ips and is_blocked(host):
            raise FetchError(BLOCKED)
        try:
            await validate_url(target, self._policy)
        except UrlValidationError as error:
            raise FetchError(NOT_RESOLVED if isinstance(error.__cause__, socket.gaierror) else BLOCKED) from error
        except UnicodeError as error:
            raise FetchError("its url is not a valid URL") from error
        return target

    async def _hop(self, url: str, timeout_s: float, max_bytes: int) -> tuple[bytes | None, str | None]:
        """One request without redirects: the body, or where it leads. aiohttp itself tries a lost connection once more."""
        try:
            return await self._fetch_body_or_redirect(url, timeout_s, max_bytes=max_bytes, policy=self._policy)
        except HttpStatusError as error:
            raise FetchError(f"the image host answered {error.status}") from error
        except HttpTimeoutError as error:
            raise FetchError(TIMED_OUT) from error
        except HttpConnectionError as error:
            raise _connection_fault(error.__cause__) from error
        except UrlValidationError as error:
            raise FetchError(f"larger than this worker's limit of {max_bytes / (1 << 20):g} MiB") from error
        except HttpConfigurationError as error:
            logger.error("images cannot be fetched: %s applies to them and is not trusted", "an egress proxy")
            raise WorkerError("this worker cannot fetch images: its egress proxy is not marked as trusted") from error
        except ValueError as error:
            raise FetchError("the image host redirects to an invalid URL") from error

    @staticmethod
    def _connect_allows_private(policy: UrlValidationPolicy | None) -> bool:
        """Our configuration decides alone; it has read the environment already."""
        return policy is not None and policy.allow_private_ips

    def _build_session(self, allow_private_ips: bool) -> aiohttp.ClientSession:
        resolver = CheckedResolver(allow_internal=allow_private_ips)
        self._checked_resolvers.append(resolver)
        connector = aiohttp.TCPConnector(
            limit=0, resolver=resolver, keepalive_timeout=self._config.keepalive_timeout, use_dns_cache=False
        )
        # Cookies of one request's host must not travel with another's; Accept names what `decode` takes.
        return aiohttp.ClientSession(
            connector=connector,
            trust_env=True,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "dynamo-trtllm"},
        )


def host_of(url: str) -> str:
    """The key under which downloads from one host are counted."""
    return (urlsplit(url).netloc.rpartition("@")[2]).lower()


def _connection_fault(cause: BaseException | None) -> FetchError:
    """What a client reads when no answer came; `cause` is aiohttp's own exception."""
    if isinstance(cause, aiohttp.ClientConnectorDNSError):
        return FetchError(BLOCKED if isinstance(cause.os_error, BlockedAddress) else NOT_RESOLVED)
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return FetchError("the TLS certificate of the image host is not valid")
    if isinstance(cause, aiohttp.ClientSSLError):
        return FetchError("no TLS connection to the image host could be made")
    if isinstance(cause, aiohttp.ClientConnectorError):
        refused = isinstance(cause.os_error, ConnectionRefusedError)
        return FetchError("the image host refused the connection" if refused else "the image host cannot be reached")
    if isinstance(cause, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        return FetchError("the image host closed the connection without an answer")
    if isinstance(cause, aiohttp.InvalidURL):
        return FetchError("its url is not a valid URL")
    if isinstance(cause, aiohttp.ClientPayloadError):
        return FetchError("the image host ended the download before it was complete")
    return FetchError("the image host did not answer in valid HTTP")
