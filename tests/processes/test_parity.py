"""The same requests in every topology: tokens, finish reasons,
log probabilities and usage must not differ."""

from __future__ import annotations

import base64
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.config import Role
from dynamo.trtllm.demo.clips import draw_clip, write_mp4
from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.metrics import METRICS, STAGE_DURATION
from dynamo.trtllm.multimodal.uuids import PREPARED_OTHERWISE, UNKNOWN
from processes.cluster import Answer, Cluster
from processes.media import ImageServer, image_server, png
from processes.outcomes import Outcome, outcome, require_the_same
from processes.prefork import run_python
from processes.topologies import TOPOLOGIES, Deployment, deploy

QUESTION = "what is in the picture?"
EMBEDDED_SEED = 77
CLIPS = (2, 3, 4)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": content[0] if len(content) == 1 and isinstance(content[0], str) else list(content),
    }


def video(server: ImageServer, seed: int) -> dict[str, Any]:
    """A clip of the demo's, served by `server`."""
    path = f"/clip/{seed}.mp4"
    if path not in server.pages:
        server.pages[path] = clip_file(seed)
    return {"type": "video_url", "video_url": {"url": server.url + path}}


@cache
def clip_file(seed: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        write_mp4(draw_clip(seed, (112, 84)), file)
        return file.read_bytes()


def requests(server: ImageServer, embeddings: str) -> list[dict[str, Any]]:
    """Some fifty requests that differ in everything that could be lost
    on the way from one worker to the next."""

    def url(seed: int) -> dict[str, Any]:
        return picture(server.image_url(seed))

    def ask(*content: Any, **options: Any) -> dict[str, Any]:
        return {"messages": [user(*content)], "max_tokens": 32, **options}

    file = picture(embeddings)
    turns = [
        user(url(40), text(QUESTION)),
        {"role": "assistant", "content": "a shape."},
        user(text("and this one?"), url(41)),
    ]
    later = [
        user(url(42), text(QUESTION)),
        {"role": "assistant", "content": "a shape."},
        user("what colour is the background?"),
    ]
    system = [{"role": "system", "content": "answer briefly"}, user(text(QUESTION), url(43))]
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    made = [ask(text(QUESTION), url(seed)) for seed in range(12)]
    made += [
        ask(url(seed), text("describe the pictures in order"), url(seed + 1)) for seed in range(12, 18, 2)
    ]
    made += [
        ask(url(seed), url(seed + 1), url(seed + 2), text("describe the pictures in order"))
        for seed in range(20, 29, 3)
    ]
    made += [ask(text("first"), url(30), text("second"), url(31), text("what do you see?"))]
    made += [ask(url(32)), ask(url(33), url(33), text("are they the same?"))]
    made += [ask(words) for words in ("hello", "what can you do?", "tell me about shapes", "a red circle")]
    made += [ask(text(QUESTION), file), ask(url(34), file, text(QUESTION)), ask(file, file, text(QUESTION))]
    made += [{"messages": each, "max_tokens": 32} for each in (turns, later, system)]
    made += [ask(text(QUESTION), url(44 + seed), seed=seed, **sampled) for seed in range(3)]
    made += [
        ask(
            "hello",
            seed=9,
            temperature=1.3,
            frequency_penalty=0.5,
            presence_penalty=0.4,
            repetition_penalty=1.2,
        )
    ]
    made += [ask(text(QUESTION), url(47), seed=5, temperature=1.1, min_p=0.02, top_k=20)]
    made += [
        ask(text(QUESTION), url(48), logprobs=True, top_logprobs=5),
        ask("hello", logprobs=True, top_logprobs=0),
    ]
    made += [ask(text(QUESTION), url(49), logprobs=True, top_logprobs=2, seed=3, **sampled)]
    made += [
        ask(text(QUESTION), url(50), max_tokens=1),
        ask("hello", max_tokens=1, logprobs=True, top_logprobs=1),
    ]
    made += [ask(text(QUESTION), url(51), stop=["on"]), ask(text(QUESTION), url(52), min_tokens=20)]
    made += [
        ask(text(QUESTION), url(53), max_tokens=200, ignore_eos=True),
        ask("hello", max_tokens=300, ignore_eos=True),
    ]
    made += [ask(text("what shape is it?"), url(54)), ask(text("what colour is the shape?"), url(55))]
    captions = [draw(seed).caption for seed in range(58, 62)]
    seen = {"properties": {"seen": {"enum": captions}}, "required": ["seen"]}
    schema = {"type": "object", "additionalProperties": False, **seen}
    made += [
        ask(text(QUESTION), url(58), guided_json=schema),
        ask(text(QUESTION), url(59), guided_choice=captions),
    ]
    made += [ask(text(QUESTION), url(60), guided_regex="I see [a-z ]{5,40}[.]", seed=1, **sampled)]
    made += [ask(video(server, seed), text("what happens?")) for seed in CLIPS]
    made += [
        ask(url(61), video(server, 1), text("describe them in order"), mm_processor_kwargs={"num_frames": 4})
    ]
    made += [ask(text("what is the background?"), url(56), repetition_penalty=1.1)]
    made += [
        ask(text(QUESTION), url(63), mm_processor_kwargs=each)
        for each in ({"max_pixels": 3136}, {"min_pixels": 78400})
    ]
    made += [ask(text(QUESTION), url(57), stop_token_ids="first"), ask("hello", stop_token_ids="first")]
    return made


def first_token(cluster: Cluster, body: dict[str, Any]) -> int:
    """The id of the token that the request begins with."""
    answer = cluster.chat(
        None, **{**body, "stop_token_ids": None, "logprobs": True, "top_logprobs": 0, "max_tokens": 2}
    )
    return int(answer.body["choices"][0]["logprobs"]["content"][0]["token_id"])


def run(cluster: Cluster, asked: list[dict[str, Any]]) -> list[tuple[Outcome, Outcome]]:
    """Every request unary and streamed, eight at a time."""

    def one(body: dict[str, Any]) -> tuple[Outcome, Outcome]:
        body = dict(body)
        if body.get("stop_token_ids") == "first":
            body["stop_token_ids"] = [first_token(cluster, body)]
        unary = cluster.chat(None, **body)
        streamed = cluster.chat(None, **body, stream=True, stream_options={"include_usage": True})
        return outcome(unary), outcome(streamed)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


def check_stop_strings(cluster: Cluster, deployment: Deployment, content: list[Any]) -> None:
    """An answer that ends at a stop string is complete:
    its usage, wherever it is said, its count, and a log without a word."""
    worker = deployment.workers[deployment.roles[-1]][0]
    before, log = worker.metrics(), worker.text()
    running = {"include_usage": True, "continuous_usage_stats": True}
    whole = cluster.chat(content, max_tokens=32)
    word = whole.text.split()[2]
    stopped = cluster.chat(content, max_tokens=32, stop=["nowhere", word])
    streamed = cluster.chat(content, max_tokens=32, stop=[word], stream=True, stream_options=running)
    assert (stopped.text, stopped.finish_reason) == (whole.text.partition(word)[0], "stop")
    assert (streamed.text, streamed.finish_reason) == (stopped.text, stopped.finish_reason)
    assert stopped.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
    assert stopped.usage["prompt_tokens_details"] == whole.usage["prompt_tokens_details"]
    assert streamed.usage == stopped.usage
    said = [event["usage"] for event in streamed.events if event.get("usage")]
    assert [usage["prompt_tokens"] for usage in said] == [whole.usage["prompt_tokens"]] * len(said)
    assert [usage["completion_tokens"] for usage in said] == [
        *range(1, len(said)),
        stopped.usage["completion_tokens"],
    ]
    messages = cluster.post("/v1/messages", anthropic(word))
    assert (messages.body["stop_reason"], messages.body["stop_sequence"]) == ("stop_sequence", word)
    assert messages.body["usage"]["input_tokens"] == whole.usage["prompt_tokens"]
    deltas = [
        e["usage"]
        for e in cluster.post("/v1/messages", {**anthropic(word), "stream": True}).events
        if e.get("usage")
    ]
    assert {usage["input_tokens"] for usage in deltas} == {whole.usage["prompt_tokens"]}
    after = worker.metrics()
    ended = {
        key: after[key] - before.get(key, 0)
        for key in after
        if "requests_total:" in key and after[key] != before.get(key)
    }
    assert ended == {"dynamo_trtllm_requests_total:completed": 5}
    new = worker.text()[len(log) :]
    assert not [word for word in ("Traceback", "cancel", "WARN", "ERROR") if word in new], new


def check_uuids(cluster: Cluster, server: ImageServer) -> None:
    """A uuid alone stands for the content that came with it last, for its tenant, and fetches nothing."""

    def ask(part: dict[str, Any], **options: Any) -> Answer:
        return cluster.chat([{**part, "uuid": "mine"}, text(QUESTION)], max_tokens=32, **options)

    alone, tenant = {"type": "image_url"}, {"cache_salt": "ours"}
    server.hits.clear()
    for seed in (95, 96):
        sent = ask(picture(server.image_url(seed)), **tenant)
        again = ask(alone, **tenant, stream=True, stream_options={"include_usage": True})
        assert (again.text, again.usage) == (sent.text, sent.usage)
        assert (
            sent.text == cluster.chat([picture(server.image_url(seed)), text(QUESTION)], max_tokens=32).text
        )
        assert sent.usage["prompt_tokens"] > 20
    assert server.hits == {"/picture/95.png": 2, "/picture/96.png": 2}
    smaller = {**tenant, "mm_processor_kwargs": {"max_pixels": 3136}}
    for other, words in (({}, UNKNOWN), ({"cache_salt": "theirs"}, UNKNOWN), (smaller, PREPARED_OTHERWISE)):
        refused = ask(alone, **other)
        assert (refused.status, refused.message) == (400, f"image 1: {words}")


def choices_of(answer: Answer) -> list[tuple[str, str]]:
    """Text and finish reason of each choice, in order."""
    if not answer.events:
        return [(each["message"]["content"], each["finish_reason"]) for each in answer.body["choices"]]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for each in (choice for event in answer.events for choice in event.get("choices", ())):
        texts[each["index"]] = texts.get(each["index"], "") + (each["delta"].get("content") or "")
        ends |= {each["index"]: each["finish_reason"]} if each.get("finish_reason") else {}
    return [(texts[index], ends[index]) for index in sorted(texts)]


def check_clips(cluster: Cluster, server: ImageServer, deployment: Deployment) -> None:
    """A clip is fetched once, and opened by encode workers where there are some;
    one that is none is named."""
    server.hits.clear()
    asked = cluster.chat([video(server, 9), text("what happens?")], max_tokens=24)
    assert (asked.status, server.hits) == (200, {"/clip/9.mp4": 1})
    opened = {
        role: workers[0].metrics().get("dynamo_trtllm_media_opened_total", 0.0)
        for role, workers in deployment.workers.items()
    }
    reader = deployment.roles[0]
    assert opened.pop(reader) > 0
    assert set(opened.values()) <= {0.0}
    broken = {"type": "video_url", "video_url": {"url": server.image_url(1)}}
    refused = cluster.chat([broken, text("what happens?")], max_tokens=4)
    words = "video 1: this is an image (PNG), not a video; send it as image_url"
    assert (refused.status, refused.message) == (400, words)


def check_choices(cluster: Cluster, server: ImageServer) -> None:
    """With n, choice i is the answer to the request with `seed + i`;
    the image is fetched once, and one token is no answer."""
    content = [picture(server.image_url(95)), text(QUESTION)]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.6, "stop": ["on"]}
    singles = [choices_of(cluster.chat(content, seed=70 + index, **options))[0] for index in range(4)]
    server.hits.clear()
    content[0] = picture(server.image_url(95) + "?again")
    together = cluster.chat(content, seed=70, n=4, **options)
    assert choices_of(together) == singles
    assert sum(server.hits.values()) == 1
    streamed = cluster.chat(
        content, seed=70, n=4, stream=True, stream_options={"include_usage": True}, **options
    )
    assert choices_of(streamed) == singles
    assert streamed.usage == {
        **together.usage,
        "prompt_tokens_details": streamed.usage.get("prompt_tokens_details"),
    }
    short = cluster.chat(content, seed=70, n=3, max_tokens=1, temperature=1.6)
    assert [end for _, end in choices_of(short)] == ["length"] * 3


ONLY_TENSORRT_LLM = {
    "dynamo_trtllm_engine_kv_events_total",
    "dynamo_trtllm_engine_iteration_seconds",
    "dynamo_trtllm_engine_gpu_memory_bytes",
    "dynamo_component_kv_cache_hit_rate",
}
ASKING_ENCODERS = {"dynamo_trtllm_encode_retries_total", "dynamo_trtllm_inflight_encode_calls"}
DECODING = {"dynamo_trtllm_media_opened_total", "dynamo_trtllm_media_decoding_images"}
LOCAL_STAGES = {"fetch", "media_decode", "encode"}
REMOTE_STAGES = {"remote_encode", "embedding_handover"}
STAGES_OF = {
    "agg": {"queue", "prepare", "prefill"},
    "prefill": {"queue", "prepare", "prefill", "kv_handover", "reply"},
    "decode": {"queue", "prepare", "kv_handover", "reply"},
    "encode": {"queue", "prepare", "embedding_handover", "reply", *LOCAL_STAGES},
}


def check_metrics(deployment: Deployment) -> None:
    """Each worker shows the metrics that its role and its place in the topology have, and no other."""
    apart = "encode" in deployment.roles
    for role, workers in deployment.workers.items():
        declared = {metric.name for metric in METRICS if Role(role) in metric.roles}
        absent = ONLY_TENSORRT_LLM | (
            DECODING if apart and role != "encode" else set() if apart else ASKING_ENCODERS
        )
        if role == "agg" and not apart:
            absent |= {name for name in declared if name.startswith("dynamo_trtllm_transfer_")}
        expected = STAGES_OF[role] | (
            (REMOTE_STAGES if apart else LOCAL_STAGES) if role in ("agg", "prefill") else set()
        )
        for worker in workers:
            families = worker.families()
            shown = {
                name
                for name in (metric.name for metric in METRICS)
                if name.removesuffix("_total") in families
            }
            assert shown == declared - absent, (deployment.name, role)
            samples = families[STAGE_DURATION.name].samples
            assert {s.labels["role"] for s in samples} == {role}
            completed = {s.labels["stage"] for s in samples if s.labels["outcome"] == "completed"}
            assert completed == expected, (deployment.name, role)


def anthropic(stop: str) -> dict[str, Any]:
    """The same question in Anthropic's words."""
    data = base64.b64encode(png(draw(EMBEDDED_SEED))).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    content = [image, {"type": "text", "text": QUESTION}]
    return {
        "model": "demo",
        "max_tokens": 32,
        "stop_sequences": [stop],
        "messages": [{"role": "user", "content": content}],
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def embeddings(directory: Path) -> str:
    """URL of an embedding file that the shipped command made of an image."""
    source, file = directory / "picture.png", directory / "picture.pt"
    source.write_bytes(png(draw(EMBEDDED_SEED)))
    words = ("-m", "dynamo.trtllm.embeddings", str(source), "-o", str(file))
    run_python(*words, "--model-path", "demo", "--engine", "transformers")
    return file.as_uri()


@pytest.fixture(scope="module")
def answers(directory: Path, embeddings: str) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """The outcomes of all requests by topology; also checks who fetched what."""
    found: dict[str, list[tuple[Outcome, Outcome]]] = {}
    env = {
        "DYN_MM_ALLOW_INTERNAL": "1",
        "DYN_ENABLE_ANTHROPIC_API": "true",
        "ALLOWED_LOCAL_MEDIA_PATH": str(directory),
    }
    for name in TOPOLOGIES:
        with image_server() as server, Cluster(env=env) as cluster:
            deployment = deploy(name, cluster)
            asked = requests(server, embeddings)
            found[name] = run(cluster, asked)
            server.hits.clear()
            images = [picture(server.image_url(seed)) for seed in (90, 91, 90, 90)]
            same = cluster.chat([*images, text(QUESTION)], max_tokens=4)
            assert same.status == 200
            assert server.hits == {"/picture/90.png": 1, "/picture/91.png": 1}, name
            imaged = cluster.chat(
                [picture(server.image_url(EMBEDDED_SEED)), text(QUESTION)], max_tokens=32
            )
            embedded = cluster.chat([picture(embeddings), text(QUESTION)], max_tokens=32)
            assert embedded.text == imaged.text
            check_uuids(cluster, server)
            check_stop_strings(
                cluster, deployment, [picture(server.image_url(EMBEDDED_SEED)), text(QUESTION)]
            )
            check_choices(cluster, server)
            check_clips(cluster, server, deployment)
            check_metrics(deployment)
    return found


def test_more_than_fifty_requests_are_asked(embeddings: str) -> None:
    with image_server() as server:
        assert len(requests(server, embeddings)) == 59


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


def test_guided_answers_are_about_the_images(answers: dict[str, list[tuple[Outcome, Outcome]]]) -> None:
    texts = {unary.text for unary, _ in answers["agg"]}
    assert {json.dumps({"seen": draw(58).caption}, separators=(",", ":")), draw(59).caption} <= texts
    assert sum(text.startswith("I see ") for text in texts) == 1


def test_answers_about_clips_say_what_moves(answers: dict[str, list[tuple[Outcome, Outcome]]]) -> None:
    assert {draw_clip(seed, (112, 84)).caption for seed in CLIPS} <= {
        unary.text for unary, _ in answers["agg"]
    }


def test_the_answers_are_about_the_images(answers: dict[str, list[tuple[Outcome, Outcome]]]) -> None:
    captions = [draw(seed).caption for seed in range(12)]
    given = [unary.text for unary, _ in answers["agg"][:12]]
    assert sum(caption == answer for caption, answer in zip(captions, given, strict=True)) >= 11
