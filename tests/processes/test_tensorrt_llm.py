"""`--engine tensorrt_llm` over the double, with the real frontend and real NIXL, in every topology."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.demo.clips import draw_clip, write_mp4
from dynamo.trtllm.demo.pictures import draw
from oracle.deployments import model_directory
from processes.cluster import Answer, Cluster, Managed, wait_until
from processes.media import png
from processes.topologies import Deployment, deploy

TESTS = Path(__file__).parents[1]
QWEN25, QWEN3 = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
ENGINE_ARGS = {
    "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 60000},
    "kv_cache_config": {"enable_block_reuse": False},
    "max_seq_len": 1024,
    "max_batch_size": 8,
    "max_num_tokens": 4096,
}
# tests/oracle asks 1.3.0rc29 aggregated, disaggregated and with encode workers as well.
RELEASES_AND_TOPOLOGIES = [
    ("1.3.0rc29", "disagg_e_pd"),
    ("1.3.0rc29", "epd_disagg"),
    ("1.2.1", "agg"),
    ("1.2.1", "epd_disagg"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer and template under an architecture that TensorRT-LLM encodes apart;
    the double reads no weights."""
    return model_directory(tmp_path_factory.mktemp("qwen2.5-vl"))


def environment(release: str) -> dict[str, str]:
    folders = [
        str(TESTS / "trtllm_double"),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    source = str(TESTS.parent / "components" / "src")
    return {
        "TRTLLM_DOUBLE_RELEASE": release,
        "PYTHONPATH": os.pathsep.join([folders[0], source, *folders[1:]]),
    }


def image(seed: int) -> dict[str, Any]:
    data = base64.b64encode(png(draw(seed))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def told(answer: Answer) -> tuple[str, str | None, int, int]:
    assert answer.status == 200, answer.body
    return answer.text, answer.finish_reason, answer.usage["prompt_tokens"], answer.usage["completion_tokens"]


def ask_all(cluster: Cluster) -> list[tuple[str, str | None, int, int]]:
    question = {"type": "text", "text": "what is in the picture?"}
    return [
        told(cluster.chat("hello", max_tokens=12)),
        told(cluster.chat("hello", max_tokens=12, ignore_eos=True)),
        told(cluster.chat([question, image(1)], max_tokens=16)),
        told(cluster.chat([image(2), question, image(3)], max_tokens=16, ignore_eos=True)),
        told(
            cluster.chat(
                [image(2), question, image(3)],
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
        ),
        told(cluster.chat([question, image(1)], max_tokens=1)),
    ]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[tuple[str, str | None, int, int]]]:
    return {}


@pytest.mark.parametrize(("release", "topology"), RELEASES_AND_TOPOLOGIES)
def test_every_topology_of_both_releases_gives_the_same_answers(
    model: Path, answers: dict[str, Any], release: str, topology: str, tmp_path: Path
) -> None:
    options = ("--engine", "tensorrt_llm", "--modality", "multimodal", "--model-path", str(model))
    options += ("--override-engine-args", json.dumps(ENGINE_ARGS))
    held = tmp_path / "held"  # a file for each context whose blocks prefill's engine keeps for decode
    with Cluster(env={**environment(release), "TRTLLM_DOUBLE_PINS": str(held)}) as cluster:
        deploy(topology, cluster, options=options)
        here = ask_all(cluster)
        wait_until(lambda: not held.is_dir() or not list(held.iterdir()), "the end of all hand-overs")
        refused = cluster.chat("hello", max_tokens=4, response_format={"type": "json_object"})
    assert here == answers.setdefault("all", here)
    assert all(text for text, *_ in here)
    assert here[2][2] > here[0][2]
    assert (refused.status, "guided decoding" in refused.message) == (400, True)


def clip(seed: int, folder: Path) -> dict[str, Any]:
    write_mp4(draw_clip(seed, (112, 84)), folder / "clip.mp4")
    data = base64.b64encode((folder / "clip.mp4").read_bytes()).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}


def renamed(model: Path, folder: Path, architecture: str) -> Path:
    """A copy of `model` that says it is of `architecture`."""
    shutil.copytree(model, folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**described, "architectures": [architecture]})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_a_clip_is_served_with_and_without_an_encode_worker_where_the_record_has_the_model(
    model: Path, tmp_path: Path
) -> None:
    asked = [clip(3, tmp_path), {"type": "text", "text": "what happens?"}]
    answers = []
    for architecture, topology in ((QWEN3, "agg"), (QWEN3, "epd_disagg"), (QWEN25, "agg")):
        directory = renamed(model, tmp_path / f"{architecture}-{topology}", architecture)
        options = ("--engine", "tensorrt_llm", "--modality", "multimodal", "--model-path", str(directory))
        options += ("--override-engine-args", json.dumps(ENGINE_ARGS))
        with Cluster(env=environment("1.3.0rc29")) as cluster:
            deploy(topology, cluster, options=options)
            answers.append(cluster.chat(asked, max_tokens=12, ignore_eos=True))
    whole, parted, refused = answers
    assert told(whole) == told(parted)
    assert told(whole)[2] > 60  # the question alone is a fraction of it
    assert refused.status == 400
    assert f"videos of {QWEN25} are not served with TensorRT-LLM 1.3.0rc29: it counts" in refused.message


def counted(deployment: Deployment, what: str) -> list[float]:
    return [sum(v for name, v in worker.metrics().items() if what in name) for worker in deployment.all()]


def overlaps(frontend: Managed) -> list[int]:
    """Of each request so far: how many of its blocks the router took the chosen worker to have."""
    return [int(found) for found in re.findall(r"with (\d+)/\d+ blocks overlap", frontend.text())]


def test_the_kv_router_sends_a_prompt_to_the_worker_that_has_its_blocks(model: Path) -> None:
    options = ("--engine", "tensorrt_llm", "--model-path", str(model), "--publish-events-and-metrics")
    with Cluster(env={**environment("1.3.0rc29"), "DYN_ROUTER_MODE": "kv", "DYN_LOG": "debug"}) as cluster:
        deployment = deploy("agg", cluster, options=options, count=2)
        frontend = next(each for each in cluster.processes if each.name == "frontend")
        words = "a red circle on a blue background. " * 20
        answers = set()

        def ask() -> int:
            answers.add(cluster.complete(words, max_tokens=4).text)
            return overlaps(frontend)[-1]

        # The router hears of the blocks some time after the answer.
        wait_until(lambda: ask() > 0, "a request routed by its blocks", 30.0)
        first = counted(deployment, "requests_total")
        blocks = {ask() for _ in range(6)}
        last = counted(deployment, "requests_total")
        logs = [worker.text() for worker in deployment.all()]
        assert sum(counted(deployment, "kv_events_total")) > 0
    assert len(answers) == 1
    assert blocks == {5}
    grown = [after - before for before, after in zip(first, last, strict=True)]
    assert sorted(grown) == [0, 6]
    assert not [log for log in logs if "could not be used" in log]


def test_an_engine_that_dies_ends_the_worker_and_its_requests(model: Path) -> None:
    script = json.dumps({"fatal_at_token": 3})
    with Cluster(env={**environment("1.3.0rc29"), "TRTLLM_DOUBLE_SCRIPT": script}) as cluster:
        deployment = deploy("agg", cluster, options=("--engine", "tensorrt_llm", "--model-path", str(model)))
        assert cluster.chat("hello", max_tokens=12, ignore_eos=True).status == 503
        assert deployment.all()[0].wait() != 0


def test_an_idle_engine_that_dies_leaves_discovery_although_asking_it_blocks(model: Path) -> None:
    script = json.dumps({"dies_idle_after_s": 8.0, "health_blocks_s": 60.0})
    with Cluster(env={**environment("1.3.0rc29"), "TRTLLM_DOUBLE_SCRIPT": script}) as cluster:
        deployment = deploy("agg", cluster, options=("--engine", "tensorrt_llm", "--model-path", str(model)))
        assert cluster.chat("hello", max_tokens=4).status == 200
        assert deployment.all()[0].wait() != 0
        wait_until(
            lambda: cluster.chat("hello", max_tokens=4).status in (404, 503), "an answer without the worker"
        )


def test_an_argument_that_the_release_does_not_know_ends_the_worker_at_once(model: Path) -> None:
    with Cluster(env=environment("1.2.1")) as cluster:
        options = ("--engine", "tensorrt_llm", "--model-path", str(model))
        worker = cluster.worker(*options, "--override-engine-args", '{"multimodal_config": {}}', wait=False)
        assert worker.wait() == 2
        assert "multimodal_config" in worker.text()
        assert "Traceback" not in worker.text()
