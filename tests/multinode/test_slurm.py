"""The multi-node scripts on a real Slurm: three nodes on this machine,
real etcd, NATS, frontend and workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo.trtllm.demo.pictures import draw
from launch.harness import script_environment
from multinode.slurm import MARK, ROOT, SlurmCluster
from processes.cluster import Cluster, die_with_parent, find_http, free_port, wait_until
from processes.media import image_server

pytestmark = pytest.mark.slurm

SCRIPTS = ROOT / "launch" / "multinode"
STAND_IN = Path(__file__).parent / "bin"
DOUBLE = ROOT / "tests" / "trtllm_double"
READY_S = 240.0


def settings(port: int) -> dict[str, str]:
    """What a launch on loopback is told: free ports everywhere, and images of this machine are allowed."""
    return {
        "DYNAMO_PYTHON": sys.executable,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2",
        "DYN_HTTP_HOST": "127.0.0.1",
        "DYN_HTTP_PORT": str(port),
        "DYN_MM_ALLOW_INTERNAL": "1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "ETCD_PORT": str(free_port()),
        "NATS_PORT": str(free_port()),
        "MODEL_PATH": "demo",
    }


@dataclass
class Run:
    """A script at work, its output, and a client of its frontend."""

    process: subprocess.Popen[bytes]
    log: Path
    client: Cluster

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        ready = f"ready: {self.client.url} model=demo\n"
        wait_until(lambda: ready in self.output or self.process.poll() is not None, "the ready line", READY_S)
        assert ready in self.output, self.output[-6000:]

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


class Launcher:
    """Starts scripts; kills and cancels what is left of them after the test."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients = ExitStack()

    def client(self) -> Cluster:
        """A client of a frontend that is still to be started, at a free port."""
        return self._clients.enter_context(Cluster())

    def environment(self, port: int, **more: str) -> dict[str, str]:
        own = {name: self.slurm.environment[name] for name in ("PATH", "SLURM_CONF", MARK)}
        return script_environment({**own, **settings(port), **more})

    def start(self, script: str, *arguments: str, **more: str) -> Run:
        client = self.client()
        log = self._folder / "output"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [SCRIPTS / script, *arguments],
                env=self.environment(client.port, **more),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._processes.append(process)
        return Run(process, log, client)

    def start_step(self, job: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts a step that no script knows of."""
        options = [f"--jobid={job}", f"--job-name={name}", "--overlap", "--nodes=1", "--ntasks=1"]
        self._processes.append(
            subprocess.Popen(["srun", *options, *command], env=self.slurm.environment, start_new_session=True)
        )
        return self._processes[-1]

    def finish(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._clients.close()
        self.slurm.run("scancel", "--user=root")
        wait_until(lambda: not self.slurm.jobs(), "the end of all jobs")
        for pid in self.slurm.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launcher(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(slurm, tmp_path)
    yield launcher
    launcher.finish()


def ask_about_an_image(client: Cluster, seed: int) -> str:
    with image_server() as server:
        content = [
            {"type": "text", "text": "Describe the image"},
            {"type": "image_url", "image_url": {"url": server.image_url(seed)}},
        ]
        answer = client.chat(content, max_tokens=40)
    assert answer.status == 200, answer.body
    return answer.text


def labels(slurm: SlurmCluster, job: str) -> dict[str, str]:
    """The nodes of the steps of a run, by the label that ends the step's name."""
    return {
        name.rsplit("-", 1)[1]: nodes
        for name, nodes in slurm.steps(job).items()
        if name.startswith("dynamo-")
    }


def test_disaggregated_serving_over_three_nodes_answers_about_an_image_and_leaves_only_what_was_there(
    slurm: SlurmCluster, launcher: Launcher
) -> None:
    job = slurm.allocate(3)
    other = launcher.start_step(job, "other", "sleep", "infinity")
    wait_until(
        lambda: "sleep" in [line.split()[0].rpartition("/")[2] for line in slurm.processes().values()],
        "another step",
    )
    before = slurm.processes()

    run = launcher.start("srun_disaggregated.sh", SLURM_JOB_ID=job, ENGINE="transformers")
    run.wait_ready()
    assert labels(slurm, job) == {
        "etcd": "n1",
        "nats": "n1",
        "frontend": "n1",
        "prefill": "n2",
        "decode": "n3",
    }
    assert '"id":"demo"' in str(find_http(f"{run.client.url}/v1/models"))
    assert ask_about_an_image(run.client, 1) == draw(1).caption
    assert "[prefill] 0: " in run.output
    assert "[decode] 0: " in run.output

    assert run.end() == 128 + signal.SIGTERM
    assert slurm.steps(job) == {"other": "n1"}
    assert slurm.processes() == before
    assert re.search(r"\[prefill\] 0: .*unregister", run.output), (
        "the workers were not asked to take their leave"
    )

    slurm.run("scancel", job)
    other.wait(60)
    assert slurm.processes() == {}


def test_aggregated_serving_from_a_batch_job_ends_with_the_job(
    slurm: SlurmCluster, launcher: Launcher, tmp_path: Path
) -> None:
    client, log = launcher.client(), tmp_path / "batch"
    environment = launcher.environment(client.port, ENGINE="double", NUM_WORKERS="2")
    command = [
        "sbatch",
        "--parsable",
        "--nodes=2",
        f"--output={log}",
        "--wrap",
        str(SCRIPTS / "srun_aggregated.sh"),
    ]
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    ready = f"ready: {client.url} model=demo\n"
    wait_until(
        lambda: log.exists() and (ready in log.read_text() or not slurm.jobs()), "the ready line", READY_S
    )
    assert ready in log.read_text(), log.read_text()[-6000:]
    # No node to spare: the head node has a worker as well.
    nodes = {name: nodes for name, nodes in slurm.steps(job).items() if "-agg-" in name}
    assert sorted(nodes.values()) == ["n1", "n2"]
    assert client.chat("hello", max_tokens=4, ignore_eos=True).usage["completion_tokens"] == 4

    slurm.run("scancel", job)
    wait_until(lambda: not slurm.jobs(), "the end of the job")
    wait_until(lambda: not slurm.processes(), "the end of its processes")


def test_a_worker_of_two_nodes_runs_under_pmix_with_one_rank_for_each_gpu_and_rank_zero_keeps_ucx(
    slurm: SlurmCluster, launcher: Launcher
) -> None:
    job = slurm.allocate(3, ranks=2)
    run = launcher.start(
        "srun_aggregated.sh",
        "--",
        "--tensor-parallel-size",
        "4",
        SLURM_JOB_ID=job,
        ENGINE="tensorrt_llm",
        NUM_GPUS_PER_NODE="2",
        UCX_TLS="tcp,self,sm",
        PATH=f"{STAND_IN}:{slurm.environment['PATH']}",
        PYTHONPATH=str(DOUBLE),
    )
    run.wait_ready()
    assert labels(slurm, job)["agg"] == "n[2-3]"
    ranks = set(re.findall(r"\[agg\] (\d): rank (\d) of 4 on (n\d)", run.output))
    assert ranks == {("0", "0", "n2"), ("1", "1", "n2"), ("2", "2", "n3"), ("3", "3", "n3")}
    (worker,) = [
        pid
        for pid, line in slurm.processes().items()
        if line.startswith(f"{sys.executable} -m dynamo.trtllm ")
    ]
    assert b"UCX_TLS=tcp,self,sm" in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert run.client.chat("hello", max_tokens=4).status == 200

    assert run.end() == 128 + signal.SIGTERM
    assert slurm.steps(job) == {}
    assert slurm.processes() == {}


def test_a_worker_that_ends_takes_the_rest_with_it_and_is_named(
    slurm: SlurmCluster, launcher: Launcher
) -> None:
    job = slurm.allocate(2)
    run = launcher.start("srun_disaggregated.sh", "--", "--no-such-flag", SLURM_JOB_ID=job, ENGINE="double")
    assert run.process.wait(READY_S) != 0
    assert re.search(r"launch: (prefill|decode) ended with status \d+, ending the rest", run.output), (
        run.output[-4000:]
    )
    assert slurm.steps(job) == {}
    assert slurm.processes() == {}


def test_an_allocation_that_is_too_small_or_gone_is_refused_in_one_sentence(
    slurm: SlurmCluster, launcher: Launcher
) -> None:
    job = slurm.allocate(2)
    run = launcher.start("srun_disaggregated.sh", SLURM_JOB_ID=job, ENGINE="double", NUM_DECODE_WORKERS="2")
    assert run.process.wait(60) == 2
    assert run.output == (
        "srun_disaggregated.sh: the workers need 3 nodes (1 prefill x "
        f"1 + 2 decode x 1), and job {job} has 2\n"
    )
    slurm.run("scancel", job)
    wait_until(lambda: not slurm.jobs(), "the end of the job")
    run = launcher.start("srun_disaggregated.sh", SLURM_JOB_ID=job, ENGINE="double")
    assert run.process.wait(60) == 2
    assert run.output == f"srun_disaggregated.sh: job {job} is not running: make a new allocation\n"
