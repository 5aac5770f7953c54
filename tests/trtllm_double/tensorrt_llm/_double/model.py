"""The double's model: a hash. Its tokens depend on the expanded prompt, its images' embeddings and, when
sampled, the seed."""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BOS = 1
EOS = 2
FIRST_ID, SPAN = 300, 50
VIDEO = "<|video_pad|>"


@dataclass(frozen=True)
class Architecture:
    """What the library does with a model class. `placeholder` stands once for each image in a prompt.

    `splits`: `@support_multimodal_disaggregated`. `token_ids`: `supports_token_id_mm_expansion` where the
    release has it. `attaches`: form of precomputed embeddings ("tensors", "llama4", "qwen"). `loads_split`:
    may be loaded with TLLM_MULTIMODAL_DISAGGREGATED=1. `adds_bos`: its usual tokenizer does.
    `one_handle_in`: releases that take one handle a request.
    """

    placeholder: str | None = None
    splits: bool = False
    token_ids: bool = False
    attaches: str | None = None
    mrope: bool = False
    adds_bos: bool = True
    loads_split: bool = True
    one_handle_in: tuple[str, ...] = ()
    text_beside_handles: bool = False
    honours_add_special_tokens: bool = False
    expands_processor_kwargs: bool = False
    """The processor is called with `**mm_processor_kwargs`."""
    times_frames: bool = False
    """Takes videos, each pair of frames behind its time (modeling_qwen3vl.py); of others none are played."""


_QWEN: dict[str, Any] = {
    "placeholder": "<|image_pad|>", "mrope": True, "adds_bos": False, "text_beside_handles": True,
    "expands_processor_kwargs": True,
}  # fmt: skip
ARCHITECTURES = {
    "LlavaNextForConditionalGeneration": Architecture(
        "<image>",
        splits=True,
        token_ids=True,
        attaches="tensors",
        one_handle_in=("1.2.1",),
        expands_processor_kwargs=True,
    ),
    "LlavaForConditionalGeneration": Architecture("<image>"),
    "Qwen2VLForConditionalGeneration": Architecture(**_QWEN),
    "Qwen2_5_VLForConditionalGeneration": Architecture(splits=True, attaches="qwen", **_QWEN),
    "Qwen3VLForConditionalGeneration": Architecture(
        splits=True, attaches="qwen", one_handle_in=("1.2.1",), times_frames=True, **_QWEN
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        splits=True, attaches="qwen", one_handle_in=("1.2.1",), times_frames=True, **_QWEN
    ),
    "Qwen3_5ForConditionalGeneration": Architecture(splits=True, attaches="qwen", **_QWEN),
    "Qwen3_5MoeForConditionalGeneration": Architecture(splits=True, attaches="qwen", **_QWEN),
    "NemotronH_Nano_VL_V2": Architecture(
        "<image>", splits=True, token_ids=True, expands_processor_kwargs=True
    ),
    "Llama4ForConditionalGeneration": Architecture(
        "<|image|>", attaches="llama4", honours_add_special_tokens=True
    ),
    "Mistral3ForConditionalGeneration": Architecture("[IMG]", loads_split=False),
    "Gemma3ForConditionalGeneration": Architecture("<start_of_image>", loads_split=False),
    "Gemma4ForConditionalGeneration": Architecture("<|image|>"),
    "LlavaLlamaModel": Architecture("<image>"),
    "Phi4MMForCausalLM": Architecture("<|endoftext10|>"),
}
TEXT_ONLY = Architecture()


class Tokenizer:
    """The directory's `tokenizer.json`, with its own special tokens; without one, a toy that knows numbers
    and a few words.

    As a tokenizer of transformers it adds its special tokens unless told otherwise.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], architecture: Architecture, image_id: int | None
    ) -> None:
        self._real: Any = None
        file, described = path / "tokenizer.json", _json(path / "tokenizer_config.json")
        self.eos_token_id, self.pad_token_id = EOS, EOS
        self.bos_token: str | None = None
        if file.is_file() and "model" in _json(file):
            from tokenizers import Tokenizer as Real

            self._real = Real.from_file(str(file))
            self.eos_token_id = config.get("eos_token_id", self._id(described.get("eos_token")) or EOS)
            self.bos_token = described.get("bos_token")
            self._prefix: list[int] = []
        else:
            self._prefix = [BOS] if architecture.adds_bos else []
            self.bos_token = "<s>" if architecture.adds_bos else None
        self.bos_token_id = self._prefix[0] if self._prefix else self._id(self.bos_token)
        self.eos_token = described.get("eos_token", "</s>")
        self.vocab_size = int(config.get("vocab_size", 32000))
        self._words = {
            "<s>": BOS,
            architecture.placeholder or "<image>": image_id,
            "<|vision_start|>": 4,
            "<|vision_end|>": 5,
            VIDEO: config.get("video_token_id"),
        }
        self._names = {number: word for word, number in self._words.items()}

    def _id(self, token: Any) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return None if self._real is None or content is None else self._real.token_to_id(content)

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text input must be of type `str`")
        if self._real is not None:
            return list(self._real.encode(text, add_special_tokens=add_special_tokens).ids)
        for word in self._words:
            text = text.replace(word, f" {word} ")
        head = self._prefix if add_special_tokens else []
        ids = (self._words[w] if w in self._words else _number(w) for w in text.split())
        return head + [i for i in ids if i is not None]

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        if self._real is not None:
            return str(self._real.decode(ids, skip_special_tokens=skip_special_tokens))
        return " ".join(str(self._names.get(i, i)) for i in ids)


class Model:
    """Reads only JSON of a model directory."""

    def __init__(self, path: str) -> None:
        directory = Path(path)
        self.config = _json(directory / "config.json")
        known = [ARCHITECTURES[a] for a in self.config.get("architectures") or () if a in ARCHITECTURES]
        self.architecture = known[0] if known else TEXT_ONLY
        text = self.config.get("text_config") or self.config
        added = {t["content"]: t["id"] for t in _json(directory / "tokenizer.json").get("added_tokens", [])}
        placeholder = self.architecture.placeholder or "<image>"
        self.image_id: int | None = added.get(
            placeholder, self.config.get("image_token_id", self.config.get("image_token_index"))
        )
        self.video_id: int | None = added.get(VIDEO, self.config.get("video_token_id"))
        self.hidden = int(text.get("hidden_size", 8))
        self.vocab_size = int(text.get("vocab_size", self.config.get("vocab_size", 32000)))
        self.max_positions = int(text.get("max_position_embeddings", 512))
        levels = (self.config.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
        self.width = self.hidden * (1 + len(levels))
        """Numbers in a row of an image's embedding, with the deepstack levels side by side
        (modeling_qwen3vl.py)."""
        self.tokenizer = Tokenizer(
            directory, {**self.config, "vocab_size": self.vocab_size}, self.architecture, self.image_id
        )

    @property
    def media_ids(self) -> set[int]:
        """What stands for the rows of images and videos in an expanded prompt."""
        return {each for each in (self.image_id, self.video_id) if each is not None}

    def sized(self, image: Any, *, min_pixels: int = 1, max_pixels: int = 1 << 30) -> Any:
        """`image` as its processor scales it; another keyword is a TypeError, as of a strict processor."""
        pixels = image.width * image.height
        scale = (min(max(pixels, min_pixels), max_pixels) / pixels) ** 0.5
        if scale == 1.0:
            return image
        return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))

    def grid(self, image: Any) -> tuple[int, int, int]:
        """An image becomes one row for each 28 pixels squared, as in Qwen's models."""
        width, height = image.size
        return 1, min(8, max(1, height // 28)), min(8, max(1, width // 28))

    def features(self, image: Any) -> torch.Tensor:
        _, height, width = self.grid(image)
        digest = zlib.crc32(image.convert("RGB").tobytes())
        rows = torch.arange(height * width).unsqueeze(1) * 31 + digest % 1009
        return (rows.expand(height * width, self.width) % 97).to(torch.float32).contiguous()

    def pair_features(self, frames: Sequence[Any]) -> torch.Tensor:
        """Rows of the frames that the model takes together."""
        both = sum((1 + at) * self.features(frame) for at, frame in enumerate(frames))
        return both % 97  # type: ignore[operator, no-any-return]

    def in_vocabulary(self, ids: Sequence[int]) -> list[int]:
        """An expanded prompt with the image token where 1.2 writes `vocab_size + 1`, so that all releases
        give the same answers."""
        return [self.image_id if i == self.vocab_size + 1 and self.image_id is not None else i for i in ids]


def media_hash(image: Any) -> str:
    """64 hexadecimal digits that name an image's content, as the library's blake3 does."""
    return hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()


def video_hash(video: Any) -> str:
    """The same of a video: its frames, and what was chosen of it (multimodal_data.py, `update_hash`)."""
    said = {name: video.metadata[name] for name in HASHED if name in video.metadata}
    hasher = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for frame in video.frames:
        hasher.update(frame.convert("RGB").tobytes())
    return hasher.hexdigest()


HASHED = ("frames_indices", "fps", "duration", "total_num_frames")


def hash_words(digest: str) -> list[int]:
    """Eight signed 32-bit numbers of a 64-digit hash (inputs/multimodal.py, `hexdigest_to_int32`)."""
    return [int.from_bytes(bytes.fromhex(digest[i : i + 8]), "big", signed=True) for i in range(0, 64, 8)]


def request_key(prompt_ids: Sequence[int], features: Sequence[torch.Tensor]) -> int:
    key = zlib.crc32(b"".join(i.to_bytes(4, "little") for i in prompt_ids))
    for rows in features:
        key = zlib.crc32(rows.to(torch.float32).contiguous().numpy().tobytes(), key)
    return key


def token_at(key: int, index: int, seed: int | None, choice: int = 0) -> int:
    name = f"{key}:{index}:{seed}" if choice == 0 else f"{key}:{index}:{seed}:{choice}"
    return FIRST_ID + zlib.crc32(name.encode()) % SPAN


def natural_length(key: int) -> int:
    return 5 + key % 11


def mrope_positions(
    ids: Sequence[int], image_id: int | None, grids: Sequence[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 positions `[3, 1, tokens]` of an expanded prompt and the int32 delta `[1, 1]`, token by token."""
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
    positions = torch.tensor(columns, dtype=torch.int64).T.unsqueeze(1).contiguous()
    return positions, torch.tensor([[following - len(ids)]], dtype=torch.int32)


def square_grid(tokens: int) -> tuple[int, int, int]:
    """The most square grid of so many tokens: what the library guesses for an image of which it has the
    embedding only."""
    height = next(h for h in range(int(tokens**0.5), 0, -1) if tokens % h == 0)
    return 1, height, tokens // height


def _number(word: str) -> int:
    """A word that is no number has an id of its own, so that the toy tokenizer takes any text."""
    return int(word) if word.lstrip("-").isdigit() else 10_000 + zlib.crc32(word.encode()) % 10_000


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
