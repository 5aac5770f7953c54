"""The context stage of a disaggregated request: one call of the library, and what decode needs to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.trtllm.engines.port import EngineRequest, Prefilled
from dynamo.trtllm.engines.tensorrt_llm import handoff, results
from dynamo.trtllm.engines.tensorrt_llm.model import ModelDescription
from dynamo.trtllm.engines.tensorrt_llm.results import Submitted, abort
from dynamo.trtllm.engines.tensorrt_llm.submission import Submission
from dynamo.trtllm.engines.tensorrt_llm.vitals import Vitals
from dynamo.trtllm.errors import WorkerError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ContextStage:
    """How one started engine computes prompts for decode workers."""

    submission: Submission
    model: ModelDescription
    vitals: Vitals

    async def run(self, request: EngineRequest) -> Prefilled:
        """Compute the prompt and choose the first token; see `Engine.prefill`."""
        asked, vitals = self.submission, self.vitals
        room = asked.room(request)
        # With room for one token nothing is handed over: a context stage would hold its blocks for a decode
        # that never comes.
        params = asked.context_params() if room > 1 else None
        with vitals.watch.flight() as flight:
            submitted = await asked.submit(request, 1, params, streaming=False)
            result, failed, prefilled = submitted.result, False, None
            try:
                await result.aresult()
                flight.waiting = False
                vitals.watch.steps += 1
                prefilled = self._prefilled(request, submitted, room)
                return prefilled
            except WorkerError:
                raise
            except Exception as error:
                failed = vitals.is_one_requests(error)
                raise await vitals.failure(request.request_id, error) from error
            finally:
                if prefilled is None or prefilled.state is None:
                    results.drop_positions(result.outputs[0].disaggregated_params, submitted)
                    if not failed:
                        abort(result)

    def _prefilled(self, request: EngineRequest, submitted: Submitted, room: int) -> Prefilled:
        result = submitted.result
        output = result.outputs[0]
        params = output.disaggregated_params or getattr(result, "disaggregated_params", None)
        token_ids = list(output.token_ids) or list(getattr(params, "first_gen_tokens", None) or ())
        prompt_ids = tuple(result.prompt_token_ids)
        cached = results.cached_tokens(result)
        first = results.first_step(request, output, token_ids, len(prompt_ids), room, params)
        if submitted.disaggregated is None or output.finish_reason == "stop":
            return Prefilled(first, prompt_ids, None, cached)
        positions: tuple[torch.Tensor, ...] = ()
        placed = self.model.facts.mrope and bool(request.prompt.media)
        if placed and not results.positions_left(params, submitted):
            positions = submitted.positions or results.positions_of_images(request, prompt_ids)
        return Prefilled(
            first, prompt_ids, handoff.pack_state(self.submission.library, params, positions), cached
        )
