"""One request inside the engine: what it asked for, how far it is, and what it holds.
Touched by the engine's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from dynamo.trtllm.core import EncodedMedia, FinishReason, Step, StepLogprobs, Usage
from dynamo.trtllm.engines.transformers.sampling import Choice


class Stage(Enum):
    """What a request wants: both stages, only the context stage, or only what follows it."""

    GENERATE = "generate"
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(Enum):
    """How far a request is. The scheduler moves it on; `Sequence.take` ends it."""

    WAITING = "for blocks of the KV cache"
    PREFILLING = "its prompt is being computed"
    RUNNING = "it has a row in the batch"
    FINISHED = "its last step was given out, or nobody waits for one"


@dataclass(frozen=True)
class ImageSpan:
    """An image's place in the prompt: `token_ids[start:stop]`,
    of which `rows` stand for its rows of features."""

    item: EncodedMedia
    start: int
    stop: int


@dataclass(eq=False)
class Sequence:
    """State of one request. `sink` stands for whoever waits for it; this class never looks inside."""

    stage: Stage
    prompt_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]
    choice: Choice
    max_new_tokens: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    blocks: int
    """KV cache blocks that are set aside for it while it runs."""
    sink: Any = field(repr=False)
    keeps_state: bool = False
    """Other choices go on from the context stage's state, whether this one has ended or not."""
    output: int = 0
    """Tokens given out so far, the first included."""
    last_token: int = 0
    computed: int = 0
    """Prompt tokens whose keys and values exist."""
    keys: torch.Tensor | None = field(default=None, repr=False)
    values: torch.Tensor | None = field(default=None, repr=False)
    """[layers, kv_heads, tokens, dim], between context stage and batch."""
    cache: Any = field(default=None, repr=False)
    """The prompt cache, while a long prompt is computed in chunks."""
    positions: torch.Tensor | None = field(default=None, repr=False)
    """[3, tokens] of the prompt where images have positions of their own."""
    feature_mask: torch.Tensor | None = field(default=None, repr=False)
    """[tokens], True where a row of features stands."""
    mutual: torch.Tensor | None = field(default=None, repr=False)
    """[tokens], the image's number where its tokens see one another, else -1."""
    rope_delta: int = 0
    """What is added to a token's index to give its position after the prompt."""
    submitted_s: float = 0.0
    admitted_s: float = 0.0
    """When it was handed to the engine's thread, and when that began with it,
    as `time.perf_counter` has it."""
    phase: Phase = Phase.WAITING
    row: int = -1
    """Its row of the batch while it is running."""

    def take(self, token: int, logprobs: StepLogprobs | None) -> Step:
        """Account for the next output token; `Step.finish` is set when it ended the request."""
        ended: FinishReason | None = None
        # A grammar bans an end until `min_tokens` where it can; where it cannot, the answer is over.
        if self.output >= self.choice.min_tokens or self.choice.grammar is not None:
            if token in self.eos_ids:
                ended = "eos"
            elif token in self.stop_ids:
                ended = "stop"
        if ended is not None:
            self.phase = Phase.FINISHED
            reason = token if ended == "stop" else None
            return Step((), None, ended, reason, Usage(len(self.prompt_ids), self.output))
        self.output += 1
        self.last_token = token
        self.choice.note(token)
        entries = None if logprobs is None else (logprobs,)
        if self.output < self.max_new_tokens:
            return (
                Step((token,), entries)
                if self.output > 1
                else Step((token,), entries, usage=Usage(len(self.prompt_ids), 1))
            )
        self.phase = Phase.FINISHED
        return Step((token,), entries, "length", None, Usage(len(self.prompt_ids), self.output))

    def release(self) -> None:
        """Drop all tensors."""
        self.keys = self.values = self.cache = self.positions = self.feature_mask = self.mutual = None
        self.images = ()
        self.choice.counts = self.choice.grammar = None
