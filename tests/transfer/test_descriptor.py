"""A descriptor that does not add up is refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dynamo.trtllm.transfer.descriptor import TransferDescriptor


def message(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "features", "dtype": "bfloat16", "shape": [4, 8], "nbytes": 64, "offset": 256}
    return {
        "version": 2,
        "transport": "nixl",
        "sender": {"name": "a", "incarnation": "b"},
        "address": 4096,
        "length": 328,
        "generation": 7,
        "time_to_live_s": 60.0,
        "tensors": [tensor],
    } | changes


def tensor(**changes: Any) -> dict[str, Any]:
    return message()["tensors"][0] | changes


def test_a_consistent_message_survives_json() -> None:
    descriptor = TransferDescriptor.model_validate(message())
    assert TransferDescriptor.model_validate_json(descriptor.model_dump_json()) == descriptor
    assert descriptor.payload_bytes == 64
    assert descriptor.sender.agent == "a#b"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tensors": [tensor(nbytes=63)]}, id="too few bytes for the shape"),
        pytest.param({"tensors": [tensor(shape=[1 << 62, 1 << 62])]}, id="a huge shape"),
        pytest.param({"tensors": [tensor(shape=[-4, -8])]}, id="a negative shape"),
        pytest.param({"tensors": [tensor(dtype="float128")]}, id="an unknown dtype"),
        pytest.param({"tensors": [tensor(offset=0)]}, id="over the header"),
        pytest.param({"tensors": [tensor(offset=264)]}, id="not aligned"),
        pytest.param({"tensors": [tensor(offset=512)]}, id="behind the end"),
        pytest.param({"tensors": [tensor(), tensor(name="other")]}, id="overlapping tensors"),
        pytest.param({"tensors": [tensor(), tensor(offset=512)], "length": 1024}, id="one name twice"),
        pytest.param({"tensors": []}, id="no tensors"),
        pytest.param({"length": 320}, id="no room for the trailer"),
        pytest.param({"length": 329}, id="a trailer that is not aligned"),
        pytest.param({"length": 0}, id="no length"),
        pytest.param({"generation": 0}, id="the generation of an empty segment"),
        pytest.param({"version": 1}, id="another schema"),
        pytest.param({"transport": ""}, id="no transport"),
        pytest.param({"address": -1}, id="a negative address"),
        pytest.param({"time_to_live_s": 0}, id="no time to live"),
        pytest.param({"extra": 1}, id="an unknown field"),
    ],
)
def test_an_inconsistent_message_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TransferDescriptor.model_validate(message(**changes))
