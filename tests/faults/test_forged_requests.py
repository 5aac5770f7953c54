"""Requests that no frontend would send, over the request plane beside sound ones:
whatever they hold, only they fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from processes.cluster import Cluster, Managed
from processes.plane import ask_endpoint

ENDPOINT = "dynamo.tensorrt_llm.generate"
PROMPT = [506, 84, 82, 346, 198, 100, 200]
SAMPLED = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2, "top_k": 50}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Managed:
    return cluster.worker("--engine", "transformers", "--modality", "multimodal")


def request(token_ids: Any = PROMPT, **groups: Any) -> dict[str, Any]:
    stop = {"max_tokens": 24, "ignore_eos": True, **groups.pop("stop_conditions", {})}
    return {"model": "demo", "token_ids": token_ids, "stop_conditions": stop, **groups}


def sampled(**options: Any) -> dict[str, Any]:
    return request(sampling_options={**SAMPLED, **options})


FORGED: list[tuple[Any, str]] = [
    (sampled(top_k=1e30), "top_k must be between"),
    (sampled(top_k=2**63), "top_k must be between"),
    (sampled(top_k=1.5), "top_k must be a whole number"),
    (sampled(seed=1e300), "seed must be between"),
    (sampled(temperature=1e300), "temperature must be between"),
    (sampled(temperature="hot"), "temperature must be a number"),
    (sampled(repetition_penalty=[1]), "repetition_penalty must be a number"),
    (request([506, 84.5, 82], sampling_options={"presence_penalty": 0.5}), "token_ids must hold token ids"),
    (request([506, 84.0, 82], sampling_options={"frequency_penalty": 0.5}), "token_ids must hold token ids"),
    (request([506, -1]), "token_ids must hold token ids"),
    (request([506, True]), "token_ids must hold token ids"),
    (request([506, 2**40]), "token_ids must hold token ids"),
    (request([506, 2**31]), "token id 2147483648 is not in the model's vocabulary"),
    (request([506, 100_000]), "token id 100000 is not in the model's vocabulary"),
    (request([]), "the prompt is empty"),
    (request(stop_conditions={"stop_token_ids": [1.5]}), "stop_token_ids must hold token ids"),
    (request(stop_conditions={"stop": 5}), "stop must be a list"),
    (request(stop_conditions={"min_tokens": "3"}), "min_tokens must be a whole number"),
    (request(eos_token_ids=[[2]]), "eos_token_ids must hold token ids"),
    (request(output_options={"logprobs": 1e9}), "logprobs must be between 0 and 100"),
    (request(multi_modal_data={"image_url": 5}), "image_url must be a list"),
    (request(extra_args={"messages": [{"content": [{"type": ["text"]}]}]}), "message 1, part 1"),
    (request(prefill_result={"disaggregated_params": "x"}), "disaggregated_params must be an object"),
    ([1, 2, 3], "the request must be an object"),
    ("prompt", "the request must be an object"),
]


def test_forged_requests_are_refused_in_words_and_the_others_of_their_steps_go_on(
    cluster: Cluster, worker: Managed
) -> None:
    sound = [request(), sampled(), sampled(seed=8, top_p=0.9), request(output_options={"logprobs": 3})]
    alone = ask_endpoint(cluster, ENDPOINT, sound)
    mixed = [*sound, *(each for each, _ in FORGED), *sound]
    outcomes = ask_endpoint(cluster, ENDPOINT, mixed)
    assert [each.status for each in alone] == ["ok"] * len(sound)
    assert [len(each.token_ids) for each in alone] == [24] * len(sound)
    assert outcomes[: len(sound)] == outcomes[-len(sound) :] == alone
    for (forged, words), outcome in zip(FORGED, outcomes[len(sound) :], strict=False):
        assert outcome.status == "InvalidArgument", (forged, outcome)
        assert words in outcome.words, (forged, outcome)
    assert worker.metrics()["dynamo_trtllm_requests_total:refused"] == len(FORGED)
    assert "dynamo_trtllm_requests_total:failed" not in worker.metrics()
    assert "Traceback" not in worker.text()
