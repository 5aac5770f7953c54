"""Images over an installed TensorRT-LLM: in one engine, split over prefill and decode, and encoded apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image, ImageDraw

from dynamo.trtllm.config import Role
from dynamo.trtllm.core import DecodedImage, PlacedMedia, Prompt, Sampling
from dynamo.trtllm.engines.port import EngineRequest, EngineState
from dynamo.trtllm.engines.tensorrt_llm.model import describe_model
from engines.contract import Output, add, generate
from gpu.tensorrt_llm_machine import NEEDS_IMAGES, TRANSCEIVER, VLM, config, started

pytestmark = [*NEEDS_IMAGES, pytest.mark.asyncio(loop_scope="module")]


def picture(colour: str, size: tuple[int, int] = (224, 224)) -> DecodedImage:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((40, 40, size[0] - 40, size[1] - 40), fill=colour)
    return DecodedImage(f"{colour}-{size}", image)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Any]:
    async with started(config(images=True, disable_overlap_scheduler=True, **TRANSCEIVER)) as (made, _):
        yield made


def question(items: list[Any]) -> EngineRequest:
    """Chat in the Qwen form, by the model's tokenizer; the text is what the frontend would render."""
    from transformers import AutoTokenizer

    facts, tokenizer = describe_model(VLM).facts, AutoTokenizer.from_pretrained(VLM)
    marks = "".join(f"{facts.around[0]}{facts.placeholder}{facts.around[1]}" for _ in items)
    text = f"<|im_start|>user\n{marks}What colour is the circle?<|im_end|>\n<|im_start|>assistant\n"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = []
    placed: list[PlacedMedia] = []
    waiting = list(items)
    for token in encoded:
        if token != tokenizer.convert_tokens_to_ids(facts.placeholder):
            ids.append(token)
            continue
        item = waiting.pop(0)
        expansion = getattr(item, "token_ids", (token,))
        placed.append(PlacedMedia(item, len(ids), len(expansion)))
        ids.extend(expansion)
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id="m", prompt=Prompt(tuple(ids), tuple(placed), text), sampling=sampling)


async def over_both_halves(engine: Any, asked: EngineRequest) -> Output:
    prefilled = await engine.prefill(asked)
    assert prefilled.state is not None
    output = Output()
    add(output, prefilled.first)
    state = EngineState(json.loads(json.dumps(prefilled.state.meta)), prefilled.state.tensors)
    follow = EngineRequest(request_id="m", prompt=Prompt(prefilled.prompt_token_ids), sampling=asked.sampling)
    async with aclosing(engine.decode(follow, prefilled.first, state)) as steps:
        async for step in steps:
            add(output, step)
    return output


async def test_images_change_the_answer_and_are_counted(engine: Any) -> None:
    red, blue = [await generate(engine, question([picture(colour)])) for colour in ("red", "blue")]
    assert red.token_ids != blue.token_ids
    assert red.usage is not None
    assert red.usage.prompt_tokens > len(question([picture("red")]).prompt.token_ids)


async def test_images_over_prefill_and_decode_give_what_one_engine_gives(engine: Any) -> None:
    asked = question([picture("red"), picture("green", (336, 224))])
    whole, halves = await generate(engine, asked), await over_both_halves(engine, asked)
    assert halves.token_ids == whole.token_ids
    assert halves.usage == whole.usage


async def test_images_encoded_apart_give_what_one_engine_gives(engine: Any) -> None:
    facts = describe_model(VLM).facts
    if not facts.encodes_apart:
        pytest.skip("TensorRT-LLM does not encode this model's images apart")
    items = [picture("red"), picture("green", (336, 224))]
    async with started(config(Role.ENCODE, images=True, max_batch_size=1)) as (encoder, _):
        encoded = await encoder.encode(items)
    whole = await generate(engine, question(items))
    assert (await generate(engine, question(encoded))).token_ids == whole.token_ids
    assert (await over_both_halves(engine, question(encoded))).token_ids == whole.token_ids
