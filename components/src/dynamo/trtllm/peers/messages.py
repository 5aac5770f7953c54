"""What crosses a process between our own workers: prefill's hand-off to decode, and the encode worker's request and reply.

Every message carries the schema's version; a reader that meets another version or an unknown field refuses it, so that workers of
two releases fail in words instead of decoding nonsense. Tensors never travel here, only the transfer's descriptors of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dynamo.trtllm.core import FinishReason, Step, StepLogprobs, Usage
from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.transfer.descriptor import TransferDescriptor

SCHEMA_VERSION: Literal[1] = 1
SCHEMA_KEY = "dynamo_trtllm_schema"
"""Name under which a worker's model card tells the version, so that `--check --live` can compare."""

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """A frozen message with its schema's version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION

    @classmethod
    def parse(cls: type[M], raw: Mapping[str, Any], sender: str) -> M:
        """The message in `raw`. Raises `PeerFault` when it is not one that this release understands."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise PeerFault(
                f"the {sender} worker speaks another schema than this one; run the same release on all workers"
            ) from error


class Handoff(Message):
    """What decode needs of a prefilled request: it fetches no media and tokenizes nothing.

    `prompt_token_ids` are expanded; `logprobs` belong to `first_token_ids`; `meta` and `transfer` are the engine's state.
    With `finish` set the request is over: decode emits what is here, and there is no state.
    `seed` is the request's own or, for a sampled request without one, prefill's choice: decode goes on with the same noise.
    """

    engine: str
    prompt_token_ids: tuple[int, ...]
    first_token_ids: tuple[int, ...]
    logprobs: tuple[StepLogprobs, ...] | None = None
    cached_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    meta: Mapping[str, Any]
    transfer: TransferDescriptor | None = None

    def first_step(self) -> Step:
        """Prefill's first token as the engine port's step; the final one when prefill finished the request."""
        return Step(self.first_token_ids, self.logprobs, self.finish, self.stop_reason, self.usage())

    def usage(self) -> Usage:
        """Token counts of the context stage alone."""
        return Usage(len(self.prompt_token_ids), len(self.first_token_ids), self.cached_tokens)


class EncodeItem(Message):
    """One image to encode, or one embedding file to load; `position` is its place among the request's media, from 1."""

    position: int
    url: str


class EncodeRequest(Message):
    """Ask an encode worker for embeddings. The counts let it refuse what would not fit before it encodes."""

    items: tuple[EncodeItem, ...]
    text_tokens: int
    context_length: int


class EncodedItem(Message):
    """One item's reply: everything of `EncodedImage`, its tensors as a descriptor."""

    digest: str
    token_ids: tuple[int, ...]
    extras: Mapping[str, Any]
    transfer: TransferDescriptor


class EncodeReply(Message):
    """The items of a request, in its order."""

    items: tuple[EncodedItem, ...]
