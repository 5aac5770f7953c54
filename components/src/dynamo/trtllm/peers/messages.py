"""What crosses a process between our own workers: prefill's hand-off to decode,
and the encode worker's request and reply.

Every message carries the schema's version; a reader that meets another version or an unknown field refuses
it, so that workers of two releases fail in words instead of decoding nonsense. Tensors never travel here,
only the transfer's descriptors of them. The fields have types of their own: a changed noun of `core` or of
the engine port changes how a message is made and read here, never what is on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dynamo.trtllm.core import Step, StepLogprobs, TokenLogprob, Usage
from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.transfer.descriptor import TransferDescriptor

SCHEMA_VERSION: Literal[2] = 2
SCHEMA_KEY = "dynamo_trtllm_schema"
"""Name under which a worker's model card tells the version, so that `--check --live` can compare."""

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """A frozen message with its schema's version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[2] = SCHEMA_VERSION

    @classmethod
    def parse(cls: type[M], raw: Mapping[str, Any], sender: str) -> M:
        """The message in `raw`. Raises `PeerFault` when it is not one that this release understands."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise PeerFault(
                f"the {sender} worker speaks another schema than this one; "
                "run the same release on all workers"
            ) from error


class WireLogprob(NamedTuple):
    """One token's natural log probability and its rank, from 1: `[token_id, logprob, rank]` in JSON."""

    token_id: int
    logprob: float
    rank: int


class WireLogprobs(NamedTuple):
    """Log probabilities at one position: `[chosen, [best, second, ...]]` in JSON."""

    chosen: WireLogprob
    top: tuple[WireLogprob, ...]


class Handoff(Message):
    """What decode needs of a prefilled request: it fetches no media and tokenizes nothing.

    `prompt_token_ids` are expanded; `logprobs` belong to `first_token_ids`; `meta` and `transfer` are the
    engine's state. With `finish` set the request is over: decode emits what is here, and there is no
    state. `seed` is the request's own or, for a sampled request without one, prefill's choice: decode
    goes on with the same noise.
    """

    engine: str
    prompt_token_ids: tuple[int, ...]
    first_token_ids: tuple[int, ...]
    logprobs: tuple[WireLogprobs, ...] | None = None
    cached_tokens: int = 0
    finish: Literal["stop", "eos", "length", "cancelled"] | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    meta: Mapping[str, Any]
    transfer: TransferDescriptor | None = None

    def for_engine(self, engine: str) -> Handoff:
        """This hand-off. Raises `PeerFault` when another engine than `engine` made it."""
        if self.engine != engine:
            raise PeerFault("the prefill worker runs another engine than this decode worker")
        return self

    def first_step(self) -> Step:
        """Prefill's first token as the engine port's step;
        the final one when prefill finished the request."""
        logprobs = None if self.logprobs is None else tuple(_position(each) for each in self.logprobs)
        return Step(
            token_ids=self.first_token_ids,
            logprobs=logprobs,
            finish=self.finish,
            stop_reason=self.stop_reason,
            usage=self.usage(),
        )

    def usage(self) -> Usage:
        """Token counts of the context stage alone."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=len(self.first_token_ids),
            cached_tokens=self.cached_tokens,
        )


def wire_logprobs(logprobs: Sequence[StepLogprobs] | None) -> tuple[WireLogprobs, ...] | None:
    """An engine's log probabilities as `Handoff.logprobs` carries them."""
    if logprobs is None:
        return None
    return tuple(WireLogprobs(_wire(each.chosen), tuple(map(_wire, each.top))) for each in logprobs)


def _wire(token: TokenLogprob) -> WireLogprob:
    return WireLogprob(token.token_id, token.logprob, token.rank)


def _position(logprobs: WireLogprobs) -> StepLogprobs:
    return StepLogprobs(chosen=_token(logprobs.chosen), top=tuple(map(_token, logprobs.top)))


def _token(logprob: WireLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)


class EncodeRequest(Message):
    """Ask an encode worker for the embeddings of one item of media, or of one embedding file.

    `position` counts the caller's items of the kind, from 1.
    `text_tokens` and `context_length` let the worker refuse what would not fit before it encodes.
    """

    kind: str
    position: int
    url: str
    uuid: str | None = None
    tenant: str | None = None
    options: Mapping[str, Any] = {}
    text_tokens: int
    context_length: int


class EncodeReply(Message):
    """The embeddings of one item: everything of `EncodedMedia`, its tensors as a descriptor."""

    kind: str
    digest: str
    token_ids: tuple[int, ...]
    extras: Mapping[str, Any]
    transfer: TransferDescriptor
