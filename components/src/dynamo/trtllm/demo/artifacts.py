"""The model directory without its weights: configuration, tokenizer, chat template, processor settings.

`config.json` keeps the flat layout of the published Qwen2-VL checkpoints, so that Transformers 4 and 5,
TensorRT-LLM and Dynamo's frontend read it alike. The sizes chosen here keep the weights below
`MAX_WEIGHTS_BYTES` in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MAX_WEIGHTS_BYTES = 5_000_000
VOCABULARY = 512
MAX_POSITIONS = 8192
MIN_PIXELS = 56 * 56
MAX_PIXELS = 448 * 448
MIN_FRAME_PIXELS = 112 * 112
MAX_FRAME_PIXELS = 224 * 224
MAX_FRAMES = 8
"""So few frames of at least so many pixels that a clip has fewer pairs of frames than merged patches on its
longer side: then all releases of Transformers give the text behind it the same positions."""
FRAMES_PER_S = 2
PATCH = 14
MERGE = 2
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}"
    "{% if part is string %}{{ part }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' or part['type'] == 'image_url' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' or part['type'] == 'video_url' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """A byte-level BPE tokenizer with Qwen2's normaliser and splitting, `VOCABULARY` entries, the special
    tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the texts give a vocabulary of {tokenizer.get_vocab_size()}, not {VOCABULARY}")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of `token`; a `ValueError` if the tokenizer has no such token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return found


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of `config.json` for a model that uses `tokenizer`."""
    ids = {token: token_id(tokenizer, token) for token in SPECIAL_TOKENS}
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
        "image_token_id": ids[IMAGE_PAD],
        "video_token_id": ids[VIDEO_PAD],
        "vision_token_id": ids[IMAGE_PAD],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 4,
            "embed_dim": 96,
            "hidden_size": 128,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 2,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
    }


def write_artifacts(directory: Path, tokenizer: Tokenizer) -> None:
    """Writes every file of the model directory except `model.safetensors` and the model card."""
    write_files(
        directory,
        tokenizer,
        SPECIAL_TOKENS,
        template=CHAT_TEMPLATE,
        processor="Qwen2VLProcessor",
        config=model_config(tokenizer),
        preprocessor=_preprocessor_config(),
    )
    write_json(directory / "video_preprocessor_config.json", _video_preprocessor_config())


def write_files(
    directory: Path,
    tokenizer: Tokenizer,
    special_tokens: Sequence[str],
    *,
    template: str,
    processor: str,
    config: dict[str, Any],
    preprocessor: dict[str, Any],
) -> None:
    """The files that both demo models have. `processor` is the name of its class in Transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = tokenizer_config(tokenizer, special_tokens, processor, template)
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", generation_config(tokenizer))
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "special_tokens_map.json", special_tokens_map(special_tokens))
    write_json(directory / "preprocessor_config.json", preprocessor)


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of `generation_config.json`: greedy, ending with the turn or the text."""
    return {
        "bos_token_id": token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": [token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)],
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "do_sample": False,
    }


def special_tokens_map(special_tokens: Sequence[str]) -> dict[str, Any]:
    """The content of `special_tokens_map.json`."""
    return {
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [
            token for token in special_tokens if token not in (TURN_END, END_OF_TEXT)
        ],
    }


def tokenizer_config(
    tokenizer: Tokenizer, special_tokens: Sequence[str], processor: str, chat_template: str
) -> dict[str, Any]:
    """The content of `tokenizer_config.json` for the class `processor` of Transformers."""
    added = {
        str(token_id(tokenizer, token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in special_tokens
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": processor,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "unk_token": None,
        **special_tokens_map(special_tokens),
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
        "chat_template": chat_template,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        **_pixels_config(MIN_PIXELS, MAX_PIXELS),
    }


def _video_preprocessor_config() -> dict[str, Any]:
    return {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_sample_frames": True,
        "fps": FRAMES_PER_S,
        "min_frames": 4,
        "max_frames": MAX_FRAMES,
        "cap_pixels_per_frame": False,
        **_pixels_config(MIN_FRAME_PIXELS, MAX_FRAME_PIXELS),
    }


def _pixels_config(least: int, most: int) -> dict[str, Any]:
    """How the pixels of an image, or of a clip's frames, become patches."""
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": least, "longest_edge": most},
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes one of the model directory's files."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
