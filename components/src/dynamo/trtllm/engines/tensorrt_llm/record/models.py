"""What TensorRT-LLM does with each multimodal architecture, as far as it was read; the loaded model is
asked where it can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """What TensorRT-LLM does with one architecture (the first of `architectures` in the model's config.json).

    `encodes_apart`: the library can encode its images in another process (EPD). `attaches_embeddings`: it
    takes precomputed embeddings beside a text prompt. `placeholder`: what the chat template writes once
    per image. `around`: text that the model expects around a lone image. `mrope`: three-dimensional
    positions travel with the hand-off. `sizes_images`: the model's own processor is called with the request's
    `mm_processor_kwargs`, and takes `min_pixels` and `max_pixels` among them.
    """

    modalities: str
    encodes_apart: bool
    attaches_embeddings: bool
    source: str
    placeholder: str | None = None
    around: tuple[str, str] = ("", "")
    mrope: bool = False
    disaggregates: bool = True
    sizes_images: bool = False


_QWEN: dict[str, Any] = {
    "placeholder": "<|image_pad|>", "around": ("<|vision_start|>", "<|vision_end|>"), "mrope": True,
    "sizes_images": True,
}  # fmt: skip

MODELS: Mapping[str, ModelFacts] = {
    "LlavaNextForConditionalGeneration": ModelFacts("LI", True, True, "D29, T-mm", "<image>"),
    "LlavaForConditionalGeneration": ModelFacts("LI", False, False, "inferred", "<image>"),
    "Qwen2VLForConditionalGeneration": ModelFacts("LIV", False, False, "D29", **_QWEN),
    "Qwen2_5_VLForConditionalGeneration": ModelFacts("LIV", True, False, "D29, T-mm, S-qwen", **_QWEN),
    "Qwen3VLForConditionalGeneration": ModelFacts("LIV", True, False, "D29, T-mm, S-qwen", **_QWEN),
    "Qwen3VLMoeForConditionalGeneration": ModelFacts("LIV", True, False, "D29, T-mm, S-qwen", **_QWEN),
    "Qwen3_5ForConditionalGeneration": ModelFacts("LIV", True, False, "D29", **_QWEN),
    "Qwen3_5MoeForConditionalGeneration": ModelFacts("LIV", True, False, "D29", **_QWEN),
    "NemotronH_Nano_VL_V2": ModelFacts("LIVA", True, False, "D29", "<image>"),
    "Llama4ForConditionalGeneration": ModelFacts("LI", False, True, "D29, S-l4", "<|image|>"),
    "Mistral3ForConditionalGeneration": ModelFacts("LI", False, False, "D29", "[IMG]"),
    "Gemma3ForConditionalGeneration": ModelFacts("LI", False, False, "D29", "<start_of_image>"),
    "Gemma4ForConditionalGeneration": ModelFacts("LIVA", False, False, "D29", disaggregates=False),
    "LlavaLlamaModel": ModelFacts("LIV", False, False, "D29", "<image>"),
    "Phi4MMForCausalLM": ModelFacts("LIA", False, False, "D29"),
}

TEXT_ONLY = ModelFacts("L", False, False, "an architecture that the table does not list takes no images")


def find_model_facts(architectures: list[str] | tuple[str, ...] | None) -> ModelFacts:
    """Facts of the first architecture that the table knows; `TEXT_ONLY` when it knows none."""
    return next((MODELS[name] for name in architectures or () if name in MODELS), TEXT_ONLY)
