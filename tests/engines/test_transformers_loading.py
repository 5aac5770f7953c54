"""What the portable engine serves at all, and how it says no: by name, at start, in one sentence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from dynamo.trtllm.config import EngineConfig, EngineKind, Modality
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.engines.transformers.options import parse_options
from dynamo.trtllm.errors import StartupError
from engines.contract import generate, request
from engines.families import make_tiny_engine, save_tiny_model, text_config


def _engine(directory: Path, modality: Modality = Modality.TEXT, **fields: Any) -> TransformersEngine:
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS,
        model_path=str(directory),
        modality=modality,
        device="cpu",
        torch_threads=1,
    )
    return TransformersEngine(EngineConfig(**{**vars(config), **fields}))


async def _refusal(engine: TransformersEngine) -> str:
    with pytest.raises(StartupError) as refused:
        await engine.start()
    await engine.close()
    return refused.value.message


@pytest.mark.asyncio
@pytest.mark.parametrize("modality", list(Modality))
@pytest.mark.parametrize("name", ["Llama4", "Qwen3_5", "Mllama"])
async def test_multimodal_models_outside_the_table_are_refused_by_name(
    tmp_path: Path, name: str, modality: Modality
) -> None:
    settings = getattr(tf, f"{name}Config")()
    settings.architectures = [f"{name}ForConditionalGeneration"]
    settings.save_pretrained(tmp_path)
    message = await _refusal(_engine(tmp_path, modality))
    assert message.startswith(f"{name}ForConditionalGeneration is not supported")
    assert "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA, LLaVA-NeXT, Mistral 3, Gemma 3" in message
    assert str(tmp_path) not in message


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mamba", {"state_size": 4}),
        ("Bloom", {"n_head": 4, "n_layer": 2}),
        ("GptOss", {"num_local_experts": 4, "sliding_window": 8}),
        ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    ],
)
async def test_text_models_with_other_than_plain_attention_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    model = tf.AutoModelForCausalLM.from_config(getattr(tf, f"{name}Config")(**text_config(**changes)))
    model.save_pretrained(tmp_path)
    message = await _refusal(_engine(tmp_path))
    assert message.startswith(f"{name}ForCausalLM is not supported by the portable engine")
    assert "text-only causal models with full or sliding attention" in message


@pytest.mark.asyncio
async def test_a_text_model_is_no_multimodal_model(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    message = await _refusal(_engine(tmp_path, Modality.MULTIMODAL))
    assert message.startswith("LlamaForCausalLM is not supported")


@pytest.mark.asyncio
async def test_a_multimodal_model_serves_text_alone_when_asked_to(tmp_path: Path) -> None:
    save_tiny_model("qwen2_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
    engine = _engine(tmp_path)
    info = await engine.start()
    assert (info.media, info.hidden_size) == ({}, None)
    assert len((await generate(engine, request((30, 31), max_tokens=3, ignore_eos=True))).token_ids) == 3
    await engine.close()


@pytest.mark.asyncio
async def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "configuration cannot be read" in await _refusal(_engine(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard_of", "architectures": ["UnheardOf"]})
    )
    assert (await _refusal(_engine(tmp_path))).startswith("UnheardOf is not supported")
    tf.LlamaConfig(**text_config()).save_pretrained(tmp_path)
    assert "weights cannot be loaded" in await _refusal(_engine(tmp_path))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("key", "value"),
    [("max_position_embeddings", "x"), ("layer_types", 5), ("rope_scaling", "x"), ("quantization_config", 5)],
)
async def test_a_configuration_with_a_value_of_a_wrong_kind_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert (await _refusal(_engine(tmp_path))).startswith(
        "LlamaForCausalLM is not supported by the portable engine"
    )


@pytest.mark.asyncio
async def test_a_model_without_its_image_processor_is_refused(tmp_path: Path) -> None:
    save_tiny_model("qwen2_vl", tmp_path)
    for file in (
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (tmp_path / file).unlink(missing_ok=True)
    message = await _refusal(_engine(tmp_path, Modality.MULTIMODAL))
    assert "processor" in message
    assert str(tmp_path) not in message


@pytest.mark.asyncio
async def test_more_context_than_the_model_has_positions_is_refused(tmp_path: Path) -> None:
    message = await _refusal(make_tiny_engine(tmp_path, "llama", max_seq_len=4096))
    assert "4096" in message
    assert "2048" in message


@pytest.mark.asyncio
async def test_length_dependent_positions_are_served_up_to_their_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
    }
    tf.LlamaForCausalLM(tf.LlamaConfig(**text_config(rope_parameters=rope))).save_pretrained(tmp_path)
    engine = _engine(tmp_path)
    assert (await engine.start()).context_length == 256
    await engine.close()


@pytest.mark.asyncio
async def test_the_facts_of_a_started_engine(tmp_path: Path) -> None:
    args = {
        "max_batch_size": 5,
        "max_num_tokens": 99,
        "max_seq_len": 128,
        "kv_cache_config": {"max_tokens": 512, "tokens_per_block": 8},
    }
    engine = make_tiny_engine(tmp_path, "qwen2_vl", **args, dtype="bfloat16")
    info = await engine.start()
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.context_length) == (5, 99, 128)
    assert (info.kv_block_size, info.total_kv_blocks) == (8, 64)
    image = info.media["image"]
    assert (image.placeholder_id, info.hidden_size) == (7, 64)
    assert (image.encodes, image.takes_encoded, image.takes_files) == (True, True, True)
    assert (info.extras["dtype"], info.extras["device"], info.extras["family"]) == (
        "bfloat16",
        "cpu",
        "Qwen2-VL",
    )
    assert torch.get_num_threads() == 1
    await engine.close()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size must be 1"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number"),
        ({"max_num_tokens": "many"}, "max_num_tokens"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "free_gpu_memory_fraction"),
        ({"kv_cache_config": {"max_tokens": -1}}, "kv_cache_config.max_tokens"),
    ],
)
def test_engine_arguments_that_cannot_be_kept_end_the_start(args: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        parse_options(args)


def test_arguments_of_other_engines_are_ignored_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    args: dict[str, Any] = {
        "backend": "pytorch",
        "max_batch_size": 3,
        "cuda_graph_config": {"enable_padding": True},
    }
    args |= {"guided_decoding_backend": "xgrammar", "kv_cache_config": {"enable_block_reuse": True}}
    with caplog.at_level(logging.INFO):
        options = parse_options({**args, "tensor_parallel_size": 1, "max_seq_len": None})
    assert options.max_batch_size == 3
    assert options.max_seq_len is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.endswith(
        "guided_decoding_backend, kv_cache_config.enable_block_reuse, cuda_graph_config.enable_padding"
    )


def test_cuda_graphs_are_asked_for_unless_their_section_is_null() -> None:
    assert parse_options({}).cuda_graphs
    assert parse_options({"cuda_graph_config": {}}).cuda_graphs
    assert not parse_options({"cuda_graph_config": None}).cuda_graphs


@pytest.mark.asyncio
async def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    for device in ("cuda:63", "tpu", "meta"):
        assert "device" in await _refusal(_engine(tmp_path, device=device))
