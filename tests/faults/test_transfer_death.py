"""A library of the transfer that does not return any more:
the worker says so and leaves, so that it is started anew."""

from __future__ import annotations

import json
from pathlib import Path

from dynamo.trtllm.model_files import DEMO_DIRECTORY
from processes.cluster import Cluster, Managed, free_port

WORKER = Path(__file__).with_name("worker_whose_nixl_hangs.py")
PLACEHOLDER = json.loads((DEMO_DIRECTORY / "config.json").read_text())["image_token_id"]


def start(cluster: Cluster, role: str, hangs: Path) -> Managed:
    override = json.dumps({"double": {"placeholder_ids": {"image": PLACEHOLDER}, "kv_bytes_per_token": 1000}})
    words = [
        str(WORKER),
        str(hangs),
        "--engine",
        "double",
        "--modality",
        "multimodal",
        "--disaggregation-mode",
        role,
    ]
    port = free_port()
    words += ["--model-path", "demo", "--override-engine-args", override]
    return cluster.start_python(role, words, {"DYN_SYSTEM_PORT": str(port)}, port)


def test_workers_whose_transfer_hangs_say_so_and_exit(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    with Cluster(env={"DYN_TRTLLM_TRANSFER_TTL": "1"}) as cluster:
        workers = [start(cluster, role, hangs) for role in ("encode", "prefill", "decode")]
        for worker in workers:
            cluster.wait_serving(worker)
        assert [worker.metrics().get("dynamo_trtllm_transfer_lost_reads") for worker in workers] == [
            None,
            0,
            0,
        ]
        hangs.touch()
        assert [worker.wait() for worker in workers] == [1, 1, 1]
        for worker in workers:
            assert "the transfer is dead, leaving" in worker.text()
            assert "Traceback" not in worker.text()
