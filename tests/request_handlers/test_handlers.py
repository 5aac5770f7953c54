"""The factory: each role's handler with what it needs started,
and nothing left running when building one fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm import metrics
from dynamo.trtllm.config import Modality, ModelConfig, PeerConfig, Role, TransferConfig, WorkerConfig
from dynamo.trtllm.core import Step, StepLogprobs, TokenLogprob, Usage
from dynamo.trtllm.errors import PeerUnavailable, StartupError
from dynamo.trtllm.frontend.response import Output, to_chunk
from dynamo.trtllm.request_handlers import handlers
from dynamo.trtllm.request_handlers.aggregated import AggregatedHandler
from dynamo.trtllm.request_handlers.decode import DecodeHandler
from dynamo.trtllm.request_handlers.encode import EncodeHandler
from dynamo.trtllm.request_handlers.handler_base import HandlerBase
from dynamo.trtllm.request_handlers.handlers import create_handler
from dynamo.trtllm.request_handlers.prefill import PrefillHandler
from dynamo.trtllm.transfer.port import Transfer
from dynamo.trtllm.transfer.registry import create_transfer
from fakes import FakeClient, answered, collect, raw_request
from media_parts import PLACEHOLDER, GatedEngine, png_url, taking_images, write_embeddings

ENCODE = "dyn://dynamo.tensorrt_llm_encode.generate"


class Endpoint:
    def __init__(self, fails: bool) -> None:
        self._fails = fails

    async def client(self) -> FakeClient:
        if self._fails:
            raise StartupError("no such endpoint")
        return FakeClient({})


class Runtime:
    """Dynamo's runtime as far as a factory uses it; `asked` holds the endpoints."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[str] = []
        self._fails = fails

    def endpoint(self, name: str) -> Endpoint:
        self.asked.append(name)
        return Endpoint(self._fails)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[Transfer]:
    """The transfers that the factory makes, in this process instead of over NIXL."""
    made: list[Transfer] = []

    def create(config: TransferConfig) -> Transfer:
        made.append(create_transfer(replace(config, backend="local", pool_bytes=1 << 16)))
        return made[-1]

    monkeypatch.setattr(handlers, "create_transfer", create)
    return made


def config(role: Role, **peers: Any) -> WorkerConfig:
    return WorkerConfig(role=role, model=ModelConfig(modality=Modality.MULTIMODAL), peers=PeerConfig(**peers))


async def create(
    role: Role, runtime: Runtime | None = None, *, images: dict[str, bool] | None = None, **peers: Any
) -> HandlerBase:
    engine = GatedEngine()
    info = taking_images(await engine.start(), **(images or {}))
    return await create_handler(config(role, **peers), engine, info, runtime or Runtime())


async def answers_about(handler: HandlerBase, url: str) -> bool:
    """Whether the worker answers about what is at `url` while no encode worker lives."""
    try:
        return bool(await collect(answered(handler, raw_request(1, PLACEHOLDER, images=(url,)))))
    except PeerUnavailable:
        return False


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("role", "peers", "kind", "started", "asked"),
    [
        (Role.AGGREGATED, {}, AggregatedHandler, 0, []),
        (Role.AGGREGATED, {"encode_endpoint": ENCODE}, AggregatedHandler, 1, [ENCODE]),
        (Role.PREFILL, {}, PrefillHandler, 1, []),
        (Role.PREFILL, {"encode_endpoint": ENCODE}, PrefillHandler, 1, [ENCODE]),
        (Role.DECODE, {}, DecodeHandler, 1, ["dyn://dynamo.prefill.generate"]),
        (Role.ENCODE, {}, EncodeHandler, 1, []),
    ],
)
async def test_each_role_gets_its_handler_its_transfer_and_its_peers(
    transfers: list[Transfer],
    role: Role,
    peers: dict[str, Any],
    kind: type[HandlerBase],
    started: int,
    asked: list[str],
) -> None:
    runtime = Runtime()
    handler = await create(role, runtime, **peers)
    assert type(handler) is kind
    assert (len(transfers), runtime.asked) == (started, asked)
    if kind in (AggregatedHandler, PrefillHandler):
        assert await answers_about(handler, png_url(1)) == (not peers)
    await handler.drained()
    await handler.close()
    assert all(transfer.stats().pool_bytes == 0 for transfer in transfers)


@pytest.mark.asyncio
@pytest.mark.parametrize("fallback", [True, False])
async def test_without_an_encode_worker_images_are_encoded_here_only_where_that_was_asked_for(
    transfers: list[Transfer], fallback: bool
) -> None:
    handler = await create(Role.AGGREGATED, encode_endpoint=ENCODE, encode_fallback=fallback)
    assert await answers_about(handler, png_url(1)) == fallback
    await handler.close()


@pytest.mark.asyncio
async def test_a_model_that_is_not_encoded_apart_asks_an_encode_worker_for_embedding_files_only(
    transfers: list[Transfer], tmp_path: Path
) -> None:
    runtime = Runtime()
    handler = await create(Role.AGGREGATED, runtime, images={"takes_encoded": False}, encode_endpoint=ENCODE)
    assert runtime.asked == [ENCODE]
    assert await answers_about(handler, png_url(1))
    assert not await answers_about(handler, write_embeddings(tmp_path, "e.pt", 3))
    await handler.close()


@pytest.mark.asyncio
async def test_a_model_that_takes_no_embeddings_refuses_an_encode_worker(transfers: list[Transfer]) -> None:
    nothing = {"takes_encoded": False, "takes_files": False}
    with pytest.raises(
        StartupError, match="takes no embeddings from an encode worker: remove --encode-endpoint"
    ):
        await create(Role.PREFILL, Runtime(), images=nothing, encode_endpoint=ENCODE)


@pytest.mark.asyncio
async def test_an_encode_worker_without_an_encoder_does_not_start_nor_its_transfer(
    transfers: list[Transfer],
) -> None:
    with pytest.raises(StartupError, match="this model has no separate encoder"):
        await create(Role.ENCODE, images={"encodes": False, "takes_files": False})
    assert transfers == []


@pytest.mark.asyncio
async def test_an_encode_worker_of_embedding_files_alone_starts(transfers: list[Transfer]) -> None:
    handler = await create(Role.ENCODE, images={"encodes": False})
    assert type(handler) is EncodeHandler
    await handler.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "build",
    [
        lambda: create(Role.DECODE, Runtime(fails=True)),
        lambda: create(Role.PREFILL, Runtime(fails=True), encode_endpoint=ENCODE),
        lambda: create(Role.AGGREGATED, Runtime(fails=True), encode_endpoint=ENCODE),
    ],
    ids=["decode", "prefill", "aggregated"],
)
async def test_a_transfer_is_closed_when_its_handler_cannot_be_built(
    transfers: list[Transfer], build: Callable[[], Any]
) -> None:
    with pytest.raises(StartupError, match="no such endpoint"):
        await build()
    (transfer,) = transfers
    assert transfer.stats().pool_bytes == 0


@pytest.mark.asyncio
async def test_an_aggregated_worker_answers_about_images_and_shows_its_cache() -> None:
    handler = await create(Role.AGGREGATED)
    raw = raw_request(1, PLACEHOLDER, images=(png_url(1),), stop={"max_tokens": 3, "ignore_eos": True})
    chunks = await collect(answered(handler, raw))
    assert [len(each["token_ids"]) for each in chunks] == [1, 1, 1]
    assert chunks[-1]["completion_usage"]["prompt_tokens"] == 5
    assert handler.stats()[metrics.MEDIA_CACHE_ENTRIES] == 1
    await handler.close()


TOP = (TokenLogprob(5, -0.1, 1), TokenLogprob(6, -2.5, 2))


@pytest.mark.parametrize(
    ("step", "chunk"),
    [
        ([5, 6], {"token_ids": [5, 6], "index": 0}),
        ({"token_ids": [5], "disaggregated_params": {}}, {"token_ids": [5], "disaggregated_params": {}}),
        (Step((5,)), {"token_ids": (5,), "index": 0}),
        (
            Step((), None, "eos", None, Usage(3, 4, 2)),
            {
                "token_ids": (),
                "index": 0,
                "finish_reason": "eos",
                "completion_usage": {
                    "prompt_tokens": 3,
                    "completion_tokens": 4,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        ),
        (Step((), None, "stop", 9), {"token_ids": (), "index": 0, "finish_reason": "stop", "stop_reason": 9}),
        (Step((5,), (StepLogprobs(TOP[0], ()),)), {"token_ids": (5,), "index": 0, "log_probs": [-0.1]}),
        (
            Step((5,), (StepLogprobs(TOP[0], TOP),)),
            {
                "token_ids": (5,),
                "index": 0,
                "log_probs": [-0.1],
                "top_logprobs": [
                    [
                        {"rank": 1, "token_id": 5, "token": None, "logprob": -0.1},
                        {"rank": 2, "token_id": 6, "token": None, "logprob": -2.5},
                    ]
                ],
            },
        ),
    ],
    ids=["bare", "chunk", "plain", "end", "stop", "logprob", "top"],
)
def test_a_step_becomes_dynamos_chunk(step: Output, chunk: dict[str, Any]) -> None:
    assert to_chunk(step) == chunk
