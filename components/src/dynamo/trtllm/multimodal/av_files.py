"""Opening clips and sounds with PyAV: from memory alone, by one demuxer,
with the codecs that are named, in silence.

Nothing that a file refers to is opened: FFmpeg reads through a stream of our bytes, and is told neither a
protocol nor any other format. PyAV is imported inside, so that the rest of the worker does without it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo.trtllm.errors import ClientFault, WorkerError

_BUFFER_BYTES = 1 << 18


@contextmanager
def opened(data: bytes, demuxer: str, codecs: frozenset[str]) -> Iterator[Any]:
    """An `av.container.InputContainer` over `data`. What FFmpeg raises passes; `damage_named` words it."""
    try:
        import av
    except ImportError as error:
        raise WorkerError("this worker's installation has no PyAV, which reads video and audio") from error
    only_these = {
        "format_whitelist": demuxer,
        "codec_whitelist": ",".join(sorted(codecs)),
        "protocol_whitelist": "none",
    }
    # From PyAV 19 on names that are not UTF-8 raise nothing by themselves, and the argument is gone.
    lenient: Any = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    with av.open(
        io.BytesIO(data),
        "r",
        format=demuxer.partition(",")[0],
        options=only_these,
        buffer_size=_BUFFER_BYTES,
        **lenient,
    ) as container:
        yield container


@contextmanager
def damage_named(message: str) -> Iterator[None]:
    """Whatever FFmpeg or PyAV raises in the block becomes a `ClientFault` of `message`;
    worded faults pass."""
    try:
        yield
    except (WorkerError, MemoryError):
        raise
    except Exception as error:
        raise ClientFault(message) from error


def has_cover_art_only(stream: Any) -> bool:
    """True for an image that comes with a clip or a sound, which FFmpeg shows as a video stream."""
    from av.stream import Disposition

    still = Disposition.attached_pic | Disposition.timed_thumbnails
    return bool(stream.disposition & still)
