"""A check at start: the engine's own way through the model must agree with the model's own forward.

It computes two prompts of different length in one context batch, then a step of both in one decode batch,
and compares the logits with those of one forward over each whole text. A model whose forward the engine
does not understand is refused here, by name.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from dynamo.trtllm.engines.transformers.attention import ATTENTION_NAME
from dynamo.trtllm.engines.transformers.graphs import GraphBatch
from dynamo.trtllm.engines.transformers.loading import LoadedModel, unsupported
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.engines.transformers.runner import Chunk, ModelRunner
from dynamo.trtllm.engines.transformers.sampling import Choice
from dynamo.trtllm.engines.transformers.sequence import Sequence, Stage
from dynamo.trtllm.engines.transformers.static_cache import StaticCache

logger = logging.getLogger(__name__)

_PROMPTS = ((3, 5, 8, 13, 21, 34), (4, 7, 11))
_NEXT = (9, 12)
_STEPS = 6
_UNFIT = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""What a model raises that is not built as the engine takes it to be."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def verify(loaded: LoadedModel) -> None:
    """Raises `StartupError` when the engine would not compute what the model computes."""
    try:
        difference = _largest_difference(loaded)
    except _UNFIT as error:
        raise unsupported(
            loaded.architecture, "it does not compute what the model itself computes"
        ) from error
    if not difference <= _TOLERANCE.get(loaded.dtype, 1e-1):
        raise unsupported(loaded.architecture, "it does not compute what the model itself computes")


def _largest_difference(loaded: LoadedModel) -> float:
    """The largest difference of logits, relative to the largest logit."""
    runner = ModelRunner(loaded, 2)
    limit = loaded.vocabulary
    sequences = _prompts(loaded)
    prompts = [s.prompt_ids for s in sequences]
    ours = [runner.prefill([Chunk(s, 0, len(s.prompt_ids)) for s in sequences])]
    ours.append(runner.decode(*_decoded(loaded, runner.batch, sequences)))
    worst = 0.0
    text_model = loaded.model if loaded.decoder is None else loaded.decoder
    text_model.set_attn_implementation(loaded.stock_attention)
    for row, ids in enumerate(prompts):
        whole = torch.tensor([[*ids, _NEXT[row] % limit]], device=loaded.device)
        expected = loaded.model(input_ids=whole, use_cache=False).logits[0, -2:].float()
        computed = torch.stack([logits[row].float() for logits in ours])
        worst = max(worst, float((computed - expected).abs().max() / expected.abs().max().clamp_min(1e-6)))
    text_model.set_attn_implementation(ATTENTION_NAME)
    return worst


def decodes_in_graphs(loaded: LoadedModel, options: EngineOptions) -> bool:
    """Whether this model decodes as CUDA graphs: if that was asked for and does what eager decoding does."""
    if loaded.device.type != "cuda" or not options.cuda_graphs:
        return False
    try:
        proved = graphs_are_right(loaded)
    except _UNFIT as error:
        logger.warning(
            "%s decodes one kernel after another: a CUDA graph of it failed",
            loaded.architecture,
            exc_info=error,
        )
        return False
    if not proved:
        logger.warning(
            "%s decodes one kernel after another: a CUDA graph of it gave other tokens", loaded.architecture
        )
    return proved


def graphs_are_right(loaded: LoadedModel) -> bool:
    """A step over the static cache gives an eager step's logits, recorded steps unrecorded ones' tokens."""
    runner = ModelRunner(loaded, 2)
    sequences = _prompts(loaded)
    runner.prefill([Chunk(s, 0, len(s.prompt_ids)) for s in sequences])
    lengths = torch.tensor([len(s.prompt_ids) for s in sequences], device=loaded.device)
    cache = StaticCache(loaded.cache_shape, 2, 1024, lengths)
    tokens, positions = _decoded(loaded, cache, sequences)
    static = runner.next_logits(tokens, positions, cache.masks(), cache).float()
    eager = runner.decode(*_decoded(loaded, runner.batch, sequences)).float()
    difference = (static - eager).abs().max() / eager.abs().max().clamp_min(1e-6)
    if not float(difference) <= _TOLERANCE.get(loaded.dtype, 1e-1):
        return False
    return _greedy(loaded, runner, records=True) == _greedy(loaded, runner, records=False)


def _greedy(loaded: LoadedModel, runner: ModelRunner, records: bool) -> list[list[int]]:
    """A few greedy tokens of both prompts from a batch that records its steps, or does not."""
    sequences = _prompts(loaded)
    runner.prefill([Chunk(s, 0, len(s.prompt_ids)) for s in sequences])
    batch = GraphBatch(runner, 2, 1024, records=records)
    for sequence in sequences:
        batch.join(sequence)
    return [[chosen.token for chosen in batch.step()] for _ in range(_STEPS)]


def _decoded(loaded: LoadedModel, cache: Any, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put `sequences` into `cache`; returns tokens and positions of their next step, [rows, 1] each."""
    for sequence in sequences:
        cache.join(sequence.keys, sequence.values)
    tokens = torch.tensor([[i % loaded.vocabulary] for i in _NEXT], device=loaded.device)
    return tokens, torch.tensor([[len(s.prompt_ids)] for s in sequences], device=loaded.device)


def _prompts(loaded: LoadedModel) -> list[Sequence]:
    return [_sequence(tuple(i % loaded.vocabulary for i in ids)) for ids in _PROMPTS]


def _sequence(ids: tuple[int, ...]) -> Sequence:
    choice = Choice(0, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, None, (), 0)
    return Sequence(Stage.GENERATE, ids, (), choice, 1024, frozenset(), frozenset(), 0, None)
