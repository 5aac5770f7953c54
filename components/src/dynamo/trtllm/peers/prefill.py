"""Prefill workers as a decode worker asks them, for a request whose KV cache is lost or was never made."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from dynamo.trtllm.core import Context
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.peers.client import PeerClient, first_answer
from dynamo.trtllm.peers.messages import Handoff


class PrefillPeers:
    """Prefill workers as decode sees them: any will do, another one if it fails."""

    def __init__(self, client: PeerClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def prefill(self, request: Request, context: Context, lost: Handoff | None = None) -> Handoff:
        """Prefill's hand-off of `request`, with the seed of the `lost` one,
        so that the first token is the same.

        Raises `ClientFault` in prefill's words, `PeerUnavailable`, `PeerTimeout`,
        and `PeerFault` for a reply of another release.
        """
        instances = self._client.instances()
        random.shuffle(instances)
        call = _as_the_frontend_asks(request, lost)

        async def ask(instance: int, seconds: float) -> Mapping[str, Any]:
            return await self._client.call(call, instance, context, seconds)

        reply = await first_answer("prefill", instances, self._timeout_s, ask)
        return Handoff.parse(reply.get("disaggregated_params") or {}, "prefill")


def _as_the_frontend_asks(request: Request, lost: Handoff | None) -> dict[str, Any]:
    """Token ids go as a list: packed ones are bytes, which Dynamo's client cannot send."""
    sampling = dict(request.original.get("sampling_options") or {})
    if lost is not None and lost.seed is not None:
        sampling["seed"] = lost.seed
    token_ids = list(request.engine_request.prompt.token_ids)
    return {**request.original, "token_ids": token_ids, "prefill_result": None, "sampling_options": sampling}
