"""A worker that is PID 1, as in a container: a signal ends it at once until it serves, and drains it then."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from processes.cluster import LOOPBACK_ONLY, wait_until
from processes.prefork import die_with_parent

DOUBLE = ("--engine", "double")
HOURS = ("--override-engine-args", '{"double": {"start_delay_s": 36000}}')


class Container:
    """A worker that is PID 1 of a namespace of its own."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self.log = directory / "log"
        unshare = [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            *(["--map-root-user"] if os.getuid() else []),
        ]
        base = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
        discovery = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(directory / "discovery")}
        grace = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2"}
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*unshare, sys.executable, "-m", "dynamo.trtllm", "--model-path", "demo", *arguments],
                env={**base, **LOOPBACK_ONLY, **discovery, **grace, **environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    def first_process(self) -> int | None:
        """The number of the namespace's PID 1 outside of it; None before it runs Python."""
        with suppress(OSError, IndexError):
            child = int(
                Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]
            )
            if b"dynamo.trtllm" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        return None

    def has_loaded(self, library: str) -> bool:
        """Whether some process of the namespace has a file of this name mapped."""
        first = self.first_process()
        for pid in [first, *children(first)] if first else []:
            with suppress(OSError):
                if library in Path(f"/proc/{pid}/maps").read_text():
                    return True
        return False

    def says(self, words: str) -> bool:
        return words in self.log.read_text(errors="replace")

    def signal(self, number: int) -> int:
        """Send a signal to PID 1 and return the status with which it ends."""
        first = self.first_process()
        assert first is not None, self.log.read_text()
        os.kill(first, number)
        return self.process.wait(20)


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def container(directory: Path, *arguments: str, **environment: str) -> Iterator[Container]:
    made = Container(directory, *arguments, **environment)
    try:
        yield made
    finally:
        first = made.first_process()
        if first is not None and made.process.poll() is None:
            os.kill(first, signal.SIGKILL)  # and the kernel ends the namespace
        made.process.kill()
        made.process.wait()


class SilentServer:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.accepted: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.accepted.append(self._socket.accept()[0])

    def close(self) -> None:
        for each in (self._socket, *self.accepted):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    server = SilentServer()
    yield server
    server.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_while_it_imports(tmp_path: Path, number: int, status: int) -> None:
    with container(tmp_path, "--engine", "transformers") as worker:
        wait_until(lambda: worker.has_loaded("libtorch"), "the import of torch")
        assert worker.signal(number) == status


def test_while_its_engine_loads(tmp_path: Path) -> None:
    with container(tmp_path, *DOUBLE, *HOURS) as worker:
        wait_until(lambda: worker.has_loaded("uvloop"), "the event loop")
        assert worker.signal(signal.SIGTERM) == 143


def test_while_it_fetches_its_model(tmp_path: Path, silent: SilentServer) -> None:
    hub = {"HF_ENDPOINT": f"http://{silent.address}", "HF_HOME": str(tmp_path)}
    with container(tmp_path, *DOUBLE, "--model-path", "org/some-model", **hub) as worker:
        wait_until(lambda: silent.accepted, "the call of the hub")
        assert worker.signal(signal.SIGTERM) == 143


@pytest.mark.parametrize(
    "environment",
    [
        lambda address: {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": f"http://{address}"},
        lambda address: {"DYN_REQUEST_PLANE": "nats", "NATS_SERVER": f"nats://{address}"},
    ],
    ids=["etcd", "nats"],
)
def test_while_it_waits_to_join(
    tmp_path: Path, silent: SilentServer, environment: Callable[[str], dict[str, str]]
) -> None:
    with container(tmp_path, *DOUBLE, **environment(silent.address)) as worker:
        wait_until(lambda: silent.accepted, "the attempt to join")
        assert worker.signal(signal.SIGTERM) == 143


def test_while_it_checks(tmp_path: Path, silent: SilentServer) -> None:
    etcd = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": f"http://{silent.address}"}
    check = ("--check", "--live", "--disaggregation-mode", "decode")
    with container(tmp_path, *DOUBLE, *check, **etcd) as worker:
        wait_until(lambda: silent.accepted, "the attempt to join")
        assert worker.signal(signal.SIGINT) == 130


def test_once_it_serves_it_drains_and_ends_well(tmp_path: Path) -> None:
    with container(tmp_path, *DOUBLE) as worker:
        wait_until(lambda: worker.says("serving demo as agg"), "serving")
        wait_until(lambda: any((tmp_path / "discovery" / "v1" / "instances").iterdir()), "registration")
        assert worker.signal(signal.SIGTERM) == 0
        assert worker.says("Drain complete")
