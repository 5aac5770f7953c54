"""The launch scripts: what they would run, and how what they run lives and ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.harness import LAUNCH, ROOT, Running, alive, run_script, wait_until

SCRIPTS = ["agg.sh", "disagg.sh", "disagg_multimodal.sh", "disagg_e_pd.sh", "epd_disagg.sh", "demo.sh"]
PYTHON = "/some/python"
FRONTEND = ["-m", "dynamo.frontend", "--http-port", "8000"]
ENCODE = "dyn://dynamo.tensorrt_llm_encode.generate"


def planned(
    name: str, *arguments: str, cwd: Path = ROOT, **settings: str
) -> list[tuple[dict[str, str], list[str]]]:
    """The commands that `--dry-run` prints: for each, its environment and its words after the Python."""
    done = run_script(name, "--dry-run", *arguments, cwd=cwd, **{"DYNAMO_PYTHON": PYTHON} | settings)
    assert (done.returncode, done.stderr) == (0, "")
    commands = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        python = words.index(PYTHON)
        environment = dict(word.split("=", 1) for word in words[:python])
        commands.append((environment, words[python + 1 :]))
    return commands


def words_of(name: str, *arguments: str, **settings: str) -> list[list[str]]:
    return [words for _, words in planned(name, *arguments, cwd=ROOT, **settings)]


def worker(*words: str, model: str = "m", engine: str = "double", modality: str = "multimodal") -> list[str]:
    return ["-m", "dynamo.trtllm", "--model-path", model, "--engine", engine, "--modality", modality, *words]


def config(path: str) -> list[str]:
    return ["--extra-engine-args", str(ROOT / "engine_configs" / path)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_script_does_and_names_its_variables(script: str) -> None:
    done = run_script(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"launch/{script}" in done.stdout
    assert not [
        word for word in ("--dry-run", "MODEL_PATH", "DYN_HTTP_PORT", "ENGINE") if word not in done.stdout
    ]
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_option_is_refused_by_name(script: str) -> None:
    done = run_script(script, "--fast", MODEL_PATH="m")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{script}: unknown option --fast (--help lists the options; arguments for the workers go after --)\n"
    )


def test_agg_plans_a_frontend_and_one_worker_with_what_is_set_and_nothing_else() -> None:
    commands = planned("agg.sh", ENGINE="double", MODEL_PATH="m")
    environment = {
        "PYTHONPATH": str(ROOT / "components" / "src"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "60000",
        "DYN_MIGRATION_LIMIT": "3",
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    }
    assert commands == [(environment, FRONTEND), (environment, worker())]


def test_every_variable_becomes_its_flag_and_arguments_after_the_dashes_go_to_the_worker(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").touch()
    commands = planned(
        "agg.sh",
        "--",
        "--max-images",
        "3",
        "a b",
        cwd=tmp_path,
        MODEL_PATH="m",
        SERVED_MODEL_NAME="my model",
        MODALITY="text",
        ENGINE="transformers",
        AGG_ENGINE_ARGS="mine.yaml",
        ALLOWED_LOCAL_MEDIA_PATH="/data",
        MAX_FILE_SIZE_MB="7",
        DYN_HTTP_PORT="18000",
        DYN_HTTP_HOST="::1",
        DYN_SYSTEM_PORT="9000",
        DYN_DISCOVERY_BACKEND="etcd",
        DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS="5",
        AGG_CUDA_VISIBLE_DEVICES="2,3",
    )
    (frontend_environment, frontend), (environment, words) = commands
    assert frontend == ["-m", "dynamo.frontend", "--http-port", "18000", "--http-host", "::1"]
    assert words == [
        *[
            "-m",
            "dynamo.trtllm",
            "--model-path",
            "m",
            "--engine",
            "transformers",
            "--served-model-name",
            "my model",
        ],
        *[
            "--modality",
            "text",
            "--extra-engine-args",
            str(tmp_path / "mine.yaml"),
            "--allowed-local-media-path",
            "/data",
        ],
        *["--max-file-size-mb", "7", "--max-images", "3", "a b"],
    ]
    assert environment["DYN_DISCOVERY_BACKEND"] == "etcd"
    assert not [name for name in environment if name.endswith("_HOST")]
    assert environment["DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS"] == "5"
    assert (environment["DYN_SYSTEM_PORT"], frontend_environment["DYN_SYSTEM_PORT"]) == ("9000", "-1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in frontend_environment


@pytest.mark.parametrize("script", ["disagg.sh", "disagg_multimodal.sh"])
def test_disagg_plans_prefill_and_decode_and_keeps_media_flags_from_decode(script: str) -> None:
    words = words_of(script, ENGINE="double", MODEL_PATH="m", ALLOWED_LOCAL_MEDIA_PATH="/data")
    assert words == [
        FRONTEND,
        worker("--disaggregation-mode", "prefill", "--allowed-local-media-path", "/data"),
        worker("--disaggregation-mode", "decode"),
    ]


def test_disagg_e_pd_plans_an_encoder_and_an_aggregated_worker_that_calls_it() -> None:
    assert words_of("disagg_e_pd.sh", ENGINE="double", MODEL_PATH="m") == [
        FRONTEND,
        worker("--disaggregation-mode", "encode", "--endpoint", ENCODE),
        worker("--encode-endpoint", ENCODE),
    ]


def test_epd_disagg_plans_three_roles_and_only_prefill_calls_the_encoder() -> None:
    assert words_of("epd_disagg.sh", ENGINE="double", MODEL_PATH="m", ENCODE_ENDPOINT="dyn://a.b.c") == [
        FRONTEND,
        worker("--disaggregation-mode", "encode", "--endpoint", "dyn://a.b.c"),
        worker("--disaggregation-mode", "prefill", "--encode-endpoint", "dyn://a.b.c"),
        worker("--disaggregation-mode", "decode"),
    ]


def test_the_encoders_default_endpoint_is_in_the_namespace_of_the_deployment() -> None:
    words = words_of("disagg_e_pd.sh", ENGINE="double", MODEL_PATH="m", DYN_NAMESPACE="mine")
    assert words[2] == worker("--encode-endpoint", "dyn://mine.tensorrt_llm_encode.generate")


def test_an_encode_endpoint_left_in_the_environment_does_not_reach_a_topology_without_encoder() -> None:
    environment, words = planned("agg.sh", ENGINE="double", MODEL_PATH="m", ENCODE_ENDPOINT=ENCODE)[1]
    assert environment["ENCODE_ENDPOINT"] == ""
    assert "--encode-endpoint" not in words


def test_counts_give_more_workers_of_a_role_each_with_gpus_and_status_port_of_its_own() -> None:
    commands = planned(
        "epd_disagg.sh",
        MODEL_PATH="m",
        NUM_ENCODE_WORKERS="2",
        NUM_PREFILL_WORKERS="2",
        ENCODE_CUDA_VISIBLE_DEVICES="0",
        PREFILL_CUDA_VISIBLE_DEVICES="1,2;3,4",
        DECODE_CUDA_VISIBLE_DEVICES="",
        DYN_SYSTEM_PORT="9000",
    )
    roles = [words[words.index("--disaggregation-mode") + 1] for _, words in commands[1:]]
    assert roles == ["encode", "encode", "prefill", "prefill", "decode"]
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment, _ in commands] == [
        None,
        "0",
        "0",
        "1,2",
        "3,4",
        None,
    ]
    assert [environment["DYN_SYSTEM_PORT"] for environment, _ in commands] == [
        "-1",
        "9000",
        "9001",
        "9002",
        "9003",
        "9004",
    ]


@pytest.mark.parametrize("count", ["0", "two", "-1"])
def test_a_count_that_is_none_is_refused(count: str) -> None:
    done = run_script("disagg.sh", "--dry-run", MODEL_PATH="m", NUM_DECODE_WORKERS=count)
    assert done.returncode == 2
    assert (
        done.stderr == f"disagg.sh: NUM_DECODE_WORKERS must be a whole number of at least 1, not '{count}'\n"
    )


PORTS = {
    "DYN_HTTP_PORT": "from 0 to 65535",
    "DYN_SYSTEM_PORT": "from 0 to 32767, or -1 for none",
    "DYN_TCP_RPC_PORT": "from 0 to 65535",
    "DYN_TCP_RESPONSE_STREAM_PORT": "from 0 to 65535",
}
KUBERNETES = " (Kubernetes sets it so for a service of that name: set it yourself)"


@pytest.mark.parametrize("script", ["agg.sh", "epd_disagg.sh"])
@pytest.mark.parametrize("variable", PORTS)
@pytest.mark.parametrize("value", ["tcp://10.0.0.1:9090", "70000", "08080", "-2", "80 80", "$(id)", "http"])
def test_a_variable_that_holds_no_port_is_refused_in_one_sentence(
    script: str, variable: str, value: str
) -> None:
    done = run_script(script, "--dry-run", MODEL_PATH="m", **{variable: value})
    advice = KUBERNETES if value.startswith("tcp:") else ""
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"{script}: {variable} must be a port number {PORTS[variable]}, not '{value}'{advice}\n"
    )


def test_status_ports_of_all_workers_must_be_ports() -> None:
    done = run_script("disagg.sh", "--dry-run", MODEL_PATH="m", DYN_SYSTEM_PORT="32767")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "disagg.sh: DYN_SYSTEM_PORT must leave a port up to 32767 to each of the workers, not '32767'\n"
    )
    environment, _ = planned("agg.sh", MODEL_PATH="m", DYN_SYSTEM_PORT="-1")[1]
    assert environment["DYN_SYSTEM_PORT"] == "-1"


@pytest.mark.parametrize("variable", ["LAUNCH_READY_TIMEOUT_S", "LAUNCH_GRACE_S"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "1e3"])
def test_a_variable_that_holds_no_seconds_is_refused(variable: str, value: str) -> None:
    done = run_script("agg.sh", "--dry-run", MODEL_PATH="m", **{variable: value})
    assert (done.returncode, done.stderr) == (
        2,
        f"agg.sh: {variable} must be a number of seconds, not '{value}'\n",
    )


def test_a_python_that_is_not_there_is_refused_when_it_has_to_find_a_free_port() -> None:
    done = run_script("agg.sh", "--dry-run", MODEL_PATH="m", DYN_HTTP_PORT="0", DYNAMO_PYTHON="/no/python")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("agg.sh: /no/python cannot be run: ")


def test_gpus_that_are_none_are_refused() -> None:
    done = run_script("agg.sh", "--dry-run", MODEL_PATH="m", AGG_CUDA_VISIBLE_DEVICES=";")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("agg.sh: AGG_CUDA_VISIBLE_DEVICES names no GPUs for agg")


def test_gpus_are_given_out_by_default_for_tensorrt_llm_only() -> None:
    ours = planned("disagg.sh", MODEL_PATH="m")
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment, _ in ours] == [None, "0", "1"]
    assert not [environment for environment, _ in ours if "OMP_NUM_THREADS" in environment]
    portable = planned("disagg.sh", MODEL_PATH="m", ENGINE="transformers")
    assert not [environment for environment, _ in portable if "CUDA_VISIBLE_DEVICES" in environment]


@pytest.mark.parametrize(
    ("script", "workers"),
    [
        ("agg.sh", [("Qwen/Qwen3-0.6B", "text", "qwen3/agg.yaml")]),
        ("disagg.sh", [("Qwen/Qwen3-0.6B", "text", f"qwen3/{role}.yaml") for role in ("prefill", "decode")]),
        (
            "disagg_multimodal.sh",
            [
                ("Qwen/Qwen2-VL-7B-Instruct", "multimodal", f"qwen2-vl-7b-instruct/{role}.yaml")
                for role in ("prefill", "decode")
            ],
        ),
        (
            "disagg_e_pd.sh",
            [
                ("Qwen/Qwen2.5-VL-7B-Instruct", "multimodal", f"qwen2.5-vl-7b-instruct/{role}.yaml")
                for role in ("encode", "agg")
            ],
        ),
        (
            "epd_disagg.sh",
            [
                ("Qwen/Qwen2.5-VL-7B-Instruct", "multimodal", f"qwen2.5-vl-7b-instruct/{role}.yaml")
                for role in ("encode", "prefill", "decode")
            ],
        ),
    ],
)
def test_without_a_model_each_script_serves_its_own_with_that_models_configurations(
    script: str, workers: list[tuple[str, str, str]]
) -> None:
    found = []
    for words in words_of(script)[1:]:
        assert words[: len(worker())] == worker(model=words[3], engine="tensorrt_llm", modality=words[7])
        found.append((words[3], words[7], words[words.index("--extra-engine-args") + 1]))
    assert found == [
        (model, modality, str(ROOT / "engine_configs" / path)) for model, modality, path in workers
    ]


@pytest.mark.parametrize("prefix", ["./examples/backends/trtllm/", "examples/backends/trtllm/", "./", ""])
def test_the_guides_paths_of_engine_configurations_are_found_here(prefix: str, tmp_path: Path) -> None:
    path = f"{prefix}engine_configs/llama4/multimodal/agg.yaml"
    words = planned("agg.sh", cwd=tmp_path, MODEL_PATH="m", AGG_ENGINE_ARGS=path)[1][1]
    assert words[-2:] == config("llama4/multimodal/agg.yaml")


def test_an_engine_configuration_that_is_nowhere_is_refused_by_its_variable() -> None:
    done = run_script("disagg.sh", "--dry-run", MODEL_PATH="m", DECODE_ENGINE_ARGS="nowhere.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"disagg.sh: DECODE_ENGINE_ARGS: there is no file nowhere.yaml, neither here nor in {ROOT}\n"
    )


def test_a_python_without_dynamo_is_refused_with_the_command_that_sets_one_up(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run_script("agg.sh", MODEL_PATH="m", DYNAMO_PYTHON=str(python))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"agg.sh: {python} has no Dynamo: run launch/lib/setup.sh")


@pytest.mark.parametrize(
    ("script", "workers"), [("agg.sh", 1), ("disagg.sh", 2), ("disagg_e_pd.sh", 2), ("epd_disagg.sh", 3)]
)
def test_a_topology_says_once_that_it_is_ready_and_sigterm_leaves_nothing(
    start: Callable[..., Running], script: str, workers: int
) -> None:
    running = start(script, SERVED_MODEL_NAME="mine", FAKE_WORKERS=str(workers))
    running.wait_ready()
    assert [line for line in running.output.splitlines() if line.startswith("ready: ")] == [
        f"ready: http://127.0.0.1:{running.port} model=mine"
    ]
    assert len(running.pids) == 1 + workers
    running.process.terminate()
    assert running.wait() == 128 + signal.SIGTERM
    assert running.leftovers() == []
    assert list((running.folder / "tmp").iterdir()) == []


def test_the_output_of_every_process_carries_its_label(start: Callable[..., Running]) -> None:
    running = start("disagg.sh", FAKE_WORKERS="3", NUM_DECODE_WORKERS="2")
    running.wait_ready()
    wait_until(lambda: running.output.count("hello") == 3, "three greetings")
    greetings = {line for line in running.output.splitlines() if "hello" in line}
    assert greetings == {
        "[prefill] hello from prefill",
        "[decode-1] hello from decode",
        "[decode-2] hello from decode",
    }


def test_a_topology_is_ready_only_when_every_worker_is_there(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    running = start("disagg.sh", NUM_DECODE_WORKERS="2", FAKE_DECODE="late", FAKE_GATE=str(gate))
    wait_until(lambda: "waiting for some-model, " in running.errors, "a second word about waiting")
    assert "ready: " not in running.output
    gate.touch()
    running.wait_ready()


def test_ctrl_c_leaves_nothing(start: Callable[..., Running]) -> None:
    running = start("agg.sh")
    running.wait_ready()
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 128 + signal.SIGINT
    assert running.leftovers() == []


def test_a_worker_that_cannot_start_ends_the_rest_and_is_named(start: Callable[..., Running]) -> None:
    running = start("epd_disagg.sh", FAKE_WORKERS="3", FAKE_DECODE="exit:7")
    assert running.wait() == 7
    assert "launch: decode ended with status 7, ending the rest" in running.errors.splitlines()
    assert "ready: " not in running.output
    assert running.leftovers() == []


def test_a_worker_that_ends_well_while_serving_is_a_failure_too(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    running = start("disagg.sh", FAKE_WORKERS="2", FAKE_PREFILL="exit-ready:0", FAKE_GATE=str(gate))
    running.wait_ready()
    gate.touch()
    assert running.wait() == 1
    assert "launch: prefill ended with status 0, ending the rest" in running.errors.splitlines()
    assert running.leftovers() == []


def test_a_killed_frontend_ends_the_workers_and_is_named(start: Callable[..., Running]) -> None:
    running = start("agg.sh")
    running.wait_ready()
    os.kill(running.pid_of("dynamo.frontend"), signal.SIGKILL)
    assert running.wait() == 128 + signal.SIGKILL
    assert "launch: frontend ended with status 137, ending the rest" in running.errors.splitlines()
    assert running.leftovers() == []


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(start: Callable[..., Running]) -> None:
    running = start("agg.sh", FAKE_AGG="stubborn", LAUNCH_GRACE_S="0.2")
    running.wait_ready()
    running.process.terminate()
    assert running.wait() == 128 + signal.SIGTERM
    assert running.leftovers() == []


def test_a_second_signal_does_not_wait_for_the_grace(start: Callable[..., Running]) -> None:
    running = start("agg.sh", FAKE_AGG="stubborn", LAUNCH_GRACE_S="600")
    running.wait_ready()
    running.process.terminate()
    wait_until(lambda: not alive(running.pid_of("dynamo.frontend")), "the end of the frontend")
    running.process.terminate()
    assert running.wait() == 128 + signal.SIGTERM
    assert running.leftovers() == []


def test_processes_do_not_outlive_a_killed_script(start: Callable[..., Running]) -> None:
    running = start("agg.sh")
    running.wait_ready()
    running.process.kill()
    wait_until(lambda: running.leftovers() == [], "the end of all processes")


def test_a_model_that_is_never_listed_ends_the_wait_with_a_reason(start: Callable[..., Running]) -> None:
    running = start("agg.sh", FAKE_WORKERS="2", LAUNCH_READY_TIMEOUT_S="0.5")
    assert running.wait() == 1
    assert "launch: some-model was not listed within 0.5 s" in running.errors.splitlines()
    assert running.leftovers() == []


def test_a_reason_that_the_frontend_repeats_ends_the_wait_and_is_told(start: Callable[..., Running]) -> None:
    reasons = ["a passing fault", *['tokenizer: "tokenizer.json" at line 1'] * 4]
    running = start("agg.sh", FAKE_WORKERS="2", FAKE_REASONS=";".join(reasons))
    assert running.wait() == 1
    told = f"launch: the frontend cannot serve some-model, as it said 4 times: {reasons[-1]}"
    assert told in running.errors.splitlines()
    assert running.leftovers() == []


@pytest.mark.parametrize(
    ("group", "reasons", "words"),
    [
        ("some-model", "a;b;a;b", "; the frontend says: b"),
        ("somebody-elses-model", "a;a;a;a;a", ""),
    ],
)
def test_reasons_that_change_or_are_anothers_do_not_end_the_wait(
    start: Callable[..., Running], group: str, reasons: str, words: str
) -> None:
    running = start(
        "agg.sh", FAKE_WORKERS="2", FAKE_GROUP=group, FAKE_REASONS=reasons, LAUNCH_READY_TIMEOUT_S="1.5"
    )
    assert running.wait() == 1
    assert f"launch: some-model was not listed within 1.5 s{words}" in running.errors.splitlines()


def test_a_port_in_use_is_refused_before_anything_starts(start: Callable[..., Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = start("agg.sh", DYN_HTTP_PORT=str(port))
        assert running.wait() == 1
    assert (
        f"launch: port {port} cannot be used (Address already in use); set DYN_HTTP_PORT to another one\n"
        in running.errors
    )
    assert running.pids == []


def test_scripts_pass_shellcheck_from_the_root_of_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.sh"], cwd=ROOT, capture_output=True, text=True
    )
    assert str(LAUNCH.relative_to(ROOT) / "agg.sh") in listed.stdout.split()
    done = subprocess.run(
        ["shellcheck", "-x", *listed.stdout.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == ""
