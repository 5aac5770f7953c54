"""The TensorRT-LLM double called as a library, with nothing of `dynamo` between."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engines.tensorrt_llm_subject import forget

RELEASES = ("1.2.1", "1.3.0rc29", "1.4.0rc2")
LATER = RELEASES[1:]
RC29 = "1.3.0rc29"
DOUBLE = Path(__file__).parents[1] / "trtllm_double"
IMAGE = 299
TEXT, QWEN25, QWEN3 = (
    "LlamaForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
LLAVA, LLAMA4 = "LlavaNextForConditionalGeneration", "Llama4ForConditionalGeneration"
MISTRAL3, GEMMA3 = "Mistral3ForConditionalGeneration", "Gemma3ForConditionalGeneration"
TRANSCEIVER = {"backend": "NIXL", "kv_transfer_timeout_ms": 60000}
REQUEST_ID = 1 << 41
"""A number within the range of disaggregated request ids."""


class Library:
    """One release, with faults of the script, and models made for it."""

    def __init__(self, release: str, folder: Path) -> None:
        self.release, self.folder = release, folder
        self.root = importlib.import_module("tensorrt_llm")

    def part(self, name: str) -> Any:
        return importlib.import_module(f"tensorrt_llm.{name}")

    @property
    def failed(self) -> type[Exception]:
        error: type[Exception] = self.part("executor.utils").RequestError
        return error

    def model(self, architecture: str = TEXT, **config: Any) -> str:
        path = self.folder / f"{architecture}-{len(list(self.folder.iterdir()))}"
        path.mkdir()
        text = {"hidden_size": 8, "max_position_embeddings": 512}
        content = {"architectures": [architecture], "image_token_id": IMAGE, "text_config": text, **config}
        (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return str(path)

    def llm(self, architecture: str = TEXT, **args: Any) -> Any:
        return self.root.LLM(self.model(architecture), **args)

    def split(self, architecture: str = TEXT, **args: Any) -> Any:
        """An engine that hands contexts over or takes them."""
        section = {**TRANSCEIVER, **args.pop("transceiver", {})}
        return self.llm(
            architecture, cache_transceiver_config=section, disable_overlap_scheduler=True, **args
        )

    def encoder(self, architecture: str = QWEN25) -> Any:
        return self.root.MultimodalEncoder(self.model(architecture))

    def sampling(self, **given: Any) -> Any:
        return self.root.SamplingParams(**given)

    def context(self, **given: Any) -> Any:
        """`DisaggregatedParams` of a context that is to be computed."""
        if self.release != "1.2.1":
            given.setdefault("disagg_request_id", REQUEST_ID)
        return self.root.DisaggregatedParams(**{"request_type": "context_only", **given})

    def generation(self, context: Any) -> Any:
        """The same of a decode, from a context's output."""
        names = type(context).__dataclass_fields__
        given = {name: getattr(context, name) for name in names}
        return self.root.DisaggregatedParams(**{**given, "request_type": "generation_only"})

    def handle(self, tensor: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.part("_torch.shared_tensor").to_handle(tensor)
        return made

    def view(self, handle: dict[str, Any]) -> Any:
        return self.part("_torch.shared_tensor").to_tensor(handle)

    def unopened(self) -> list[str]:
        return sorted(self.part("_torch.shared_tensor").made)

    def held(self) -> list[str]:
        names: list[str] = self.part("_double.pins").held()
        return names

    def ask(self, engine: Any, inputs: Any, disagg: Any = None, options: Any = None, **sampling: Any) -> Any:
        """The whole answer to one request, read on a loop of its own."""

        async def read() -> Any:
            params = self.sampling(**{"end_id": 2, **sampling})
            return await engine.generate_async(inputs, params, disaggregated_params=disagg, **(options or {}))

        return asyncio.run(read())

    def encode(self, encoder: Any, inputs: Any) -> Any:
        async def read() -> Any:
            return await encoder.generate_async(inputs)

        return asyncio.run(read()).disaggregated_params


@contextmanager
def library(release: str, folder: Path, **script: Any) -> Iterator[Library]:
    """`tensorrt_llm` as `release` with faults in `script`; afterwards it is gone again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTLLM_DOUBLE_RELEASE", release)
        patch.setenv("TRTLLM_DOUBLE_SCRIPT", json.dumps(script))
        patch.syspath_prepend(str(DOUBLE))
        forget()
        try:
            yield Library(release, folder)
        finally:
            forget()


def picture(width: int = 84, height: int = 56, shade: int = 40) -> Any:
    """Two by three tokens, unless it has another size."""
    return Image.new("RGB", (width, height), (shade, 90, 200))


def about(*pictures: Any, placeholder: str = "<|image_pad|>", **more: Any) -> dict[str, Any]:
    """A question in words with images."""
    words = " ".join(f"{placeholder} 305" for _ in pictures)
    return {"prompt": f"301 {words} 306", "multi_modal_data": {"image": list(pictures)}, **more}


