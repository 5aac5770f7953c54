"""Media from encode workers: whom it asks, what it does when one is gone or late,
and that no offer is left behind."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dynamo.llm import exceptions as dynamo

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig, PeerConfig
from dynamo.trtllm.core import Context, EncodedMedia, MediaItem, TokenBudget
from dynamo.trtllm.errors import ClientFault, LimitFault, PartFault, PeerFault, PeerTimeout, PeerUnavailable
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal.parts import MediaPart
from dynamo.trtllm.peers import encode as module
from dynamo.trtllm.peers.client import PeerClient
from dynamo.trtllm.peers.encode import RemoteEncoder
from dynamo.trtllm.peers.placement import Placement
from dynamo.trtllm.request_handlers.encode import EncodeHandler
from dynamo.trtllm.transfer.local import LocalTransport
from dynamo.trtllm.transfer.pooled import PooledTransfer
from fakes import Answer, FakeClient, FakeContext, cancelled, replies, served_by, until
from media_parts import (
    HIDDEN,
    IMAGE_TOKENS,
    ROOMY,
    GatedEngine,
    loader_over,
    named,
    parts,
    png_url,
    write_embeddings,
)

LONG_S = 60.0


class Cluster:
    """Encode workers in this process, all with one kind of engine, and the reading end of their transfers."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.client = FakeClient({})
        self.engines: dict[int, GatedEngine] = {}
        self.senders: dict[int, PooledTransfer] = {}

    async def transfer(self) -> PooledTransfer:
        transfer = PooledTransfer(LocalTransport(), pool_bytes=1 << 20)
        await transfer.start()
        self._stack.push_async_callback(transfer.close)
        return transfer

    async def add(self, instance: int, **media: Any) -> None:
        engine = GatedEngine()
        loader = await loader_over(engine, **media)
        transfer = await self.transfer()
        handler = EncodeHandler(engine, await engine.start(), loader, transfer)
        self.engines[instance], self.senders[instance] = engine, transfer
        self.client.answers[instance] = served_by(handler)

    async def encoder(
        self, *, timeout_s: float = LONG_S, fallback: MediaLoader | None = None, **media: Any
    ) -> RemoteEncoder:
        self.reader = await self.transfer()
        client = PeerClient(self.client, "encode")
        return RemoteEncoder(
            client, self.reader, PeerConfig(timeout_s=timeout_s), MediaConfig(**media), fallback
        )

    def encoded(self) -> dict[int, int]:
        return {instance: len(engine.encoded) for instance, engine in self.engines.items()}

    def assert_nothing_held(self) -> None:
        assert self.reader.stats().pool_used_bytes == 0
        for sender in self.senders.values():
            assert (sender.stats().open_offers, sender.stats().pool_used_bytes) == (0, 0)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack)


def order_of(instances: list[int], url: str, placement: Placement | None = None) -> list[int]:
    """The instances in the order in which they are asked for `url`."""
    return (placement or Placement()).order(instances, *parts(url))


def encoder_over(client: FakeClient, **options: Any) -> RemoteEncoder:
    """An encoder that never gets as far as reading."""
    config = PeerConfig(timeout_s=options.pop("timeout_s", LONG_S))
    return RemoteEncoder(
        PeerClient(client, "encode"), PooledTransfer(LocalTransport()), config, MediaConfig(**options), None
    )


@pytest.mark.asyncio
async def test_embeddings_arrive_as_the_encode_worker_made_them_and_nothing_stays_held(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.add(1, allowed_local_path=tmp_path)
    encoder = await cluster.encoder()
    file = write_embeddings(tmp_path, "e.pt", 3, value=2.5)
    here = await loader_over(GatedEngine(), allowed_local_path=tmp_path)
    urls = [png_url(1), file, png_url(2)]
    got, expected = (
        await encoder.load(parts(*urls), ROOMY, FakeContext()),
        await here.load(parts(*urls), ROOMY),
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert isinstance(ours, EncodedMedia)
        assert isinstance(theirs, EncodedMedia)
        assert (ours.digest, ours.token_ids, ours.extras) == (theirs.digest, theirs.token_ids, theirs.extras)
        assert ours.tensors["features"].equal(theirs.tensors["features"])
    assert [len(item.token_ids) for item in got if isinstance(item, EncodedMedia)] == [
        IMAGE_TOKENS,
        3,
        IMAGE_TOKENS,
    ]
    assert got[0].tensors["features"].shape == (IMAGE_TOKENS, HIDDEN)  # type: ignore[union-attr]
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_what_a_request_holds_twice_is_asked_for_once(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.add(1, allowed_local_path=tmp_path, local_files=True)
    encoder = await cluster.encoder()
    embeddings = write_embeddings(tmp_path, "e.pt", 3, value=2.5)
    image = tmp_path / "p.png"
    image.write_bytes(base64.b64decode(png_url(7).partition(",")[2]))
    urls = [png_url(1), image.as_uri(), embeddings, png_url(2)]
    twice = [*urls, f" {urls[0]}\n", *reversed(urls)]
    got = await encoder.load(parts(*twice), ROOMY, FakeContext())
    assert sorted(request["url"] for request in cluster.client.requests) == sorted(urls)
    digests = [item.digest for item in got]
    assert len(set(digests)) == 4
    assert digests == [*digests[:4], digests[0], *digests[3::-1]]
    assert cluster.encoded() == {1: 3}
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_reference_that_fails_is_named_by_its_first_place(cluster: Cluster) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    with pytest.raises(ClientFault, match=r"^image 2: url scheme 'ftp'"):
        await encoder.load(parts(png_url(1), "ftp://x/y.png", "ftp://x/y.png"), ROOMY, FakeContext())
    assert len(cluster.client.calls) == 2


@pytest.mark.asyncio
async def test_an_image_goes_to_one_instance_and_a_leaving_one_moves_only_its_own() -> None:
    references = [f"https://x/{i}.png" for i in range(300)]
    before = {each: order_of([11, 22, 33], each) for each in references}
    assert before == {each: order_of([33, 11, 22], each) for each in references}
    assert all(sorted(order) == [11, 22, 33] for order in before.values())
    share = {instance: sum(order[0] == instance for order in before.values()) for instance in (11, 22, 33)}
    assert min(share.values()) > 60
    for each, order in before.items():
        assert order_of([11, 33], each) == [instance for instance in order if instance != 22]


@pytest.mark.asyncio
async def test_any_text_is_a_reference() -> None:
    assert order_of([1], "https://x/\ud800\udcff") == [1]


@pytest.mark.asyncio
async def test_an_instance_with_much_more_than_its_share_comes_last_unless_a_uuid_leads_to_it() -> None:
    placement, url = Placement(), "https://x/y.png"
    order = order_of([1, 2, 3], url)
    known = placement.order([1, 2, 3], named("u"))
    with ExitStack() as calls:
        for _ in range(12):
            calls.enter_context(placement.call(order[0]))
        assert order_of([1, 2, 3], url, placement) == order
        calls.enter_context(placement.call(order[0]))
        assert order_of([1, 2, 3], url, placement) == [*order[1:], order[0]]
        for _ in range(100):
            calls.enter_context(placement.call(known[0]))
        assert placement.order([1, 2, 3], named("u")) == known
    assert (placement.calls, order_of([1, 2, 3], url, placement)) == (0, order)


@pytest.mark.asyncio
async def test_calls_under_way_are_counted_and_forgotten(cluster: Cluster) -> None:
    await cluster.add(1)
    cluster.engines[1].gate = asyncio.Event()
    encoder = await cluster.encoder()
    loading = asyncio.create_task(encoder.load(parts(png_url(1), png_url(2)), ROOMY, FakeContext()))
    await until(lambda: encoder.stats()[metrics.INFLIGHT_ENCODE_CALLS] == 2)
    await cluster.engines[1].encoding.wait()
    cluster.engines[1].gate.set()
    await loading
    assert encoder.stats()[metrics.INFLIGHT_ENCODE_CALLS] == 0


@pytest.mark.asyncio
async def test_a_dead_instance_costs_one_retry_on_the_next(cluster: Cluster) -> None:
    await cluster.add(1)
    await cluster.add(2)
    encoder = await cluster.encoder()
    first, second = order_of(list(cluster.engines), png_url(1))
    cluster.client.answers[first] = replies(ValueError("Unavailable: tcp://10.0.0.1:9"))
    assert len(await encoder.load(parts(png_url(1)), ROOMY, FakeContext())) == 1
    assert cluster.client.calls == [first, second]
    assert encoder.stats()[metrics.ENCODE_RETRIES] == 1
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_two_dead_instances_are_a_503_without_a_third_try() -> None:
    client = FakeClient(dict.fromkeys((1, 2, 3), replies(ValueError("Unavailable: x"))))
    with pytest.raises(PeerUnavailable, match="the encode worker is not reachable"):
        await encoder_over(client).load(parts(png_url(1)), ROOMY, FakeContext())
    assert len(set(client.calls)) == len(client.calls) == 2


@pytest.mark.asyncio
async def test_without_any_instance_it_is_a_503() -> None:
    with pytest.raises(PeerUnavailable, match="no encode worker is available"):
        await encoder_over(FakeClient({})).load(parts(png_url(1)), ROOMY, FakeContext())


@pytest.mark.asyncio
async def test_the_deadline_is_split_over_two_tries_and_whole_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    async def call(
        self: PeerClient, request: Any, instance: int, context: Any, timeout_s: float
    ) -> Mapping[str, Any]:
        given.append(timeout_s)
        raise PeerTimeout("late")

    monkeypatch.setattr(PeerClient, "call", call)
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    for count in (3, 1):
        encoder = encoder_over(FakeClient(dict.fromkeys(range(count), replies())), timeout_s=10.0)
        with pytest.raises(PeerTimeout):
            await encoder.load(parts(png_url(1)), ROOMY, FakeContext())
    assert given == [5.0, 10.0, 10.0]


@pytest.mark.asyncio
async def test_a_fault_of_the_client_arrives_in_the_encoders_words_and_is_not_tried_again(
    cluster: Cluster,
) -> None:
    await cluster.add(1)
    await cluster.add(2)
    encoder = await cluster.encoder()
    with pytest.raises(ClientFault) as caught:
        await encoder.load(parts(png_url(1), "data:image/png;base64,AAAA"), ROOMY, FakeContext())
    assert caught.value.message.startswith("image 2: ")
    assert len(cluster.client.calls) == 2
    await until(lambda: not any(s.stats().open_offers for s in cluster.senders.values()))
    assert cluster.reader.stats().pool_used_bytes == 0


@pytest.mark.asyncio
async def test_what_no_encode_worker_takes_is_refused_before_any_is_asked() -> None:
    client = FakeClient({1: replies()})
    encoder = encoder_over(client, max_images=2)
    with pytest.raises(LimitFault, match="the request holds 3 images; this worker takes at most 2"):
        await encoder.load(parts("a", "b", "c"), ROOMY)
    with pytest.raises(LimitFault, match="the request holds 2 videos; this worker takes at most 1"):
        await encoder.load([MediaPart(1, "video", "https://x"), MediaPart(2, "video", "https://y")], ROOMY)
    with pytest.raises(PartFault, match="image 1: its url is missing or not a string"):
        await encoder.load(parts(5), ROOMY)
    assert client.calls == []


@pytest.mark.asyncio
async def test_an_image_too_long_for_the_context_is_refused_by_the_encode_worker_before_encoding(
    cluster: Cluster,
) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    with pytest.raises(
        ClientFault, match="the prompt has 12 tokens with its media; the context length is 12"
    ):
        await encoder.load(parts(png_url(1)), TokenBudget(8, 12), FakeContext())
    assert cluster.encoded() == {1: 0}


@pytest.mark.asyncio
async def test_what_was_read_is_kept_and_a_second_offer_of_it_is_discarded_unread(cluster: Cluster) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    (first,) = await encoder.load(parts(png_url(1)), ROOMY, FakeContext())
    (second,) = await encoder.load(parts(png_url(1)), ROOMY, FakeContext())
    assert second is first
    assert cluster.reader.stats().fetches_total == 1
    assert cluster.senders[1].stats().acknowledged_total == 2
    assert cluster.encoded() == {1: 1}
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_the_same_image_twice_in_a_request_is_read_once(cluster: Cluster) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    one, two = await encoder.load(parts(png_url(1), png_url(1)), ROOMY, FakeContext())
    assert one is two
    assert cluster.reader.stats().fetches_total == 1
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_without_a_cache_everything_is_read(cluster: Cluster) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder(cache_bytes=0)
    for _ in range(2):
        await encoder.load(parts(png_url(1)), ROOMY, FakeContext())
    assert cluster.reader.stats().fetches_total == 2
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_uuid_alone_finds_its_content_through_every_worker_that_asks(cluster: Cluster) -> None:
    for instance in (1, 2, 3):
        await cluster.add(instance)
    one, other = await cluster.encoder(cache_bytes=0), await cluster.encoder()
    for number in range(6):
        (sent,) = await one.load([named(f"u{number}", png_url(number))], ROOMY, FakeContext())
        (found,) = await other.load([named(f"u{number}")], ROOMY, FakeContext())
        assert (found.digest, found.kind) == (sent.digest, "image")
        assert cluster.client.calls[-1] == cluster.client.calls[-2]
    assert sum(cluster.encoded().values()) == 6
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_uuid_that_the_encode_workers_do_not_know_for_this_tenant_is_the_clients_fault(
    cluster: Cluster,
) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    await encoder.load([named("u", png_url(1), "ours")], ROOMY, FakeContext())
    for stranger in (named("u", "", "theirs"), named("u"), named("v", "", "ours")):
        with pytest.raises(ClientFault, match=r"^image 1: its uuid is not known here"):
            await encoder.load([stranger], ROOMY, FakeContext())
    (again,) = await encoder.load([named("u", "", "ours")], ROOMY, FakeContext())
    assert isinstance(again, EncodedMedia)
    assert cluster.encoded() == {1: 1}


@pytest.mark.asyncio
async def test_other_content_under_a_known_uuid_is_encoded_and_takes_the_name(cluster: Cluster) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    (old,) = await encoder.load([named("u", png_url(1))], ROOMY, FakeContext())
    (new,) = await encoder.load([named("u", png_url(2))], ROOMY, FakeContext())
    (found,) = await encoder.load([named("u")], ROOMY, FakeContext())
    assert old.digest != new.digest == found.digest


@pytest.mark.asyncio
async def test_a_uuid_that_a_request_sends_with_content_may_stand_alone_beside_it(cluster: Cluster) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    asked = [named("u", position=1), named("u", png_url(1), position=2)]
    alone, beside = await encoder.load(asked, ROOMY, FakeContext())
    assert alone is beside
    with pytest.raises(ClientFault, match=r"^image 2: its uuid names another content in the same request"):
        await encoder.load([named("u", png_url(1)), named("u", png_url(2), position=2)], ROOMY, FakeContext())


@pytest.mark.asyncio
async def test_options_of_the_processor_reach_the_encode_worker_and_part_its_answers(
    cluster: Cluster,
) -> None:
    await cluster.add(1)
    encoder = await cluster.encoder()
    (plain,) = await encoder.load(parts(png_url(1)), ROOMY, FakeContext())
    (longer,) = await encoder.load([named("u", png_url(1), tokens=7)], ROOMY, FakeContext())
    assert isinstance(plain, EncodedMedia)
    assert isinstance(longer, EncodedMedia)
    assert (len(plain.token_ids), len(longer.token_ids)) == (IMAGE_TOKENS, 7)
    assert plain.digest != longer.digest
    with pytest.raises(
        ClientFault,
        match=r"^image 1: the content that its uuid names is not kept as these mm_processor_kwargs",
    ):
        await encoder.load([named("u", tokens=6)], ROOMY, FakeContext())


class Fallback:
    """A loader that counts."""

    def __init__(self) -> None:
        self.loads = 0
        self.closed = False

    async def load(
        self, parts: Sequence[MediaPart], budget: TokenBudget, context: Context | None = None
    ) -> list[MediaItem]:
        self.loads += 1
        return []

    async def close(self) -> None:
        self.closed = True


@pytest.mark.asyncio
async def test_the_fallback_encodes_while_no_encode_worker_lives_or_is_reachable(cluster: Cluster) -> None:
    fallback: Any = Fallback()
    encoder = await cluster.encoder(fallback=fallback)
    assert await encoder.load(parts(png_url(1)), ROOMY, FakeContext()) == []
    cluster.client.answers[1] = replies(dynamo.CannotConnect("10.0.0.1"))
    assert await encoder.load(parts(png_url(1)), ROOMY, FakeContext()) == []
    assert fallback.loads == 2
    await cluster.add(1)
    assert len(await encoder.load(parts(png_url(1)), ROOMY, FakeContext())) == 1
    assert fallback.loads == 2
    await encoder.close()
    assert fallback.closed


@pytest.mark.asyncio
async def test_the_fallback_does_not_hide_a_late_encode_worker(cluster: Cluster) -> None:
    fallback: Any = Fallback()
    encoder = await cluster.encoder(fallback=fallback)
    cluster.client.answers[1] = replies(dynamo.ConnectionTimeout("late"))
    with pytest.raises(PeerTimeout):
        await encoder.load(parts(png_url(1)), ROOMY, FakeContext())
    assert fallback.loads == 0


@pytest.mark.asyncio
async def test_leaving_stops_the_encode_worker_and_leaves_nothing_held(cluster: Cluster) -> None:
    await cluster.add(1)
    cluster.engines[1].gate = asyncio.Event()
    encoder, context = await cluster.encoder(), FakeContext()
    loading = asyncio.create_task(encoder.load(parts(png_url(1), png_url(2)), ROOMY, context))
    await cluster.engines[1].encoding.wait()
    await cancelled(loading)
    await until(lambda: all(child.is_stopped() for child in context.children))
    assert len(context.children) == 2
    await until(lambda: encoder.stats()[metrics.INFLIGHT_ENCODE_CALLS] == 0)
    cluster.engines[1].gate.set()
    cluster.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_reply_of_another_release_is_a_peers_fault() -> None:
    client = FakeClient({1: replies({"schema_version": 1, "items": []})})
    with pytest.raises(PeerFault, match="the encode worker speaks another schema"):
        await encoder_over(client).load(parts(png_url(1)), ROOMY, FakeContext())


@pytest.mark.asyncio
async def test_an_offer_that_is_gone_costs_a_retry_on_the_next_instance(cluster: Cluster) -> None:
    await cluster.add(1)
    await cluster.add(2)
    encoder = await cluster.encoder()
    first, second = order_of(list(cluster.engines), png_url(1))
    cluster.client.answers[first] = forgetful(cluster.client.answers[first], cluster.senders[first])
    assert len(await encoder.load(parts(png_url(1)), ROOMY, FakeContext())) == 1
    assert cluster.client.calls == [first, second]


def forgetful(answer: Answer, sender: PooledTransfer) -> Answer:
    """An instance whose process ends right after its reply."""

    async def wrapped(request: Mapping[str, Any], context: FakeContext | None) -> AsyncGenerator[Any, None]:
        async for item in answer(request, context):
            yield item
        await sender.close()

    return wrapped
