"""Reading a file that a client named: only regular files inside the allowed directory,
and nothing learnt about any other.

Outside and missing give one and the same message, so answers cannot map the disk.
Blocking; called in the media pool.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dynamo.trtllm.errors import ClientFault

NOT_READABLE = "not a readable file inside the allowed directory"
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_READ_BYTES = 1 << 20


def read_file(path: str, root: Path, max_bytes: int) -> bytes:
    """The content of `path`, which must lead to a regular file inside `root` after all links are followed.

    Raises `ClientFault`: `NOT_READABLE`, or that the file exceeds `max_bytes`.
    """
    if not path.startswith("/") or path.startswith("//") or "\0" in path:
        raise ClientFault(NOT_READABLE)
    try:
        descriptor = _open_inside(path, root)
    except (OSError, ValueError) as error:
        raise ClientFault(NOT_READABLE) from error
    try:
        return _read_capped(descriptor, max_bytes)
    except OSError as error:
        raise ClientFault(NOT_READABLE) from error
    finally:
        os.close(descriptor)


def _inside(path: str, root: str) -> bool:
    return path.startswith(root.rstrip("/") + "/")


def _open_inside(path: str, root: Path) -> int:
    """Open `path`; raise `OSError` unless it is a regular file whose real path lies in `root`,
    before and after the opening."""
    real_root = os.path.realpath(root)
    target = os.path.realpath(path)
    if not _inside(target, real_root) or not stat.S_ISREG(os.lstat(target).st_mode):
        raise PermissionError(NOT_READABLE)
    descriptor = os.open(target, _OPEN_FLAGS)
    try:
        # A directory on the way may have become a link since realpath; the descriptor cannot change any more.
        opened = os.readlink(f"/proc/self/fd/{descriptor}")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _inside(opened, real_root):
            raise PermissionError(NOT_READABLE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_capped(descriptor: int, max_bytes: int) -> bytes:
    """Read to the end; the size is checked before and,
    for a file that grows meanwhile, during the reading."""
    size = os.fstat(descriptor).st_size
    pieces: list[bytes] = []
    total = 0
    while size <= max_bytes and total <= max_bytes:
        piece = os.read(descriptor, _READ_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        total += len(piece)
    raise ClientFault(f"the file is larger than this worker's limit of {max_bytes / (1 << 20):g} MiB")
