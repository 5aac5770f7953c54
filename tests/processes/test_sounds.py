"""The audio demo model, aggregated and with all stages apart: the same right answers, each sound opened by
one role."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from dynamo.trtllm.demo.audio.dialogues import count_answer
from dynamo.trtllm.demo.audio.sounds import FORMATS, draw_sound, sound_file
from processes.cluster import Cluster
from processes.media import image_server
from processes.outcomes import Outcome, outcome
from processes.topologies import deploy

AGGREGATED, APART = "agg", "epd_disagg"
OPENED = "dynamo_trtllm_media_opened_total"
OPTIONS = (
    *("--engine", "transformers", "--modality", "multimodal"),
    *("--model-path", "demo-audio", "--limit-mm-per-prompt", "audio=2"),
)
SEEDS = range(1, 9)
FILES = {
    f"/sound/{seed}{FORMATS[seed % 4]}": sound_file(draw_sound(seed), FORMATS[seed % 4]) for seed in SEEDS
}
CAPTIONS = [draw_sound(seed).caption for seed in SEEDS]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def sound(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def ask_all(cluster: Cluster, url: str) -> list[Outcome]:
    """Each sound by itself, the first two side by side, one in a data URL and streamed, and none."""
    urls = [url + path for path in FILES]
    data = f"data:audio/flac;base64,{base64.b64encode(sound_file(draw_sound(1), '.flac')).decode()}"
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    contents: list[list[dict[str, Any]]] = [[text("Describe the sound"), sound(each)] for each in urls]
    contents.append([sound(urls[0]), sound(urls[1]), text("Describe the sounds in order.")])
    answers = [cluster.chat(content, max_tokens=32) for content in contents]
    answers.append(cluster.chat([sound(data), text("How many beeps?")], max_tokens=32, **streamed))
    answers.append(cluster.chat("Describe the sound", max_tokens=40))
    return [outcome(answer) for answer in answers]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Outcome]]:
    found = {}
    for name in (AGGREGATED, APART):
        with (
            image_server() as server,
            Cluster(env={"DYN_MM_ALLOW_INTERNAL": "1"}, model="demo-audio") as cluster,
        ):
            server.pages |= FILES
            deployment = deploy(name, cluster, options=OPTIONS)
            found[name] = ask_all(cluster, server.url)
            assert server.hits == {path: 1 + (place < 2) for place, path in enumerate(FILES)}, name
            opened = {
                role: workers[0].metrics().get(OPENED, 0.0) for role, workers in deployment.workers.items()
            }
            assert opened.pop(deployment.roles[0]) == len(FILES), name
            assert set(opened.values()) <= {0.0}
            wrong = sound(server.image_url(1))
            refused = cluster.chat([wrong, text("Describe the sound")], max_tokens=4)
            assert refused.status == 400
            assert refused.message.startswith("audio 1: ")
    return found


def test_every_sound_is_described_rightly_whatever_its_format(answers: dict[str, list[Outcome]]) -> None:
    said = [answer.text for answer in answers[AGGREGATED]]
    assert said[:8] == CAPTIONS
    assert said[8] == " ".join(CAPTIONS[:2])
    assert said[9] == count_answer(draw_sound(1))
    assert said[10].startswith("i hear no sound.")
    assert {answer.finish for answer in answers[AGGREGATED]} == {"stop"}


def test_with_all_stages_apart_the_answers_and_their_tokens_are_the_same(
    answers: dict[str, list[Outcome]],
) -> None:
    assert answers[APART] == answers[AGGREGATED]
