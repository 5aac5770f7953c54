"""Workers that discovery by files has forgotten: stopped for too long,
their entries removed, or the directory gone."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from processes.cluster import Cluster, Managed, wait_until
from processes.media import data_url
from processes.topologies import Deployment, deploy

PLACEHOLDER = json.loads((DEMO_DIRECTORY / "config.json").read_text())["image_token_id"]
SCRIPT = json.dumps({"double": {"placeholder_ids": {"image": PLACEHOLDER}, "kv_bytes_per_token": 1000}})
DOUBLE = ("--engine", "double", "--modality", "multimodal", "--override-engine-args", SCRIPT)


@pytest.fixture(scope="module")
def homeless() -> Iterator[Managed]:
    """A worker whose discovery has become a file that nothing can be written into;
    it takes its time to leave."""
    with Cluster() as cluster:
        worker = cluster.worker(*DOUBLE)
        shutil.rmtree(cluster.directory / "discovery")
        (cluster.directory / "discovery").touch()
        yield worker


@pytest.fixture(scope="module")
def deployments(homeless: Managed) -> Iterator[list[Deployment]]:
    with ExitStack() as stack:
        yield [deploy(name, stack.enter_context(Cluster()), options=DOUBLE) for name in ("agg", "epd_disagg")]


def entries(cluster: Cluster, kind: str) -> set[str]:
    """Names of what discovery holds: `instances` or `mdc`, the model cards."""
    folder = cluster.directory / "discovery" / "v1" / kind
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}


def all_entries(deployments: list[Deployment]) -> list[set[str]]:
    return [entries(each.cluster, kind) for each in deployments for kind in ("instances", "mdc")]


def answers(deployment: Deployment) -> bool:
    content = [{"type": "image_url", "image_url": {"url": data_url(draw(3))}}, {"type": "text", "text": "hi"}]
    return deployment.cluster.chat(content, max_tokens=4, ignore_eos=True).status == 200


def assert_all_answer_again(deployments: list[Deployment], before: list[set[str]]) -> None:
    for deployment in deployments:
        wait_until(lambda deployment=deployment: answers(deployment), f"an answer of {deployment.name}")
    assert all_entries(deployments) == before
    assert all(worker.alive() for deployment in deployments for worker in deployment.all())


def test_workers_of_every_role_that_were_stopped_register_again(deployments: list[Deployment]) -> None:
    workers = [worker for deployment in deployments for worker in deployment.all()]
    before = all_entries(deployments)
    assert all(answers(deployment) for deployment in deployments)
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    wait_until(lambda: not any(all_entries(deployments)), "the end of every entry")
    for worker in workers:
        worker.signal(signal.SIGCONT)
    assert_all_answer_again(deployments, before)


@pytest.mark.parametrize("kind", ["instances", "mdc"])
def test_an_entry_that_something_else_removed_is_written_again(
    deployments: list[Deployment], kind: str
) -> None:
    before = all_entries(deployments)
    for deployment in deployments:
        for name in entries(deployment.cluster, kind):
            (deployment.cluster.directory / "discovery" / "v1" / kind / name).unlink()
    wait_until(lambda: not any(answers(deployment) for deployment in deployments), "the end of answers")
    assert_all_answer_again(deployments, before)


def test_a_worker_that_cannot_register_again_ends_with_an_error(homeless: Managed) -> None:
    assert homeless.wait(60) == 1
    assert "this worker is out of discovery and cannot register again, leaving" in homeless.text()
