"""A URL as it goes over the wire: byte for byte what was given, and only what no URL may hold percent-encoded
(RFC 3986).

Signed addresses are signed over these bytes, so `%27` must not become `'`, nor `%2F` a slash. The host alone
is normalised: it decides where the request goes, and every way to write it means the same.
"""

from __future__ import annotations

import re

from yarl import URL

_ILLEGAL = re.compile(rb"%(?![0-9A-Fa-f]{2})|[^A-Za-z0-9\-._~:/?@!$&'()*+,;=%]")
_PARTS = re.compile(r"(?s)(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?#\\]*))?([^?#]*)(\?[^#]*)?(?:#.*)?")


class NotWebUrl(ValueError):
    """A URL of another scheme than http and https."""


def parse_url(text: str, base: URL | None = None) -> URL:
    """The URL that `text` is, or leads to from `base`, without its fragment.

    Raises `NotWebUrl` for another scheme than http and https, and `ValueError` for what is no valid URL.
    """
    found = _PARTS.fullmatch(text.strip(" \t\r\n"))
    scheme, authority, path, query = found.groups() if found is not None else (None,) * 4
    if scheme is not None and scheme.lower() not in ("http", "https"):
        raise NotWebUrl("neither http nor https")
    rest = _legal(path or "") + _legal(query or "")
    if scheme is None and authority is None:
        if base is None:
            raise ValueError("neither a scheme nor a host")
        if rest.startswith("/"):
            return URL(f"{base.scheme}://{base.raw_authority}{rest}", encoded=True)
        return base.join(URL(rest, encoded=True))
    if not authority or (scheme is None and base is None):
        raise ValueError("no host")
    origin = URL(f"{scheme or (base.scheme if base else '')}://{authority}/")
    host = (origin.host or "").rstrip(".").lower()
    slash = "" if rest.startswith("/") else "/"
    return URL(str(origin.with_host(host)).rstrip("/") + slash + rest, encoded=True)


def _legal(text: str) -> str:
    raw = text.encode(errors="surrogateescape")
    return _ILLEGAL.sub(lambda found: b"".join(b"%%%02X" % byte for byte in found[0]), raw).decode("ascii")
