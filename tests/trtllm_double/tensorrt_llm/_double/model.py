"""The double's model: a hash. Its tokens depend on the expanded prompt, its images' embeddings and, when sampled, the seed."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dynamo.trtllm.engines.tensorrt_llm.record import find_model_facts

BOS = 1
EOS = 2
FIRST_ID, SPAN = 300, 50


class Model:
    """Reads only JSON of a model directory. A text prompt is tokenized by the directory's tokenizer, else word by word."""

    def __init__(self, path: str) -> None:
        self.config = _json(Path(path) / "config.json")
        architectures = self.config.get("architectures")
        self.facts = find_model_facts(architectures)
        self.placeholder = self.facts.placeholder or "<image>"
        added = {t["content"]: t["id"] for t in _json(Path(path) / "tokenizer.json").get("added_tokens", [])}
        self.image_id = added.get(self.placeholder, self.config.get("image_token_id", self.config.get("image_token_index")))
        self.hidden = int((self.config.get("text_config") or self.config).get("hidden_size", 8))
        self.max_positions = int((self.config.get("text_config") or self.config).get("max_position_embeddings", 512))
        self._tokenizer = None
        if (Path(path) / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        head = [BOS] if add_special_tokens else []
        if self._tokenizer is not None:
            return head + list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        words = {"<s>": BOS, self.placeholder: self.image_id, "<|vision_start|>": 4, "<|vision_end|>": 5}
        for word in list(words):
            text = text.replace(word, f" {word} ")
        return head + [words[w] if w in words else int(w) for w in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        names = {BOS: "<s>", self.image_id: self.placeholder}
        return " ".join(names.get(i, str(i)) for i in ids)

    def grid(self, image: Any) -> tuple[int, int, int]:
        """An image becomes one row for each 28 pixels squared, as in Qwen's models."""
        width, height = image.size
        return 1, min(8, max(1, height // 28)), min(8, max(1, width // 28))

    def features(self, image: Any) -> torch.Tensor:
        _, height, width = self.grid(image)
        digest = zlib.crc32(image.convert("RGB").tobytes())
        rows = torch.arange(height * width).unsqueeze(1) * 31 + digest % 1009
        return (rows.expand(height * width, self.hidden) % 97).to(torch.float32).contiguous()


def request_key(prompt_ids: Sequence[int], features: Sequence[torch.Tensor]) -> int:
    key = zlib.crc32(b"".join(i.to_bytes(4, "little") for i in prompt_ids))
    for rows in features:
        key = zlib.crc32(rows.to(torch.float32).contiguous().numpy().tobytes(), key)
    return key


def token_at(key: int, index: int, seed: int | None) -> int:
    return FIRST_ID + zlib.crc32(f"{key}:{index}:{seed}".encode()) % SPAN


def natural_length(key: int) -> int:
    return 5 + key % 11


def mrope_positions(
    ids: Sequence[int], image_id: int, grids: Sequence[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of an expanded prompt, token by token (the plain way, to check the adapter's way)."""
    columns: list[tuple[int, int, int]] = []
    remaining = list(grids)
    following, at = 0, 0
    while at < len(ids):
        if ids[at] != image_id:
            columns.append((following,) * 3)
            following += 1
            at += 1
            continue
        frames, height, width = remaining.pop(0)
        cells = itertools.product(range(frames), range(height), range(width))
        columns += [(following + t, following + y, following + x) for t, y, x in cells]
        at += frames * height * width
        following += max(frames, height, width)
    positions = torch.tensor(columns, dtype=torch.int64).T.unsqueeze(1)
    return positions, torch.tensor([[following - len(ids)]], dtype=torch.int64)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
