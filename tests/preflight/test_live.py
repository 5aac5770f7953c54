from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.trtllm.config import PeerConfig, Role, RuntimeConfig, WorkerConfig
from dynamo.trtllm.preflight import live
from dynamo.trtllm.preflight.loopback import Loopback, find_transports, measure_loopback
from processes.cluster import Cluster

CHECK = """
import os, sys
from dynamo.trtllm.preflight import live, run
from dynamo.trtllm.preflight.loopback import Loopback
from dynamo.trtllm.utils.trtllm_utils import parse
if "LOOPBACK" not in os.environ:
    live.measure_loopback = lambda: Loopback(1e9, "not measured")
sys.exit(run(parse(["--check", "--live", "--engine", "double", "--model-path", "demo", *sys.argv[1:]])))
"""

OTHER_SCHEMA = """
import dynamo.trtllm.peers.messages
dynamo.trtllm.peers.messages.SCHEMA_VERSION = 99
from dynamo.trtllm.main import main
main()
"""


def check_live(cluster: Cluster, *arguments: str, loopback: bool = False) -> tuple[int, list[str]]:
    """Exit code and the printed lines from `live` on; without `loopback`, that part is taken as measured."""
    environment = {
        **os.environ,
        **({"LOOPBACK": "1"} if loopback else {}),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(cluster.directory / "discovery"),
        "DYN_EVENT_PLANE": "zmq",
    }
    command = [sys.executable, "-c", CHECK, *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return result.returncode, result.stdout.partition("live\n")[2].splitlines()


def test_running_peers_are_counted_with_their_schema_and_missing_ones_named() -> None:
    with Cluster() as cluster:
        cluster.worker("--engine", "double", "--disaggregation-mode", "prefill", name="prefill")
        code, lines = check_live(cluster, "--disaggregation-mode", "decode", loopback=True)
        assert code == 0
        assert lines[0] == "  prefill at dyn://dynamo.prefill.generate: 1 running, 1 with message schema 2"
        assert lines[1].startswith("  NIXL loopback ")
        assert "not measured" not in lines[1]
        arguments = [
            "--disaggregation-mode",
            "prefill",
            "--modality",
            "multimodal",
            "--encode-endpoint",
            "dynamo.encoder.generate",
        ]
        code, lines = check_live(cluster, *arguments)
        assert code == 1
        assert [line for line in lines if line.startswith("fault: ")] == [
            (
                "fault: no encode worker runs at dyn://dynamo.encoder.generate: "
                "start one, or correct namespace and discovery"
            ),
            (
                "fault: no decode worker runs at dyn://dynamo.tensorrt_llm.generate: "
                "start one, or correct namespace and discovery"
            ),
        ]


def test_a_peer_of_another_schema_is_a_fault() -> None:
    with Cluster() as cluster:
        command = ["--engine", "double", "--model-path", "demo", "--disaggregation-mode", "prefill"]
        worker = cluster.start(
            "other", [sys.executable, "-c", OTHER_SCHEMA, *command], {"DYN_SYSTEM_PORT": "0"}
        )
        cluster.wait_for(worker, lambda: "serving" in worker.text(), "the other worker's start")
        code, lines = check_live(cluster, "--disaggregation-mode", "decode")
        assert code == 1
        assert lines[0] == "  prefill at dyn://dynamo.prefill.generate: 1 running, 0 with message schema 2"
        assert lines[-2] == (
            "fault: 1 prefill worker at dyn://dynamo.prefill.generate speaks another message "
            "schema than 2: run the same release on all workers"
        )


def test_a_worker_without_peers_asks_nobody() -> None:
    assert live.ask_peers(WorkerConfig()) == (["no peers needed"], [])


@pytest.mark.parametrize(
    ("role", "encoder", "expected"),
    [
        (Role.AGGREGATED, None, []),
        (Role.AGGREGATED, "dyn://n.e.generate", [("encode", "dyn://n.e.generate")]),
        (
            Role.PREFILL,
            "dyn://n.e.generate",
            [("encode", "dyn://n.e.generate"), ("decode", "dyn://n.tensorrt_llm.generate")],
        ),
        (Role.DECODE, None, [("prefill", "dyn://n.prefill.generate")]),
        (Role.ENCODE, None, []),
    ],
)
def test_each_role_asks_the_workers_it_cannot_do_without(
    role: Role, encoder: str | None, expected: list[tuple[str, str]]
) -> None:
    peers = PeerConfig(encode_endpoint=encoder, prefill_endpoint="dyn://n.prefill.generate")
    assert (
        live.peers_of(WorkerConfig(role=role, runtime=RuntimeConfig(namespace="n"), peers=peers)) == expected
    )


def test_the_loopback_measures_real_hand_overs_and_names_the_transport() -> None:
    loopback = measure_loopback()
    assert isinstance(loopback, Loopback)
    assert loopback.rate > 1e6
    assert loopback.transports.startswith("rma")


def test_a_machine_where_nixl_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nixl"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    reason = measure_loopback()
    assert isinstance(reason, str)
    assert "NIXL" in reason


def test_transports_are_read_from_what_ucx_logs() -> None:
    log = (
        "ucp_worker.c:1 a self cfg#0 rma(self/memory)\nucp_worker.c:1 "
        "a intra-node cfg#1  rma(sysv/memory)   am(x) \n"
    )
    assert find_transports(log) == "rma(sysv/memory) am(x)"
    assert find_transports("") == "not told by UCX"
