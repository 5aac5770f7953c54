"""An engine that dies in silence while requests are in every stage:
they end in a 503, and the process does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.model_files import DEMO_DIRECTORY
from processes.cluster import Answer, Cluster, Managed, wait_until
from processes.media import ImageServer, image_server
from processes.topologies import ENCODE_ENDPOINT

PLACEHOLDER = json.loads((DEMO_DIRECTORY / "config.json").read_text())["image_token_id"]
HOURS_S = 36_000.0
SLOW = "/picture/7.png"


@pytest.fixture(scope="module")
def server() -> Iterator[ImageServer]:
    with image_server() as server:
        server.gates[SLOW] = threading.Event()
        yield server
        server.gates[SLOW].set()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(env={"DYN_MM_ALLOW_INTERNAL": "1"}) as cluster:
        cluster.frontend()
        yield cluster


class Mortal:
    """A worker whose engine dies when `kill` is called."""

    def __init__(self, cluster: Cluster, directory: Path, role: str, *options: str, **script: Any) -> None:
        self._file = directory / f"{role}-is-dead"
        played = {"placeholder_ids": {"image": PLACEHOLDER}, "kv_bytes_per_token": 1000, **script}
        words = ["--engine", "double", "--modality", "multimodal", "--disaggregation-mode", role, *options]
        override = json.dumps({"double": {**played, "dies_with_file": str(self._file)}})
        self.process: Managed = cluster.worker(*words, "--override-engine-args", override, name=role)

    def kill(self) -> None:
        self._file.touch()

    def has(self, requests: int) -> bool:
        return self.process.metrics()["dynamo_trtllm_inflight_requests"] == requests


def text(number: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": f"hello {number}"}]


def image(server: ImageServer, seed: int) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": server.image_url(seed)}}, *text(seed)]


class Asking:
    """Requests that are asked side by side."""

    def __init__(self, cluster: Cluster, pool: ThreadPoolExecutor) -> None:
        self._cluster = cluster
        self._pool = pool
        self._answers: list[Future[Answer]] = []

    def ask(self, content: Any, **options: Any) -> None:
        options = {"max_tokens": 50, "ignore_eos": True, **options}
        self._answers.append(self._pool.submit(self._cluster.chat, content, **options))

    def answers(self) -> list[Answer]:
        return [each.result() for each in self._answers]


@pytest.fixture
def asking(cluster: Cluster) -> Iterator[Asking]:
    with ThreadPoolExecutor(16) as pool:
        yield Asking(cluster, pool)


def assert_ended(process: Managed) -> None:
    """The process ended by itself: 71 would say that something had refused to."""
    assert process.wait(20) == 1, process.text()[-3000:]
    assert "the engine is dead, leaving" in process.text()


def test_aggregated_while_it_decodes_streams_and_fetches(
    cluster: Cluster, server: ImageServer, asking: Asking, tmp_path: Path
) -> None:
    worker = Mortal(cluster, tmp_path, "agg", stall_at_token=3)
    cluster.wait_listed()
    for number in range(3):
        asking.ask(text(number))
        asking.ask(text(number), stream=True)
    asking.ask(image(server, 7))
    wait_until(lambda: worker.has(7) and server.hits[SLOW], "seven requests in flight, one of them fetching")
    worker.kill()
    answers = asking.answers()
    assert [answer.status for answer in answers] == [503, 200] * 3 + [503]
    for answer in answers[1:6:2]:
        assert len(answer.text) > 0
        assert answer.events[-1]["error"]["code"] == 503
    assert_ended(worker.process)


def test_prefill(cluster: Cluster, asking: Asking, tmp_path: Path) -> None:
    worker = Mortal(cluster, tmp_path, "prefill", prefill_delay_s=HOURS_S)
    decode = Mortal(cluster, tmp_path, "decode")
    cluster.wait_listed()
    for number in range(6):
        asking.ask(text(number), stream=number % 2 == 1)
    wait_until(lambda: worker.has(6), "six requests in flight")
    worker.kill()
    assert [answer.status for answer in asking.answers()] == [503] * 6
    assert_ended(worker.process)
    decode.kill()
    assert_ended(decode.process)


def test_decode(cluster: Cluster, asking: Asking, tmp_path: Path) -> None:
    prefill = Mortal(cluster, tmp_path, "prefill")
    worker = Mortal(cluster, tmp_path, "decode", stall_at_token=1)
    cluster.wait_listed()
    for number in range(6):
        asking.ask(text(number), stream=number % 2 == 1)
    wait_until(lambda: worker.has(6), "six requests in flight")
    worker.kill()
    answers = asking.answers()
    assert [answer.status for answer in answers] == [503, 200] * 3
    assert [answer.events[-1]["error"]["code"] for answer in answers[1::2]] == [503] * 3
    assert_ended(worker.process)
    prefill.kill()
    assert_ended(prefill.process)


def test_encode(cluster: Cluster, server: ImageServer, asking: Asking, tmp_path: Path) -> None:
    worker = Mortal(cluster, tmp_path, "encode", encode_delay_s=HOURS_S)
    agg = Mortal(cluster, tmp_path, "agg", "--encode-endpoint", ENCODE_ENDPOINT)
    cluster.wait_listed()
    for seed in range(20, 26):
        asking.ask(image(server, seed), stream=seed % 2 == 1)
    wait_until(lambda: worker.has(6), "six requests in flight")
    worker.kill()
    assert [answer.status for answer in asking.answers()] == [503] * 6
    assert_ended(worker.process)
    assert agg.process.alive()
    agg.kill()
    assert_ended(agg.process)


def test_an_engine_that_refuses_to_close_does_not_keep_the_process(
    cluster: Cluster, asking: Asking, tmp_path: Path
) -> None:
    worker = Mortal(cluster, tmp_path, "agg", stall_at_token=1, close_delay_s=HOURS_S)
    cluster.wait_listed()
    asking.ask(text(1))
    wait_until(lambda: worker.has(1), "a request in flight")
    worker.kill()
    assert [answer.status for answer in asking.answers()] == [503]
    assert worker.process.wait(20) == 71
    assert "not everything ended within 3 s, exiting with 71" in worker.process.text()
