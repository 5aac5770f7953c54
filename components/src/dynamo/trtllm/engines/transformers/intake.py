"""From a request of the port to a sequence of the engine, checked against the model and its limits."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.trtllm.core import EncodedMedia, PlacedMedia, Step
from dynamo.trtllm.engines.port import EngineRequest, EngineState
from dynamo.trtllm.engines.transformers.loading import LoadedModel
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.engines.transformers.sampling import make_choice
from dynamo.trtllm.engines.transformers.sequence import ImageSpan, Stage
from dynamo.trtllm.engines.transformers.sequence import Sequence as EngineSequence
from dynamo.trtllm.engines.transformers.state import unpack_state
from dynamo.trtllm.engines.transformers.worker import Sink
from dynamo.trtllm.errors import ClientFault, EngineFault, LimitFault, PartFault, require_room

_MAX_SEED = 1 << 63
_NO_TOKEN_BETWEEN = "there must be at least one token between it and what stands before it"


@dataclass(frozen=True)
class Intake:
    """What requests of one loaded model are checked against. Touches no state: any thread may use it."""

    loaded: LoadedModel
    options: EngineOptions
    context_length: int

    def sequence(self, request: EngineRequest, stage: Stage) -> EngineSequence:
        """Check `request` against the model and its limits. Raises `ClientFault`."""
        loaded, sampling, prompt = self.loaded, request.sampling, request.prompt
        length = len(prompt.token_ids)
        if not length:
            raise ClientFault("the prompt is empty")
        require_room(length, self.context_length)
        if self.options.max_input_len is not None and length > self.options.max_input_len:
            raise LimitFault(
                f"the prompt has {length} tokens; at most {self.options.max_input_len} are taken"
            )
        images = tuple(map(self._span, itertools.repeat(prompt.token_ids), prompt.media, prompt.positions()))
        for position, (before, after) in zip(prompt.positions()[1:], itertools.pairwise(images), strict=True):
            if before.stop >= after.start:
                raise PartFault(position, _NO_TOKEN_BETWEEN, kind=after.item.kind)
        if request.choices > 1 and images and images[-1].stop == length:
            raise PartFault(
                prompt.positions()[-1], "with n above 1 text must follow it", kind=images[-1].item.kind
            )
        _require_known_ids(prompt.token_ids, images if stage is not Stage.DECODE else None, loaded)
        room = self.context_length - length
        longest = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        eos = frozenset() if sampling.ignore_eos else sampling.eos_token_ids or loaded.eos_token_ids
        seed = secrets.randbelow(_MAX_SEED) if sampling.seed is None else sampling.seed
        held = length if stage is Stage.PREFILL else length + longest
        return EngineSequence(
            stage=stage,
            prompt_ids=tuple(prompt.token_ids),
            images=images,
            choice=make_choice(sampling, seed, eos, loaded.logits),
            max_new_tokens=longest,
            stop_ids=sampling.stop_token_ids,
            eos_ids=eos,
            blocks=-(-held // self.options.tokens_per_block),
            sink=Sink(),
            keeps_state=request.choices > 1,
        )

    def _span(self, token_ids: Sequence[int], media: PlacedMedia, position: int) -> ImageSpan:
        """One item at its place, with as many rows of features as the prompt has tokens for them there."""
        loaded, item = self.loaded, media.item
        if item.kind not in loaded.features:
            raise PartFault(position, f"this worker takes no {item.kind}", kind=item.kind)
        if not isinstance(item, EncodedMedia):
            raise EngineFault("the portable engine takes media only through its encode stage")
        placed = token_ids[media.start : media.start + media.length].count(loaded.features[item.kind])
        names = ["features", *(f"features.{level}" for level in range(1, loaded.levels + 1))]
        for name in names:
            tensor = item.tensors.get(name)
            if tensor is None or tuple(tensor.shape) != (placed, loaded.hidden_size):
                wanted = f"{placed} x {loaded.hidden_size}"
                raise PartFault(
                    position, f"its embeddings are not the {wanted} that the prompt needs", kind=item.kind
                )
        return ImageSpan(item, media.start, media.start + media.length)

    def continued(self, request: EngineRequest, first: Step | None, state: EngineState) -> EngineSequence:
        """The sequence of a request whose context stage ran before, here or elsewhere.

        Without a first token the last token of the prompt is computed once more:
        its logits are those that choose it.
        """
        if first is None:
            return self._forked(request, state)
        if len(first.token_ids) != 1 or first.finish is not None:
            raise EngineFault("the prefill worker handed over a request that has no token to continue")
        loaded = self.loaded
        if not 0 <= first.token_ids[0] < loaded.vocabulary:
            raise EngineFault("the prefill worker handed over a token that is not in the model's vocabulary")
        sequence = self.sequence(request, Stage.DECODE)
        keys, values, delta, seed = unpack_state(state, loaded.cache_shape, len(sequence.prompt_ids))
        sequence.keys, sequence.values = keys, values
        sequence.rope_delta, sequence.choice.seed = delta, seed
        sequence.last_token, sequence.output = first.token_ids[0], 1
        return sequence

    def _forked(self, request: EngineRequest, state: EngineState) -> EngineSequence:
        if len(request.prompt.token_ids) == 1:
            return self.sequence(request, Stage.GENERATE)
        sequence = self.sequence(request, Stage.DECODE)
        keys, values, delta, _ = unpack_state(state, self.loaded.cache_shape, len(sequence.prompt_ids))
        sequence.keys, sequence.values, sequence.rope_delta = keys[:, :, :-1], values[:, :, :-1], delta
        sequence.last_token = sequence.prompt_ids[-1]
        return sequence


def _require_known_ids(
    token_ids: Sequence[int], images: tuple[ImageSpan, ...] | None, loaded: LoadedModel
) -> None:
    """Ids must lie in the embedding table, but for image tokens that stand for features.
    `images` is None in the decode stage."""
    if min(token_ids) >= 0 and max(token_ids) < loaded.vocabulary:
        return
    features = set(loaded.features.values())
    unknown = [i for i in token_ids if i not in features and not 0 <= i < loaded.vocabulary]
    if unknown:
        raise ClientFault(f"token id {unknown[0]} is not in the model's vocabulary of {loaded.vocabulary}")
    if images is None:
        return
    for kind, feature in loaded.features.items():
        rows = sum(span.item.tensors["features"].shape[0] for span in images if span.item.kind == kind)
        if token_ids.count(feature) != rows:
            raise ClientFault(f"the prompt holds {kind} tokens that belong to no {kind}")
