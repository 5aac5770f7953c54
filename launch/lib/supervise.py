"""Runs the processes of one serving topology together: labelled output, readiness, and an end in common.

usage: supervise.py [options] --start LABEL COUNT ARG...
  --start LABEL COUNT ARG...  one process; COUNT says how many ARGs follow; leading NAME=VALUE are its
                              environment
  --then COUNT ARG...         runs this when the model is listed, with this terminal; when it ends, so does
                              everything else
  --outlive LABEL             ends this process after the others have ended
  --stop COUNT ARG...         asks processes to end by this command, with their labels as further arguments,
                              and not by SIGTERM
  --finally COUNT ARG...      runs this when all processes have ended, however that came about
  --url URL                   the frontend's address: its port must be free, if it is of this host, and its
                              /v1/models says what is served
  --model NAME                the model to wait for
  --instances N               waits until the frontend's /health lists so many workers too (default 1)
  --ready-timeout S           gives up when the model is not listed after S seconds
  --grace S                   time between SIGTERM and SIGKILL
  --temporary NAME            makes a directory, passes its path in the variable NAME, removes it at the end
  --log FILE                  writes the processes' output there and shows the end of it on failure; removed
                              after a good end
  --since EPOCH               counts the time until ready from this moment

The first process to end takes the others with it, and its name and status are reported. SIGTERM, SIGINT and
SIGHUP end all of them; a second signal cuts the grace short. Each process leads a process group of its own,
and the whole group is ended. The exit status is that of the process that ended first (1 if it was 0), that of
--then, or 128 and the signal's number. While the model is not listed, the reasons that the frontend gives are
repeated here, and the same reason several times ends the wait. Uses the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

POLL_S = 0.2
MAX_POLL_S = 1.0
PROGRESS_S = 5.0
LOG_TAIL_LINES = 30
MAX_LINE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
FRONTEND = "frontend"
PATIENCE = 4
"""How often the frontend may give one reason; it tries again after 1, 2, 4, 8 ... seconds."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
REASON = re.compile(r'error"?[=:] ?("(?:[^"\\]|\\.)*")')
T = TypeVar("T")


class LaunchError(Exception):
    """What ended the launch, in one sentence, the exit status that goes with it,
    and the process whose fault it was, if any."""

    def __init__(self, message: str, status: int = 1, label: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.label = label


class Interrupted(LaunchError):
    """A signal asked for the end: nothing has failed."""


@dataclass(frozen=True)
class Command:
    """One process to run; `environment` is added to this process's own."""

    label: str
    argv: Sequence[str]
    environment: dict[str, str]


@dataclass
class Plan:
    """What the command line asks for."""

    commands: list[Command] = field(default_factory=list)
    client: Command | None = None
    stop: Command | None = None
    last: Command | None = None
    outlive: list[str] = field(default_factory=list)
    url: str = ""
    model: str = ""
    instances: int = 1
    ready_timeout: float = 1800.0
    grace: float = 15.0
    temporary: str = ""
    log: str = ""
    since: float = field(default_factory=time.time)


def parse(arguments: Sequence[str]) -> Plan:
    """Reads the command line that is described at the top of this file."""
    plan = Plan()
    words = iter(arguments)
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if word == "--start":
            plan.commands.append(_command(next(words), words))
        elif word == "--then":
            plan.client = _command("client", words)
        elif word == "--stop":
            plan.stop = _command("stop", words)
        elif word == "--finally":
            plan.last = _command("finally", words)
        elif word == "--outlive":
            plan.outlive.append(next(words))
        elif name in {"url", "model", "temporary", "log"}:
            setattr(plan, name, next(words))
        elif word == "--instances":
            plan.instances = int(next(words))
        elif name in {"ready_timeout", "grace", "since"}:
            setattr(plan, name, _seconds(word, next(words)))
        else:
            raise LaunchError(f"unknown argument {word}", 2)
    return plan


def _seconds(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise LaunchError(f"{option} needs a number of seconds, not {text!r}", 2) from None


def _command(label: str, words: Iterator[str]) -> Command:
    argv = [next(words) for _ in range(int(next(words)))]
    environment = {}
    while argv and ASSIGNMENT.match(argv[0]):
        name, value = argv.pop(0).split("=", 1)
        environment[name] = value
    return Command(label, argv, environment)


class Complaints:
    """Why the frontend does not list the model, from its own log:
    the last reason, and how often it was given.

    Dynamo's frontend says so on lines that hold 'materialization failed',
    the model's name and the reason as `error`.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.reason = ""
        self.times = 0

    def read(self, line: bytes) -> None:
        if b"materialization failed" not in line:
            return
        text = COLOURS.sub("", line.decode(errors="replace"))
        found = REASON.search(text)
        if found is None or f'"{self._model}' not in text.replace("\\", ""):
            return
        reason = str(json.loads(found[1]))
        self.times = self.times + 1 if reason == self.reason else 1
        self.reason = reason


class Supervisor:
    """The running processes of one plan. `_processes` and `_readers` are written by `_start` alone."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processes: dict[str, Process] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._environment: dict[str, str] = {}
        self._complaints = Complaints(plan.model)
        if plan.log or not sys.stdout.isatty():
            self._environment["DYN_SDK_DISABLE_ANSI_LOGGING"] = "1"
        self._output = open(plan.log, "ab") if plan.log else sys.stdout.buffer  # noqa: SIM115 - lives as long as the process

    async def run(self) -> int:
        """Starts everything, serves until something ends, ends the rest;
        returns the client's status or raises LaunchError."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._signals.put_nowait, number)
        with self._temporary_directory():
            try:
                _require_free_port(self._plan.url)
                for command in self._plan.commands:
                    await self._start(command)
                await self._until(self._listed())
                print(f"ready: {self._plan.url} model={self._plan.model}", flush=True)
                say(f"ready {time.time() - self._plan.since:.1f} s after the start")
                return await self._until(self._serve())
            except LaunchError as error:
                say(str(error))
                raise
            finally:
                await self._stop()
                if self._plan.last is not None:
                    await _run_detached(self._plan.last)

    @contextlib.contextmanager
    def _temporary_directory(self) -> Iterator[None]:
        if not self._plan.temporary:
            yield
            return
        path = tempfile.mkdtemp(prefix="dynamo-trtllm-")
        self._environment[self._plan.temporary] = path
        try:
            yield
        finally:
            shutil.rmtree(path, ignore_errors=True)

    async def _start(self, command: Command, own_output: bool = False) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=os.environ | self._environment | command.environment,
                stdin=DEVNULL,
                stdout=None if own_output else PIPE,
                stderr=None if own_output else STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise LaunchError(f"{command.label} could not be started: {error.strerror}") from error
        self._processes[command.label] = process
        if process.stdout is not None:
            listener = self._complaints.read if command.label == FRONTEND else None
            self._readers.append(
                asyncio.create_task(_copy(command.label, process.stdout, self._output, listener))
            )
        return process

    async def _until(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; LaunchError as soon as a signal arrives
        or one of the processes that run now ends."""
        main = asyncio.create_task(work)
        watchers = [asyncio.create_task(self._signalled())]
        watchers += [
            asyncio.create_task(_ended(label, process)) for label, process in self._processes.items()
        ]
        try:
            await asyncio.wait([main, *watchers], return_when=asyncio.FIRST_COMPLETED)
            for task in (main, *watchers):
                if task.done():
                    task.result()
            return await main
        finally:
            for task in (main, *watchers):
                task.cancel()
            await asyncio.gather(main, *watchers, return_exceptions=True)

    async def _signalled(self) -> None:
        number = await self._signals.get()
        raise Interrupted(f"{number.name}, ending", 128 + number)

    async def _listed(self) -> None:
        """Returns when the model and all workers are listed; says every few seconds that it is still waiting.

        Asks less often as the wait grows: the frontend logs every request.
        """
        started = spoke = time.monotonic()
        say(f"started {', '.join(self._processes)}; waiting for {self._plan.model}")
        while not await asyncio.to_thread(_is_listed, self._plan.url, self._plan.model, self._plan.instances):
            now, complaints = time.monotonic(), self._complaints
            if complaints.times >= PATIENCE:
                raise LaunchError(
                    f"the frontend cannot serve {self._plan.model}, as it said {complaints.times} times: "
                    f"{complaints.reason}"
                )
            reason = f"; the frontend says: {complaints.reason}" if complaints.reason else ""
            if now - started > self._plan.ready_timeout:
                raise LaunchError(
                    f"{self._plan.model} was not listed within {self._plan.ready_timeout:g} s{reason}"
                )
            if now - spoke > PROGRESS_S:
                spoke = now
                say(f"waiting for {self._plan.model}, {now - started:.0f} s{reason}")
            await asyncio.sleep(min(MAX_POLL_S, max(POLL_S, (now - started) / 20)))

    async def _serve(self) -> int:
        """Runs the client and returns its status; without a client, waits for ever."""
        if self._plan.client is None:
            never: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            return await never
        process = await self._start(self._plan.client, own_output=True)
        return _shell_status(await process.wait())

    async def _stop(self) -> None:
        """Ends every process group, those that outlive the others last."""
        outliving = self._plan.outlive
        for last in (False, True):
            labels = [label for label in self._processes if (label in outliving) is last]
            if labels:
                await self._end(labels)
        if self._readers:
            await asyncio.wait(self._readers, timeout=2.0)

    async def _end(self, labels: Sequence[str]) -> None:
        """SIGTERM or the command for it, and SIGKILL after the grace or at a second signal."""
        deadline = time.monotonic() + self._plan.grace
        groups = [self._processes[label].pid for label in labels]
        if self._plan.stop is None:
            _signal_groups(groups, signal.SIGTERM)
        else:
            await _run_detached(self._plan.stop, *labels)
        # The groups hold processes that are not children of this one, so there is no event to wait for.
        while _signal_groups(groups, 0) and time.monotonic() < deadline and self._signals.empty():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S / 4)
        _signal_groups(groups, signal.SIGKILL)


async def _run_detached(command: Command, *arguments: str) -> None:
    """Runs a command to its end, in a session of its own so that the terminal's signals do not reach it."""
    process = await asyncio.create_subprocess_exec(
        *command.argv, *arguments, env=os.environ | command.environment, stdin=DEVNULL, start_new_session=True
    )
    await process.wait()


async def _copy(
    label: str,
    stream: asyncio.StreamReader,
    target: BinaryIO,
    listener: Callable[[bytes], None] | None = None,
) -> None:
    """Copies a process's output to `target`, each line behind its label, and hands each to `listener`."""
    prefix = f"[{label}] ".encode()
    pending = b""
    while chunk := await stream.read(1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > MAX_LINE_BYTES:
            lines, pending = [*lines, pending], b""
        _write(target, [prefix + line + b"\n" for line in lines])
        if listener is not None:
            for line in lines:
                listener(line)
    if pending:
        _write(target, [prefix + pending + b"\n"])


def _write(target: BinaryIO, lines: list[bytes]) -> None:
    # A reader of ours that went away (`| head`) must not stop the processes.
    with contextlib.suppress(BrokenPipeError):
        target.writelines(lines)
        target.flush()


async def _ended(label: str, process: Process) -> None:
    status = _shell_status(await process.wait())
    raise LaunchError(f"{label} ended with status {status}, ending the rest", status or 1, label)


def _shell_status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _signal_groups(groups: Sequence[int], number: int) -> bool:
    """Sends a signal to each group; False when none of them is left."""
    left = False
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            left = True
    return left


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child: the kernel sends SIGTERM when the supervisor is gone, however it went."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _require_free_port(url: str) -> None:
    port, host = urlsplit(url).port, urlsplit(url).hostname
    if host not in {"127.0.0.1", "localhost"}:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port or 80))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used ({error.strerror}); set DYN_HTTP_PORT to another one"
            ) from error


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _is_listed(url: str, model: str, instances: int) -> bool:
    """Whether the frontend lists the model and so many different workers; False while it does not answer."""
    try:
        with _direct.open(f"{url}/v1/models", timeout=2.0) as response:
            if model not in {entry["id"] for entry in json.load(response)["data"]}:
                return False
        with _direct.open(f"{url}/health", timeout=2.0) as response:
            return len({entry["instance_id"] for entry in json.load(response)["instances"]}) >= instances
    except (OSError, ValueError, KeyError, TypeError):
        return False


def say(message: str) -> None:
    print(f"launch: {message}", file=sys.stderr, flush=True)


def _show_log_end(path: str, label: str) -> None:
    """Shows the last lines of one process, or of all without a label."""
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        lines = (line for line in file if not label or line.startswith(f"[{label}] "))
        sys.stderr.writelines(deque(lines, LOG_TAIL_LINES))


def main() -> int:
    try:
        plan = parse(sys.argv[1:])
    except LaunchError as error:
        say(str(error))
        return error.status
    good = False
    try:
        status = asyncio.run(Supervisor(plan).run())
        good = status == 0
    except LaunchError as error:
        status, good = error.status, isinstance(error, Interrupted)
        if plan.log and not good:
            _show_log_end(plan.log, error.label)
    if plan.log and good:
        os.unlink(plan.log)
    elif plan.log:
        say(f"the output of all processes is in {plan.log}")
    return status


if __name__ == "__main__":
    sys.exit(main())
