"""The portable engine on an NVIDIA GPU, in float32 with TF32 off:
against `generate`, against the CPU, and in separate stages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dynamo.trtllm.config import EngineConfig, EngineKind, Modality
from dynamo.trtllm.core import DecodedImage, EncodedMedia, PlacedMedia, Prompt
from dynamo.trtllm.demo.pictures import draw
from dynamo.trtllm.engines.factory import create_engine
from dynamo.trtllm.engines.port import Engine, EngineInfo, EngineRequest, EngineState
from dynamo.trtllm.engines.transformers.causal import continues_unmasked
from dynamo.trtllm.engines.transformers.graphs import Recorder
from dynamo.trtllm.engines.transformers.loading import load_model
from dynamo.trtllm.engines.transformers.media import encoders_of
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from engines.contract import Output, add, generate, request, split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
QUESTION = "what is in the picture?"
SEEDS = range(500, 516)
OUTPUT_TOKENS = 48


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


async def started(device: str, **args: Any) -> tuple[Engine, EngineInfo]:
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS,
        model_path=str(DEMO_DIRECTORY),
        modality=Modality.MULTIMODAL,
        device=device,
        args={"dtype": "float32", **args},
    )
    engine = create_engine(config)
    return engine, await engine.start()


def chat_ids(info: EngineInfo, images: int) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY)
    content = [{"type": "text", "text": QUESTION}, *({"type": "image"} for _ in range(images))]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = tuple(tokenizer(text)["input_ids"])
    assert ids.count(info.placeholder_id("image")) == images
    return ids


def prompt(info: EngineInfo, encoded: Sequence[EncodedMedia], **sampling: Any) -> EngineRequest:
    """A question about `encoded`, with its placeholders expanded."""
    ids: list[int] = []
    placed: list[PlacedMedia] = []
    rest = iter(encoded)
    for token in chat_ids(info, len(encoded)):
        if token == info.placeholder_id("image"):
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
            **inputs,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
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
    alone, together, stages = await outputs("cuda")
    expected = [reference("cuda", seed) for seed in SEEDS]
    assert [o.token_ids for o in alone] == expected
    assert [o.token_ids for o in together] == expected
    assert [o.token_ids for o in stages] == expected


@pytest.mark.asyncio
async def test_cuda_gives_the_tokens_of_the_cpu() -> None:
    on_gpu, on_cpu = (await outputs("cuda"))[1], (await outputs("cpu"))[1]
    assert [o.token_ids for o in on_gpu] == [o.token_ids for o in on_cpu]
    gpu_logprobs = [p.chosen.logprob for o in on_gpu for p in o.logprobs]
    cpu_logprobs = [p.chosen.logprob for o in on_cpu for p in o.logprobs]
    # Pictures are resized on the device, where a pixel may be rounded the other way.
    assert gpu_logprobs == pytest.approx(cpu_logprobs, abs=1e-2)


@pytest.mark.asyncio
async def test_prefill_on_one_device_continues_on_the_other() -> None:
    gpu, info = await started("cuda")
    cpu, _ = await started("cpu")
    try:
        encoded = await gpu.encode([DecodedImage("a", draw(SEEDS[0]).image)])
        asked = prompt(info, encoded, ignore_eos=True)
        whole = await generate(gpu, asked)
        prefilled = await gpu.prefill(asked)
        assert prefilled.state is not None
        assert all(tensor.is_cuda for tensor in prefilled.state.tensors.values())
        state = EngineState(
            prefilled.state.meta, {name: t.cpu() for name, t in prefilled.state.tensors.items()}
        )
        output = Output()
        add(output, prefilled.first)
        follow = EngineRequest(
            request_id="r", prompt=Prompt(prefilled.prompt_token_ids), sampling=asked.sampling
        )
        async for step in cpu.decode(follow, prefilled.first, state):
            add(output, step)
        assert output.token_ids == whole.token_ids
    finally:
        await gpu.close()
        await cpu.close()


@pytest.mark.asyncio
async def test_cuda_graphs_give_every_kind_of_request_the_tokens_of_plain_decoding_and_of_the_cpu() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 50, "logprobs": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 8},
        {"temperature": 1.5, "seed": 5, "min_p": 0.05, "presence_penalty": 0.5},
    ]
    found: dict[str, list[list[int]]] = {}
    for name, device, args in (
        ("cuda graphs", "cuda", {}),
        ("eager", "cuda", {"cuda_graph_config": None}),
        ("cpu", "cpu", {}),
    ):
        engine, info = await started(device, **args)
        assert info.extras["decoding"] == ("eager" if name == "cpu" else name)
        encoded = await engine.encode([DecodedImage(str(seed), draw(seed).image) for seed in SEEDS])
        asked = [prompt(info, [each], ignore_eos=True, **kinds[i % 5]) for i, each in enumerate(encoded)]
        outputs = await asyncio.gather(*(generate(engine, each) for each in asked))
        # Once more, now that every shape of the batch has been recorded.
        again = await asyncio.gather(*(generate(engine, each) for each in asked))
        assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
        found[name] = [o.token_ids for o in outputs]
        await engine.close()
    assert found["cuda graphs"] == found["eager"] == found["cpu"]


def test_a_recorded_step_is_replayed_and_the_oldest_record_goes_first() -> None:
    recorder, counter = Recorder(records=True, most=2), torch.zeros((), device="cuda")
    for key, times in (("a", 3), ("b", 1), ("a", 1), ("c", 1), ("b", 1)):
        for _ in range(times):
            recorder.run(key, lambda: counter.add_(1))
        assert len(recorder) <= 2
    assert float(counter) == 7
    recorder.clear()
    assert len(recorder) == 0
    for _ in range(2):
        recorder.run("a", lambda: counter.add_(1))
    assert len(recorder) == 1
    assert float(counter) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_kernels_give_what_the_operations_that_they_replace_give(dtype: torch.dtype) -> None:
    from dynamo.trtllm.engines.transformers import kernels

    limits = {"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    both = torch.randn(7, 3, 2 * 331, device="cuda").to(dtype)
    gate, up = both.split(331, -1)
    torch.testing.assert_close(kernels.silu_product(both), torch.nn.functional.silu(gate) * up, **limits)
    values = torch.randn(33, 517, device="cuda").to(dtype)
    torch.testing.assert_close(kernels.quick_gelu(values), values * torch.sigmoid(1.702 * values), **limits)
    parts = torch.randn(57, 3, 5, 80, device="cuda").to(dtype)[:, :2]
    angles = torch.randn(57, 80, device="cuda")
    turned = torch.cat([-parts[..., 40:], parts[..., :40]], -1).float()
    expected = parts.float() * angles.cos()[:, None, None] + turned * angles.sin()[:, None, None]
    torch.testing.assert_close(
        kernels.rotary(parts, angles.cos(), angles.sin()), expected.to(dtype), **limits
    )


def test_half_precision_prompts_are_continued_without_masks() -> None:
    assert continues_unmasked(torch.device("cuda"), torch.bfloat16, 128, 128)
    assert not continues_unmasked(torch.device("cuda"), torch.float32, 128, 128)


def test_pixels_and_token_counts_on_the_device_are_those_of_the_processor_on_the_cpu() -> None:
    """A pixel that is resized on the device may be rounded the other way: 1 of 255, over the deviation of
    0.26.
    """
    from transformers import AutoProcessor

    config = EngineConfig(modality=Modality.MULTIMODAL, device="cuda")
    encoder = encoders_of(load_model(str(DEMO_DIRECTORY), config, EngineOptions()))["image"]
    processor = AutoProcessor.from_pretrained(DEMO_DIRECTORY).image_processor
    for side, size in ((0, None), (1, (100, 260)), (2, (317, 90))):
        image = draw(SEEDS[side]).image
        image = image if size is None else image.resize(size)
        expected = processor(images=[image], return_tensors="pt")
        found = encoder.preprocess(DecodedImage(str(side), image)).tensors
        assert found["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
        difference = (found["pixel_values"].cpu() - expected["pixel_values"]).abs()
        assert float(difference.max()) <= 1 / 255 / 0.26 + 1e-3
        assert float(difference.mean()) <= 1e-3
