"""launch/demo.sh as a stranger runs it: the real frontend, the portable engine, the demo model."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from launch.harness import LAUNCH, ROOT, Running, run_script, script_environment, wait_until
from processes.cluster import free_port

CAPTION = "a red circle on a blue background."
BEEPS = "three high beeps."
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
FOR_SOME_ROLES = [
    "--max-seq-len",
    "4096",
    "--max-images",
    "3",
    "--peer-timeout",
    "50",
    "--transfer-ttl",
    "50",
]


def assert_told(
    output: list[str],
    errors: str,
    *,
    file: Path | None = None,
    question: str,
    caption: str,
    noun: str = "picture",
    model: str = "demo",
) -> None:
    """The lines of a whole demo; the answer is the last one."""
    assert re.fullmatch(rf"ready: http://127\.0\.0\.1:\d+ model={model}", output[0])
    shown = Path(output[1].removeprefix(f"{noun}: "))
    assert shown == file if file else shown.is_file()
    assert output[2] == f"question: {question}"
    assert re.fullmatch(r"time to first token: \d+ ms", output[3])
    assert re.fullmatch(r"speed: \d+ tokens/s \(\d+ prompt tokens, \d+ generated\)", output[4])
    assert output[-1] == f"answer: {caption}"
    assert re.search(r"launch: ready \d+\.\d s after the start", errors)


def test_with_encode_workers_the_answer_is_the_last_line_whatever_flags_go_to_all_roles() -> None:
    done = demo("--topology", "epd_disagg", "--", *FOR_SOME_ROLES)
    assert done.returncode == 0, done.stderr
    assert_told(done.stdout.splitlines(), done.stderr, question="Describe the image", caption=CAPTION)


def test_a_sound_is_described_by_the_audio_model_and_its_waveform_shown() -> None:
    done = demo("--audio", "--topology", "disagg_e_pd", "--", *FOR_SOME_ROLES)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    asked = {"question": "Describe the sound", "caption": BEEPS, "noun": "sound", "model": "demo-audio"}
    assert_told(lines, done.stderr, **asked)
    with Image.open(lines[5].removeprefix("shown with its answer: ")) as picture:
        assert picture.size == (640, 272)


def test_prefill_and_decode_answer_another_question_about_another_picture(tmp_path: Path) -> None:
    picture, path = draw(7), tmp_path / "picture.png"
    picture.image.save(path)
    question = "Describe the picture."
    done = demo("--topology", "disagg", "--image", str(path), "--prompt", question, "--", *FOR_SOME_ROLES)
    assert done.returncode == 0, done.stderr
    assert_told(done.stdout.splitlines(), done.stderr, file=path, question=question, caption=picture.caption)


def test_a_model_that_the_frontend_cannot_use_ends_the_launch_with_the_frontends_own_reason(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, model)
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": 5}}')
    settings = {"ENGINE": "double", "MODEL_PATH": str(model), "DYN_HTTP_PORT": str(free_port())}
    done = run_script("agg.sh", DYNAMO_PYTHON=sys.executable, **settings)
    assert done.returncode == 1
    start = f"launch: the frontend cannot serve {model}, as it said 4 times: "
    (reason,) = [line.removeprefix(start) for line in done.stderr.splitlines() if line.startswith(start)]
    assert "tokenizer" in reason


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], str]]:
    """The lines and the errors of an aggregated demo that has answered and goes on serving."""
    output, errors = (tmp_path_factory.mktemp("kept") / name for name in ("output", "errors"))
    with open(output, "wb") as out, open(errors, "wb") as err:
        process = subprocess.Popen(
            [LAUNCH / "demo.sh", "--keep", "--", *FOR_SOME_ROLES],
            env=script_environment({"DYNAMO_PYTHON": sys.executable}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        wait_until(
            lambda: "answer: " in output.read_text() or process.poll() is not None, "the answer", DEADLINE_S
        )
        yield output.read_text().splitlines(), errors.read_text()
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_keep_goes_on_serving_and_prints_a_curl_line_that_works(kept: tuple[list[str], str]) -> None:
    lines, errors = kept
    assert_told(lines, errors, question="Describe the image", caption=CAPTION)
    words = shlex.split(lines[5].removeprefix("ask again: "))
    assert words[0] == "curl"
    command = [sys.executable, "-c", POST, words[1], words[-1]]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert CAPTION in asked.stdout


def test_a_file_that_is_no_picture_ends_in_one_sentence_and_a_failure(
    kept: tuple[list[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    path.write_text("no picture")
    url = kept[0][0].removeprefix("ready: ").removesuffix(" model=demo")
    command = [
        sys.executable,
        "-m",
        "dynamo.trtllm.demo.ask",
        "--url",
        url,
        "--model",
        "demo",
        "--image",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("ask: the frontend answered 400: ")
    assert "answer: " not in done.stdout


def test_a_question_that_fails_ends_the_demo_with_the_clients_status(start: Callable[..., Running]) -> None:
    running = start("demo.sh")
    assert running.wait() == 1
    (sentence,) = [line for line in running.errors.splitlines() if line.startswith("ask: ")]
    assert sentence.startswith("ask: the frontend answered 501: ")
    assert "answer: " not in running.output
    assert running.leftovers() == []


POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).read().decode())
"""


def test_options_that_cannot_work_are_refused_before_anything_is_set_up() -> None:
    for arguments, sentence in (
        (["--image", "/no/such/file"], "demo.sh: --image: there is no file /no/such/file"),
        (["--audio", "/no/such/file"], "demo.sh: --audio: there is no file /no/such/file"),
        (
            ["--topology", "ring"],
            "demo.sh: there is no topology ring: choose agg, disagg, disagg_e_pd or epd_disagg",
        ),
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
    model = [
        "dynamo.trtllm",
        "--model-path",
        "demo",
        "--engine",
        "transformers",
        "--served-model-name",
        "demo",
    ]
    assert starts[0] == ["dynamo.frontend", "--http-port", "18000", "--http-host", "127.0.0.1"]
    assert [words[: len(model)] for words in starts[1:4]] == [model] * 3
    client = ["dynamo.trtllm.demo.ask", "--url", "http://127.0.0.1:18000", "--model", "demo"]
    assert starts[4] == [*client, "--prompt", "what's this?"]
    assert f"PYTHONPATH={ROOT / 'components' / 'src'}" in commands[0]
