"""How chunks reach the frontend and how a request ends:
both arms, cancellation, unread streams, outcomes and draining."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dynamo.llm import exceptions as dynamo

from dynamo.trtllm.core import Context
from dynamo.trtllm.errors import (
    ClientFault,
    EngineDead,
    EngineFault,
    PeerFault,
    PeerTimeout,
    RequestCancelled,
    ShuttingDown,
)
from dynamo.trtllm.frontend import endpoint as module
from dynamo.trtllm.frontend.endpoint import DIRECT_CHUNKS, CancelWatch, EndpointServer, Outlet, StreamClosed
from dynamo.trtllm.frontend.response import Chunk
from fakes import FakeContext, FakeSender, cancelled, collect, ignore_death, outcome, until

SHORT_S = 0.02
LONG_S = 20.0


class Scripted:
    """A handler that yields `count` chunks, then raises `error`;
    `ended` is set when its generator has been closed."""

    def __init__(
        self, count: int = 3, error: BaseException | None = None, gate: asyncio.Event | None = None
    ) -> None:
        self.count = count
        self.error = error
        self.gate = gate
        self.started = asyncio.Event()
        self.ended = False

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        self.started.set()
        try:
            for index in range(self.count):
                yield {"token_ids": [index]}
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.ended = True


class BlockingSender(FakeSender):
    """Blocks in `send` from chunk `blocks_at` on until `opened` is set;
    `blocked` says that it has come there."""

    def __init__(self, blocks_at: int, fails_at: int | None = None) -> None:
        super().__init__(fails_at)
        self.blocks_at = blocks_at
        self.opened = threading.Event()
        self.blocked = threading.Event()
        self.threads: set[str] = set()

    def send(self, chunk: Chunk) -> None:
        self.threads.add(threading.current_thread().name)
        if len(self.chunks) >= self.blocks_at:
            self.blocked.set()
            assert self.opened.wait(LONG_S)
        super().send(chunk)


def make(handler: Scripted, **options: Any) -> EndpointServer:
    return EndpointServer(handler, **{"on_dead": ignore_death, **options})


async def push(server: EndpointServer, sender: Any, context: FakeContext | None = None) -> list[Chunk]:
    return await collect(server.serve({}, context or FakeContext(), response_sender=sender))


def ids(chunks: list[Chunk]) -> list[int]:
    return [each["token_ids"][0] for each in chunks]


@pytest.mark.asyncio
async def test_push_sends_every_chunk_in_order_yields_nothing_and_closes() -> None:
    server, sender = make(Scripted(5)), FakeSender()
    assert await push(server, sender) == []
    assert ids(sender.chunks) == [0, 1, 2, 3, 4]
    assert sender.closed
    assert (server.in_flight, dict(server.outcomes)) == (0, {"completed": 1})


@pytest.mark.asyncio
async def test_pull_yields_every_chunk_in_order() -> None:
    server = make(Scripted(4))
    assert ids(await collect(server.serve({}, FakeContext()))) == [0, 1, 2, 3]
    assert dict(server.outcomes) == {"completed": 1}


def test_the_parameter_that_switches_push_on_is_in_the_signature_and_only_then() -> None:
    pushing, pulling = make(Scripted()).endpoint_handler(), make(Scripted(), push=False).endpoint_handler()
    assert "response_sender" in inspect.signature(pushing).parameters
    assert "response_sender" not in inspect.signature(pulling).parameters


def test_a_handler_that_lost_the_parameter_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(self: EndpointServer, *args: Any) -> None: ...

    monkeypatch.setattr(EndpointServer, "serve", wrapped)
    with pytest.raises(AssertionError, match="lost its response_sender"):
        make(Scripted()).endpoint_handler()


@pytest.mark.asyncio
@pytest.mark.parametrize("sender", [FakeSender(), None], ids=["push", "pull"])
async def test_an_answer_without_any_output_is_a_fault(sender: FakeSender | None) -> None:
    server = make(Scripted(0))
    error = await outcome(collect(server.serve({}, FakeContext(), response_sender=sender)))
    assert type(error) is dynamo.Unknown
    assert str(error) == "the engine ended the request without any output"
    assert dict(server.outcomes) == {"failed": 1}
    assert sender is None or not sender.closed


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "theirs", "words", "counted"),
    [
        (ClientFault("too many"), dynamo.InvalidArgument, "too many", "refused"),
        (PeerTimeout("late"), dynamo.ConnectionTimeout, "late", "failed"),
        (EngineFault("broke"), dynamo.Unknown, "broke", "failed"),
        (ValueError("/srv/secret"), dynamo.Unknown, "the worker failed on this request", "failed"),
        (RequestCancelled("gone"), dynamo.Cancelled, "the client went away", "cancelled"),
    ],
)
@pytest.mark.parametrize("pushed", [True, False])
async def test_a_handlers_error_ends_the_request_as_dynamos_exception(
    error: Exception, theirs: type[BaseException], words: str, counted: str, pushed: bool
) -> None:
    handler = Scripted(1, error)
    server = make(handler)
    raised = await outcome(
        collect(server.serve({}, FakeContext(), response_sender=FakeSender() if pushed else None))
    )
    assert type(raised) is theirs
    assert str(raised) == words
    assert (dict(server.outcomes), server.in_flight, handler.ended) == ({counted: 1}, 0, True)


@pytest.mark.asyncio
@pytest.mark.parametrize("raw", [None, [], "text", 5, [["token_ids", [1]]]])
async def test_a_request_that_is_no_object_is_refused_whatever_the_role(raw: Any) -> None:
    server = make(Scripted(1))
    raised = await outcome(collect(server.serve(raw, FakeContext(), response_sender=FakeSender())))
    assert (type(raised), str(raised)) == (dynamo.InvalidArgument, "the request must be an object")
    assert dict(server.outcomes) == {"refused": 1}


@pytest.mark.asyncio
async def test_what_a_peer_did_is_one_line_with_its_cause_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault = PeerFault("the peer broke")
    fault.__cause__ = OSError("first line " + "x" * 500 + "\nsecond line")
    await outcome(push(make(Scripted(0, fault)), FakeSender(), FakeContext("r-1")))
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "request r-1 failed: the peer broke (OSError: " + ("first line " + "x" * 500)[:200] + ")"
    )
    assert not record.exc_info


@pytest.mark.asyncio
async def test_a_dead_engine_is_reported_once_with_its_error() -> None:
    deaths: list[EngineDead] = []
    dead = EngineDead("the engine died")
    raised = await outcome(push(make(Scripted(1, dead), on_dead=deaths.append), FakeSender()))
    assert type(raised) is dynamo.EngineShutdown
    assert deaths == [dead]


@pytest.mark.asyncio
async def test_a_stream_that_the_frontend_dropped_is_a_cancellation_and_stops_the_handler() -> None:
    handler = Scripted(10)
    server = make(handler)
    raised = await outcome(push(server, FakeSender(fails_at=2)))
    assert type(raised) is dynamo.Cancelled
    assert str(raised) == "the client went away"
    assert (handler.ended, dict(server.outcomes)) == (True, {"cancelled": 1})


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_nothing_is_sent_stops_the_handler() -> None:
    handler, context = Scripted(1, gate=asyncio.Event()), FakeContext()
    server = make(handler)
    running = asyncio.create_task(push(server, FakeSender(), context))
    await handler.started.wait()
    assert server.in_flight == 1
    context.stop_generating()
    raised = await outcome(running)
    assert type(raised) is dynamo.Cancelled
    assert (handler.ended, server.in_flight, dict(server.outcomes)) == (True, 0, {"cancelled": 1})


@pytest.mark.asyncio
async def test_a_task_cancelled_by_the_runtime_itself_stays_cancelled() -> None:
    handler = Scripted(1, gate=asyncio.Event())
    server = make(handler)
    running = asyncio.create_task(push(server, FakeSender()))
    await handler.started.wait()
    await cancelled(running)
    assert (handler.ended, dict(server.outcomes)) == (True, {"cancelled": 1})


@pytest.mark.asyncio
async def test_pull_ends_between_chunks_when_the_client_has_left() -> None:
    handler, context = Scripted(5), FakeContext()
    server = make(handler)
    chunks = server.serve({}, context)
    assert ids([await anext(chunks), await anext(chunks)]) == [0, 1]
    context.stop_generating()
    assert type(await outcome(anext(chunks))) is dynamo.Cancelled
    assert (handler.ended, dict(server.outcomes)) == (True, {"cancelled": 1})


@pytest.mark.asyncio
async def test_a_pulled_stream_that_is_closed_early_closes_the_handler() -> None:
    handler = Scripted(5)
    server = make(handler)
    chunks = server.serve({}, FakeContext())
    await anext(chunks)
    await chunks.aclose()
    assert (handler.ended, server.in_flight, dict(server.outcomes)) == (True, 0, {"cancelled": 1})


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [DIRECT_CHUNKS - 1, DIRECT_CHUNKS, DIRECT_CHUNKS + 1, 3 * DIRECT_CHUNKS])
async def test_long_streams_leave_the_event_loops_thread_and_keep_their_order(count: int) -> None:
    server, sender = make(Scripted(count)), BlockingSender(blocks_at=count)
    await push(server, sender)
    assert ids(sender.chunks) == list(range(count))
    assert sender.closed
    assert any(name.startswith("endpoint") for name in sender.threads) == (count > DIRECT_CHUNKS)
    server.close()


@pytest.mark.asyncio
async def test_a_client_that_stops_reading_is_cancelled_at_the_stall_deadline_and_others_are_served() -> None:
    handler = Scripted(DIRECT_CHUNKS + 10)
    server, sender = make(handler, stall_deadline_s=SHORT_S), BlockingSender(blocks_at=DIRECT_CHUNKS + 2)
    stuck = asyncio.create_task(push(server, sender))
    other = FakeSender()
    await push(server, other)
    assert len(other.chunks) == DIRECT_CHUNKS + 10
    assert type(await outcome(stuck)) is dynamo.Cancelled
    assert (handler.ended, server.in_flight) == (True, 0)
    assert dict(server.outcomes) == {"completed": 1, "cancelled": 1}
    sender.opened.set()
    server.close()


@pytest.mark.asyncio
async def test_a_send_that_fails_after_its_stream_was_given_up_leaves_no_unread_exception() -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: problems.append(about))
    server, sender = (
        make(Scripted(DIRECT_CHUNKS + 5), stall_deadline_s=SHORT_S),
        BlockingSender(blocks_at=DIRECT_CHUNKS, fails_at=DIRECT_CHUNKS),
    )
    assert type(await outcome(push(server, sender))) is dynamo.Cancelled
    sender.opened.set()
    server.close()
    await until(lambda: not any(each.name.startswith("endpoint") for each in threading.enumerate()))
    await until(lambda: not asyncio.all_tasks() - {asyncio.current_task()})
    gc.collect()
    assert problems == []


class SteppedSender(FakeSender):
    """Takes one chunk each time that the other side of `turn` has been there."""

    def __init__(self, turn: Callable[[], object]) -> None:
        super().__init__()
        self._turn = turn

    def send(self, chunk: Chunk) -> None:
        self._turn()
        super().send(chunk)


@pytest.mark.asyncio
async def test_a_slow_reader_is_no_stall_however_long_its_whole_batch_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = 0
    taken = threading.Semaphore(0)
    plain_wait = asyncio.wait

    async def wait(futures: Any, timeout: float | None = None) -> Any:
        """The deadline passes at once, each time after one more chunk was taken."""
        nonlocal waits
        waits += 1
        taken.release()
        await asyncio.to_thread(progressed.acquire, timeout=LONG_S)
        return await plain_wait(futures, timeout=0)

    progressed = threading.Semaphore(0)

    def turn() -> None:
        assert taken.acquire(timeout=LONG_S)

    class Sender(SteppedSender):
        def send(self, chunk: Chunk) -> None:
            super().send(chunk)
            progressed.release()

    with ThreadPoolExecutor(1) as threads:
        sender = Sender(turn)
        outlet = Outlet(sender, threads, SHORT_S)
        for index in range(20):
            await outlet.put({"token_ids": [index]})
        monkeypatch.setattr(module.asyncio, "wait", wait)
        taken_all = asyncio.create_task(outlet.flush())
        await taken_all
    assert ids(sender.chunks) == list(range(20))
    assert waits >= 20


@pytest.mark.asyncio
async def test_a_batch_that_waits_for_a_thread_is_no_stall() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        blocker = threads.submit(release.wait, LONG_S)
        sender = FakeSender()
        outlet = Outlet(sender, threads, 0.001)
        await outlet.put({"token_ids": [1]})
        flushing = asyncio.create_task(outlet.flush())
        for _ in range(5):
            await asyncio.wait({flushing}, timeout=0.005)
        assert not flushing.done()
        release.set()
        await flushing
        assert blocker.result()
    assert ids(sender.chunks) == [1]


@pytest.mark.asyncio
async def test_a_full_outlet_pauses_the_engines_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_CHUNKS", 4)
    with ThreadPoolExecutor(1) as threads:
        sender = BlockingSender(blocks_at=0)
        outlet = Outlet(sender, threads, LONG_S)
        for index in range(4):
            await outlet.put({"token_ids": [index]})
        paused = asyncio.create_task(outlet.put({"token_ids": [4]}))
        await asyncio.to_thread(sender.blocked.wait, LONG_S)
        assert not paused.done()
        sender.opened.set()
        await paused
        await outlet.flush()
    assert ids(sender.chunks) == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
async def test_a_stream_that_is_dropped_late_is_a_closed_stream() -> None:
    with ThreadPoolExecutor(1) as threads:
        outlet = Outlet(FakeSender(fails_at=1), threads, LONG_S)
        await outlet.put({"token_ids": [0]})
        await outlet.put({"token_ids": [1]})
        with pytest.raises(StreamClosed):
            await outlet.flush()


@pytest.mark.asyncio
async def test_draining_waits_for_the_last_request_and_then_refuses_new_ones() -> None:
    gate = asyncio.Event()
    handler = Scripted(1, gate=gate)
    server, sender = make(handler), FakeSender()
    running = asyncio.create_task(push(server, sender))
    await handler.started.wait()
    drained = asyncio.create_task(server.drained())
    await until(lambda: bool(sender.chunks))
    assert not drained.done()
    gate.set()
    await drained
    assert await running == []
    server.end_all(ShuttingDown("this worker is shutting down"))
    raised = await outcome(push(server, FakeSender()))
    assert type(raised) is dynamo.EngineShutdown
    assert str(raised) == "this worker is shutting down"
    assert (server.in_flight, dict(server.outcomes)) == (0, {"completed": 1})


class Preparing(Scripted):
    """Waits before there is a stream, as a handler that fetches; `clings` cancellations are not heeded."""

    def __init__(self, clings: int = 0) -> None:
        super().__init__()
        self.clings = clings

    async def respond(self, raw: Mapping[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        self.started.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.clings:
                    raise
                self.clings -= 1


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", [0, 2])
async def test_the_engines_death_ends_every_request_at_whatever_stage(sent: int) -> None:
    handler = Scripted(sent, gate=asyncio.Event()) if sent else Preparing()
    server, senders = make(handler), [FakeSender() for _ in range(6)]
    running = [asyncio.create_task(push(server, sender)) for sender in senders]
    await until(lambda: server.in_flight == 6 and handler.started.is_set())
    await until(lambda: len(senders[-1].chunks) == sent)
    server.end_all(EngineDead("the engine died"))
    server.end_all(ShuttingDown("this worker is shutting down"))
    raised = [await outcome(each) for each in running]
    assert {(type(each), str(each)) for each in raised} == {(dynamo.EngineShutdown, "the engine died")}
    assert [sender.closed for sender in senders] == [False] * 6
    assert (server.in_flight, dict(server.outcomes), server.accepting) == (0, {"failed": 6}, False)


@pytest.mark.asyncio
async def test_a_request_that_heeds_no_cancellation_ends_when_it_is_cancelled_again() -> None:
    handler = Preparing(clings=2)
    server = make(handler)
    running = asyncio.create_task(push(server, FakeSender()))
    await handler.started.wait()
    server.end_all(EngineDead("the engine died"))
    await until(lambda: handler.clings == 1)
    server.end_all(EngineDead("the engine died"))
    await until(lambda: handler.clings == 0)
    assert not running.done()
    server.end_all(EngineDead("the engine died"))
    assert type(await outcome(running)) is dynamo.EngineShutdown


@pytest.mark.asyncio
async def test_a_client_that_has_left_counts_as_cancelled_whatever_the_engine_does() -> None:
    handler, context = Preparing(), FakeContext()
    server = make(handler)
    running = asyncio.create_task(push(server, FakeSender(), context))
    await handler.started.wait()
    context.stop_generating()
    server.end_all(EngineDead("the engine died"))
    assert type(await outcome(running)) is dynamo.Cancelled
    assert dict(server.outcomes) == {"cancelled": 1}


@pytest.mark.asyncio
async def test_a_request_that_ran_into_a_deadline_is_refused_at_once_if_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = Scripted(0, PeerTimeout("the encode worker did not answer within 2 s"))
    server = make(handler)
    for _ in range(2):
        raised = await outcome(push(server, FakeSender(), FakeContext("late")))
        assert type(raised) is dynamo.ConnectionTimeout
    assert dict(server.outcomes) == {"failed": 1}
    handler.error = None
    handler.count = 1
    assert type(await outcome(push(server, FakeSender(), FakeContext("late")))) is dynamo.ConnectionTimeout
    assert await push(server, FakeSender(), FakeContext("other")) == []
    monkeypatch.setattr("dynamo.trtllm.frontend.endpoint.LATE_MEMORY_S", -1.0)
    assert await push(server, FakeSender(), FakeContext("late")) == []
    assert dict(server.outcomes) == {"failed": 1, "completed": 2}


@pytest.mark.asyncio
async def test_the_watch_looks_only_while_there_is_something_to_watch() -> None:
    def looking() -> int:
        return len(asyncio.all_tasks() - {asyncio.current_task()})

    watch = CancelWatch()
    for _ in range(2):
        contexts = [FakeContext(), FakeContext()]
        for context in contexts:
            watch.add(context)
        assert looking() == 1
        for context in contexts:
            watch.remove(context)
        await until(lambda: looking() == 0)
