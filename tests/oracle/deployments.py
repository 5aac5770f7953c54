"""Dynamo's own component and this project's,
each deployed over TensorRT-LLM's double and asked the same things."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from oracle.compare import Call
from processes.cluster import Answer, Cluster, Managed, free_port, wait_until
from processes.media import png
from processes.topologies import ENCODE_ENDPOINT, TOPOLOGIES

Which = Literal["ours", "theirs"]
TESTS = Path(__file__).parents[1]
ENGINE_ARGS = {
    "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 60000},
    "kv_cache_config": {"enable_block_reuse": False},
    "guided_decoding_backend": "xgrammar",
    "max_seq_len": 1024,
    "max_batch_size": 8,
    "max_num_tokens": 4096,
}


def picture(seed: int) -> dict[str, Any]:
    data = base64.b64encode(png(draw(seed))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


_WARM_UP = "warm-up"
QUESTION = {"type": "text", "text": "what is in the picture?"}
REQUESTS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "text": ("hello", {"max_tokens": 12}),
    "text without a limit": ("hello", {}),
    "sampling": (
        "hello",
        {
            "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 5,
            "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1,
        },
    ),
    "log probabilities": ("hello", {"max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    "stop words": ("hello", {"max_tokens": 8, "stop": ["zebra"], "stop_token_ids": [300]}),
    "end ignored": ("hello", {"max_tokens": 6, "ignore_eos": True, "stop_token_ids": [300]}),
    "structured": ("hello", {"max_tokens": 8, "response_format": {"type": "json_object"}}),
    "one picture": ([QUESTION, picture(1)], {"max_tokens": 8}),
    "two pictures": ([picture(2), QUESTION, picture(3)], {"max_tokens": 8, "ignore_eos": True}),
}  # fmt: skip


@dataclass
class Seen:
    """What a deployment answered and what its workers asked of the library,
    at start (`""`) and for each request."""

    answers: dict[str, Answer] = field(default_factory=dict)
    calls: dict[str, dict[str, list[Call]]] = field(default_factory=dict)
    """Request -> role -> calls."""
    logs: dict[str, str] = field(default_factory=dict)


def model_directory(path: Path) -> Path:
    """The demo's tokenizer and template under an architecture whose
    pictures TensorRT-LLM can encode apart."""
    for file in DEMO_DIRECTORY.iterdir():
        if file.is_file():
            shutil.copy(file, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def environment(release: str) -> dict[str, str]:
    return {
        "TRTLLM_DOUBLE_RELEASE": release,
        "PYTHONPATH": os.pathsep.join(
            [
                str(TESTS / "trtllm_double"),
                str(TESTS.parent / "components" / "src"),
                os.environ.get("PYTHONPATH", ""),
            ]
        ),
    }


def observe(which: Which, topology: str, model: Path, folder: Path) -> Seen:
    """Deploy `topology`, ask `REQUESTS` one after the other, and return what was seen."""
    seen = Seen()
    with Cluster(env=environment("1.3.0rc29")) as cluster:
        workers = start(which, topology, cluster, model, folder)
        try:
            wait_listed(cluster, workers)
            _collect(seen, "", folder)
            wait_answering(cluster, f"{which} {topology}")
            _collect(seen, _WARM_UP, folder)
            for name, (content, options) in REQUESTS.items():
                seen.answers[name] = cluster.chat(content, **options)
                _collect(seen, name, folder)
            del seen.calls[_WARM_UP]
        finally:
            seen.logs = {role: worker.text() for role, worker in workers.items()}
    return seen


def start(which: Which, topology: str, cluster: Cluster, model: Path, folder: Path) -> dict[str, Managed]:
    """A frontend and one worker of each role; their calls into the library go to files of `folder`."""
    cluster.frontend()
    return {
        role: _start(which, role, topology, cluster, model, folder / f"{role}.jsonl")
        for role in TOPOLOGIES[topology]
    }


def wait_listed(cluster: Cluster, workers: Mapping[str, Managed]) -> None:
    for worker in workers.values():
        cluster.wait_serving(worker)
    cluster.wait_listed()


def wait_answering(cluster: Cluster, name: str) -> None:
    """A model is listed before every worker of it can be reached."""
    content, options = REQUESTS["one picture"]
    wait_until(lambda: cluster.chat(content, **options).status == 200, f"a first answer of {name}")


def _start(which: Which, role: str, topology: str, cluster: Cluster, model: Path, record: Path) -> Managed:
    record.touch()
    port = free_port()
    words = ["--disaggregation-mode", role, "--modality", "multimodal"]
    words += ["--model-path", str(model), "--served-model-name", cluster.model]
    words += ["--override-engine-args", json.dumps(ENGINE_ARGS)]
    if role in ("agg", "prefill") and "encode" in TOPOLOGIES[topology]:
        words += ["--encode-endpoint", ENCODE_ENDPOINT]
    if role == "encode":
        words += ["--endpoint", ENCODE_ENDPOINT]  # theirs has another default
    script = str(TESTS / "oracle" / "run_worker.py")
    return cluster.start_python(
        role, [script, which, str(record), *words], {"DYN_SYSTEM_PORT": str(port)}, port
    )


def _collect(seen: Seen, request: str, folder: Path) -> None:
    """The lines that came since the last request: requests run one at a time, so they belong to this one."""
    for record in folder.glob("*.jsonl"):
        lines = record.read_text(encoding="utf-8").splitlines()
        known = sum(len(roles.get(record.stem, ())) for roles in seen.calls.values())
        seen.calls.setdefault(request, {})[record.stem] = [json.loads(line) for line in lines[known:]]
