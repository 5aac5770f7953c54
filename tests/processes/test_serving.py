"""An aggregated worker with the double behind Dynamo's real frontend:
answers, errors, streams, metrics, signals."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

from processes.cluster import Cluster, Managed, wait_until

REFUSED: dict[str, Any] = {"guided_json": {}, "guided_whitespace_pattern": " "}
"""What the frontend takes and the worker refuses."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.frontend()
        yield cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Managed:
    worker = cluster.worker("--engine", "double", "--max-seq-len", "200000")
    cluster.wait_listed()
    return worker


def test_chat_and_completions_answer_with_usage(cluster: Cluster, worker: Managed) -> None:
    chat = cluster.chat("hi", max_tokens=5, ignore_eos=True)
    assert (chat.status, chat.finish_reason) == (200, "length")
    assert chat.text
    assert chat.usage["completion_tokens"] == 5
    assert chat.usage["total_tokens"] == chat.usage["prompt_tokens"] + 5
    plain = cluster.complete("hi", max_tokens=3, ignore_eos=True)
    assert (plain.status, plain.usage["completion_tokens"]) == (200, 3)


def test_a_streamed_answer_is_the_unary_one_and_ends_with_usage(cluster: Cluster, worker: Managed) -> None:
    unary = cluster.chat("hello there", max_tokens=20, ignore_eos=True)
    streamed = cluster.chat(
        "hello there", max_tokens=20, ignore_eos=True, stream=True, stream_options={"include_usage": True}
    )
    assert streamed.text == unary.text
    assert streamed.finish_reason == unary.finish_reason == "length"
    assert streamed.usage == unary.usage


def test_string_and_list_content_give_the_same_answer(cluster: Cluster, worker: Managed) -> None:
    as_string = cluster.chat("hi there", max_tokens=8)
    as_list = cluster.chat([{"type": "text", "text": "hi there"}], max_tokens=8)
    assert as_string.text == as_list.text
    assert as_string.usage == as_list.usage


def test_system_tool_and_null_contents_are_taken(cluster: Cluster, worker: Managed) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert cluster.chat(None, messages=messages, max_tokens=4).status == 200


def test_logprobs_come_one_per_token_with_their_alternatives(cluster: Cluster, worker: Managed) -> None:
    answer = cluster.chat("hi", max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=2)
    content = answer.body["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert [len(each["top_logprobs"]) for each in content] == [2] * 4
    assert content[0]["logprob"] == pytest.approx(-0.693147, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "must be greater than 0"),
        (REFUSED, "guided_whitespace_pattern is not supported"),
        ({"repetition_penalty": 0.0}, "Repetition penalty must be between 0 and 2"),
    ],
)
def test_what_cannot_be_served_is_a_400_twice_in_a_row(
    cluster: Cluster, worker: Managed, options: dict[str, object], words: str, stream: bool
) -> None:
    for _ in range(2):
        answer = cluster.chat("hi", stream=stream, **options)
        assert answer.status == 400
        assert words in answer.message


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_media_sent_to_a_text_worker_is_refused_in_words(
    cluster: Cluster, worker: Managed, kind: str
) -> None:
    answer = cluster.chat(
        [{"type": "text", "text": "hi"}, {"type": kind, kind: {"url": "https://example.com/x"}}]
    )
    assert answer.status == 400
    name = kind.removesuffix("_url")
    plural = {"audio": "audio"}.get(name, f"{name}s")
    assert answer.message == f"{name} 1: the model demo takes no {plural} on this worker; it takes text only"
    assert "example.com" not in answer.message


def test_a_long_prompt_is_refused_before_it_is_run(cluster: Cluster, worker: Managed) -> None:
    answer = cluster.complete("hello " * 400_000, max_tokens=4)
    assert answer.status == 400
    assert re.search(r"the prompt has \d{6,} tokens; the context length is 200000", answer.message)
    assert cluster.chat("hi", max_tokens=2).status == 200


def test_a_wrong_model_is_a_404(cluster: Cluster, worker: Managed) -> None:
    assert (
        cluster.post(
            "/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}
        ).status
        == 404
    )


def test_many_requests_at_once_each_get_their_own_answer(cluster: Cluster, worker: Managed) -> None:
    prompts = [f"question {i}" for i in range(64)]
    alone = [cluster.complete(p, max_tokens=12).text for p in prompts]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: cluster.complete(p, max_tokens=12).text, prompts))
    assert together == alone
    assert len(set(alone)) > 32


def open_stream(cluster: Cluster, tokens: int) -> socket.socket:
    """Ask for a long streamed answer over a raw socket with a small receive buffer, and read nothing."""
    body = json.dumps(
        {
            "model": cluster.model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", cluster.port))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_reads_nothing_does_not_hold_up_others(cluster: Cluster, worker: Managed) -> None:
    before = worker.metrics()
    with open_stream(cluster, 100_000):
        wait_until(
            lambda: (
                worker.metrics()["dynamo_trtllm_engine_output_tokens_total"]
                > before["dynamo_trtllm_engine_output_tokens_total"] + 3000
            ),
            "the unread stream's start",
        )
        for _ in range(200):
            assert cluster.chat("hi", max_tokens=5, timeout_s=5).status == 200
        assert worker.metrics()["dynamo_trtllm_inflight_requests"] == 1
    wait_until(
        lambda: worker.metrics()["dynamo_trtllm_inflight_requests"] == 0, "the end of the abandoned stream"
    )
    after = worker.metrics()
    key = "dynamo_trtllm_requests_total:cancelled"
    assert after[key] == before.get(key, 0) + 1
    assert after["dynamo_trtllm_engine_active_requests"] == 0


def test_metrics_count_requests_by_how_they_ended(cluster: Cluster, worker: Managed) -> None:
    before = worker.metrics()
    assert cluster.chat("hi", max_tokens=3).status == 200
    assert cluster.chat("hi", max_tokens=3, **REFUSED).status == 400
    after = worker.metrics()
    assert (
        after["dynamo_trtllm_requests_total:completed"]
        == before["dynamo_trtllm_requests_total:completed"] + 1
    )
    assert (
        after["dynamo_trtllm_requests_total:refused"]
        == before.get("dynamo_trtllm_requests_total:refused", 0) + 1
    )


def test_a_request_that_is_refused_or_left_has_one_line_in_the_log_and_no_traceback(
    cluster: Cluster, worker: Managed
) -> None:
    log = worker.text()
    assert [cluster.chat("hi", **REFUSED, stream=stream).status for stream in (False, True)] == [400, 400]
    key = "dynamo_trtllm_requests_total:cancelled"
    before = worker.metrics().get(key, 0)
    with open_stream(cluster, 100_000):
        wait_until(lambda: worker.metrics()["dynamo_trtllm_inflight_requests"] == 1, "the stream's start")
    wait_until(lambda: worker.metrics().get(key, 0) == before + 1, "the end of the abandoned stream")
    new = worker.text()[len(log) :]
    assert "Traceback" not in new
    assert "dynamo._core" not in new
    ours = re.findall(r"request (\S+) (refused|cancelled): (.+)", re.sub(r"\x1b\[[0-9;]*m", "", new))
    assert [outcome for _, outcome, _ in ours].count("cancelled") == 1
    assert ("cancelled", "the client went away") in [(outcome, reason.strip()) for _, outcome, reason in ours]
    refusals = [reason for _, outcome, reason in ours if outcome == "refused"]
    assert len(refusals) == 2
    assert all(reason.startswith("guided_whitespace_pattern is not") for reason in refusals)
    assert len({name for name, _, _ in ours}) == len(ours)


def test_the_pull_arm_serves_the_same_answers(cluster: Cluster, worker: Managed) -> None:
    pushed = cluster.chat("the same question", max_tokens=9)
    with Cluster() as other:
        other.frontend()
        other.worker("--engine", "double", env={"DYN_TRTLLM_PULL_EGRESS": "1"})
        other.wait_listed()
        pulled = other.chat("the same question", max_tokens=9)
        assert (pulled.text, pulled.usage) == (pushed.text, pushed.usage)
        assert other.chat("hi", **REFUSED).status == 400


def script(**values: object) -> list[str]:
    return ["--engine", "double", "--override-engine-args", json.dumps({"double": values})]


def test_sigterm_lets_a_running_request_finish_and_exits_zero() -> None:
    with Cluster() as cluster, ThreadPoolExecutor(1) as pool:
        cluster.frontend()
        worker = cluster.worker(*script(step_delay_s=0.05))
        cluster.wait_listed()
        running = pool.submit(cluster.chat, "hi", max_tokens=40, ignore_eos=True)
        wait_until(lambda: worker.metrics()["dynamo_trtllm_inflight_requests"] == 1, "the request's start")
        worker.signal(signal.SIGTERM)
        answer = running.result()
        assert (answer.status, answer.usage["completion_tokens"]) == (200, 40)
        assert worker.wait() == 0


def test_a_second_signal_exits_at_once() -> None:
    with Cluster() as cluster, ThreadPoolExecutor(1) as pool:
        cluster.frontend()
        worker = cluster.worker(
            *script(step_delay_s=30.0), env={"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "60"}
        )
        cluster.wait_listed()
        pending = pool.submit(cluster.chat, "hi", max_tokens=40, ignore_eos=True)
        wait_until(lambda: worker.metrics()["dynamo_trtllm_inflight_requests"] == 1, "the request's start")
        worker.signal(signal.SIGINT)
        wait_until(lambda: "unregistering endpoints" in worker.text(), "the first signal's handling")
        worker.signal(signal.SIGINT)
        assert worker.wait(10) == 70
        assert pending.result().status >= 500


def test_a_dead_engine_ends_the_request_with_a_503_and_the_process_with_an_error() -> None:
    with Cluster() as cluster:
        cluster.frontend()
        worker = cluster.worker(*script(die_at_token=3))
        cluster.wait_listed()
        answer = cluster.chat("hi", max_tokens=10, ignore_eos=True)
        assert answer.status == 503
        assert worker.wait() == 1
        assert "the engine is dead" in worker.text()


def test_one_failed_request_leaves_the_worker_serving() -> None:
    with Cluster() as cluster:
        cluster.frontend()
        worker = cluster.worker(*script(fail_at_token=5))
        cluster.wait_listed()
        assert cluster.chat("hi", max_tokens=10, ignore_eos=True).status == 500
        assert cluster.chat("hi", max_tokens=5, ignore_eos=True).status == 200
        assert worker.alive()
        assert worker.text().count("Traceback") == 1  # the fault's own


def test_a_failed_start_is_one_sentence_and_not_a_traceback() -> None:
    with Cluster() as cluster:
        worker = cluster.worker(*script(fail_start=True), wait=False)
        assert worker.wait() == 2
        assert "the double engine was told to fail at start" in worker.text()
        assert "Traceback" not in worker.text()


@pytest.mark.skipif(find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed here")
def test_a_missing_tensorrt_llm_is_one_sentence_before_any_model_is_fetched() -> None:
    command = [
        sys.executable,
        "-m",
        "dynamo.trtllm",
        "--engine",
        "tensorrt_llm",
        "--model-path",
        "no-such/model",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "dynamo.trtllm: TensorRT-LLM is not installed here: run `pip install 'dynamo-trtllm[trtllm]'` on "
        "a machine with an NVIDIA GPU, use NVIDIA's image, or choose the portable engine with `--engine "
        "transformers`\n"
    )


def test_the_health_canary_is_answered() -> None:
    with Cluster(env={"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_CANARY_WAIT_TIME": "1"}) as cluster:
        cluster.frontend()
        worker = cluster.worker("--engine", "double")
        wait_until(
            lambda: worker.metrics().get("dynamo_trtllm_requests_total:completed", 0) >= 1, "a canary request"
        )
        assert "dynamo_trtllm_requests_total:failed" not in worker.metrics()
