"""What a media part of a request refers to, decided from its text alone;
nothing here touches a disk or a network.

Steps of this package raise `ClientFault` without saying which part is meant;
`at_part` adds the position, in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.errors import ClientFault, PartFault
from dynamo.trtllm.multimodal.kinds.kind import MediaKind
from dynamo.trtllm.multimodal.kinds.registry import KINDS, in_words, plural_of

EMBEDDING_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".safetensors"})
MAX_URL_CHARACTERS = 8192
"""Longest http, https or file URL; data URLs are bounded by `MediaConfig.max_file_bytes`."""

NOT_PREPARED = "no processor prepares an embedding file: leave out mm_processor_kwargs"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AROUND = " \t\r\n"
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_DESCRIBED_CHARACTERS = 100
_MEDIA_PARTS = tuple(each for kind in KINDS.values() for each in (kind.part_type, *kind.message_parts))
TAKEN = f"a content part is {in_words(('text', *_MEDIA_PARTS), 'or')}"
_KNOWN_CONTENT = frozenset({"text", "refusal", *_MEDIA_PARTS})
"""Parts that are text, and those that come as `MediaPart`s too and are taken or refused as such."""
_PART_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True)
class MediaPart:
    """One media part of a request; `position` counts those of its kind from 1,
    in the order in which they were sent."""

    position: int
    kind: str
    url: str = field(repr=False)
    """Empty where the part is its uuid alone."""
    uuid: str | None = None
    """The client's own name for the content, among those of `tenant`."""
    tenant: str | None = field(default=None, repr=False)
    """Whose request it is (`cache_salt`): a uuid of one tenant means nothing to another."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The request's `mm_processor_kwargs`, checked, as far as they are for this kind."""


@dataclass(frozen=True)
class HttpSource:
    """Media on a web server. `accept` is what the server is asked for."""

    url: str = field(repr=False)
    accept: str = field(default="*/*", repr=False, compare=False)


@dataclass(frozen=True)
class DataSource:
    """Media inside their URL; `payload` is still encoded, as base64 or by percent signs."""

    mime: str
    payload: str = field(repr=False)
    base64: bool


@dataclass(frozen=True)
class MediaFile:
    """Media on this worker's disk; `path` is what the client wrote, percent-decoded and unchecked."""

    path: str


@dataclass(frozen=True)
class EmbeddingFile:
    """Precomputed embeddings on this worker's disk; `path` as in `MediaFile`,
    `suffix` in lower case with its dot."""

    path: str
    suffix: str


@dataclass(frozen=True)
class Known:
    """A part that is its uuid alone: content that came with that uuid before."""

    uuid: str


Source: TypeAlias = HttpSource | DataSource | MediaFile | EmbeddingFile | Known


@contextmanager
def at_part(part: MediaPart) -> Iterator[None]:
    """Turn a `ClientFault` of the block into a `PartFault` that names `part`;
    one that names a part already passes."""
    try:
        yield
    except PartFault:
        raise
    except ClientFault as error:
        raise PartFault(part.position, error.message, kind=part.kind) from error


def classify(part: MediaPart, config: MediaConfig, modality: Modality = Modality.MULTIMODAL) -> Source:
    """Decide what `part` refers to. Raises `PartFault` for what this worker does not take."""
    with at_part(part):
        kind = KINDS.get(part.kind)
        if modality is Modality.TEXT or kind is None:
            serves = (
                "text alone"
                if modality is Modality.TEXT
                else in_words(each.plural for each in KINDS.values())
            )
            raise ClientFault(f"this worker takes no {plural_of(part.kind)}; it serves {serves}")
        if part.uuid is not None and not part.url:
            return Known(part.uuid)
        source = _classify_url(part.url, kind, config)
        if part.options and isinstance(source, EmbeddingFile):
            raise ClientFault(NOT_PREPARED)
        return source


def require_known_content(messages: object) -> None:
    """Refuse what of a request's `messages` would be answered as if it were not there.

    Media of the kinds in the registry come as `MediaPart`s as well; any other part that is not text reaches
    a worker here only. Raises `ClientFault` naming message and part, counted from 1.
    """
    if not isinstance(messages, (list, tuple)):
        raise ClientFault("messages must be a list")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ClientFault(f"message {number}: it must be an object")
        if message.get("audio"):
            raise ClientFault(f"message {number}: an answer's audio is not supported; {TAKEN}")
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, (list, tuple)) else (), 1):
            kind = (
                part.get("type") if isinstance(part, Mapping) else "text" if isinstance(part, str) else None
            )
            is_named = isinstance(kind, str) and _PART_TYPE.fullmatch(kind)
            if not is_named or kind not in _KNOWN_CONTENT:
                named = kind if is_named else "a part of this type"
                raise ClientFault(f"message {number}, part {at}: {named} is not supported; {TAKEN}")


def names_embedding_file(part: MediaPart) -> bool:
    """True for a file URL, or a path, with an embedding file's suffix, where the kind has such files."""
    url, kind = part.url, KINDS.get(part.kind)
    if not isinstance(url, str) or _scheme_of(url.strip()) not in ("", "file"):
        return False
    suffix = _suffix(url.strip().partition("?")[0].partition("#")[0])
    return kind is not None and kind.embedding_files and suffix in EMBEDDING_SUFFIXES


def reference_of(url: str) -> str:
    """`url` as far as it says what to read: equal ones are one download.
    A fragment is never sent to a server."""
    url = url.strip(_AROUND)
    return url.partition("#")[0] if _scheme_of(url) in ("http", "https") else url


def describe(url: object) -> str:
    """`url` for a log line: at most about 100 characters, without credentials, query, fragment or payload."""
    if not isinstance(url, str):
        return "(not a string)"
    scheme = _scheme_of(url.strip())
    if scheme == "data":
        mime = url.strip()[5:105].partition(",")[0].partition(";")[0]
        return _shorten(f"data:{mime} ({len(url)} characters)")
    try:
        parsed = urlsplit(url.strip()[: 4 * _DESCRIBED_CHARACTERS])
    except ValueError:
        return "(not a URL)"
    host = parsed.netloc.rpartition("@")[2]
    prefix = f"{scheme}://" if scheme else ""
    return _shorten(_CONTROL.sub("?", f"{prefix}{host}{parsed.path}"))


def _shorten(text: str) -> str:
    return text if len(text) <= _DESCRIBED_CHARACTERS else text[: _DESCRIBED_CHARACTERS - 3] + "..."


def _scheme_of(url: str) -> str:
    found = _SCHEME.match(url[:64])
    return found.group(1).lower() if found else ""


def _classify_url(url: object, kind: MediaKind, config: MediaConfig) -> Source:
    if not isinstance(url, str):
        raise ClientFault("its url is missing or not a string")
    url = url.strip(_AROUND)
    if not url:
        raise ClientFault("its url is empty")
    scheme = _scheme_of(url)
    if scheme == "data":
        return _classify_data(url, config)
    if len(url) > MAX_URL_CHARACTERS:
        raise ClientFault(f"its url is longer than {MAX_URL_CHARACTERS} characters")
    if scheme in ("http", "https"):
        return _classify_http(url, kind)
    if scheme == "file":
        return _classify_file(_path_of_file_url(url), kind, config)
    if scheme:
        raise ClientFault(f"url scheme '{scheme[:16]}' is not supported; use http, https, data or file")
    return _classify_file(url, kind, config)


def _split(url: str) -> SplitResult:
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError as error:
        raise ClientFault("its url is not a valid URL") from error
    return parsed


def _classify_http(url: str, kind: MediaKind) -> HttpSource:
    parsed = _split(url)
    if not parsed.hostname or _CONTROL.search(parsed.netloc):
        raise ClientFault("its url is not a valid URL")
    if kind.embedding_files and _suffix(parsed.path) in EMBEDDING_SUFFIXES:
        raise ClientFault(
            "embedding files are not fetched over http; they are read from the worker's own disk (file://)"
        )
    return HttpSource(reference_of(url), kind.accept)


def _classify_data(url: str, config: MediaConfig) -> DataSource:
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise ClientFault("its data URL has no comma before the data")
    if len(payload) > 3 * config.max_file_bytes:
        raise ClientFault(too_large(config))
    parameters = [piece.strip().lower() for piece in header[:1024].split(";")]
    # The label decides nothing: object stores call everything binary/octet-stream.
    # The content is looked at, as over http.
    return DataSource(mime=parameters[0][:100], payload=payload, base64="base64" in parameters[1:])


def too_large(config: MediaConfig) -> str:
    """The message for media over `max_file_bytes`."""
    return f"larger than this worker's limit of {config.max_file_bytes / (1 << 20):g} MiB"


def _path_of_file_url(url: str) -> str:
    parsed = _split(url)
    if parsed.netloc.lower() not in ("", "localhost"):
        raise ClientFault("a file URL must not name a host; write file:///path")
    return unquote(parsed.path, errors="surrogateescape")


def _classify_file(path: str, kind: MediaKind, config: MediaConfig) -> MediaFile | EmbeddingFile:
    suffix = _suffix(path)
    if suffix in EMBEDDING_SUFFIXES:
        if not kind.embedding_files:
            raise ClientFault(f"embedding files do not stand for {kind.plural}")
        return EmbeddingFile(path, suffix)
    if not config.local_files:
        raise ClientFault(
            f"{kind.name} files are served only when the worker's allowed local media path is set explicitly"
        )
    return MediaFile(path)


def _suffix(path: str) -> str:
    return PurePosixPath(unquote(path).rstrip("/")).suffix.lower()
