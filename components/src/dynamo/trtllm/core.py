"""What a request and its answer are made of: the nouns that every part of the worker uses.
Imports nothing of ours.

A request comes with a context, sampling options and a prompt;
media stand in the prompt as items at their places; an engine answers in steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL import Image

FinishReason = Literal["stop", "eos", "length", "cancelled"]


class Context(Protocol):
    """The part of Dynamo's request context that this worker uses."""

    def id(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def stop_generating(self) -> None: ...
    def detached(self, id: str) -> Context: ...
    def trace_headers(self) -> Mapping[str, str] | None: ...


@dataclass(frozen=True)
class MediaShape:
    """How large an item of media is, as far as that is known before it is decoded.

    `sizes` are those of its kind: of an image `(width, height)`, upright, in pixels; of a video `(frames,
    width, height)`, of which only the frames that the model sees count; of audio `(samples,)`, at the rate at
    which the model hears it.
    """

    kind: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class DecodedMedia(ABC):
    """One item of media as the model should take it.
    `digest` names its content, and what was chosen of it."""

    kind: ClassVar[str]
    """`image`, `video`, `audio`: a name in `multimodal.kinds.registry`."""
    digest: str
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """What the request says of how the model's processor prepares it (`mm_processor_kwargs`),
    as far as it is for this kind."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that it takes."""


@dataclass(frozen=True)
class DecodedImage(DecodedMedia):
    """One image: RGB, upright."""

    kind = "image"
    image: Image.Image

    @property
    def nbytes(self) -> int:
        return self.image.width * self.image.height * 4  # Pillow keeps an RGB pixel in four bytes


@dataclass(frozen=True, eq=False)
class DecodedVideo(DecodedMedia):
    """The frames of one clip that the model should see, upright, in the order in which they are shown.

    `frames` is uint8 `[frames, height, width, 3]`, RGB, and read-only.
    `digest` names the content together with the choice of frames.
    """

    kind = "video"
    frames: NDArray[np.uint8]
    frame_indices: tuple[int, ...]
    """Which frames of the clip they are, counted from 0."""
    fps: float
    """Frames a second of the clip itself, on average."""
    total_frames: int
    """Frames of the clip itself."""
    duration_s: float

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        """When each frame is shown, in seconds: its index over `fps`,
        as Transformers' `VideoMetadata` has it."""
        return tuple(index / self.fps for index in self.frame_indices)

    @property
    def nbytes(self) -> int:
        return self.frames.nbytes


@dataclass(frozen=True, eq=False)
class DecodedAudio(DecodedMedia):
    """One sound as the model should hear it: one channel, float32 `[samples]` within -1 and 1, read-only.

    `rate` is in samples a second. `digest` names the content together with the rate.
    """

    kind = "audio"
    samples: NDArray[np.float32]
    rate: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes


@dataclass(frozen=True)
class EncodedMedia:
    """The embeddings of one item of media, from this engine's `encode`,
    from an encode worker, or from a file.

    `tensors["features"]` is `[tokens, hidden]`, floating point; models with several feature levels add
    `features.1` and so on, of the same number of rows. `token_ids` is what the item's placeholder becomes in
    the prompt: the rows of `features` belong to those of its ids that equal the engine's token for a row of
    features, in order. `extras` is what the processor says beside it (grid, sizes), as JSON.
    """

    kind: str
    digest: str
    tensors: Mapping[str, torch.Tensor]
    token_ids: tuple[int, ...]
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


MediaItem: TypeAlias = "DecodedMedia | EncodedMedia"
"""What one media part of a request becomes."""


@dataclass(frozen=True)
class PlacedMedia:
    """Media at its place: `Prompt.token_ids[start:start + length]` stand for it."""

    item: MediaItem
    start: int
    length: int


@dataclass(frozen=True)
class Prompt:
    """What to continue. `text` is the rendered prompt, for an engine release
    that cannot take token ids beside media."""

    token_ids: tuple[int, ...]
    media: tuple[PlacedMedia, ...] = ()
    text: str | None = None

    def positions(self) -> tuple[int, ...]:
        """For each of `media` its place among those of its kind, counted from 1:
        by it errors name the part."""
        seen: Counter[str] = Counter()
        found: list[int] = []
        for media in self.media:
            seen[media.item.kind] += 1
            found.append(seen[media.item.kind])
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class GuidedDecoding:
    """One grammar that the output must follow; exactly one field is set."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False
    structural_tag: Any = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens and when to stop. None leaves a choice out;
    without temperature, top-p and top-k it is greedy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    """None: up to the context length."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; k: each token's own log probability and those of the k most likely ones."""
    prompt_logprobs: int | None = None
    guided: GuidedDecoding | None = None


MOST_OF_A_SCALE = 1e6
"""Bound of temperature and repetition penalty: far beyond any use,
far below where arithmetic on scores overflows."""
LARGEST_INT32 = (1 << 31) - 1
SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MOST_OF_A_SCALE),
    "top_p": (0.0, 1.0),
    "top_k": (-1, LARGEST_INT32),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, MOST_OF_A_SCALE),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (1, LARGEST_INT32),
    "min_tokens": (0, LARGEST_INT32),
    "logprobs": (0, 100),
}
"""Least and most of the numbers of `Sampling`, by field;
a repetition penalty of 0 is not in its range either."""


@dataclass(frozen=True)
class TokenBudget:
    """How far media may expand a prompt: `text_tokens` are taken already,
    `context_length` is the limit for all."""

    text_tokens: int
    context_length: int

    def total(self, media_tokens: int) -> int:
        """Tokens of the prompt once its media take `media_tokens`."""
        return self.text_tokens + media_tokens


class TokenLogprob(NamedTuple):
    """A token's natural log probability and its rank, from 1, among all tokens."""

    token_id: int
    logprob: float
    rank: int


class StepLogprobs(NamedTuple):
    """Log probabilities at one output position: of the chosen token,
    and of the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Usage(NamedTuple):
    """Token counts of a finished request; `prompt_tokens` counts the expanded prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Step(NamedTuple):
    """What one engine step added to a request's output: usually one token, none only at the end."""

    token_ids: Sequence[int]
    logprobs: Sequence[StepLogprobs] | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    """Set together with `finish`, and in the first step of `generate`:
    the frontend counts on from there for usage as it runs."""


Tokens = list[int]
"""A step that brought new token ids and nothing else, as almost all do: bare, because making and
reading a `Step` takes half a microsecond of a worker's CPU for each token (measured). Whoever
gets one leaves it as it is.
"""
