"""Prefill workers as a decode worker asks them, for a request whose KV cache is lost or was never made."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from dynamo.trtllm.core import Context
from dynamo.trtllm.peers.client import PeerClient, first_answer


class PrefillPeers:
    """Prefill workers as decode sees them: any will do, another one if it fails."""

    def __init__(self, client: PeerClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def prefill(self, request: Mapping[str, Any], context: Context) -> Mapping[str, Any]:
        """Prefill's reply. Raises `ClientFault` in prefill's words, `PeerUnavailable` and `PeerTimeout`."""
        instances = self._client.instances()
        random.shuffle(instances)

        async def ask(instance: int, seconds: float) -> Mapping[str, Any]:
            return await self._client.call(request, instance, context, seconds)

        return await first_answer("prefill", instances, self._timeout_s, ask)
