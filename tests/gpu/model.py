#!/usr/bin/env python3
"""Makes a random model of Qwen2-VL-7B's shape in bfloat16, with the demo's tokenizer and processor.

Weights do not matter for how long a step takes; the demo's 512 tokens in place of 152,064 save a twelfth of
a decode step's reading. Tokens that are parts of characters, or no text, have output weights of zero and
are never chosen, so the frontend holds no token back until a character is whole. Needs a GPU, 17 GB of it,
and as much disk.

usage: model.py OUT
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

DEMO = Path(__file__).resolve().parents[2] / "components/src/dynamo/trtllm/demo/model"
MAX_PIXELS = 12_845_056
TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
VISION: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def mute_parts_of_characters(model: Any, tokenizer: Any) -> None:
    """Make the logits of tokens zero that are no text of their own."""
    weight = model.get_output_embeddings().weight
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(weight.shape[0])]
    parts = [token for token, text in enumerate(texts) if not text or "\ufffd" in text]
    weight.data[parts] = 0


def main() -> None:
    out, start = Path(sys.argv[1]), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    for file in DEMO.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out / file.name)
    config = json.loads((DEMO / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **TEXT, "vision_config": VISION}))
    processor = json.loads((DEMO / "preprocessor_config.json").read_text())
    size = {"shortest_edge": 3136, "longest_edge": MAX_PIXELS}
    (out / "preprocessor_config.json").write_text(
        json.dumps({**processor, "max_pixels": MAX_PIXELS, "size": size})
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen2VLForConditionalGeneration(transformers.AutoConfig.from_pretrained(out))
    mute_parts_of_characters(model, transformers.AutoTokenizer.from_pretrained(out))
    model.save_pretrained(out, max_shard_size="4GB")
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    print(f"{billions:.2f} billion parameters in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
