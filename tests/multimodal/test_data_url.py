"""Payloads of data URLs."""

from __future__ import annotations

import base64

import pytest

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.data_url import decode_payload
from dynamo.trtllm.multimodal.parts import DataSource

CONFIG = MediaConfig(max_file_bytes=1000)
# its base64 has '+' and '/' and one sign of padding or two
DATA = bytes(range(250, 256)) + b"\xfb\xff\xbe>?" + b"xy"


def base64_source(payload: str) -> DataSource:
    return DataSource("image/png", payload, base64=True)


@pytest.mark.parametrize("data", [DATA, DATA + b"z", DATA + b"zz"])
@pytest.mark.parametrize(
    "write",
    [
        lambda text: text,
        lambda text: "\r\n ".join(text),
        lambda text: text.replace("+", "-").replace("/", "_"),
        lambda text: text.rstrip("="),
        lambda text: text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    ],
    ids=["plain", "white-space", "url-safe", "unpadded", "percent-encoded"],
)
def test_every_usual_way_to_write_base64_gives_the_same_bytes(data: bytes, write: object) -> None:
    text = base64.b64encode(data).decode()
    assert decode_payload(base64_source(write(text)), CONFIG) == data  # type: ignore[operator]


@pytest.mark.parametrize("payload", ["A", "AAAAA", "AA=A", "AA===", "=AAA", "AA*A", "AAAé", "AAA\ud800"])
def test_other_base64_is_refused(payload: str) -> None:
    with pytest.raises(ClientFault, match=r"^its data URL is not valid (base64|text)$"):
        decode_payload(base64_source(payload), CONFIG)


@pytest.mark.parametrize("source", [base64_source(""), base64_source(" \n"), DataSource("", "", False)])
def test_an_empty_payload_is_refused(source: DataSource) -> None:
    with pytest.raises(ClientFault, match="its data URL is empty"):
        decode_payload(source, CONFIG)


def test_percent_encoded_bytes_are_read_without_base64() -> None:
    assert decode_payload(DataSource("image/bmp", "BM%00%ff a", False), CONFIG) == b"BM\x00\xff a"


def test_the_size_limit_holds_for_both_encodings_and_to_the_byte() -> None:
    assert len(decode_payload(base64_source(base64.b64encode(bytes(1000)).decode()), CONFIG)) == 1000
    for source in (base64_source(base64.b64encode(bytes(1001)).decode()), DataSource("", "a" * 1001, False)):
        with pytest.raises(ClientFault, match="larger than this worker's limit"):
            decode_payload(source, CONFIG)
