"""The audio model's directory without its weights: configuration, tokenizer, chat template, processor
settings.

A Qwen2-Audio hears 30 seconds at most; this one `CHUNK_S`, and what comes after that is not heard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..artifacts import (
    END_OF_TEXT,
    MAX_POSITIONS,
    TURN_END,
    TURN_START,
    VOCABULARY,
    token_id,
    write_files,
)
from .sounds import MODEL_RATE

MAX_WEIGHTS_BYTES = 3_000_000
CHUNK_S = 4
MEL_BINS = 64
HOP = 160
"""Samples from one frame of the spectrum to the next."""
FRAMES = CHUNK_S * MODEL_RATE // HOP

AUDIO = "<|AUDIO|>"
AUDIO_START = "<|audio_bos|>"
AUDIO_END = "<|audio_eos|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, AUDIO_START, AUDIO_END, AUDIO)

CHAT_TEMPLATE = (
    "{% set sounds = namespace(count=0) %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}"
    "{% if part is string %}{{ part }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ['audio', 'audio_url', 'input_audio'] %}"
    "{% set sounds.count = sounds.count + 1 %}"
    "{{ 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of `config.json` for a model that uses `tokenizer`."""
    ids = {token: token_id(tokenizer, token) for token in SPECIAL_TOKENS}
    ends = {
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
    }
    return {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "torch_dtype": "float32",
        "audio_token_index": ids[AUDIO],
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        **ends,
        "text_config": {
            "model_type": "qwen2",
            "torch_dtype": "float32",
            "vocab_size": VOCABULARY,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "max_window_layers": 3,
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            **ends,
        },
        "audio_config": _audio_config(),
    }


def _audio_config() -> dict[str, Any]:
    return {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": MEL_BINS,
        "d_model": 96,
        "encoder_layers": 3,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 192,
        "max_source_positions": FRAMES // 2,
        "activation_function": "gelu",
        "scale_embedding": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
    }


def write_artifacts(directory: Path, tokenizer: Tokenizer) -> None:
    """Writes every file of the model directory except `model.safetensors` and the model card."""
    write_files(
        directory,
        tokenizer,
        SPECIAL_TOKENS,
        template=CHAT_TEMPLATE,
        processor="Qwen2AudioProcessor",
        config=model_config(tokenizer),
        preprocessor=_preprocessor_config(),
    )


def _preprocessor_config() -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": MEL_BINS,
        "sampling_rate": MODEL_RATE,
        "hop_length": HOP,
        "chunk_length": CHUNK_S,
        "n_fft": 400,
        "n_samples": CHUNK_S * MODEL_RATE,
        "nb_max_frames": FRAMES,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
