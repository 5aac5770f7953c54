"""The encode role: replies in order, refusals before work,
and no offer left for a reply that did not leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo.trtllm import metrics
from dynamo.trtllm.errors import ClientFault, EngineDead, LimitFault, Overloaded, PartFault, PeerFault
from dynamo.trtllm.frontend.endpoint import EndpointServer
from dynamo.trtllm.peers.messages import EncodeReply, EncodeRequest
from dynamo.trtllm.request_handlers.encode import EncodeHandler
from dynamo.trtllm.transfer.pooled import PooledTransfer
from fakes import FakeContext, FakeSender, answered, cancelled, collect, ignore_death, outcome, until
from media_parts import (
    HIDDEN,
    IMAGE_TOKENS,
    PLACEHOLDER,
    GatedEngine,
    loader_over,
    png_url,
    taking_images,
    write_embeddings,
)
from request_handlers.topology import start_transfer


@dataclass
class Worker:
    engine: GatedEngine
    transfer: PooledTransfer
    handler: EncodeHandler

    async def reply(self, raw: dict[str, Any]) -> EncodeReply:
        (chunk,) = await collect(answered(self.handler, raw))
        return EncodeReply.parse(chunk, "encode")


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def start(
    stack: AsyncExitStack, transfer: dict[str, Any] | None = None, encodes: bool = True, **media: Any
) -> Worker:
    engine = GatedEngine()
    info = taking_images(await engine.start(), encodes=encodes)
    ours = await start_transfer(stack, **(transfer or {}))
    return Worker(
        engine, ours, EncodeHandler(engine, info, await loader_over(engine, info=info, **media), ours)
    )


def asking(url: str, text_tokens: int = 1, context_length: int = 1000, position: int = 1) -> dict[str, Any]:
    return EncodeRequest(
        kind="image", position=position, url=url, text_tokens=text_tokens, context_length=context_length
    ).model_dump(mode="json")


@pytest.mark.asyncio
async def test_the_reply_describes_the_item_and_its_tensors_can_be_read(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    worker = await start(stack, allowed_local_path=tmp_path)
    image = await worker.reply(asking(png_url(1)))
    file = await worker.reply(asking(write_embeddings(tmp_path, "e.pt", 3, value=2.5)))
    assert (image.kind, image.token_ids) == ("image", (PLACEHOLDER,) * IMAGE_TOKENS)
    assert (file.kind, file.token_ids) == ("image", (PLACEHOLDER,) * 3)
    assert worker.transfer.stats().open_offers == 2
    reader = await start_transfer(stack)
    async with await reader.fetch(file.transfer, 10.0) as received:
        assert received.tensors["features"].tolist() == [[2.5] * HIDDEN] * 3
    await until(lambda: worker.transfer.stats().open_offers == 1)


@pytest.mark.asyncio
async def test_an_image_that_two_calls_name_is_encoded_once_and_offered_to_both(
    stack: AsyncExitStack,
) -> None:
    worker = await start(stack)
    first, second = await asyncio.gather(
        worker.reply(asking(png_url(1))), worker.reply(asking(png_url(1), position=3))
    )
    assert first.digest == second.digest
    assert (worker.engine.encoded, worker.transfer.stats().open_offers) == ([first.digest], 2)


@pytest.mark.asyncio
async def test_a_fault_names_the_part_by_the_position_in_the_callers_request(stack: AsyncExitStack) -> None:
    worker = await start(stack)
    with pytest.raises(PartFault, match="image 4: its data URL is empty"):
        await worker.reply(asking("data:image/png,", position=4))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 1001}, "tokens must be a whole number between 1 and 1000"),
        ({"size": 5}, "size is not known"),
    ],
)
async def test_options_that_its_model_does_not_know_are_refused_whoever_asks(
    stack: AsyncExitStack, options: dict[str, Any], words: str
) -> None:
    worker = await start(stack)
    assert len((await worker.reply({**asking(png_url(1)), "options": {"tokens": 7}})).token_ids) == 7
    with pytest.raises(ClientFault, match=f"mm_processor_kwargs: {words}"):
        await worker.reply({**asking(png_url(1)), "options": options})
    with pytest.raises(PartFault, match="smell 1: this worker takes no smell"):
        await worker.reply({**asking(png_url(1)), "kind": "smell"})


@pytest.mark.asyncio
async def test_what_would_not_fit_the_context_is_refused_before_encoding(stack: AsyncExitStack) -> None:
    worker = await start(stack)
    with pytest.raises(LimitFault, match="the prompt has 12 tokens with its media; the context length is 12"):
        await worker.reply(asking(png_url(1), text_tokens=8, context_length=12))
    assert worker.engine.encoded == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "raw",
    [
        {"token_ids": [1]},
        {**asking("u"), "schema_version": 99},
        {"schema_version": 1, "items": []},
        {**asking("u"), "more": 1},
    ],
)
async def test_a_call_of_another_release_is_refused(stack: AsyncExitStack, raw: dict[str, Any]) -> None:
    worker = await start(stack)
    with pytest.raises(PeerFault, match="the calling worker speaks another schema than this one"):
        await worker.reply(raw)


@pytest.mark.asyncio
async def test_a_health_check_asks_the_engine_and_offers_nothing(stack: AsyncExitStack) -> None:
    worker = await start(stack)
    raw = {"_HEALTH_CHECK": True, "token_ids": [1]}
    assert await collect(answered(worker.handler, raw)) == [{"token_ids": [], "finish_reason": "stop"}]
    await worker.engine.close()
    assert type(await outcome(collect(answered(worker.handler, raw)))) is EngineDead
    assert worker.transfer.stats().offers_total == 0


@pytest.mark.asyncio
async def test_a_reply_that_its_caller_no_longer_takes_withdraws_its_offer(stack: AsyncExitStack) -> None:
    worker = await start(stack)
    server = EndpointServer(worker.handler, on_dead=ignore_death)
    raw = asking(png_url(1))
    raised = await outcome(collect(server.serve(raw, FakeContext(), response_sender=FakeSender(fails_at=0))))
    assert type(raised).__name__ == "Cancelled"
    assert (worker.transfer.stats().offers_total, worker.transfer.stats().open_offers) == (1, 0)


@pytest.mark.asyncio
async def test_a_reply_that_was_taken_keeps_its_offer(stack: AsyncExitStack) -> None:
    worker = await start(stack)
    server, sender = EndpointServer(worker.handler, on_dead=ignore_death), FakeSender()
    await collect(server.serve(asking(png_url(1)), FakeContext(), response_sender=sender))
    assert (len(sender.chunks), worker.transfer.stats().open_offers) == (1, 1)


@pytest.mark.asyncio
async def test_an_offer_without_room_is_said_in_its_own_words_and_leaves_nothing(
    stack: AsyncExitStack,
) -> None:
    worker = await start(stack)

    async def full(*args: Any) -> Any:
        raise Overloaded("no room")

    worker.transfer.offer = full  # type: ignore[method-assign]
    with pytest.raises(Overloaded, match="no room"):
        await worker.reply(asking(png_url(1)))
    assert worker.transfer.stats().open_offers == 0


@pytest.mark.asyncio
async def test_a_caller_that_leaves_while_an_offer_waits_for_room_leaves_none(stack: AsyncExitStack) -> None:
    worker = await start(stack, {"pool_bytes": 1536})
    calls = [asyncio.create_task(worker.reply(asking(png_url(shade)))) for shade in range(4)]
    await until(lambda: any(each.done() for each in calls) and worker.transfer.stats().waiting_offers > 0)
    taken = sum(each.done() for each in calls)
    for each in calls:
        if not each.done():
            await cancelled(each)
    assert (worker.transfer.stats().open_offers, worker.transfer.stats().waiting_offers) == (taken, 0)


@pytest.mark.asyncio
async def test_a_caller_that_leaves_during_encoding_leaves_nothing(stack: AsyncExitStack) -> None:
    worker = await start(stack)
    worker.engine.gate = asyncio.Event()
    running = asyncio.create_task(worker.reply(asking(png_url(1))))
    await worker.engine.encoding.wait()
    await cancelled(running)
    assert worker.transfer.stats().offers_total == 0


@pytest.mark.asyncio
async def test_a_worker_that_encodes_nothing_takes_embedding_files_and_names_the_image_that_it_cannot_take(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    worker = await start(stack, encodes=False, allowed_local_path=tmp_path)
    file = write_embeddings(tmp_path, "e.pt", 3)
    assert (await worker.reply(asking(file))).token_ids == (PLACEHOLDER,) * 3
    with pytest.raises(PartFault) as caught:
        await worker.reply(asking(png_url(1), position=2))
    assert caught.value.message == (
        "image 2: this encode worker takes embedding files only: "
        "images of this model are encoded by prefill and aggregated workers"
    )
    assert (worker.engine.encoded, worker.transfer.stats().offers_total) == ([], 1)


@pytest.mark.asyncio
async def test_the_role_is_drained_when_its_offers_are_read_and_shows_them_meanwhile(
    stack: AsyncExitStack,
) -> None:
    worker = await start(stack)
    reply = await worker.reply(asking(png_url(1)))
    assert worker.handler.stats()[metrics.TRANSFER_OPEN_OFFERS] == 1
    assert worker.handler.stats()[metrics.MEDIA_CACHE_MISSES] == 1
    draining = asyncio.create_task(worker.handler.drained())
    await (await start_transfer(stack)).fetch(reply.transfer, 10.0, copy=True)
    await draining
    await worker.handler.close()
