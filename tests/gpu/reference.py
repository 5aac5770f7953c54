#!/usr/bin/env python3
"""Milliseconds per token of Transformers' own `generate`, one request with one picture. Prints them.

usage: reference.py MODEL_DIRECTORY
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import transformers

from gpu.load import QUESTION, picture

TOKENS = 65
ROUNDS = 4


def main() -> None:
    auto: Any = transformers
    processor = auto.AutoProcessor.from_pretrained(sys.argv[1])
    loader = auto.AutoModelForImageTextToText
    with torch.device("cuda"):
        model = loader.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = []
    for seed in range(ROUNDS):
        inputs = processor(text=[text], images=[picture(seed, 1036)], return_tensors="pt").to("cuda")
        times = {}
        for tokens in (1, TOKENS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    **inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, eos_token_id=None
                )
            torch.cuda.synchronize()
            times[tokens] = time.perf_counter() - start
        found.append((times[TOKENS] - times[1]) / (TOKENS - 1) * 1e3)
    print(f"{statistics.median(found[1:]):.2f}")


if __name__ == "__main__":
    main()
