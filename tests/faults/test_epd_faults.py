"""Encode, prefill and decode, two workers of each: under load,
with cancelled clients, with killed workers."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from processes.cluster import Answer, Cluster, Managed, wait_until
from processes.media import ImageServer, image_server
from processes.topologies import Deployment, deploy

QUESTION = "what is in the picture?"
TIME_TO_LIVE_S = 10
DEADLINE_S = 60.0
IMAGES = 24


@pytest.fixture(scope="module")
def server() -> Iterator[ImageServer]:
    with image_server() as server:
        yield server


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    env = {
        "DYN_MM_ALLOW_INTERNAL": "1",
        "DYN_TRTLLM_TRANSFER_TTL": str(TIME_TO_LIVE_S),
        "DYN_TRTLLM_PEER_TIMEOUT": "20",
    }
    with Cluster(env=env) as cluster:
        yield deploy("epd_disagg", cluster, count=2)


def body(server: ImageServer, number: int) -> dict[str, Any]:
    """Request `number` of a mixed load: one image, two, none, long or short."""
    seeds = [number % IMAGES, (number * 7 + 1) % IMAGES][: (1, 2, 0, 1)[number % 4]]
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": server.image_url(s)}} for s in seeds
    ]
    content.append({"type": "text", "text": QUESTION if seeds else f"hello {number % 5}"})
    options: dict[str, Any] = (
        {"max_tokens": 24} if number % 4 != 3 else {"max_tokens": 64, "ignore_eos": True}
    )
    return {"messages": [{"role": "user", "content": content}], "temperature": 0.0, **options}


def ask(cluster: Cluster, server: ImageServer, number: int) -> Answer:
    return cluster.chat(None, timeout_s=DEADLINE_S, **body(server, number))


@pytest.fixture(scope="module")
def expected(deployment: Deployment, server: ImageServer) -> list[str]:
    """The answers when each is asked alone."""
    answers = [ask(deployment.cluster, server, number) for number in range(IMAGES * 4)]
    assert all(answer.status == 200 for answer in answers)
    return [answer.text for answer in answers]


def open_files(worker: Managed) -> int:
    return len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))


def resident_mb(worker: Managed) -> float:
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


HELD = (
    "dynamo_trtllm_inflight_requests",
    "dynamo_trtllm_engine_active_requests",
    "dynamo_trtllm_engine_waiting_requests",
    "dynamo_trtllm_engine_used_kv_blocks",
    "dynamo_trtllm_transfer_open_offers",
    "dynamo_trtllm_transfer_reads_in_flight",
    "dynamo_trtllm_transfer_quarantined_segments",
    "dynamo_trtllm_transfer_pool_used_bytes",
)


def held(deployment: Deployment) -> dict[str, dict[str, float]]:
    """What living workers still hold, by worker."""
    found = {}
    for worker in deployment.all():
        if worker.alive():
            kept = {name: value for name, value in worker.metrics().items() if name in HELD and value}
            if kept:
                found[f"{worker.name}-{worker.pid}"] = kept
    return found


def wait_empty(deployment: Deployment) -> None:
    """Every pool and slot is free within the time to live and its quarantine."""
    try:
        wait_until(lambda: not held(deployment), "emptying of pools and slots", 2.5 * TIME_TO_LIVE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {held(deployment)}") from None


def check_right(deployment: Deployment, server: ImageServer, expected: list[str], count: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(deployment.cluster, server, n), range(count)))
    assert [a.status for a in answers] == [200] * count
    assert [a.text for a in answers] == expected[:count]


def test_two_hundred_mixed_requests_are_answered_and_leave_nothing(
    deployment: Deployment, server: ImageServer, expected: list[str]
) -> None:
    wait_empty(deployment)
    files = {worker.pid: open_files(worker) for worker in deployment.all()}
    memory = {worker.pid: resident_mb(worker) for worker in deployment.all()}
    numbers = [n % len(expected) for n in range(200)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: ask(deployment.cluster, server, n), numbers))
    assert [a.status for a in answers] == [200] * 200
    assert [a.text for a in answers] == [expected[n] for n in numbers]
    wait_empty(deployment)
    for worker in deployment.all():
        assert open_files(worker) <= files[worker.pid] + 40, worker.name
        assert resident_mb(worker) <= memory[worker.pid] + 200, worker.name


def test_one_image_is_encoded_once_however_many_ask(deployment: Deployment, server: ImageServer) -> None:
    def encoded() -> float:
        return sum(
            w.metrics()["dynamo_trtllm_engine_encoded_images_total"] for w in deployment.workers["encode"]
        )

    before = encoded()
    content = [
        {"type": "image_url", "image_url": {"url": server.image_url(5000)}},
        {"type": "text", "text": QUESTION},
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: deployment.cluster.chat(content, max_tokens=24), range(32)))
    assert [a.status for a in answers] == [200] * 32
    assert len({a.text for a in answers}) == 1
    assert encoded() == before + 1


def abandoned(cluster: Cluster, request: dict[str, Any], delay_s: float, done: threading.Event) -> None:
    """Ask for a stream, and hang up after `delay_s`."""
    raw = json.dumps({"model": cluster.model, "stream": True, **request}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", cluster.port)) as connection:
        connection.sendall(head.encode() + raw)
        done.wait(delay_s)


def test_three_hundred_cancelled_requests_leave_nothing(
    deployment: Deployment, server: ImageServer, expected: list[str]
) -> None:
    rng, never = random.Random(4), threading.Event()

    def leave(number: int) -> None:
        request = body(server, number)
        # New images, so that every stage from the fetch on has work to be interrupted in.
        for part in request["messages"][0]["content"]:
            if part["type"] == "image_url":
                part["image_url"]["url"] = server.image_url(10_000 + number)
        request |= {"max_tokens": 400, "ignore_eos": True}
        abandoned(deployment.cluster, request, rng.random() * 0.6, never)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(300)))
    wait_empty(deployment)
    assert all(worker.alive() for worker in deployment.all())
    check_right(deployment, server, expected, 24)


@pytest.mark.parametrize("role", ["prefill", "encode", "decode"])
def test_a_killed_worker_costs_no_more_than_what_it_streamed(
    deployment: Deployment, server: ImageServer, expected: list[str], role: str
) -> None:
    victim = deployment.workers[role][0]
    killed = threading.Event()

    def one(number: int) -> Answer:
        if number == 30:
            victim.signal(signal.SIGKILL)
            victim.wait()
            killed.set()
        return ask(deployment.cluster, server, number % len(expected))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(100)))
    assert killed.is_set()
    wrong = [n for n, a in enumerate(answers) if a.status == 200 and a.text != expected[n % len(expected)]]
    assert not wrong
    failed = [a for a in answers if a.status != 200]
    if role == "decode":
        assert all(a.status in (500, 502, 503, 504) for a in failed), [a.body for a in failed]
        assert len(failed) <= 16
    else:
        assert not failed, [(a.status, a.body) for a in failed]
    deployment.workers[role].remove(victim)
    replacement = deployment.start(role, None)
    deployment.cluster.wait_serving(replacement)
    check_right(deployment, server, expected, 50)
    wait_empty(deployment)
