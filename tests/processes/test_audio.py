"""Sounds in every topology, over real frontends, with the demo model that hears."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.demo.audio.sounds import draw_sound, sound_file
from media.sounds import tone, wav
from processes.cluster import Answer, Cluster
from processes.media import ImageServer, image_server
from processes.outcomes import Outcome, outcome, require_the_same
from processes.topologies import TOPOLOGIES, Deployment, deploy

QUESTION = "What do you hear?"
EACH = "Describe the sounds in order."
OTHER_FORMATS = {".mp3": 6, ".ogg": 8, ".flac": 20}
OPENED = "dynamo_trtllm_media_opened"
ALONE = (
    "the prompt has 1 audio placeholders for 0 audio parts; "
    "the text must not contain the model's placeholder; without other media beside it "
    "no worker gets input_audio: send it as audio_url, with a data URL"
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def sound(url: str, **more: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}, **more}


def spoken(seed: int) -> dict[str, Any]:
    """OpenAI's own form of a sound."""
    return {"type": "input_audio", "input_audio": {"data": inline(seed), "format": "wav"}}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def file_of(seed: int, suffix: str = ".wav") -> bytes:
    """A sound of the demo's, half a second to four seconds long."""
    return sound_file(draw_sound(seed), suffix)


def captions(*seeds: int) -> str:
    """What the demo model says of these sounds."""
    return " ".join(draw_sound(seed).caption for seed in seeds)


def inline(seed: int) -> str:
    return base64.b64encode(file_of(seed)).decode()


def served(server: ImageServer, seed: int) -> dict[str, Any]:
    """The sound of `seed` on `server`."""
    server.pages.setdefault(f"/{seed}.wav", file_of(seed))
    return sound(f"{server.url}/{seed}.wav")


def requests(server: ImageServer, directory: Path) -> list[dict[str, Any]]:
    def ask(*content: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {"messages": [user(*content)], "max_tokens": 16, **options}

    (directory / "50.wav").write_bytes(file_of(50))
    server.pages |= {f"/{seed}{suffix}": file_of(seed, suffix) for suffix, seed in OTHER_FORMATS.items()}
    others = [sound(f"{server.url}/{seed}{suffix}") for suffix, seed in OTHER_FORMATS.items()]
    a, b, c = (served(server, seed) for seed in (1, 2, 5))
    turns = [
        user(a, text(QUESTION)),
        {"role": "assistant", "content": captions(1)},
        user(text("And this?"), b),
    ]
    system = [{"role": "system", "content": "Be brief."}, user(c)]
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    made = [ask(text("Hello.")), ask(a, text(QUESTION)), ask(text(QUESTION), a), ask(a, b, text(EACH))]
    made += [ask(a, a, text("The same?")), ask(a, text("then"), b, text("then"), c)]
    made += [ask(each, text(QUESTION)) for each in others]
    made += [ask(sound(f"data:audio/wav;base64,{inline(seed)}"), text(QUESTION)) for seed in (1, 4)]
    made += [ask(sound((directory / "50.wav").as_uri()), text(QUESTION))]
    made += [{"messages": each, "max_tokens": 16} for each in (turns, system)]
    made += [ask(b, each, text(EACH)) for each in (spoken(4), sound(f"data:audio/wav;base64,{inline(4)}"))]
    made += [ask(spoken(4), b, spoken(5), text(EACH))]
    made += [ask(served(server, 6 + seed), text(QUESTION), seed=seed, **sampled) for seed in range(3)]
    made += [ask(c, text(QUESTION), logprobs=True, top_logprobs=3), ask(c, text(QUESTION), max_tokens=1)]
    return made


def run(cluster: Cluster, asked: list[dict[str, Any]]) -> list[tuple[Outcome, Outcome]]:
    """Every request unary and streamed, four at a time."""

    def one(body: dict[str, Any]) -> tuple[Outcome, Outcome]:
        streamed = cluster.chat(None, **body, stream=True, stream_options={"include_usage": True})
        return outcome(cluster.chat(None, **body)), outcome(streamed)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, asked))


def check_who_opens(cluster: Cluster, server: ImageServer, deployment: Deployment) -> None:
    """A sound is fetched once, however often a request holds it, and opened by encode workers alone where
    there are some.
    """
    server.hits.clear()
    first, second = served(server, 20), served(server, 21)
    assert cluster.chat([first, second, first, text(QUESTION)], max_tokens=2).status == 200
    assert server.hits == {"/20.wav": 1, "/21.wav": 1}
    opened = {
        role: [
            sample.value
            for worker in workers
            for sample in (worker.families()[OPENED].samples if OPENED in worker.families() else ())
            if sample.labels["kind"] == "audio"
        ]
        for role, workers in deployment.workers.items()
    }
    assert sum(opened.pop(deployment.roles[0])) >= 2
    assert {count for counts in opened.values() for count in counts} <= {0.0}


def check_names(cluster: Cluster, server: ImageServer) -> None:
    """A name never lets one sound answer for another."""

    def ask(part: dict[str, Any], **options: Any) -> Answer:
        return cluster.chat([{**part, "uuid": "mine"}, text(QUESTION)], max_tokens=12, **options)

    texts = [ask(served(server, seed), cache_salt="ours").text for seed in (22, 23, 22)]
    assert texts == [captions(22), captions(23), captions(22)]
    same = cluster.chat([sound(f"data:audio/wav;base64,{inline(23)}"), text(QUESTION)], max_tokens=12)
    assert same.text == texts[1]


def refusals(server: ImageServer) -> list[tuple[list[dict[str, Any]], dict[str, Any], str]]:
    """What is asked, with which options, and how the refusal begins."""
    server.pages["/long.wav"] = wav(tone(5.0))
    server.pages["/short.wav"] = wav(tone(0.01))
    server.pages["/cut.wav"] = file_of(32)[:-4000]
    one, image = served(server, 1), {"type": "image_url", "image_url": {"url": server.image_url(1)}}
    video = {"type": "video_url", "video_url": {"url": server.image_url(1)}}
    only = "on this worker; it takes audio only"
    accepted = "accepted are WAV, FLAC, MP3, Ogg (Vorbis, Opus)"
    broken = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    known = "mm_processor_kwargs: sampling_rate is not known; this model knows no such keys"
    return [
        (
            [sound(f"{server.url}/long.wav")],
            {},
            "audio 1: the sound takes 5.0 s; this worker takes at most 4 s",
        ),
        ([one, sound(f"{server.url}/short.wav")], {}, "audio 2: the sound is too short: this model hears"),
        ([sound(f"{server.url}/cut.wav")], {}, "audio 1: the sound is cut short"),
        ([sound(f"{server.url}/missing.wav")], {}, "audio 1: "),
        ([sound(server.image_url(1))], {}, f"audio 1: the type PNG is not accepted as a sound; {accepted}"),
        ([one, broken], {}, f"audio 2: not a sound of a known type; {accepted}"),
        ([one, image], {}, f"image 1: the model demo takes no images {only}"),
        ([video], {}, f"video 1: the model demo takes no videos {only}"),
        ([one], {"mm_processor_kwargs": {"sampling_rate": 16000}}, known),
        ([one, text("What is <|AUDIO|>?")], {}, "the prompt has 2 audio placeholders for 1 audio parts"),
        (
            [served(server, 40 + at) for at in range(5)],
            {},
            "the request holds 5 audio; this worker takes at most 4",
        ),
        ([spoken(1)], {}, ALONE),
    ]


def check_refusals(cluster: Cluster, server: ImageServer) -> None:
    """In words that name the part, and the worker serves on."""
    for content, options, words in refusals(server):
        for stream in (False, True):
            answer = cluster.chat([*content, text(QUESTION)], max_tokens=4, stream=stream, **options)
            assert (answer.status, answer.message[: len(words)]) == (400, words)
    assert not [path for path in server.hits if path in {f"/{seed}.wav" for seed in range(40, 45)}]
    assert cluster.chat([served(server, 1), text(QUESTION)], max_tokens=2).status == 200


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """The outcomes of all requests by topology; also checks who opens what, and what is refused."""
    directory = tmp_path_factory.mktemp("sounds")
    env = {"DYN_MM_ALLOW_INTERNAL": "1", "ALLOWED_LOCAL_MEDIA_PATH": str(directory)}
    options = ("--engine", "transformers", "--modality", "multimodal", "--limit-mm-per-prompt", "audio=4")
    found: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for name in TOPOLOGIES:
        with image_server() as server, Cluster(env=env) as cluster:
            deployment = deploy(name, cluster, options=options, model_path="demo-audio")
            found[name] = run(cluster, requests(server, directory))
            check_who_opens(cluster, server, deployment)
            check_names(cluster, server)
            check_refusals(cluster, server)
    return found


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "agg"])
def test_every_topology_gives_what_the_aggregated_worker_gives(
    answers: dict[str, list[tuple[Outcome, Outcome]]], name: str
) -> None:
    require_the_same(answers[name], answers["agg"])


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_streamed_answers_are_the_unary_ones(
    answers: dict[str, list[tuple[Outcome, Outcome]]], name: str
) -> None:
    for unary, streamed in answers[name]:
        assert (streamed.text, streamed.finish, streamed.usage) == (unary.text, unary.finish, unary.usage)


def test_every_sound_is_described_rightly_in_every_form_of_a_part(
    answers: dict[str, list[tuple[Outcome, Outcome]]],
) -> None:
    texts = [unary.text for unary, _ in answers["agg"]]
    assert texts[0].startswith("hello.")
    assert texts[1:6] == [captions(1), captions(1), captions(1, 2), captions(1, 1), captions(1, 2, 5)]
    assert texts[6:9] == [captions(seed) for seed in OTHER_FORMATS.values()]
    assert texts[9:12] == [captions(1), captions(4), captions(50)]
    assert texts[13] == captions(5)
    assert texts[14:17] == [captions(2, 4), captions(2, 4), captions(4, 2, 5)]
