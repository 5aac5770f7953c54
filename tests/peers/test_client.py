"""Calls between workers: what Dynamo's client does becomes our errors, and leaving early stops the remote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from dynamo.llm import exceptions as dynamo

from dynamo.trtllm.errors import (
    ClientFault,
    EngineFault,
    PeerFault,
    PeerTimeout,
    PeerUnavailable,
    RequestCancelled,
    WorkerError,
)
from dynamo.trtllm.frontend.request import parse_request
from dynamo.trtllm.peers import client as peers
from dynamo.trtllm.peers.client import PeerClient
from dynamo.trtllm.peers.messages import Handoff
from dynamo.trtllm.peers.prefill import PrefillPeers
from fakes import Answer, FakeClient, FakeContext, cancelled, outcome, raw_request, replies

SHORT_S = 0.02
LONG_S = 60.0


class Hanging:
    """An instance that never answers; `context` is what the call brought."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.context: FakeContext | None = None
        self.closed = False

    async def __call__(
        self, request: Mapping[str, Any], context: FakeContext | None
    ) -> AsyncGenerator[Any, None]:
        self.context = context
        self.asked.set()
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            self.closed = True


async def call(
    answer: Answer, context: FakeContext | None = None, timeout_s: float = LONG_S
) -> Mapping[str, Any]:
    return await PeerClient(FakeClient({1: answer}), "encode").call(
        {"a": 1}, 1, context or FakeContext(), timeout_s
    )


@pytest.mark.asyncio
async def test_the_reply_is_the_streams_first_item_and_the_rest_is_read() -> None:
    ended: list[bool] = []

    async def answer(request: Mapping[str, Any], context: FakeContext | None) -> AsyncGenerator[Any, None]:
        yield {"first": request["a"]}
        yield {"second": 2}
        ended.append(True)

    assert await call(answer) == {"first": 1}
    assert ended == [True]


@pytest.mark.asyncio
async def test_a_call_has_a_context_of_its_own_that_is_stopped_at_the_end() -> None:
    context = FakeContext("parent")
    seen: list[FakeContext | None] = []

    async def answer(request: Mapping[str, Any], given: FakeContext | None) -> AsyncGenerator[Any, None]:
        seen.append(given)
        yield {}

    await call(answer, context)
    (child,) = context.children
    assert seen == [child]
    assert child.id() != "parent"
    assert (child.is_stopped(), context.is_stopped()) == (True, False)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "ours", "words"),
    [
        (
            ValueError("Unavailable: tcp://10.0.0.1:9 refused"),
            PeerUnavailable,
            "the encode worker is not reachable",
        ),
        (ValueError("DeadlineExceeded: 10.0.0.1"), PeerTimeout, "the encode worker took too long"),
        (dynamo.ConnectionTimeout("10.0.0.1"), PeerTimeout, "the encode worker took too long"),
        (TimeoutError("10.0.0.1"), PeerTimeout, "the encode worker took too long"),
        (dynamo.InvalidArgument("image 2: not an image"), ClientFault, "image 2: not an image"),
        (
            dynamo.InvalidArgument("InvalidArgument: image 2: not an image"),
            ClientFault,
            "image 2: not an image",
        ),
        (dynamo.CannotConnect("10.0.0.1"), PeerUnavailable, "the encode worker is not reachable"),
        (dynamo.Disconnected("10.0.0.1"), PeerUnavailable, "the encode worker is not reachable"),
        (dynamo.EngineShutdown("x"), PeerUnavailable, "the encode worker is not reachable"),
        (dynamo.StreamIncomplete("x"), PeerUnavailable, "the encode worker is not reachable"),
        (dynamo.Cancelled("x"), PeerUnavailable, "the encode worker is not reachable"),
        (RuntimeError("no responders at 10.0.0.1"), PeerUnavailable, "the encode worker is not reachable"),
        (ConnectionRefusedError("10.0.0.1"), PeerUnavailable, "the encode worker is not reachable"),
        (dynamo.Unknown("/srv/secret"), EngineFault, "the encode worker failed"),
    ],
)
async def test_each_failure_becomes_ours_in_our_words(
    error: Exception, ours: type[WorkerError], words: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        await call(replies(error))
    assert type(caught.value) is ours
    assert caught.value.message == words
    assert caught.value.__cause__ is error


@pytest.mark.asyncio
async def test_a_failure_after_the_reply_is_a_failure() -> None:
    with pytest.raises(PeerUnavailable):
        await call(replies({"reply": 1}, dynamo.StreamIncomplete("cut")))


@pytest.mark.asyncio
async def test_an_empty_stream_is_a_fault_and_not_an_answer() -> None:
    with pytest.raises(PeerUnavailable, match="the encode worker ended its reply without sending anything"):
        await call(replies())


@pytest.mark.asyncio
async def test_a_remote_that_says_cancelled_because_our_client_left_is_a_cancellation() -> None:
    async def answer(request: Mapping[str, Any], context: FakeContext | None) -> AsyncGenerator[Any, None]:
        assert context is not None
        context.stop_generating()
        raise dynamo.Cancelled("gone")
        yield {}

    with pytest.raises(RequestCancelled, match="the client went away"):
        await call(answer)


@pytest.mark.asyncio
async def test_a_late_reply_is_a_timeout_that_stops_the_remote() -> None:
    hanging, context = Hanging(), FakeContext()
    with pytest.raises(PeerTimeout, match=r"the encode worker did not answer within 0\.02 s"):
        await call(hanging, context, SHORT_S)
    assert hanging.closed
    assert hanging.context is not None
    assert (hanging.context.is_stopped(), context.is_stopped()) == (True, False)


@pytest.mark.asyncio
async def test_a_cancelled_call_stops_the_remote() -> None:
    hanging = Hanging()
    calling = asyncio.create_task(call(hanging))
    await hanging.asked.wait()
    await cancelled(calling)
    assert hanging.closed
    assert hanging.context is not None
    assert hanging.context.is_stopped()


@pytest.mark.asyncio
async def test_a_call_without_a_context_brings_none() -> None:
    hanging = Hanging()
    client = PeerClient(FakeClient({1: hanging}), "encode")
    assert type(await outcome(client.call({}, 1, None, SHORT_S))) is PeerTimeout
    assert hanging.context is None


@pytest.mark.asyncio
async def test_connecting_makes_a_client_of_the_endpoint() -> None:
    class Endpoint:
        async def client(self) -> FakeClient:
            return FakeClient({4: replies(), 2: replies()})

    class Runtime:
        def endpoint(self, name: str) -> Endpoint:
            assert name == "dyn://n.prefill.generate"
            return Endpoint()

    assert sorted((await peers.connect(Runtime(), "dyn://n.prefill.generate", "prefill")).instances()) == [
        2,
        4,
    ]


RAW = raw_request(1, 2, temperature=0.5, stop={"max_tokens": 3}, routing={"priority": 1.0})
ASKED = parse_request(RAW, FakeContext())
HANDOFF = Handoff(engine="E", prompt_token_ids=(1, 2), first_token_ids=(5,), seed=77, meta={})
REPLY = {"token_ids": [5], "disaggregated_params": HANDOFF.model_dump(mode="json")}


def prefill_over(client: FakeClient, timeout_s: float = LONG_S) -> PrefillPeers:
    return PrefillPeers(PeerClient(client, "prefill"), timeout_s)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [ValueError("Unavailable: x"), ValueError("DeadlineExceeded: x"), dynamo.EngineShutdown("x")]
)
async def test_prefill_is_tried_once_more_on_another_instance(error: Exception) -> None:
    client = FakeClient({1: replies(error), 2: replies(REPLY)})
    for _ in range(8):
        client.calls.clear()
        assert await prefill_over(client).prefill(ASKED, FakeContext()) == HANDOFF
        assert client.calls in ([2], [1, 2])


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [None, HANDOFF, HANDOFF.model_copy(update={"seed": None})])
async def test_prefill_is_asked_again_what_the_frontend_asked_with_the_seed_of_what_was_lost(
    lost: Handoff | None,
) -> None:
    client = FakeClient({1: replies(REPLY)})
    sent = {
        **RAW,
        "token_ids": b"\1\0\0\0\2\0\0\0",
        "prefill_result": {"disaggregated_params": {"a": 1}},
        "unknown": [1],
    }
    await prefill_over(client).prefill(parse_request(sent, FakeContext()), FakeContext(), lost)
    seed = {"seed": 77} if lost is HANDOFF else {}
    (asked,) = client.requests
    assert asked == {
        **RAW,
        "sampling_options": {"temperature": 0.5, **seed},
        "prefill_result": None,
        "unknown": [1],
    }
    assert RAW["sampling_options"] == {"temperature": 0.5}


@pytest.mark.asyncio
@pytest.mark.parametrize("reply", [{"token_ids": [5]}, {"disaggregated_params": {"schema_version": 99}}])
async def test_a_reply_without_a_handoff_of_this_release_is_a_peers_fault(reply: dict[str, Any]) -> None:
    with pytest.raises(PeerFault, match="the prefill worker speaks another schema"):
        await prefill_over(FakeClient({1: replies(reply)})).prefill(ASKED, FakeContext())


@pytest.mark.asyncio
async def test_two_dead_instances_of_three_are_one_fault_and_no_third_try() -> None:
    client = FakeClient({each: replies(ValueError("Unavailable: x")) for each in (1, 2, 3)})
    with pytest.raises(PeerUnavailable, match="the prefill worker is not reachable"):
        await prefill_over(client).prefill(ASKED, FakeContext())
    assert len(client.calls) == len(set(client.calls)) == 2


@pytest.mark.asyncio
async def test_without_any_instance_prefill_is_unavailable() -> None:
    with pytest.raises(PeerUnavailable, match="no prefill worker is available"):
        await prefill_over(FakeClient({})).prefill(ASKED, FakeContext())


@pytest.mark.asyncio
async def test_a_clients_fault_is_not_tried_again() -> None:
    client = FakeClient({each: replies(dynamo.InvalidArgument("no")) for each in (1, 2)})
    with pytest.raises(ClientFault, match="no"):
        await prefill_over(client).prefill(ASKED, FakeContext())
    assert len(client.calls) == 1


@pytest.mark.asyncio
async def test_the_deadline_is_shared_by_the_tries_and_whole_for_a_single_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    async def call_peer(
        self: PeerClient, request: Any, instance: int, context: Any, timeout_s: float
    ) -> Mapping[str, Any]:
        given.append(timeout_s)
        raise PeerTimeout("late")

    monkeypatch.setattr(PeerClient, "call", call_peer)
    monkeypatch.setattr(peers.time, "monotonic", lambda: 0.0)
    for count in (1, 3):
        with pytest.raises(PeerTimeout):
            await prefill_over(FakeClient(dict.fromkeys(range(count), replies())), 10.0).prefill(
                ASKED, FakeContext()
            )
    assert given == [10.0, 5.0, 10.0]
