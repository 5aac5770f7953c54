"""The same answers over every discovery backend and request plane, with real etcd and NATS servers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.cluster import Cluster, etcd_server, nats_server, wait_until


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    directory: Path = tmp_path_factory.mktemp("servers")
    with etcd_server(directory) as etcd, nats_server(directory) as nats:
        yield {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("discovery", "request_plane", "event_plane"),
    [("file", "tcp", "zmq"), ("etcd", "tcp", "zmq"), ("etcd", "nats", "nats"), ("file", "nats", "zmq")],
)
def test_answers_do_not_depend_on_discovery_or_planes(
    servers: dict[str, str], answers: dict[str, str], discovery: str, request_plane: str, event_plane: str
) -> None:
    with Cluster(
        discovery=discovery, request_plane=request_plane, event_plane=event_plane, env=servers
    ) as cluster:
        cluster.frontend()
        worker = cluster.worker("--engine", "double")
        cluster.wait_listed()
        answer = cluster.chat("what is in the picture?", max_tokens=8, ignore_eos=True)
        assert (answer.status, answer.usage["completion_tokens"]) == (200, 8)
        assert answer.text == answers.setdefault("all", answer.text) != ""
        refused = cluster.chat("hi", guided_json={}, guided_whitespace_pattern=" ")
        assert refused.status == 400
        assert "guided_whitespace_pattern is not supported" in refused.message
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        wait_until(lambda: cluster.chat("hi", max_tokens=1).status in (404, 503), "the model's leaving")
