"""Decoding the payload of a `data:` URL (RFC 2397), as tolerant as browsers are.

Base64 may hold white space, percent-encoded characters and the URL-safe alphabet, and may lack its
padding; padding in a wrong place, other characters and an impossible length are refused. Pure; long
payloads belong into the media pool.
"""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.parts import DataSource, too_large

_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_WHITE_SPACE = b" \t\r\n\f"


def decode_payload(source: DataSource, config: MediaConfig) -> bytes:
    """The bytes that `source` stands for. Raises `ClientFault`; base64 is measured before it is decoded."""
    payload = source.payload
    try:
        raw = unquote_to_bytes(payload) if "%" in payload else payload.encode()
    except UnicodeEncodeError as error:
        raise ClientFault("its data URL is not valid text") from error
    data = _decode_base64(raw, config) if source.base64 else raw
    if not data:
        raise ClientFault("its data URL is empty")
    if len(data) > config.max_file_bytes:
        raise ClientFault(too_large(config))
    return data


def _decode_base64(raw: bytes, config: MediaConfig) -> bytes:
    text = raw.translate(_URL_SAFE, _WHITE_SPACE)
    if len(text) // 4 * 3 > config.max_file_bytes + 3:
        raise ClientFault(too_large(config))
    missing = -len(text) % 4
    if missing in (1, 2) and not text.endswith(b"="):
        text += b"=" * missing
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ClientFault("its data URL is not valid base64") from error
