"""Fifty requests through Dynamo's frontend on one GPU, in float32: every topology answers the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dynamo.trtllm.demo.pictures import draw
from processes.cluster import Cluster
from processes.media import image_server, png
from processes.test_parity import EMBEDDED_SEED, Outcome, requests, run
from processes.topologies import TOPOLOGIES, deploy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
OPTIONS = ("--engine", "transformers", "--modality", "multimodal", "--device", "cuda", "--dtype", "float32")
KV_CACHE = ("--override-engine-args", '{"kv_cache_config": {"max_tokens": 65536}}')
Answers = dict[str, list[tuple[Outcome, Outcome]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The outcomes of all requests by topology."""
    directory = tmp_path_factory.mktemp("embeddings")
    source, file = directory / "picture.png", directory / "picture.pt"
    source.write_bytes(png(draw(EMBEDDED_SEED)))
    command = [
        sys.executable,
        "-m",
        "dynamo.trtllm.embeddings",
        str(source),
        "-o",
        str(file),
        "--model-path",
        "demo",
    ]
    subprocess.run([*command, "--engine", "transformers", "--device", "cpu"], check=True, timeout=180)
    # A path of its own makes each worker a process of its own: CUDA does not survive a fork.
    env = {
        "DYN_MM_ALLOW_INTERNAL": "1",
        "ALLOWED_LOCAL_MEDIA_PATH": str(directory),
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path[1:]),
    }
    found: Answers = {}
    for name in TOPOLOGIES:
        with image_server() as server, Cluster(env=env) as cluster:
            deploy(name, cluster, options=(*OPTIONS, *KV_CACHE))
            found[name] = run(cluster, requests(server, file.as_uri()))
    return found


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "agg"])
def test_every_topology_on_the_gpu_gives_what_the_aggregated_worker_gives(
    answers: Answers, name: str
) -> None:
    assert len(answers[name]) == 50
    for number, (ours, reference) in enumerate(zip(answers[name], answers["agg"], strict=True)):
        for one, other in zip(ours, reference, strict=True):
            assert (one.text, one.finish, one.usage) == (other.text, other.finish, other.usage), number
            assert [i for i, _ in one.logprobs] == [i for i, _ in other.logprobs], number
            assert [p for _, p in one.logprobs] == pytest.approx([p for _, p in other.logprobs], abs=1e-3), (
                number
            )
