"""Reading files that a client names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal import files
from dynamo.trtllm.multimodal.files import NOT_READABLE, read_file

SECRET = b"not for clients"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed directory beside one that is not, which holds a secret."""
    outside = tmp_path / "allowed_evil"
    outside.mkdir()
    (outside / "x.pt").write_bytes(SECRET)
    inside = tmp_path / "allowed"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "a.pt").write_bytes(b"data")
    (inside / "file-link").symlink_to(outside / "x.pt")
    (inside / "dir-link").symlink_to(outside)
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "inner-link").symlink_to(inside / "deep" / "a.pt")
    os.mkfifo(inside / "fifo")
    return inside


def test_a_file_inside_is_read_directly_by_dots_and_by_a_link_that_stays_inside(root: Path) -> None:
    for path in ("deep/a.pt", "deep/../deep/./a.pt", "inner-link"):
        assert read_file(f"{root}/{path}", root, 100) == b"data"


def test_the_root_itself_may_be_reached_by_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert read_file(f"{tmp_path}/alias/deep/a.pt", root, 100) == b"data"
    assert read_file(f"{root}/deep/a.pt", tmp_path / "alias", 100) == b"data"


@pytest.mark.parametrize(
    "path",
    [
        "{root}/missing.pt",
        "{root}/../allowed_evil/x.pt",
        "{root}_evil/x.pt",
        "{root}_evil/missing.pt",
        "{root}/file-link",
        "{root}/dir-link/x.pt",
        "{root}/loop",
        "{root}/fifo",
        "{root}/deep",
        "{root}",
        "{root}/",
        "{root}/deep/a.pt/x",
        "{root}/deep/a.pt\0.png",
        "{root}/" + "n" * 5000,
        "{root}/\ud800.pt",
        "/{root}/deep/a.pt",
        "//host/x.pt",
        "\\\\host\\x.pt",
        "deep/a.pt",
        "../allowed/deep/a.pt",
        "~/x.pt",
        "/proc/self/environ",
        "/etc/passwd",
        "/dev/zero",
        "",
    ],
)
def test_everything_else_gives_one_and_the_same_answer(
    root: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(ClientFault) as caught:
        read_file(path.format(root=root), root, 100)
    assert caught.value.message == NOT_READABLE


def test_a_directory_that_becomes_a_link_after_the_check_gives_nothing_away(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "deep" / "x.pt").write_bytes(b"data")
    open_file = os.open

    def swap_and_open(path: str, flags: int) -> int:
        (root / "deep").rename(root / "moved")
        (root / "deep").symlink_to(root.parent / "allowed_evil")
        return open_file(path, flags)

    monkeypatch.setattr(files.os, "open", swap_and_open)
    with pytest.raises(ClientFault, match=NOT_READABLE):
        read_file(f"{root}/deep/x.pt", root, 100)


def test_the_size_limit_holds_to_the_byte_and_for_sparse_files(root: Path) -> None:
    (root / "exact").write_bytes(b"x" * 100)
    assert len(read_file(f"{root}/exact", root, 100)) == 100
    with (root / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ClientFault, match="the file is larger than this worker's limit"):
        read_file(f"{root}/huge", root, 100)


def test_no_descriptor_is_left_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("deep/a.pt", "fifo", "file-link", "missing", "deep"):
        for _ in range(5):
            try:
                read_file(f"{root}/{name}", root, 3)
            except ClientFault:
                continue
    assert len(os.listdir("/proc/self/fd")) == before
