"""The process in which media are decoded: it can be ended at any moment, and its memory ends with it.

`decoders` starts it as `python -m dynamo.trtllm.multimodal.decoder_process FD`, where FD is its end of a
socket pair of messages. A job is a message with a file descriptor of the file's bytes; the answer is a
message and a descriptor of the pixels or samples. Both are anonymous memory (`memfd_create`), so nothing
is copied through the socket. The process ends when its socket does, when a job takes more processor time than
it may, and of its own accord when it has served long enough or has grown.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault, LimitFault, WorkerError
from dynamo.trtllm.multimodal.decode import decode

MESSAGE_BYTES = 1 << 16
KEPT_PIXEL_BYTES = 64 << 20
"""Memory for pixels that is kept for the next image, since fresh memory costs more than what is written to
it.
"""
MAX_JOBS = 1000
"""Files that one process decodes before another takes its place."""
MAX_GROWTH_BYTES = 64 << 20
"""So much more memory than at the start may stay after a job; a process with more gives way to another."""
_KILLED_FIRST = "500"
"""When the machine runs out of memory, this process goes before the worker (`proc(5)`, `oom_score_adj`)."""


def main() -> None:
    """Serve jobs until the socket closes or the process has served long enough."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker may still want media while it drains
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST)
    logging.disable(logging.CRITICAL)
    with socket.socket(fileno=int(sys.argv[1])) as connection, Outlet() as outlet:
        at_start = _resident_bytes()
        for served in range(1, MAX_JOBS + 1):
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
            if not message:
                return
            answer, result = _serve(json.loads(message), descriptors[0], outlet)
            last = served == MAX_JOBS or _resident_bytes() - at_start > MAX_GROWTH_BYTES
            descriptors = [] if result is None else [result]
            socket.send_fds(connection, [json.dumps({**answer, "last": last}).encode()], descriptors)
            if result not in (None, outlet.descriptor):
                os.close(result)
            if last:
                return


class Outlet:
    """Anonymous memory that takes one image after the other. Its reader is done before the next job is
    sent.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("pixels", os.MFD_CLOEXEC)
        self._file = os.fdopen(self.descriptor, "r+b", buffering=0)

    def __enter__(self) -> Outlet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, image: Image.Image) -> int:
        """Write the pixels, three bytes each, and give where they start.
        PPM is what Pillow writes fastest."""
        if os.fstat(self.descriptor).st_size > KEPT_PIXEL_BYTES:
            self._file.truncate(0)
        self._file.seek(0)
        image.save(self._file, "PPM")
        return self._file.tell() - 3 * image.width * image.height


def _serve(job: dict[str, Any], descriptor: int, outlet: Outlet) -> tuple[Mapping[str, object], int | None]:
    """The answer to one job, and the descriptor of what it decoded.
    The timer counts processor time, and its signal ends the process.
    """
    with open(descriptor, "rb") as file:
        data = file.read()
    signal.setitimer(signal.ITIMER_PROF, job["processor_s"])
    try:
        if job["kind"] == "image":
            return _decode_image(job, data, outlet), outlet.descriptor
        from dynamo.trtllm.multimodal import clip_process  # Images do without what reads clips.

        return clip_process.serve(job, data)
    except WorkerError as fault:
        kind = (
            "limit"
            if isinstance(fault, LimitFault)
            else "client"
            if isinstance(fault, ClientFault)
            else "worker"
        )
        return {"fault": kind, "message": fault.message}, None
    except MemoryError:
        return {"fault": "memory"}, None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _decode_image(job: Mapping[str, Any], data: bytes, outlet: Outlet) -> Mapping[str, object]:
    image = decode(data, MediaConfig(max_image_pixels=job["max_image_pixels"]))
    return {"size": image.size, "start": outlet.put(image)}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
