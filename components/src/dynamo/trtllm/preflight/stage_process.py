"""One group of stages over the installed TensorRT-LLM; `stages` runs this as a process and reads a line
for each outcome."""

from __future__ import annotations

import asyncio
import json
import pickle
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.trtllm.config import EngineConfig, Role
from dynamo.trtllm.core import DecodedImage, EncodedMedia, Prompt, Sampling
from dynamo.trtllm.engines.port import EngineInfo, EngineRequest, EngineState
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from dynamo.trtllm.engines.tensorrt_llm.model import describe_model
from dynamo.trtllm.multimodal_processor import expand
from dynamo.trtllm.preflight.stages import ENCODE, ENCODED, IMAGE, IMAGE_HALVES, MARK

TOKENS = 8
TEXT_IDS = tuple(range(300, 312))
"""Ids that every vocabulary has: what they mean does not matter."""
LIMITS: Mapping[str, int] = {"max_seq_len": 4096, "max_num_tokens": 4096, "max_batch_size": 8}
SHARE_OF_PAIR = 0.25
"""Of the free GPU memory, for the KV cache of each of two engines on one GPU."""

Started = tuple[TensorRTLLMEngine, EngineInfo]
Item = DecodedImage | EncodedMedia


async def main(group: str, wanted: Sequence[str], config: EngineConfig) -> None:
    """Try the `wanted` stages of one group and print a line for each as it ends."""
    await _GROUPS[group](config, wanted)


async def _whole(config: EngineConfig, wanted: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        engines = await _start(stack, wanted, config, Role.AGGREGATED)
        for stage in wanted if engines else ():
            await _tell(stage, partial(_ask, config, engines, stage))


async def _halves(config: EngineConfig, wanted: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        engines = await _start(stack, wanted, config, Role.PREFILL, Role.DECODE)
        for stage in wanted if engines else ():
            await _tell(stage, partial(_ask, config, engines, stage))


async def _encoder(config: EngineConfig, wanted: Sequence[str]) -> None:
    """Encode an image, and answer about it in an engine that did not encode it."""
    encoded: list[EncodedMedia] = []
    async with AsyncExitStack() as stack:
        engines = await _start(stack, wanted, config, Role.ENCODE)
        if engines:
            await _tell(ENCODE, lambda: _encode(engines[0][0], encoded))
    if not encoded:
        if engines:
            _print(ENCODED, "not tried: no image was encoded")
        return
    async with AsyncExitStack() as stack:
        engines = await _start(stack, [ENCODED], config, Role.AGGREGATED)
        if engines:
            await _tell(ENCODED, lambda: _ask(config, engines, ENCODED, encoded[0]))


_GROUPS: Mapping[str, Callable[[EngineConfig, Sequence[str]], Awaitable[None]]] = {
    "whole": _whole,
    "halves": _halves,
    "encoder": _encoder,
}


async def _start(
    stack: AsyncExitStack, stages: Sequence[str], config: EngineConfig, *roles: Role
) -> list[Started]:
    """Engines of `roles`, closed with `stack`. When one does not start, that is the outcome of all
    `stages`."""
    started: list[Started] = []
    try:
        for role in roles:
            engine = TensorRTLLMEngine(_config_for(config, role))
            stack.push_async_callback(engine.close)
            started.append((engine, await engine.start()))
    except Exception as error:
        for stage in stages:
            _print(stage, f"FAILED: the engine did not start: {_words(error)}")
        return []
    return started


async def _tell(stage: str, attempt: Callable[[], Awaitable[str]]) -> None:
    began = time.monotonic()
    try:
        outcome = await attempt()
    except Exception as error:
        _print(stage, f"FAILED: {_words(error)}")
    else:
        _print(stage, f"ok, {outcome}, {time.monotonic() - began:.1f} s")


def _words(error: BaseException) -> str:
    """Class and first line of an error and of its causes, for whoever reads the report."""
    lines = str(getattr(error, "message", None) or error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0] if lines else 'no words'}"
    return f"{said}, because of {_words(error.__cause__)}" if error.__cause__ is not None else said


def _print(stage: str, outcome: str) -> None:
    print(f"{MARK}{json.dumps([stage, outcome])}", flush=True)


async def _encode(engine: TensorRTLLMEngine, encoded: list[EncodedMedia]) -> str:
    encoded.extend(await engine.encode([_image()]))
    rows, width = encoded[0].tensors["features"].shape
    return f"{rows} rows of {width}"


async def _ask(config: EngineConfig, engines: Sequence[Started], stage: str, item: Item | None = None) -> str:
    """The request of `stage` to one engine, or over two."""
    asked = _request(config, engines[0][1], stage, item)
    if len(engines) > 1:
        return await _over_both(engines, asked)
    return _counted(await _read(engines[0][0].generate(asked)))


async def _over_both(engines: Sequence[Started], asked: EngineRequest) -> str:
    """One request from a prefill engine to a decode engine, its state as it is after crossing processes."""
    (prefill, _), (decode, _) = engines
    prefilled = await prefill.prefill(asked)
    if prefilled.state is None:
        return "1 token, which ended the request before decode"
    state = EngineState(json.loads(json.dumps(prefilled.state.meta)), prefilled.state.tensors)
    follow = replace(asked, prompt=Prompt(prefilled.prompt_token_ids))
    rest = await _read(decode.decode(follow, prefilled.first, state))
    return _counted([*prefilled.first.token_ids, *rest])


async def _read(steps: Any) -> list[int]:
    found: list[int] = []
    async with aclosing(steps):
        async for step in steps:
            found += step if isinstance(step, list) else step.token_ids
    return found


def _counted(token_ids: list[int]) -> str:
    return f"{len(token_ids)} tokens"


def _config_for(config: EngineConfig, role: Role) -> EngineConfig:
    """The user's engine arguments, small enough for a trial, and what the role cannot do without."""
    args = dict(config.args)
    for name, most in LIMITS.items():
        given = args.get(name)
        args[name] = min(given, most) if isinstance(given, int) else most
    if role.runs_language_model:
        cache = {**(args.get("kv_cache_config") or {}), "free_gpu_memory_fraction": SHARE_OF_PAIR}
        args["kv_cache_config"] = {**cache, "enable_block_reuse": False}
    if role.moves_kv_caches and not (args.get("cache_transceiver_config") or {}).get("backend"):
        backend = "NIXL" if platform.machine() == "x86_64" else "UCX"
        args["cache_transceiver_config"] = {"backend": backend, "max_tokens_in_buffer": LIMITS["max_seq_len"]}
    return replace(config, role=role, args=args, publish_kv_events=False, publish_metrics=False)


def _request(config: EngineConfig, info: EngineInfo, stage: str, item: Item | None) -> EngineRequest:
    if stage in (IMAGE, IMAGE_HALVES, ENCODED):
        return _image_request(config, info, item or _image())
    return EngineRequest(request_id="report-text", prompt=Prompt(TEXT_IDS), sampling=_sampling())


def _sampling() -> Sampling:
    return Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


def _image() -> DecodedImage:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((40, 40, 184, 184), fill="red")
    return DecodedImage("report-image", image)


def _image_request(config: EngineConfig, info: EngineInfo, item: Item) -> EngineRequest:
    """A question about one image, with the placeholder that the model's chat template writes."""
    facts = describe_model(config.model_path).facts
    placeholder = info.placeholder_id("image")
    if placeholder is None or facts.placeholder is None:
        raise ValueError("the engine does not say which token stands for an image")
    text = f"{facts.around[0]}{facts.placeholder}{facts.around[1]}What is in this image?"
    ids = _tokenize(config.model_path, text)
    if ids is None:
        text, ids = (
            f"{TEXT_IDS[0]} {facts.placeholder} {TEXT_IDS[1]}",
            [TEXT_IDS[0], placeholder, TEXT_IDS[1]],
        )
    prompt = expand(ids, {"image": placeholder}, [item], text)
    return EngineRequest(request_id="report-image", prompt=prompt, sampling=_sampling())


def _tokenize(directory: str, text: str) -> list[int] | None:
    """Ids of `text` by the model's own tokenizer, without special tokens around it; None where it has
    none."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)


if __name__ == "__main__":
    # written by `stages`, in the parent of this process
    given: EngineConfig = pickle.loads(sys.stdin.buffer.read())
    asyncio.run(main(sys.argv[1], sys.argv[2:], given))
