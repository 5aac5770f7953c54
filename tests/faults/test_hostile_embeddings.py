"""Malicious and broken embedding files through the real frontend:
a 400 in our words each, and the worker serves on."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from processes.cluster import Answer, Cluster, Managed

HIDDEN = 128


class Opens:
    """Unpickles to a call of `open(path, "w")`."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self._path, "w")


def saved(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()


def zipped(content: bytes, compression: int) -> bytes:
    """The members of a zip file, written again with `compression`."""
    sink = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(sink, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return sink.getvalue()


def bad_sparse() -> torch.Tensor:
    indices, values = torch.tensor([[10**9], [10**9]]), torch.ones(1)
    return torch.sparse_coo_tensor(indices, values, (2 * 10**9, 2 * 10**9), check_invariants=False)


def with_nan() -> torch.Tensor:
    tensor = torch.rand(1, 16, HIDDEN)
    tensor[0, 3, 5] = float("nan")
    return tensor


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that exists only if a pickle ran."""
    return tmp_path_factory.mktemp("marker") / "ran"


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[Cluster]:
    with Cluster(env={"ALLOWED_LOCAL_MEDIA_PATH": str(directory), "MAX_FILE_SIZE_MB": "20"}) as cluster:
        cluster.frontend()
        yield cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Managed:
    worker = cluster.worker("--engine", "transformers", "--modality", "multimodal")
    cluster.wait_listed()
    return worker


def ask(cluster: Cluster, path: Path) -> Answer:
    part = {"type": "image_url", "image_url": {"url": path.as_uri()}}
    return cluster.chat([{"type": "text", "text": "what is in the picture?"}, part], max_tokens=8)


FILES: dict[str, Any] = {
    "code.pt": lambda marker: pickle.dumps(Opens(marker)),
    "code-in-zip.pt": lambda marker: saved({"mm_embeddings": torch.rand(1, 16, HIDDEN), "x": Opens(marker)}),
    "sparse.pt": lambda _: saved(bad_sparse()),
    "wrong-hidden-size.pt": lambda _: saved(torch.rand(1, 16, HIDDEN * 2)),
    "wrong-token-count.pt": lambda _: saved(torch.rand(1, 15, HIDDEN)),
    "nan.pt": lambda _: saved(with_nan()),
    "integers.pt": lambda _: saved(torch.ones(1, 16, HIDDEN, dtype=torch.int8)),
    "batch.pt": lambda _: saved(torch.rand(2, 16, HIDDEN)),
    "truncated.pt": lambda _: saved(torch.rand(1, 16, HIDDEN))[:-100],
    "expanding.pt": lambda _: saved(torch.rand(1, 1).expand(2**18, 1024)),
    "deflated.pt": lambda _: zipped(saved(torch.zeros(1, 2**14, HIDDEN)), zipfile.ZIP_DEFLATED),
    "meta.pt": lambda _: saved(torch.empty(1, 16, HIDDEN, device="meta")),
    "no-key.pt": lambda _: saved({"features": torch.rand(1, 16, HIDDEN)}),
    "empty.pt": lambda _: b"",
    "empty.bin": lambda _: b"",
    "noise.safetensors": lambda _: os.urandom(100),
}


@pytest.mark.parametrize("name", list(FILES))
def test_a_bad_file_is_refused_in_words_and_nothing_runs(
    cluster: Cluster, worker: Managed, directory: Path, marker: Path, name: str
) -> None:
    (directory / name).write_bytes(FILES[name](marker))
    check_refused(cluster, worker, directory / name)
    assert not marker.exists()


def check_refused(cluster: Cluster, worker: Managed, path: Path) -> Answer:
    answer = ask(cluster, path)
    assert answer.status == 400, answer.body
    assert answer.message.startswith("image 1: "), answer.message
    for secret in (str(path.parent), "0x", "Traceback", "pickle.", "zipfile", "pydantic"):
        assert secret not in answer.message
    assert worker.alive()
    return answer


def test_what_is_no_plain_file_inside_the_directory_looks_like_a_missing_one(
    cluster: Cluster, worker: Managed, directory: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.pt"
    outside.write_bytes(saved(torch.rand(1, 16, HIDDEN)))
    (directory / "link.pt").symlink_to(outside)
    (directory / "folder.pt").mkdir()
    os.mkfifo(directory / "fifo.pt")
    names = ("link.pt", "folder.pt", "fifo.pt", "missing.pt")
    messages = {check_refused(cluster, worker, directory / name).message for name in names}
    messages.add(check_refused(cluster, worker, outside).message)
    assert len(messages) == 1


def test_a_file_over_the_size_limit_is_refused_without_reading_it(
    cluster: Cluster, worker: Managed, directory: Path
) -> None:
    with (directory / "huge.pt").open("wb") as sink:
        sink.truncate(1 << 30)
    assert "20 MiB" in check_refused(cluster, worker, directory / "huge.pt").message


def test_the_worker_serves_good_files_after_all_that(
    cluster: Cluster, worker: Managed, directory: Path
) -> None:
    good = {"mm_embeddings": torch.rand(1, 16, HIDDEN), "image_grid_thw": [[1, 8, 8]]}
    (directory / "good.pt").write_bytes(saved(good))
    assert ask(cluster, directory / "good.pt").status == 200
    assert cluster.chat("hello", max_tokens=4).status == 200
