"""A check at start: the engine's own way through the model must agree with the model's plain forward.

It computes two prompts of different length in one context batch, then a step of both in one decode batch, and compares the logits
with those of one forward over each whole text. A model whose forward the engine does not understand is refused here, by name.
"""

from __future__ import annotations

import torch

from dynamo.trtllm.engines.transformers.attention import ATTENTION_NAME
from dynamo.trtllm.engines.transformers.loading import LoadedModel, unsupported
from dynamo.trtllm.engines.transformers.runner import Chunk, ModelRunner
from dynamo.trtllm.engines.transformers.sampling import Choice
from dynamo.trtllm.engines.transformers.sequence import Sequence, Stage

_PROMPTS = ((3, 5, 8, 13, 21, 34), (4, 7, 11))
_NEXT = (9, 12)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def verify(loaded: LoadedModel) -> None:
    """Raises `StartupError` when the engine would not compute what the model computes."""
    try:
        difference = _largest_difference(loaded)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, KeyError, IndexError) as error:
        raise unsupported(loaded.architecture, "it does not compute what the model itself computes") from error
    if not difference <= _TOLERANCE.get(loaded.dtype, 1e-1):
        raise unsupported(loaded.architecture, "it does not compute what the model itself computes")


def _largest_difference(loaded: LoadedModel) -> float:
    """The largest difference of logits, relative to the largest logit."""
    runner = ModelRunner(loaded, 2)
    limit = loaded.vocabulary
    prompts = [tuple(i % limit for i in ids) for ids in _PROMPTS]
    sequences = [_sequence(ids) for ids in prompts]
    ours = [runner.prefill([Chunk(s, 0, len(s.prompt_ids)) for s in sequences])]
    for sequence in sequences:
        assert sequence.keys is not None
        assert sequence.values is not None
        runner.batch.join(sequence.keys, sequence.values)
    tokens = torch.tensor([[i % limit] for i in _NEXT], device=loaded.device)
    ours.append(runner.decode(tokens, torch.tensor([[len(ids)] for ids in prompts], device=loaded.device)))
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


def _sequence(ids: tuple[int, ...]) -> Sequence:
    choice = Choice(0, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, None, (), 0)
    return Sequence(Stage.GENERATE, ids, (), choice, 1, frozenset(), frozenset(), 0, None)
