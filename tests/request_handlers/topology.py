"""Prefill and decode handlers over the double in this process, joined as the frontend joins them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.core import Step, Tokens
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.engines.port import EngineRequest, EngineState, Prefilled
from dynamo.trtllm.frontend.response import Chunk
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.peers.client import PeerClient
from dynamo.trtllm.peers.prefill import PrefillPeers
from dynamo.trtllm.request_handlers.aggregated import AggregatedHandler
from dynamo.trtllm.request_handlers.decode import DecodeHandler
from dynamo.trtllm.request_handlers.prefill import PrefillHandler
from dynamo.trtllm.transfer.descriptor import TransferDescriptor
from dynamo.trtllm.transfer.local import LocalTransport
from dynamo.trtllm.transfer.pooled import PooledTransfer
from dynamo.trtllm.transfer.port import Received
from dynamo.trtllm.transfer.transport import Transport
from fakes import FakeClient, FakeContext, answered, collect, served_by
from media_parts import IMAGE_TOKENS, PLACEHOLDER, loader_over

POOL_BYTES = 1 << 20
KV_BYTES = 100
NO_STOPS = StopStrings("")
"""For requests without stop strings: a tokenizer is not there to be loaded."""


class RecordingEngine(DoubleEngine):
    """The double with a KV cache to hand over; keeps what it was asked, and counts states that were freed.

    `prefilling` is set when `prefill` has begun, which then waits for `prefill_gate`;
    `fail_decode` is raised after the first step of `decode`.
    """

    def __init__(self, **script: Any) -> None:
        media = {"placeholder_ids": {"image": PLACEHOLDER}, "media_tokens": IMAGE_TOKENS}
        given = {**media, "kv_bytes_per_token": KV_BYTES, **script}
        super().__init__(EngineConfig(kind=EngineKind.DOUBLE, double_script=given))
        self.kv_bytes_per_token: int = given["kv_bytes_per_token"]
        self.requests: list[EngineRequest] = []
        self.generated: list[EngineRequest] = []
        self.released = 0
        self.prefilling = asyncio.Event()
        self.prefill_gate: asyncio.Event | None = None
        self.fail_decode: Exception | None = None
        self.decoding = 0

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        self.generated.append(request)
        return super().generate(request)

    async def prefill(self, request: EngineRequest) -> Prefilled:
        self.requests.append(request)
        self.prefilling.set()
        if self.prefill_gate is not None:
            await self.prefill_gate.wait()
        done = await super().prefill(request)
        if done.state is None:
            return done
        state = EngineState(done.state.meta, done.state.tensors, self._release)
        return Prefilled(done.first, done.prompt_token_ids, state, cached_tokens=2)

    async def decode(
        self, request: EngineRequest, first: Step, state: EngineState
    ) -> AsyncGenerator[Step | Tokens, None]:
        self.requests.append(request)
        self.decoding += 1
        try:
            held = sum(tensor.numel() for tensor in state.tensors.values())
            assert held == self.kv_bytes_per_token * len(request.prompt.token_ids)
            async for step in super().decode(request, first, state):
                yield step
                if self.fail_decode is not None:
                    raise self.fail_decode
        finally:
            self.decoding -= 1

    def _release(self) -> None:
        self.released += 1


class GatedTransfer(PooledTransfer):
    """Its reads wait for `gate` when there is one; `reading` says that one has begun."""

    def __init__(self, transport: Transport, **options: Any) -> None:
        super().__init__(transport, **options)
        self.gate: asyncio.Event | None = None
        self.reading = asyncio.Event()
        self.fail: Exception | None = None

    async def fetch(
        self, descriptor: TransferDescriptor, deadline_s: float | None = None, **options: Any
    ) -> Received:
        self.reading.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            raise self.fail
        return await super().fetch(descriptor, deadline_s, **options)


@dataclass
class PrefillWorker:
    engine: RecordingEngine
    transfer: PooledTransfer
    handler: PrefillHandler


@dataclass
class Pair:
    """One prefill worker that the frontend asks, others that only decode knows, and a decode worker."""

    prefill: PrefillWorker
    engine: RecordingEngine
    transfer: GatedTransfer
    decode: DecodeHandler
    client: FakeClient
    workers: list[PrefillWorker] = field(default_factory=list)

    async def prefilled(self, raw: Mapping[str, Any], context: FakeContext | None = None) -> Chunk:
        """Prefill's one reply to what the frontend would send it."""
        stop = {**raw["stop_conditions"], "max_tokens": 1}
        (reply,) = await collect(answered(self.prefill.handler, {**raw, "stop_conditions": stop}, context))
        return dict(json.loads(json.dumps(reply)))

    def decoded(
        self, raw: Mapping[str, Any], reply: Mapping[str, Any] | None, context: FakeContext | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Decode's stream for a request whose prefill replied with `reply`;
        None: the frontend found no prefill worker."""
        result = None if reply is None else {"disaggregated_params": reply["disaggregated_params"]}
        return answered(self.decode, {**raw, "prefill_result": result}, context)

    async def run(self, raw: Mapping[str, Any]) -> list[Chunk]:
        """Both stages, as the frontend runs them: any end but "length" is answered from prefill's reply."""
        reply = await self.prefilled(raw)
        if reply["finish_reason"] != "length":
            return [{key: value for key, value in reply.items() if key != "disaggregated_params"}]
        return await collect(self.decoded(raw, reply))

    def assert_nothing_held(self) -> None:
        assert self.transfer.stats().pool_used_bytes == 0
        assert self.transfer.stats().reads_in_flight == 0
        assert self.engine.decoding == 0
        for worker in self.workers:
            stats = worker.transfer.stats()
            assert (stats.open_offers, stats.pool_used_bytes) == (0, _quarantined_bytes(worker.transfer))
            assert worker.engine.stats()[metrics.ENGINE_ACTIVE] == 0

    async def add(self, stack: AsyncExitStack, instance: int, **script: Any) -> PrefillWorker:
        """One more prefill worker, known to decode as `instance`."""
        worker = await prefill_worker(stack, **script)
        self.workers.append(worker)
        self.client.answers[instance] = served_by(worker.handler)
        return worker


def _quarantined_bytes(transfer: PooledTransfer) -> int:
    """Bytes of offers that were withdrawn: they stay aside for a while,
    since a reader may still be at them."""
    stats = transfer.stats()
    return stats.pool_used_bytes if stats.quarantined_segments and not stats.open_offers else 0


async def start_transfer(
    stack: AsyncExitStack, kind: type[PooledTransfer] = PooledTransfer, **options: Any
) -> Any:
    transfer = kind(LocalTransport(), **{"pool_bytes": POOL_BYTES, **options})
    await transfer.start()
    stack.push_async_callback(transfer.close)
    return transfer


async def prefill_worker(
    stack: AsyncExitStack, transfer_options: Mapping[str, Any] | None = None, **script: Any
) -> PrefillWorker:
    engine = RecordingEngine(**script)
    info = await engine.start()
    transfer = await start_transfer(stack, **(transfer_options or {}))
    processor = MultimodalProcessor(info, await loader_over(engine))
    return PrefillWorker(engine, transfer, PrefillHandler(engine, info, processor, transfer))


async def pair(stack: AsyncExitStack, **script: Any) -> Pair:
    worker = await prefill_worker(stack, **script)
    engine, client = RecordingEngine(**script), FakeClient({})
    info = await engine.start()
    transfer = await start_transfer(stack, GatedTransfer)
    decode = DecodeHandler(
        engine, info, transfer, PrefillPeers(PeerClient(client, "prefill"), 60.0), NO_STOPS
    )
    return Pair(worker, engine, transfer, decode, client, [worker])


async def aggregated(raw: Mapping[str, Any], **script: Any) -> list[Chunk]:
    """What one worker answers."""
    engine = RecordingEngine(**script)
    info = await engine.start()
    handler = AggregatedHandler(engine, info, MultimodalProcessor(info, await loader_over(engine)), NO_STOPS)
    return await collect(answered(handler, raw))


def joined(chunks: list[Chunk]) -> dict[str, Any]:
    """A whole answer, however it was cut into chunks."""
    out: dict[str, Any] = {"token_ids": [], "log_probs": [], "top_logprobs": []}
    for chunk in chunks:
        for key in ("token_ids", "log_probs", "top_logprobs"):
            out[key] += chunk.get(key, [])
    last = chunks[-1]
    usage = dict(last["completion_usage"])
    usage.pop("prompt_tokens_details")
    return {
        **out,
        "finish_reason": last["finish_reason"],
        "stop_reason": last.get("stop_reason"),
        "usage": usage,
    }
