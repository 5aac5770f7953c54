"""What reaches the log of the tracebacks that Dynamo's binding prints,
by the same call of Python's that the binding makes."""

from __future__ import annotations

import asyncio
import ctypes
import io
import sys
import threading
import traceback
from contextlib import redirect_stderr

import pytest
from dynamo.llm import exceptions as dynamo

from dynamo.trtllm.errors import ClientFault, ShuttingDown
from dynamo.trtllm.frontend.endpoint import EndpointServer
from dynamo.trtllm.service.binding_log import LoggedErrors
from fakes import FakeContext, FakeSender, collect, ignore_death, outcome
from frontend.test_endpoint import Scripted


def raised(error: BaseException) -> BaseException:
    """`error` with a traceback of several frames."""

    def thrower(depth: int) -> None:
        if depth:
            thrower(depth - 1)
        raise error

    try:
        thrower(4)
    except BaseException as caught:
        return caught
    raise AssertionError


def display(error: BaseException) -> None:
    """Print `error` to `sys.stderr` as PyO3's `PyErr::display` does."""
    call = ctypes.pythonapi.PyErr_Display
    call.argtypes, call.restype = [ctypes.py_object] * 3, None
    call(type(error), error, error.__traceback__)


@pytest.fixture
def log() -> io.StringIO:
    """What stands for the worker's log; each test puts it in the place of `sys.stderr`."""
    return io.StringIO()


@pytest.mark.parametrize(
    "words", ["n must be 1", "", "two\nlines", "naïve: «x»", "Traceback (most recent call last):"]
)
def test_a_hidden_exception_is_not_printed_and_all_else_is(log: io.StringIO, words: str) -> None:
    with redirect_stderr(log), LoggedErrors.on_stderr() as told:
        told.hide(dynamo.InvalidArgument(words))
        display(raised(ValueError("another")))
        display(raised(dynamo.InvalidArgument(words)))
        print("a line", file=sys.stderr)
    text = log.getvalue()
    assert "InvalidArgument" not in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert "thrower(depth - 1)" in text
    assert text.endswith("ValueError: another\na line\n")


def test_an_exception_is_hidden_as_often_as_was_said(log: io.StringIO) -> None:
    with redirect_stderr(log), LoggedErrors.on_stderr() as told:
        for _ in range(2):
            told.hide(dynamo.Cancelled("gone"))
        for _ in range(3):
            display(raised(dynamo.Cancelled("gone")))
    assert log.getvalue().count("Traceback") == 1
    assert log.getvalue().count("Cancelled: gone") == 1


def test_an_exception_of_another_kind_or_message_is_printed(log: io.StringIO) -> None:
    with redirect_stderr(log), LoggedErrors.on_stderr() as told:
        told.hide(dynamo.Cancelled("gone"))
        display(raised(dynamo.Unknown("gone")))
        display(raised(dynamo.Cancelled("gone too")))
        traceback.print_exception(raised(KeyError("k")))
    assert log.getvalue().count("Traceback") == 3


def test_what_other_threads_print_meanwhile_is_kept_whole(log: io.StringIO) -> None:
    with redirect_stderr(log), LoggedErrors.on_stderr() as told:
        told.hide(dynamo.Cancelled("gone"))
        sys.stderr.write("Traceback (most recent call last):\n")
        sys.stderr.write('  File "x", line 1\n')
        other = threading.Thread(target=display, args=[raised(OSError("disk"))])
        other.start()
        other.join()
        sys.stderr.write("dynamo._core.Cancelled: gone\n")
    assert "Cancelled" not in log.getvalue()
    assert log.getvalue().endswith("OSError: disk\n")


def test_a_traceback_that_breaks_off_is_written_when_the_stream_is_flushed(log: io.StringIO) -> None:
    with redirect_stderr(log), LoggedErrors.on_stderr() as told:
        told.hide(dynamo.Cancelled("gone"))
        sys.stderr.write("Traceback (most recent call last):\n  File")
        assert log.getvalue() == ""
        sys.stderr.flush()
        assert log.getvalue() == "Traceback (most recent call last):\n  File"


def test_stderr_is_itself_again_afterwards(log: io.StringIO) -> None:
    with redirect_stderr(log):
        with LoggedErrors.on_stderr():
            assert sys.stderr is not log
            assert sys.stderr.writable()
        assert sys.stderr is log


@pytest.mark.asyncio
@pytest.mark.parametrize("pushed", [True, False])
async def test_a_request_that_ends_early_has_one_line_and_no_traceback(
    log: io.StringIO, caplog: pytest.LogCaptureFixture, pushed: bool
) -> None:
    caplog.set_level("INFO", "dynamo.trtllm.frontend.endpoint")
    with redirect_stderr(log), LoggedErrors.on_stderr() as told:
        server = EndpointServer(Scripted(0, ClientFault("too many")), on_dead=ignore_death, on_told=told.hide)
        sender = FakeSender() if pushed else None
        error = await outcome(collect(server.serve({}, FakeContext("r-1"), response_sender=sender)))
        display(error)
        context = FakeContext("r-2")
        server = EndpointServer(Scripted(2, gate=asyncio.Event()), on_dead=ignore_death, on_told=told.hide)
        running = asyncio.create_task(collect(server.serve({}, context, response_sender=FakeSender())))
        await asyncio.sleep(0)
        context.stop_generating()
        display(await outcome(running))
        server.end_all(ShuttingDown("this worker is shutting down"))
        display(await outcome(collect(server.serve({}, FakeContext("r-3"), response_sender=sender))))
    assert log.getvalue() == ""
    assert [r.getMessage() for r in caplog.records] == [
        "request r-1 refused: too many",
        "request r-2 cancelled: the client went away",
        "request r-3 refused: this worker is shutting down",
    ]
    assert not any(r.exc_info for r in caplog.records)
