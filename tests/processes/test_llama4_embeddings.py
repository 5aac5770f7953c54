"""Llama 4's embedding files, from the disk to the engine:
one worker, prefill and decode, and with an encode worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dynamo.trtllm.model_files import DEMO_DIRECTORY
from processes.cluster import Cluster
from processes.test_tensorrt_llm import ENGINE_ARGS, environment, image, told
from processes.topologies import TOPOLOGIES, Deployment

HIDDEN = 128
ROWS = 4
SPECIAL = {"image_special_tokens": [21, 22, 23], "image_special_token_offsets": [0, 3, 6]}
OLDER = {"special_tokens": [21, 22, 23], "image_token_offsets": [[1, 3], [4, 6]]}
"""The same places, as the first guide to such files named them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer and template with Llama 4's placeholder; the double reads no weights."""
    path = tmp_path_factory.mktemp("llama4")
    for file in DEMO_DIRECTORY.iterdir():
        if file.is_file():
            shutil.copy(file, path)
    for file in path.iterdir():
        if file.suffix in (".json", ".jinja"):
            text = file.read_text(encoding="utf-8").replace("<|image_pad|>", "<|image|>")
            file.write_text(text, encoding="utf-8")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Llama4ForConditionalGeneration"]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    first, second = (torch.full((1, ROWS, HIDDEN), value) for value in (1.0, 2.0))
    torch.save({"mm_embeddings": first, **SPECIAL}, path / "named.pt")
    torch.save({"mm_embeddings": first, **OLDER}, path / "older.pt")
    tensors = {"mm_embeddings": second, **{name: torch.tensor(value) for name, value in SPECIAL.items()}}
    safetensors.torch.save_file(tensors, path / "second.safetensors")
    torch.save(first, path / "bare.pt")
    torch.save({"mm_embeddings": first, **SPECIAL, "image_special_token_offsets": [0, 3, 9]}, path / "far.pt")
    return path


def file(files: Path, name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"file://{files / name}"}}


def deployed(topology: str, cluster: Cluster, model: Path, files: Path, elsewhere: Path) -> Deployment:
    """Only the worker that should read files may: the encode worker where there is one."""
    options = ("--engine", "tensorrt_llm", "--modality", "multimodal", "--model-path", str(model))
    deployment = Deployment(topology, cluster, (*options, "--override-engine-args", json.dumps(ENGINE_ARGS)))
    reads = "encode" if "encode" in TOPOLOGIES[topology] else TOPOLOGIES[topology][0]
    cluster.frontend()
    for role in deployment.roles:
        deployment.start(role, {"ALLOWED_LOCAL_MEDIA_PATH": str(files if role == reads else elsewhere)})
    for worker in deployment.all():
        cluster.wait_serving(worker)
    cluster.wait_listed()
    return deployment


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("topology", ["agg", "disagg", "epd_disagg"])
def test_a_dictionary_of_rows_and_special_tokens_reaches_the_engine(
    model: Path, files: Path, tmp_path: Path, answers: dict[str, Any], topology: str
) -> None:
    question = {"type": "text", "text": "what is in the picture?"}
    with Cluster(env=environment("1.3.0rc29")) as cluster:
        deployed(topology, cluster, model, files, tmp_path)
        asked = [
            [question, file(files, "named.pt")],
            [question, file(files, "older.pt")],
            [question, file(files, "second.safetensors")],
            [file(files, "named.pt"), question, file(files, "second.safetensors")],
            [question, image(1)],
        ]
        here = [told(cluster.chat(content, max_tokens=12)) for content in asked]
        refused = [
            cluster.chat([question, file(files, name)], max_tokens=4) for name in ("bare.pt", "far.pt")
        ]
        mixed = cluster.chat([image(1), question, file(files, "named.pt")], max_tokens=4)
    assert here == answers.setdefault("all", here)
    assert here[0] == here[1] != here[2]
    text_alone = here[0][2] - (ROWS + len(SPECIAL["image_special_tokens"]))
    # one more image, between its own two tokens
    assert here[3][2] - here[0][2] == here[0][2] - text_alone + 2
    assert [each.status for each in (*refused, mixed)] == [400, 400, 400]
    assert "image 1: embeddings for this model need the keys image_special_tokens" in refused[0].message
    assert "image 1: image_special_token_offsets must be different places from 0 to 6" in refused[1].message
    assert "cannot be mixed" in mixed.message
