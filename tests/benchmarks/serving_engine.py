#!/usr/bin/env python3
"""Tokens per second of the portable engine beside Transformers' `generate`;
run by `serving.py` in a process of its own.

One thread each. A round is, in alternating order: one request through `generate`, the same request through
the engine, and several at once through the engine, free and with a JSON schema to follow. Each request is an
image and a question of its own, from decoded image to the last token. Prints a JSON object per round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

import torch  # noqa: E402
import transformers  # noqa: E402
import uvloop  # noqa: E402

from dynamo.trtllm.config import EngineConfig, EngineKind, Modality  # noqa: E402
from dynamo.trtllm.core import DecodedImage, GuidedDecoding, Sampling  # noqa: E402
from dynamo.trtllm.demo.pictures import draw  # noqa: E402
from dynamo.trtllm.engines.port import EngineRequest  # noqa: E402
from dynamo.trtllm.engines.transformers.engine import TransformersEngine  # noqa: E402
from dynamo.trtllm.model_files import resolve_model  # noqa: E402
from dynamo.trtllm.multimodal_processor import expand  # noqa: E402

SIDES = ("generate", "one", "many", "guided")
QUESTION = "Describe the picture."
GRAMMAR = GuidedDecoding(
    json={"type": "array", "items": {"type": "string", "minLength": 8000}, "minItems": 1}
)
"""Longer than any answer here, so that a guided one has as many tokens as a free one."""
IMAGE_SIZE = (224, 224)


def picture(seed: int) -> DecodedImage:
    """The held-out demo image of `seed`, 224 pixels a side so that every request has as many tokens."""
    return DecodedImage(f"image-{seed}", draw(seed, IMAGE_SIZE).image)


class Reference:
    """Transformers' own `generate`, as its documentation calls it."""

    def __init__(self, directory: str) -> None:
        auto: Any = transformers
        self.processor: Any = auto.AutoProcessor.from_pretrained(directory)
        self._model: Any = auto.AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        self._model.generation_config.eos_token_id = None  # as `ignore_eos`
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
        self.text: str = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def run(self, image: DecodedImage, tokens: int) -> list[int]:
        """The greedy continuation, `tokens` ids."""
        inputs = self.processor(text=[self.text], images=[image.image], return_tensors="pt")
        with torch.inference_mode():
            output = self._model.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
        return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]


class Portable:
    """The portable engine through its port, as a handler uses it."""

    def __init__(self, engine: TransformersEngine, placeholder: int, token_ids: Sequence[int]) -> None:
        self._engine = engine
        self._placeholder = placeholder
        self._token_ids = tuple(token_ids)

    async def run(self, image: DecodedImage, tokens: int, guided: GuidedDecoding | None = None) -> list[int]:
        """The greedy continuation, `tokens` ids."""
        prompt = expand(self._token_ids, {"image": self._placeholder}, await self._engine.encode([image]))
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, guided=guided)
        request = EngineRequest(request_id=image.digest, prompt=prompt, sampling=sampling)
        return [token async for step in self._engine.generate(request) for token in step.token_ids]

    async def run_many(
        self, images: Sequence[DecodedImage], tokens: int, guided: GuidedDecoding | None = None
    ) -> list[list[int]]:
        """All at once, each a request of its own."""
        return list(await asyncio.gather(*(self.run(image, tokens, guided) for image in images)))


async def run_round(
    number: int, reference: Reference, portable: Portable, tokens: int, concurrency: int
) -> dict[str, Any]:
    """Wall and CPU time of the four, and whether `generate`,
    the engine and the engine under load gave the same tokens."""
    images = [picture(number * concurrency + at) for at in range(concurrency)]
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    outputs: dict[str, list[int]] = {}
    for name in SIDES if number % 2 == 0 else reversed(SIDES):
        start, start_cpu = time.perf_counter(), time.process_time()
        if name == "generate":
            outputs[name] = reference.run(images[0], tokens)
        elif name == "one":
            outputs[name] = await portable.run(images[0], tokens)
        else:
            guided = GRAMMAR if name == "guided" else None
            outputs[name] = (await portable.run_many(images, tokens, guided))[0]
        seconds[name], cpu[name] = time.perf_counter() - start, time.process_time() - start_cpu
    if any(len(output) != tokens for output in outputs.values()):
        raise RuntimeError(
            f"not {tokens} tokens: { {name: len(output) for name, output in outputs.items()} }"
        )
    same = outputs["generate"] == outputs["one"] == outputs["many"]
    counts = {"generate": tokens, "one": tokens, "many": tokens * concurrency, "guided": tokens * concurrency}
    return {
        "tokens_per_s": {name: count / seconds[name] for name, count in counts.items()},
        "cpu_per_token_s": {name: cpu[name] / count for name, count in counts.items()},
        "same_tokens": same,
    }


async def main(options: argparse.Namespace) -> None:
    directory = await resolve_model(options.model_path)
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS,
        model_path=directory,
        modality=Modality.MULTIMODAL,
        device="cpu",
        torch_threads=1,
    )
    engine = TransformersEngine(config)
    info = await engine.start()
    try:
        reference = Reference(directory)
        assert info.placeholder_id("image") is not None
        portable = Portable(
            engine, info.placeholder_id("image"), reference.processor.tokenizer(reference.text)["input_ids"]
        )
        await run_round(0, reference, portable, min(options.tokens, 32), options.concurrency)
        for number in range(1, options.rounds + 1):
            print(
                json.dumps(await run_round(number, reference, portable, options.tokens, options.concurrency)),
                flush=True,
            )
    finally:
        await engine.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(parse()))
