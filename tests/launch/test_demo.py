"""launch/demo.sh as a stranger runs it: the real frontend, the portable engine, the demo model."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from launch.harness import LAUNCH, ROOT, run_script, script_environment, wait_until
from processes.cluster import free_port

CAPTION = "a red circle on a blue background."
DEADLINE_S = 240.0


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the whole demo with this Python."""
    return subprocess.run(
        [LAUNCH / "demo.sh", *arguments],
        cwd="/",
        env=script_environment({"DYNAMO_PYTHON": sys.executable}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


# Each is of use to some roles only, and to none in some topologies.
FOR_SOME_ROLES = ["--max-seq-len", "4096", "--max-images", "3", "--peer-timeout", "50", "--transfer-ttl", "50"]


@pytest.mark.parametrize("topology", ["agg", "disagg", "disagg_e_pd", "epd_disagg"])
def test_every_topology_gives_the_same_answer_as_the_last_line_whatever_flags_go_to_all_roles(topology: str) -> None:
    done = demo("--topology", topology, "--", *FOR_SOME_ROLES)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"answer: {CAPTION}"
    assert re.fullmatch(r"ready: http://127\.0\.0\.1:\d+ model=demo", lines[0])
    assert Path(lines[1].removeprefix("picture: ")).is_file()
    assert lines[2] == "question: Describe the image"
    assert re.fullmatch(r"time to first token: \d+ ms", lines[3])
    assert re.fullmatch(r"speed: \d+ tokens/s \(\d+ prompt tokens, \d+ generated\)", lines[4])
    assert re.search(r"launch: ready \d+\.\d s after the start", done.stderr)


def test_another_picture_and_another_question_are_answered_and_by_prefill_and_decode(tmp_path: Path) -> None:
    picture = draw(7)
    path = tmp_path / "picture.png"
    picture.image.save(path)
    done = demo("--topology", "disagg", "--image", str(path), "--prompt", "Describe the picture.")
    assert done.returncode == 0, done.stderr
    assert f"picture: {path}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == f"answer: {picture.caption}"


def test_a_file_that_is_no_picture_ends_in_one_sentence_and_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("no picture")
    done = demo("--image", str(path))
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("ask: the frontend answered 400: ")]
    assert "answer: " not in done.stdout


def test_a_model_that_the_frontend_cannot_use_ends_the_launch_with_the_frontends_own_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, model)
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": 5}}')
    settings = {"ENGINE": "double", "MODEL_PATH": str(model), "DYN_HTTP_PORT": str(free_port())}
    done = run_script("agg.sh", DYNAMO_PYTHON=sys.executable, **settings)
    assert done.returncode == 1
    start = f"launch: the frontend cannot serve {model}, as it said 4 times: "
    (reason,) = [line.removeprefix(start) for line in done.stderr.splitlines() if line.startswith(start)]
    assert "tokenizer" in reason


def test_keep_goes_on_serving_and_prints_a_curl_line_that_works(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [LAUNCH / "demo.sh", "--keep"],
            env=script_environment({"DYNAMO_PYTHON": sys.executable}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
        )
    try:
        wait_until(lambda: "answer: " in output.read_text() or process.poll() is not None, "the answer", DEADLINE_S)
        curl = next(line for line in output.read_text().splitlines() if line.startswith("ask again: "))
        words = shlex.split(curl.removeprefix("ask again: "))
        assert words[0] == "curl"
        command = [sys.executable, "-c", POST, words[1], words[-1]]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert CAPTION in asked.stdout
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).read().decode())
"""


def test_options_that_cannot_work_are_refused_before_anything_is_set_up() -> None:
    for arguments, sentence in (
        (["--image", "/no/such/file"], "demo.sh: --image: there is no file /no/such/file"),
        (["--topology", "ring"], "demo.sh: there is no topology ring: choose agg, disagg, disagg_e_pd or epd_disagg"),
        (["--prompt"], "demo.sh: --prompt needs a value"),
    ):
        done = run_script("demo.sh", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence + "\n")


def test_a_dry_run_shows_the_demo_model_on_the_portable_engine_and_ignores_other_models_settings() -> None:
    done = run_script(
        "demo.sh",
        *["--dry-run", "--topology", "epd_disagg", "--prompt", "what's this?"],
        DYNAMO_PYTHON="/some/python",
        MODEL_PATH="other",
        ENGINE="tensorrt_llm",
        PREFILL_ENGINE_ARGS="other.yaml",
        DYN_HTTP_PORT="18000",
    )
    assert (done.returncode, done.stderr) == (0, "")
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert all("DYN_MM_ALLOW_INTERNAL=1" in words and "OMP_NUM_THREADS=1" in words for words in commands)
    assert all("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS=60000" in words for words in commands)
    starts = [words[words.index("/some/python") + 2 :] for words in commands]
    model = ["dynamo.trtllm", "--model-path", "demo", "--engine", "transformers", "--served-model-name", "demo"]
    assert starts[0] == ["dynamo.frontend", "--http-port", "18000", "--http-host", "127.0.0.1"]
    assert [words[: len(model)] for words in starts[1:4]] == [model] * 3
    client = ["dynamo.trtllm.demo.ask", "--url", "http://127.0.0.1:18000", "--model", "demo"]
    assert starts[4] == [*client, "--prompt", "what's this?"]
    assert f"PYTHONPATH={ROOT / 'components' / 'src'}" in commands[0]
