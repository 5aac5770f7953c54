"""The checks at start with a model that hears:
config.json of Qwen/Qwen2-Audio-7B, without what no check reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.trtllm.preflight import find_faults
from dynamo.trtllm.preflight.shape import parse_shape
from dynamo.trtllm.utils.trtllm_utils import parse
from model_directory import FILES, make_model_directory

CONFIG = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_token_index": 151646,
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "max_source_positions": 1500,
    },
    "text_config": {
        "model_type": "qwen2",
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "sliding_window": 32768,
        "torch_dtype": "bfloat16",
        "vocab_size": 156032,
    },
}
PARAMETERS, AUDIO_PARAMETERS = 8_397_094_912, 642_215_936
"""As Transformers 5.24 counts them on the meta device."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = make_model_directory(tmp_path / "model", "qwen3-0.6b")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def faults(directory: Path, engine: str) -> list[str]:
    arguments = ["--model-path", str(directory), "--modality", "multimodal", "--engine", engine]
    return find_faults(parse(arguments).config)


def test_its_size_is_estimated_with_its_audio_encoder() -> None:
    shape = parse_shape(CONFIG)
    assert shape is not None
    assert shape.parameters == pytest.approx(PARAMETERS, rel=0.01)
    assert shape.media_parameters == pytest.approx(AUDIO_PARAMETERS, rel=0.01)
    assert (shape.heads, shape.kv_heads, shape.layers, shape.windowed_layers) == (32, 32, 32, 0)


def test_the_portable_engine_takes_it_and_tensorrt_llm_does_not(directory: Path) -> None:
    assert not [fault for fault in faults(directory, "transformers") if "audio" in fault.lower()]
    words = (
        "Qwen2AudioForConditionalGeneration takes audio, "
        "which this worker serves with --engine transformers only"
    )
    assert words in faults(directory, "tensorrt_llm")


def test_a_directory_without_its_feature_extractor_is_named(directory: Path) -> None:
    assert "preprocessor_config.json" in FILES
    (directory / "preprocessor_config.json").unlink()
    lacks = [fault for fault in faults(directory, "transformers") if "feature extractor" in fault]
    assert len(lacks) == 1
    assert "has no feature extractor (preprocessor_config.json, processor_config.json)" in lacks[0]
