"""The engine port: what a handler may ask of an engine, in our own types, and what every adapter guarantees.

Life of an engine: `start` once, then any number of `encode`, `generate`, `prefill` and `decode` calls side by
side, then `close` once. All calls are made on one event loop; blocking work is the adapter's to move off it.
Adapters import their library inside, so this module needs neither torch nor an engine. What a request and its
answer are made of is in `core.py`.

Contract, held by one test suite for every adapter (`tests/engines/test_contract.py`):
* Tokens depend on the request alone: the same request gives the same tokens alone,
  beside others, and in two stages.
* Sampling noise of output token i depends on (seed, i) only;
  penalties count the tokens of prompt and output alike.
* Closing the iterator of `generate` or `decode`, or cancelling `prefill` or `encode`, aborts the request: its
  slot and KV cache blocks are free at the engine's next step. Closing twice, or after the end, does nothing.
* The first step of `generate` says the usage so far: the prompt as it was expanded, and that step's tokens.
* A stream ends with exactly one `Step` that has `finish` set,
  or with an exception from `errors`; nothing follows it.
* The token that ended the request (end-of-sequence, or one of `stop_token_ids`)
  is neither in `token_ids` nor in the usage.
* A request that the engine refuses raises `ClientFault` and leaves others untouched;
  `EngineFault` fails one request; `EngineDead` says that no further request will be served.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.core import DecodedMedia, EncodedMedia, MediaShape, Prompt, Sampling, Step, Tokens
from dynamo.trtllm.metrics import Readings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ProcessorOption:
    """One key of a request's `mm_processor_kwargs` that a model's processor knows:
    a number, or an object of such."""

    least: float = 0
    most: float = 0
    whole: bool = True
    fields: Mapping[str, ProcessorOption] = field(default_factory=dict)
    """Not empty: the value is an object with some of these keys."""


@dataclass(frozen=True, kw_only=True)
class MediaInput:
    """How an engine takes one kind of media: the one answer to where items of it are encoded."""

    placeholder_id: int
    """The id that the chat template writes once for each item of the kind; no two kinds share one."""
    encodes: bool = False
    """True: items go through `Engine.encode` in this process first, and the prompt comes expanded.
    False: the engine takes them decoded; of an encode worker, that it encodes none."""
    takes_encoded: bool = False
    """The engine takes embeddings that an encode worker made of an item."""
    takes_files: bool = False
    """The engine takes embeddings from a file (`Engine.adopt_embeddings`)."""
    rule: Any = None
    """What of an item the model wants read, in the form that the kind's file names (`multimodal.kinds`):
    for a video which frames, for audio at which rate and how long. None where everything is."""
    options: Mapping[str, ProcessorOption] = field(default_factory=dict)
    """Keys of `mm_processor_kwargs` that the model knows for this kind.
    They come with the items (`DecodedMedia.options`)."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What a started engine is; fixed until it closes."""

    context_length: int
    """Most tokens of prompt and output together."""
    kv_block_size: int
    """Tokens in a KV cache block."""
    total_kv_blocks: int | None
    max_num_seqs: int
    """Most requests that are decoded in one step."""
    max_num_batched_tokens: int
    """Most prompt tokens that are computed in one step."""
    media: Mapping[str, MediaInput] = field(default_factory=dict)
    """The kinds of media that the engine takes, by their names; none: it takes text alone."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Kinds that it does not take, and in words for a client why, where that is known."""
    hidden_size: int | None = None
    """Width of an embedding row, where the engine takes rows."""
    data_parallel_size: int = 1
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the start-up log and the model card, for instance the library's version."""

    def placeholder_id(self, kind: str) -> int | None:
        """The id that stands for one item of `kind`; None: the engine takes none."""
        return self.media[kind].placeholder_id if kind in self.media else None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One request as the engine sees it."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    priority: float | None = None
    cache_salt: str | None = None
    dp_rank: int | None = None
    trace_headers: Mapping[str, str] | None = None
    choices: int = 1
    """Answers that the client asked for (`n`). Only `prefill` looks at it:
    with several it returns a state in any case."""
    media_hashes: tuple[str, ...] = ()
    """The frontend's hexadecimal hash of each media item, in order,
    for KV-aware routing; empty when it sent none."""


@dataclass(frozen=True)
class EngineState:
    """What decode needs of a prefilled request beside its token ids:
    `meta` is JSON, `tensors` move by the transfer.

    `tensors` are contiguous and stay valid until `release`, which may be called more than once.
    `decode` has copied them when its first step comes.
    """

    meta: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    on_release: Callable[[], None] | None = None
    """Frees the memory behind `tensors`; must bear being called twice."""

    def release(self) -> None:
        if self.on_release is not None:
            self.on_release()


@dataclass(frozen=True)
class Prefilled:
    """A finished context stage. `first` holds the first token;
    its `finish` is set when that token ended the request.

    `prompt_token_ids` are the expanded ids. `state` is None when the request is finished, unless
    other choices of it go on, or the engine still holds it (`Engine.holds_until_decoded`) and
    decode has to abandon it.
    """

    first: Step
    prompt_token_ids: tuple[int, ...]
    state: EngineState | None
    cached_tokens: int = 0


class Engine(ABC):
    """One inference engine. See the module's docstring for what all adapters guarantee."""

    holds_until_decoded: bool = False
    """True: prefill's engine keeps a request's KV cache until decode's has fetched it, so decode tells its
    engine of every hand-over, by `decode` or by `abandon`. False: `EngineState` is all there is."""

    forks: bool = False
    """True: `decode` can continue one state several times at once, and choose the first token as well."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load the model and be ready to serve.

        Raises `StartupError` when the model or its options cannot be served,
        in one sentence that says what to change.
        """

    @abstractmethod
    def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        """Run context and generation of `request` and yield its output as it comes."""

    @abstractmethod
    async def prefill(self, request: EngineRequest) -> Prefilled:
        """Run the context stage and choose the first token.
        `request.sampling.max_tokens` is the request's own."""

    @abstractmethod
    def decode(
        self, request: EngineRequest, first: Step | None, state: EngineState
    ) -> AsyncGenerator[Step | Tokens, None]:
        """Continue a prefilled request after its `first` token, which is not yielded again;
        None, where the engine `forks`: choose that token, too.

        `request.prompt.token_ids` are the expanded ids and hold no media. Yields at least the final step.
        """

    def abandon(self, request: EngineRequest, state: EngineState) -> None:
        """A prefilled request ends without `decode`: let go of it on both workers.
        Does not wait; releases `state`."""
        state.release()

    @abstractmethod
    def media_tokens(self, shape: MediaShape, options: Mapping[str, Any]) -> int | None:
        """Length of the expansion of an item of that kind and size,
        prepared with `options` (`MediaInput.options`).

        The least length where the times of a video's frames stand in the prompt:
        how long they are is known with the frames. None when only the engine itself finds out.
        """

    @abstractmethod
    async def encode(self, items: Sequence[DecodedMedia]) -> list[EncodedMedia]:
        """Embeddings of `items`, in order. Only of kinds of which `MediaInput.encodes` is true.

        Raises `ClientFault`, without a part's position, for a kind or a size that the model does not take.
        """

    def adopt_embeddings(
        self, kind: str, digest: str, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any]
    ) -> EncodedMedia:
        """Make an `EncodedMedia` of tensors that came from a file and stand for one item of `kind`.

        Raises `ClientFault`, without the part's position, when shape, grid or levels do not fit the model.
        """
        from dynamo.trtllm.errors import ClientFault

        raise ClientFault("this model takes no precomputed embeddings")

    @abstractmethod
    async def check_health(self) -> None:
        """Return at once while the engine can serve; raise `EngineDead` when it cannot."""

    def stats(self) -> Readings:
        """The engine's metrics, those that it can tell."""
        return {}

    def attach_kv_publisher(self, create: Callable[[int], Any]) -> bool:
        """Send KV cache events to publishers made by `create(dp_rank)`.
        False where the engine reports none."""
        return False

    @abstractmethod
    async def close(self) -> None:
        """End running requests and free everything. Safe to call twice, and after a failed start."""
