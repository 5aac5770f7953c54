"""The TensorRT-LLM double as an importable library, and engines over it."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from dynamo.trtllm.config import EngineConfig, Modality, Role
from dynamo.trtllm.core import DecodedImage, PlacedMedia, Prompt, Sampling
from dynamo.trtllm.engines.port import EngineInfo, EngineRequest
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine

RELEASES = ("1.2.1", "1.3.0rc29")
ALL_RELEASES = (*RELEASES, "1.4.0rc2")
"""Of the newest only the documentation was read."""
DOUBLE = Path(__file__).parents[1] / "trtllm_double"
IMAGE_ID = 299
TRANSCEIVER = {"cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 60000}}
QWEN25 = "Qwen2_5_VLForConditionalGeneration"
LLAVA = "LlavaNextForConditionalGeneration"
QWEN3 = "Qwen3VLForConditionalGeneration"
LLAMA4 = "Llama4ForConditionalGeneration"
GEMMA3 = "Gemma3ForConditionalGeneration"
MISTRAL3 = "Mistral3ForConditionalGeneration"
PLACEHOLDERS = {
    QWEN25: "<|image_pad|>", QWEN3: "<|image_pad|>", LLAVA: "<image>", LLAMA4: "<|image|>",
    GEMMA3: "<start_of_image>", MISTRAL3: "[IMG]",
}  # fmt: skip
TEXT = "LlamaForCausalLM"


@contextmanager
def installed(release: str, **script: Any) -> Iterator[Any]:
    """`tensorrt_llm` is importable as `release`; faults in `script`. Afterwards it is gone again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTLLM_DOUBLE_RELEASE", release)
        patch.setenv("TRTLLM_DOUBLE_SCRIPT", json.dumps(script))
        patch.syspath_prepend(str(DOUBLE))
        forget()
        try:
            yield importlib.import_module("tensorrt_llm")
        finally:
            forget()


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Iterator[str]:
    """The double of each release in turn, in the library's place. A test file imports it."""
    with installed(request.param):
        yield request.param


def forget() -> None:
    for name in [n for n in sys.modules if n == "tensorrt_llm" or n.startswith("tensorrt_llm.")]:
        del sys.modules[name]


def model_directory(path: Path, architecture: str = TEXT, **config: Any) -> Path:
    """A model directory with nothing but a configuration, which is all that the double reads."""
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": [architecture],
        "image_token_id": IMAGE_ID,
        "text_config": {"hidden_size": 8, "max_position_embeddings": 512},
        **config,
    }
    (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def engine_config(
    path: Path, role: Role = Role.AGGREGATED, *, images: bool = False, **changes: Any
) -> EngineConfig:
    args = {"max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 4096, **changes.pop("args", {})}
    if role in (Role.PREFILL, Role.DECODE):
        args = {**TRANSCEIVER, **args}
    modality = Modality.MULTIMODAL if images else Modality.TEXT
    return EngineConfig(model_path=str(path), role=role, modality=modality, args=args, **changes)


@asynccontextmanager
async def started(
    config: EngineConfig, make: Any = TensorRTLLMEngine
) -> AsyncIterator[tuple[Any, EngineInfo]]:
    engine = make(config)
    try:
        yield engine, await engine.start()
    finally:
        await engine.close()


def instances() -> list[Any]:
    """Engines that the double made, oldest first."""
    return list(sys.modules["tensorrt_llm.llmapi.llm"].instances)


def leaked_handles() -> list[str]:
    """Handles that were made and that nobody has opened."""
    return sorted(sys.modules["tensorrt_llm._torch.shared_tensor"].made)


def script() -> Any:
    return sys.modules["tensorrt_llm._double.script"].script


def picture(width: int = 84, height: int = 56, shade: int = 40) -> DecodedImage:
    return DecodedImage(
        f"image-{width}x{height}-{shade}", Image.new("RGB", (width, height), (shade, 90, 200))
    )


def ask(
    ids: tuple[int, ...] = tuple(range(300, 312)), *, request_id: str = "r", **sampling: Any
) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt=Prompt(ids), sampling=Sampling(**sampling))


def ask_about(
    items: list[Any], *, placeholder: str = "<|image_pad|>", text: bool = True, **sampling: Any
) -> EngineRequest:
    """A question with images or embeddings at their places, as the multimodal processor makes it.
    `placeholder` may be an architecture's name; a tokenizer other than Qwen's has a beginning-of-sequence
    token, which templates write."""
    placeholder = PLACEHOLDERS.get(placeholder, placeholder)
    ids: list[int] = [1, 301, 4]
    words = ["<s>", "301", "4"]
    placed = []
    for item in items:
        expansion = getattr(item, "token_ids", (IMAGE_ID,))
        placed.append(PlacedMedia(item, len(ids), len(expansion)))
        ids += [*expansion, 305]
        words += [placeholder, "305"]
    ids += [306, 307]
    words += ["306", "307"]
    prompt = Prompt(tuple(ids), tuple(placed), " ".join(words) if text else None)
    return EngineRequest(request_id="m", prompt=prompt, sampling=Sampling(**sampling))


def held_contexts() -> list[str]:
    """Requests whose KV blocks a prefill engine of this process keeps for a decode."""
    return list(sys.modules["tensorrt_llm._double.pins"].held())


patience = SimpleNamespace(seconds=10.0)
"""How long a check waits for what has to come; the mutations, for which it does not, wait less."""


async def until(condition: Callable[[], Any]) -> None:
    """Returns when `condition` holds; fails when it does not within `patience`."""
    end = time.monotonic() + patience.seconds
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.002)
