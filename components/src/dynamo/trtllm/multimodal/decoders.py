"""Decoding media in processes of their own, so that an image, clip or sound that takes too long,
or whose client has left, is ended for good and takes nothing from the others.

Each decoder is a process behind one thread, which waits for it; the thread starts another in advance when its
own has ended. Large images have decoders of their own, and clips and sounds too, so however many of them
are under way, a small image waits for small ones alone. `decoder_process` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from PIL import Image

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault, LimitFault, Overloaded, WorkerError
from dynamo.trtllm.multimodal.decoder_process import MESSAGE_BYTES

T = TypeVar("T")
Lane: TypeAlias = Literal["small", "large", "clips"]

MAX_DECODERS = 4
"""Of each kind; bounds the memory of images that are decoded at once, too: each may take several times
`max_image_pixels` bytes.
"""
SMALL_PIXELS = 4 << 20
SMALL_BYTES = 4 << 20
"""An image of no more pixels and bytes is small: whatever is in it, decoding takes two seconds at most."""
_PATIENCE = 3
"""A job may take so many times its processor time by the clock, before the process is taken for stuck."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


async def run_apart(work: Work[T]) -> T:
    """Do `work` in a process that ends when the caller is cancelled.

    Raises `ClientFault`, `LimitFault` also after `limit_s`, and `Overloaded` when memory runs out.
    """
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads_of(work.lane), work.run)
    except asyncio.CancelledError:
        work.abandon()
        raise


async def decode_apart(data: bytes, pixels: int, config: MediaConfig) -> Image.Image:
    """As `decode.decode`, in a process of its own: see `run_apart`.
    `pixels` are those that its header tells."""
    small = pixels <= SMALL_PIXELS and len(data) <= SMALL_BYTES
    message = {"kind": "image", "max_image_pixels": config.max_image_pixels}
    limit_s = config.decode_timeout_s
    return await run_apart(Work("small" if small else "large", "image", data, message, limit_s, _image))


def stats() -> metrics.Readings:
    """Media under way, those that wait for a decoder not counted."""
    return {metrics.MEDIA_DECODING.of(lane): count for lane, count in _under_way.items()}


def start_decoder() -> None:
    """Start the first decoder of small images, so that the first image need not wait for it. Returns at
    once.
    """
    _threads_of("small").submit(_own_decoder)


@cache
def _threads_of(lane: Lane) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_DECODERS, os.cpu_count() or 1), thread_name_prefix=f"decode-{lane}")


_under_way: dict[Lane, int] = {"small": 0, "large": 0, "clips": 0}
_counting = threading.Lock()


@contextmanager
def _counted(lane: Lane) -> Iterator[None]:
    with _counting:
        _under_way[lane] += 1
    try:
        yield
    finally:
        with _counting:
            _under_way[lane] -= 1


class _Ended(Exception):
    """The process ended, or was ended, before it answered."""


class _Decoder:
    """One process and the socket to it. Used by one thread; `kill` may be called by any."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dynamo.trtllm.multimodal.decoder_process", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self._connection = ours

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill the process if it still runs, and give what it ended with: a negative signal, or its exit
        code.
        """
        self._connection.close()
        self._process.kill()
        return self._process.wait()

    def ask(self, job: Mapping[str, Any], data: bytes, patience_s: float) -> tuple[dict[str, Any], list[int]]:
        """The answer to `job` and its descriptors. Raises `_Ended`, and `TimeoutError` after `patience_s`."""
        descriptor = os.memfd_create("media", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(descriptor, 0, os.SEEK_SET)
            self._connection.settimeout(patience_s)
            try:
                socket.send_fds(self._connection, [json.dumps(job).encode()], [descriptor])
                message, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _Ended from error
        finally:
            os.close(descriptor)
        if not message:
            raise _Ended
        return json.loads(message), descriptors


_threads = threading.local()


def _own_decoder() -> _Decoder:
    """The calling thread's decoder, started when it has none that lives."""
    decoder: _Decoder | None = getattr(_threads, "decoder", None)
    if decoder is not None and decoder.alive():
        return decoder
    if decoder is not None:
        decoder.end()
        _threads.decoder = None
    try:
        _threads.decoder = decoder = _Decoder()
    except OSError as error:
        raise WorkerError("this worker cannot start a process to decode media in") from error
    return decoder


def _replace_decoder() -> int:
    """End the calling thread's decoder, start the next one in advance,
    and give what the old one ended with."""
    status: int = _threads.decoder.end()
    _threads.decoder = None
    with suppress(WorkerError):
        _own_decoder()
    return status


class Work(Generic[T]):
    """One file to decode. The thread that runs it and the caller that abandons it share `_decoder`."""

    def __init__(
        self,
        lane: Lane,
        noun: str,
        data: bytes,
        message: Mapping[str, Any],
        limit_s: float,
        receive: Callable[[Mapping[str, Any], int], T],
    ) -> None:
        """`noun` is what a client calls it: image, video, sound. `message` says to `decoder_process` how to
        decode, in at most `limit_s` of processor time. `receive` makes the result of the answer and the
        descriptor that comes with it, and closes that.
        """
        self.lane = lane
        self._noun = noun
        self._data = data
        self._message = {**message, "processor_s": limit_s}
        self._limit_s = limit_s
        self._receive = receive
        self._lock = threading.Lock()
        self._decoder: _Decoder | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """End the work, begun or not; the caller has left."""
        with self._lock:
            self._abandoned = True
            if self._decoder is not None:
                self._decoder.kill()

    def run(self) -> T:
        """Decode in the calling thread's process."""
        with _counted(self.lane):
            return self._run()

    def _run(self) -> T:
        decoder = _own_decoder()
        with self._lock:
            if self._abandoned:
                raise _Ended
            self._decoder = decoder
        try:
            answer, descriptors = decoder.ask(self._message, self._data, _PATIENCE * self._limit_s)
        except (_Ended, TimeoutError) as error:
            self._release()
            late = not isinstance(error, _Ended)
            raise self._fault_of(_replace_decoder(), late) from error
        killed = self._release()
        try:
            _require_result(answer, self._noun)
            return self._receive(answer, descriptors[0])
        finally:
            if killed or answer["last"]:
                _replace_decoder()

    def _release(self) -> bool:
        """From here on `abandon` leaves the process alone; True when it has ended it already."""
        with self._lock:
            self._decoder = None
            return self._abandoned

    def _fault_of(self, status: int, late: bool) -> Exception:
        noun, limit_s = self._noun, self._limit_s
        if late or status == -signal.SIGPROF:
            return LimitFault(f"decoding the {noun} takes longer than this worker's limit of {limit_s:g} s")
        if -status in _CRASHES:
            return ClientFault(f"the {noun} is damaged or incomplete")
        if status == -signal.SIGKILL and not self._abandoned:
            return Overloaded(f"this worker ran out of memory while it decoded the {noun}")
        return WorkerError(f"the process that decoded the {noun} ended")


def _require_result(answer: Mapping[str, Any], noun: str) -> None:
    """Raise the fault that the answer names, if it does."""
    fault = answer.get("fault")
    if fault == "memory":
        raise Overloaded(f"this worker has too little memory for the {noun} now")
    if fault is not None:
        raise _FAULTS[fault](answer["message"])


_FAULTS: Mapping[str, type[WorkerError]] = {"limit": LimitFault, "client": ClientFault, "worker": WorkerError}


def _image(answer: Mapping[str, Any], descriptor: int) -> Image.Image:
    """The image whose pixels lie in the descriptor."""
    width, height = answer["size"]
    start = answer["start"]
    image = Image.new("RGB", (width, height), None)
    try:
        with (
            mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory,
            memoryview(memory) as view,
            view[start : start + 3 * width * height] as pixels,
        ):
            image.frombytes(pixels, "raw", "RGB")
    finally:
        os.close(descriptor)
    return image
