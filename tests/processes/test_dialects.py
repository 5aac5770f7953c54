"""What README and --help say of clients' requests,
asked of Dynamo's real frontend in front of the portable engine."""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.utils.trtllm_utils import parse
from processes.cluster import Cluster, find_http, free_port, wait_until
from processes.media import png

README = (Path(__file__).parents[2] / "README.md").read_text()
IMAGE = draw(7)
ENCODED = base64.b64encode(png(IMAGE)).decode()
ADDRESS = f"data:image/png;base64,{ENCODED}"
QUESTION = "Describe the image"
CONTENT = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": ADDRESS}}]
UNKNOWN = ["verbosity", "safety_identifier", "prompt_cache_retention", "field_of_tomorrow"]
CAPTIONS = [draw(seed).caption for seed in range(5, 12)]
CAPTIONED = {
    "type": "object",
    "properties": {"caption": {"enum": CAPTIONS}},
    "required": ["caption"],
    "additionalProperties": False,
}
GRAMMAR = """root ::= "here: a " colour " " [a-z]+ " on a " colour " background."
colour ::= "red" | "cyan" | "purple" | "pink"
"""
AS_JSON = json.dumps({"caption": IMAGE.caption}, separators=(",", ":"))
TOOL = {"type": "function", "function": {"name": "file_under", "parameters": CAPTIONED}}
ECHO = (
    "echo is not supported: neither the prompt nor log probabilities of its tokens are given back; "
    "leave out echo and prompt_logprobs"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(env={"DYN_ENABLE_ANTHROPIC_API": "true"}) as cluster:
        cluster.frontend()
        cluster.worker("--engine", "transformers", "--modality", "multimodal", "--transfer-ttl", "50")
        cluster.wait_listed()
        yield cluster


@pytest.fixture(scope="module")
def lenient(cluster: Cluster) -> Cluster:
    """The same deployment by a second frontend, which lets unknown fields pass and has no Anthropic API."""
    other = copy.copy(cluster)
    other.port = free_port()
    command = [
        sys.executable,
        "-m",
        "dynamo.frontend",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(other.port),
    ]
    variables = {"DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS": "true", "DYN_ENABLE_ANTHROPIC_API": "false"}
    cluster.start("lenient", command, variables)
    wait_until(
        lambda: '"demo"' in (find_http(f"{other.url}/v1/models") or ""), "listing by the second frontend"
    )
    return other


def describe(cluster: Cluster, **options: Any) -> Any:
    return cluster.chat(CONTENT, max_tokens=32, temperature=0, **options)


def anthropic(source: dict[str, str]) -> dict[str, Any]:
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    return {"model": "demo", "max_tokens": 32, "messages": [{"role": "user", "content": content}]}


def test_a_worker_says_in_its_log_which_flag_it_ignores(cluster: Cluster) -> None:
    (worker,) = [process for process in cluster.processes if process.name == "worker"]
    note = "an aggregated worker without --encode-endpoint has no use for --transfer-ttl, so it is ignored"
    assert worker.text().count(note) == 1


def test_an_image_is_described_through_each_api(cluster: Cluster) -> None:
    assert describe(cluster).text == IMAGE.caption
    asked = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": ADDRESS}]
    answer = cluster.post(
        "/v1/responses", {"model": "demo", "input": [{"role": "user", "content": asked}], "temperature": 0}
    )
    assert answer.status == 200
    assert answer.body["output"][0]["content"][0]["text"] == IMAGE.caption
    messages = cluster.post(
        "/v1/messages", anthropic({"type": "base64", "media_type": "image/png", "data": ENCODED})
    )
    assert messages.status == 200
    assert messages.body["content"][0]["text"] == IMAGE.caption


def test_the_anthropic_api_is_there_only_when_asked_for_and_takes_no_addresses(
    cluster: Cluster, lenient: Cluster
) -> None:
    body = anthropic({"type": "base64", "media_type": "image/png", "data": ENCODED})
    assert lenient.post("/v1/messages", body).status == 404
    assert (
        cluster.post("/v1/messages", anthropic({"type": "url", "url": "http://127.0.0.1:1/x.png"})).status
        == 400
    )


@pytest.mark.parametrize("field", UNKNOWN)
def test_fields_that_the_frontend_does_not_know_pass_only_with_its_variable(
    field: str, cluster: Cluster, lenient: Cluster
) -> None:
    refused = describe(cluster, **{field: "low"})
    assert (refused.status, field in refused.message) == (400, True)
    taken = describe(lenient, **{field: "low"})
    assert (taken.status, taken.text) == (200, IMAGE.caption)


@pytest.mark.parametrize("field", ["tools", "stop"])
def test_empty_lists_of_tools_and_stop_strings_are_refused_with_the_variable_too(
    field: str, cluster: Cluster, lenient: Cluster
) -> None:
    assert [describe(frontend, **{field: []}).status for frontend in (cluster, lenient)] == [400, 400]


def test_logit_bias_and_suffix_change_nothing(cluster: Cluster) -> None:
    assert describe(cluster, logit_bias={"300": 100}).text == IMAGE.caption
    plain = cluster.complete("hello", max_tokens=5, temperature=0)
    assert cluster.complete("hello", max_tokens=5, temperature=0, suffix="bye").text == plain.text
    assert cluster.complete("hello", max_tokens=5, temperature=0, logit_bias={"300": 100}).text == plain.text


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}, {"logprobs": 2}, {"stream": True}])
def test_echo_is_refused_in_those_words(options: dict[str, Any], cluster: Cluster) -> None:
    refused = cluster.complete("hello", max_tokens=5, echo=True, **options)
    assert (refused.status, refused.message) == (400, ECHO)
    assert cluster.complete("hello", max_tokens=5, echo=False).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CAPTIONED}}},
            AS_JSON,
        ),
        ({"response_format": {"type": "json_object"}}, "{}"),
        ({"response_format": {"type": "text"}}, IMAGE.caption),
        ({"guided_choice": CAPTIONS}, IMAGE.caption),
        ({"guided_regex": "it shows (a red|a cyan) [a-z ]+[.]"}, f"it shows {IMAGE.caption}"),
        ({"guided_grammar": GRAMMAR}, f"here: {IMAGE.caption}"),
        ({"guided_json": CAPTIONED}, AS_JSON),
        ({"tools": [TOOL], "tool_choice": "auto"}, IMAGE.caption),
        ({"tools": [TOOL], "tool_choice": "none"}, IMAGE.caption),
    ],
)
def test_an_answer_about_an_image_follows_the_form_that_was_asked_for(
    options: dict[str, Any], expected: str, stream: bool, cluster: Cluster
) -> None:
    answer = describe(cluster, stream=stream, **options)
    assert (answer.status, answer.text, answer.finish_reason) == (200, expected, "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "file_under"}}])
def test_a_forced_tool_is_called_with_what_the_image_shows(choice: Any, cluster: Cluster) -> None:
    answer = cluster.chat(CONTENT, max_tokens=200, temperature=0, tools=[TOOL], tool_choice=choice)
    calls = answer.body["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"file_under"}
    assert json.loads(calls[0]["function"]["arguments"]) == {"caption": IMAGE.caption}


def test_a_form_that_cannot_be_followed_is_refused_in_our_words(cluster: Cluster) -> None:
    refused = describe(cluster, guided_json={"type": "array", "uniqueItems": True})
    words = "guided decoding: the JSON schema uses what is not supported: uniqueItems"
    assert (refused.status, refused.message) == (400, words)


def test_readme_and_help_name_each_of_these(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    names = [
        "/v1/messages",
        "DYN_ENABLE_ANTHROPIC_API=true",
        "/v1/responses",
        "verbosity",
        "safety_identifier",
        "tools: []",
    ]
    names += [
        "stop: []",
        "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS=true",
        "logit_bias",
        "suffix",
        "echo",
        "response_format",
    ]
    for name in names:
        assert name in README, name
        assert name in told, name
