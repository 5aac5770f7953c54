"""A Slurm cluster on one machine for tests: munged, slurmctld and several slurmd,
on loopback, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from processes.cluster import die_with_parent, free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "squeue", "scancel", "scontrol")
SYSTEM_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
# In the environment of everything that runs on the cluster, so that what is left over can be found.
MARK = "TEST_CLUSTER_FOLDER"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def is_installed() -> bool:
    """Whether this machine has Slurm, munge, and what Slurm needs for `--mpi=pmix`."""
    has_pmix = any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"))
    return has_pmix and all(shutil.which(name, path=SYSTEM_PATH) for name in PROGRAMS)


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster; its nodes are called n1, n2 and so on."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to talk to this cluster, without anything
        of a Slurm job that the tests themselves may run in."""
        outside = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SALLOC"))
        }
        return {
            **outside,
            "PATH": SYSTEM_PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            MARK: str(self.folder),
        }

    def run(self, *command: str, **settings: str) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            command,
            env={**self.environment, **settings},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def allocate(self, nodes: int, ranks: int = 1) -> str:
        """The id of a new job of so many nodes, with room for so many ranks on each,
        that runs nothing yet."""
        job_name = f"allocation-{free_port()}"
        self.run(
            "salloc", "--no-shell", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", f"--job-name={job_name}"
        )
        return self.run("squeue", "--noheader", f"--name={job_name}", "--format=%i").strip()

    def steps(self, job: str) -> dict[str, str]:
        """The nodes of each of the job's steps that are not over, by the step's name."""
        lines = self.run("squeue", "--noheader", "--steps", "--format=%i %j %N").splitlines()
        return {name: nodes for step, name, nodes in map(str.split, lines) if step.startswith(f"{job}.")}

    def jobs(self) -> list[str]:
        return self.run("squeue", "--noheader", "--format=%i").split()

    def processes(self) -> dict[int, str]:
        """Command lines by process id of everything that was started on this cluster
        and still runs, its daemons left out."""
        mark, found = f"{MARK}={self.folder}".encode(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and mark in _read(entry / "environ").split(b"\0"):
                found[int(entry.name)] = (
                    _read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
                )
        return found


def _read(path: Path) -> bytes:
    """A file of /proc; empty when the process is gone."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 3) -> Iterator[SlurmCluster]:
    """A cluster that is ready to run jobs; all of it is ended with the block."""
    cluster = SlurmCluster(folder)
    _configure(folder, nodes)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_start(cluster, "munged", _munged(folder)))
        wait_until((folder / "munge.socket").exists, "the start of munged", 20.0)
        daemons.append(_start(cluster, "slurmctld", ["slurmctld", "-D", "-f", str(folder / "slurm.conf")]))
        for node in _names(nodes):
            daemons.append(
                _start(cluster, node, ["slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf")])
            )
        wait_until(
            lambda: _idle_nodes(cluster) == nodes, f"readiness of {nodes} nodes\n{_logs(folder)}", 30.0
        )
        yield cluster
    finally:
        _end(cluster, daemons)


def _names(nodes: int) -> list[str]:
    return [f"n{index}" for index in range(1, nodes + 1)]


def _configure(folder: Path, nodes: int) -> None:
    ports: set[int] = set()
    while len(ports) < nodes + 1:
        ports.add(free_port())
    host, controller_port, *node_ports = socket.gethostname(), *ports
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
        for name, port in zip(_names(nodes), node_ports, strict=True)
    ]
    text = CONFIGURATION.format(
        host=host, folder=folder, controller_port=controller_port, nodes="\n".join(lines)
    )
    (folder / "slurm.conf").write_text(text)
    for name in ("state", *(f"{use}-{node}" for use in ("spool", "tmp") for node in _names(nodes))):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))


def _munged(folder: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    # --force, since the folder is not one that only root can write to.
    return [
        "munged",
        "--foreground",
        "--force",
        *(f"--{option}={folder}/munge.{name}" for option, name in files.items()),
    ]


def _start(cluster: SlurmCluster, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in cluster.environment.items() if name != MARK}
    with (cluster.folder / f"{name}.out").open("wb") as sink:
        return subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _idle_nodes(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%D", "--states=idle"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return sum(map(int, done.stdout.split()))


def _logs(folder: Path) -> str:
    return "\n".join(
        path.read_text(errors="replace")[-1500:]
        for path in sorted(folder.glob("*.log")) + sorted(folder.glob("*.out"))
    )


def _end(cluster: SlurmCluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Cancels all jobs, waits until they are gone, and ends the daemons; kills what does not end."""
    with suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "--user=root")
        wait_until(lambda: not cluster.jobs(), "the end of all jobs", 40.0)
    for daemon in reversed(daemons):
        daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
