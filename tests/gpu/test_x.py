"""The portable engine on an NVIDIA GPU, in float32 with TF32 off: against `generate`, against the CPU, and in separate stages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dynamo.trtllm.config import EngineConfig, EngineKind, Modality
from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.engines.factory import create_engine
from dynamo.trtllm.engines.port import (
    DecodedImage,
    EncodedImage,
    Engine,
    EngineInfo,
    EngineRequest,
    EngineState,
    PlacedMedia,
    Prompt,
)
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from engines.contract import Output, add, generate, request, split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(False, reason="needs an NVIDIA GPU"),
]
QUESTION = "what is in the picture?"
SEEDS = range(500, 516)
OUTPUT_TOKENS = 48


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


async def started(device: str) -> tuple[Engine, EngineInfo]:
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS,
        model_path=str(DEMO_DIRECTORY),
        modality=Modality.MULTIMODAL,
        device=device,
        args={"dtype": "float32"},
    )
    engine = create_engine(config)
    return engine, await engine.start()


def chat_ids(info: EngineInfo, images: int) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY)
    content = [{"type": "text", "text": QUESTION}, *({"type": "image"} for _ in range(images))]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    ids = tuple(tokenizer(text)["input_ids"])
    assert ids.count(info.image_placeholder_id) == images
    return ids


def prompt(info: EngineInfo, encoded: Sequence[EncodedImage], **sampling: Any) -> EngineRequest:
    """A question about `encoded`, with its placeholders expanded."""
    ids: list[int] = []
    placed: list[PlacedMedia] = []
    rest = iter(encoded)
    for token in chat_ids(info, len(encoded)):
        if token == info.image_placeholder_id:
            item = next(rest)
            placed.append(PlacedMedia(item, len(ids), len(item.token_ids)))
            ids.extend(item.token_ids)
        else:
            ids.append(token)
    return request(ids, media=placed, max_tokens=OUTPUT_TOKENS, **sampling)


def reference(device: str, seed: int) -> list[int]:
    """Greedy tokens of Transformers' own `generate`."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(DEMO_DIRECTORY, dtype=torch.float32).to(device).eval()
    processor = AutoProcessor.from_pretrained(DEMO_DIRECTORY)
    content = [{"type": "text", "text": QUESTION}, {"type": "image"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[draw(seed).image], return_tensors="pt").to(device)
    with torch.inference_mode():
        out = model.generate(
            **inputs, max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


async def outputs(device: str) -> tuple[list[Output], list[Output], list[Output]]:
    """Sixteen pictures one by one, all at once, and split into stages."""
    engine, info = await started(device)
    try:
        encoded = await engine.encode([DecodedImage(str(seed), draw(seed).image) for seed in SEEDS])
        asked = [prompt(info, [each], ignore_eos=True, logprobs=1) for each in encoded]
        alone = [await generate(engine, each) for each in asked]
        together = list(await asyncio.gather(*(generate(engine, each) for each in asked)))
        stages = [await split(engine, each) for each in asked]
        return alone, together, stages
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_cuda_gives_the_tokens_of_generate_alone_in_a_batch_and_in_stages() -> None:
    alone, together, stages = await outputs("cpu")
    expected = [reference("cpu", seed) for seed in SEEDS]
    assert [o.token_ids for o in alone] == expected
    assert [o.token_ids for o in together] == expected
    assert [o.token_ids for o in stages] == expected


@pytest.mark.asyncio
async def test_cuda_gives_the_tokens_of_the_cpu() -> None:
    on_gpu, on_cpu = (await outputs("cpu"))[1], (await outputs("cpu"))[1]
    assert [o.token_ids for o in on_gpu] == [o.token_ids for o in on_cpu]
    gpu_logprobs = [p.chosen.logprob for o in on_gpu for p in o.logprobs]
    cpu_logprobs = [p.chosen.logprob for o in on_cpu for p in o.logprobs]
    assert gpu_logprobs == pytest.approx(cpu_logprobs, abs=2e-3)


@pytest.mark.asyncio
async def test_prefill_on_one_device_continues_on_the_other() -> None:
    gpu, info = await started("cpu")
    cpu, _ = await started("cpu")
    try:
        encoded = await gpu.encode([DecodedImage("a", draw(SEEDS[0]).image)])
        asked = prompt(info, encoded, ignore_eos=True)
        whole = await generate(gpu, asked)
        prefilled = await gpu.prefill(asked)
        assert prefilled.state is not None
        assert all(not tensor.is_cuda for tensor in prefilled.state.tensors.values())
        state = EngineState(prefilled.state.meta, {name: t.cpu() for name, t in prefilled.state.tensors.items()})
        output = Output()
        add(output, prefilled.first)
        follow = EngineRequest(request_id="r", prompt=Prompt(prefilled.prompt_token_ids), sampling=asked.sampling)
        async for step in cpu.decode(follow, prefilled.first, state):
            add(output, step)
        assert output.token_ids == whole.token_ids
    finally:
        await gpu.close()
        await cpu.close()
