"""Peers that are missing, stopped or told to leave, with the double:
readiness, 503s, fallback and draining."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo.trtllm.model_files import DEMO_DIRECTORY
from processes.cluster import Cluster, Managed, wait_until
from processes.media import ImageServer, image_server
from processes.topologies import ENCODE_ENDPOINT

PLACEHOLDER = json.loads((DEMO_DIRECTORY / "config.json").read_text())["image_token_id"]
DOUBLE = ("--engine", "double", "--modality", "multimodal")


@pytest.fixture(scope="module")
def server() -> Iterator[ImageServer]:
    with image_server() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(env={"DYN_MM_ALLOW_INTERNAL": "1", "DYN_TRTLLM_PEER_TIMEOUT": "10"}) as cluster:
        cluster.frontend()
        yield cluster


def worker(cluster: Cluster, role: str, *options: str, wait: bool = True, **script: Any) -> Managed:
    played = {"double": {"placeholder_ids": {"image": PLACEHOLDER}, "kv_bytes_per_token": 1000, **script}}
    mode = ("--disaggregation-mode", role, "--override-engine-args", json.dumps(played))
    return cluster.worker(*DOUBLE, *mode, *options, name=role, wait=wait)


def image(server: ImageServer, seed: int) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": server.image_url(seed)}},
        {"type": "text", "text": "what is it?"},
    ]


@pytest.mark.parametrize(("first", "second"), [("prefill", "decode"), ("decode", "prefill")])
def test_half_a_pair_is_not_ready_and_a_whole_one_is(cluster: Cluster, first: str, second: str) -> None:
    worker(cluster, first)
    answer = cluster.chat("hi", max_tokens=4, timeout_s=30)
    assert answer.status in (404, 503)
    worker(cluster, second)
    cluster.wait_listed()
    wait_until(lambda: cluster.chat("hi", max_tokens=4, ignore_eos=True).status == 200, "an answer")


def test_a_lost_prefill_worker_is_a_503_and_not_a_hang(cluster: Cluster) -> None:
    prefill = worker(cluster, "prefill")
    worker(cluster, "decode")
    cluster.wait_listed()
    wait_until(lambda: cluster.chat("hi", max_tokens=4).status == 200, "an answer")
    prefill.signal(signal.SIGKILL)
    prefill.wait()
    answer = cluster.chat("hi", max_tokens=4, timeout_s=60)
    assert answer.status in (404, 503)


def test_a_missing_encode_worker_is_a_503_for_images_and_nothing_for_text(
    cluster: Cluster, server: ImageServer
) -> None:
    encode = worker(cluster, "encode")
    worker(cluster, "agg", "--encode-endpoint", ENCODE_ENDPOINT)
    cluster.wait_listed()
    assert cluster.chat(image(server, 1), max_tokens=4).status == 200
    encode.signal(signal.SIGTERM)
    assert encode.wait() == 0
    answer = cluster.chat(image(server, 2), max_tokens=4, timeout_s=60)
    assert answer.status == 503


def test_with_the_fallback_a_worker_encodes_by_itself_while_no_encoder_lives(
    cluster: Cluster, server: ImageServer
) -> None:
    agg = worker(cluster, "agg", "--encode-endpoint", ENCODE_ENDPOINT, "--encode-fallback")
    cluster.wait_listed()
    alone = cluster.chat(image(server, 3), max_tokens=4)
    assert alone.status == 200
    assert agg.metrics()["dynamo_trtllm_engine_encoded_images_total"] == 1
    encode = worker(cluster, "encode")
    wait_until(
        lambda: (
            cluster.chat(image(server, 4), max_tokens=4).status == 200
            and encode.metrics()["dynamo_trtllm_engine_encoded_images_total"] == 1
        ),
        "the encoder's first image",
    )
    assert cluster.chat(image(server, 3), max_tokens=4).text == alone.text


def test_the_encoders_words_reach_the_client(cluster: Cluster, server: ImageServer) -> None:
    worker(cluster, "encode")
    worker(cluster, "agg", "--encode-endpoint", ENCODE_ENDPOINT)
    cluster.wait_listed()
    content = [*image(server, 1), {"type": "image_url", "image_url": {"url": server.url + "/missing.png"}}]
    for stream in (False, True):
        answer = cluster.chat(content, max_tokens=4, stream=stream)
        assert (answer.status, answer.message) == (400, "image 2: the media host answered 404")


def test_an_encoder_that_hangs_is_a_504_within_the_deadline(cluster: Cluster, server: ImageServer) -> None:
    encode = worker(cluster, "encode", encode_delay_s=3600.0)
    agg = worker(cluster, "agg", "--encode-endpoint", ENCODE_ENDPOINT, "--peer-timeout", "3")
    cluster.wait_listed()
    answer = cluster.chat(image(server, 1), max_tokens=4, timeout_s=60)
    assert answer.status == 504
    # The frontend sends it again, and the worker does not wait again.
    assert agg.text().count("failed: the encode worker did not answer within 3 s") == 1
    wait_until(lambda: encode.metrics()["dynamo_trtllm_inflight_requests"] == 0, "the encoder's letting go")


@pytest.mark.parametrize("roles", [("agg",), ("encode", "prefill", "decode")])
def test_waiting_for_a_busy_host_ends_in_one_504(
    cluster: Cluster, server: ImageServer, roles: tuple[str, ...]
) -> None:
    bounds = ("--max-media-fetches-per-host", "1", "--media-fetch-timeout", "2")
    options = {
        "agg": bounds,
        "encode": bounds,
        "prefill": ("--encode-endpoint", ENCODE_ENDPOINT),
        "decode": (),
    }
    workers = [worker(cluster, role, *options[role]) for role in roles]
    cluster.wait_listed()
    seeds, gate = range(500, 505), threading.Event()
    server.gates = {f"/picture/{seed}.png": gate for seed in seeds}
    with ThreadPoolExecutor(len(seeds)) as pool:
        answers = list(
            pool.map(lambda seed: cluster.chat(image(server, seed), max_tokens=4, timeout_s=60), seeds)
        )
    gate.set()
    # The host answers nobody: one download after another takes its two seconds,
    # and who waits longer than that is told so.
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {400, 504}
    assert statuses.count(504) >= 3
    busy = workers[0].text().count("failed: this worker is busy with other downloads from the same host")
    assert busy == statuses.count(504)
    assert all("the media host" in answer.message for answer in answers if answer.status == 400)
    assert cluster.chat(image(server, 1), max_tokens=4).status == 200


def test_sigterm_lets_prefill_wait_for_the_hand_over_in_flight(cluster: Cluster) -> None:
    prefill = worker(cluster, "prefill")
    decode = worker(cluster, "decode")
    cluster.wait_listed()
    wait_until(lambda: cluster.chat("hi", max_tokens=6, ignore_eos=True).status == 200, "an answer")
    with ThreadPoolExecutor(1) as pool:
        decode.signal(signal.SIGSTOP)
        pending = pool.submit(cluster.chat, "hi there", max_tokens=6, ignore_eos=True)
        wait_until(lambda: prefill.metrics()["dynamo_trtllm_transfer_open_offers"] == 1, "the hand-off")
        prefill.signal(signal.SIGTERM)
        wait_until(lambda: "Draining" in prefill.text(), "the drain")
        assert prefill.alive()
        decode.signal(signal.SIGCONT)
        answer = pending.result()
    assert (answer.status, answer.usage["completion_tokens"]) == (200, 6)
    assert prefill.wait() == 0
