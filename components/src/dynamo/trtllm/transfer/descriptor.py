"""What a sender tells a reader about an offer:
small frozen messages that travel as JSON inside other messages.

This module needs neither torch nor nixl, so that every role can validate a message.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

HEADER_BYTES = 256
"""A segment starts with this many bytes, of which the first eight hold its generation."""
TRAILER_BYTES = 8
"""A segment ends with its generation again."""
WORD_BYTES = 8
"""Bytes of a generation, wherever one is written."""
ALIGNMENT_BYTES = 256
"""Alignment of segments in a pool and of tensors in a segment."""

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""The dtypes that can be handed over, by torch's name, and the bytes of one element."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
ShortName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PeerIdentity(_Message):
    """Who can be read from: one run of one process.

    `name` is stable over restarts and unique among live processes, `incarnation` is new at every
    start. `metadata` is the transport's own description of the process and its registered memory,
    base64, about 0.6 kB for NIXL.
    """

    name: ShortName
    incarnation: ShortName
    metadata: Annotated[str, StringConstraints(max_length=1 << 16)] = ""

    @property
    def agent(self) -> str:
        """The name that the transport knows this run by."""
        return f"{self.name}#{self.incarnation}"


class TensorSpec(_Message):
    """One tensor of an offer: `nbytes` contiguous bytes at `offset` from the start of the segment."""

    name: ShortName
    dtype: str
    shape: Annotated[tuple[Count, ...], Field(max_length=16)]
    nbytes: Count
    offset: Count

    @model_validator(mode="after")
    def _bytes_fit_the_shape(self) -> TensorSpec:
        item_bytes = ITEM_BYTES.get(self.dtype)
        if item_bytes is None:
            raise ValueError("unknown dtype")
        if math.prod(self.shape) * item_bytes != self.nbytes:
            raise ValueError("dtype, shape and byte count disagree")
        if self.offset % ALIGNMENT_BYTES:
            raise ValueError("a tensor is not aligned")
        return self


class TransferDescriptor(_Message):
    """Everything a reader needs to fetch one offer.

    The segment is `length` bytes at `address` on `device`: header, tensors in order of their offsets,
    trailer in the last eight bytes. `generation` stands in header and trailer for as long as the offer
    is valid. `time_to_live_s` is how long the sender keeps an offer that nobody acknowledges; a read
    may take at most half of it.
    """

    version: Literal[2] = 2
    transport: ShortName
    sender: PeerIdentity
    device: Literal["cpu", "cuda"] = "cpu"
    device_index: Annotated[int, Field(ge=0, lt=1024)] = 0
    address: Count
    length: Annotated[int, Field(ge=HEADER_BYTES + TRAILER_BYTES, lt=1 << 48)]
    acknowledge_at: Count = 0
    generation: Annotated[int, Field(gt=0, lt=1 << 53)]
    time_to_live_s: Annotated[float, Field(gt=0, le=86400)]
    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=4096)]

    @model_validator(mode="after")
    def _tensors_lie_in_the_segment(self) -> TransferDescriptor:
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError("two tensors have one name")
        end = HEADER_BYTES
        for spec in self.tensors:
            if spec.offset < end:
                raise ValueError("tensors overlap")
            end = spec.offset + spec.nbytes
        if end > self.length - TRAILER_BYTES or self.length % TRAILER_BYTES:
            raise ValueError("the tensors do not fit the segment")
        return self

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors, without padding, header and trailer."""
        return sum(spec.nbytes for spec in self.tensors)
