"""Images and embeddings on the TensorRT-LLM adapter, over the double of both recorded releases."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo.trtllm.config import Role
from dynamo.trtllm.core import EncodedMedia, Prompt, Step
from dynamo.trtllm.engines.port import EngineInfo
from dynamo.trtllm.engines.tensorrt_llm import mrope, private
from dynamo.trtllm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from dynamo.trtllm.engines.tensorrt_llm.model import describe_model
from dynamo.trtllm.engines.tensorrt_llm.record import MODELS
from dynamo.trtllm.errors import ClientFault, EngineFault, LimitFault, StartupError
from engines.contract import generate, split
from engines.tensorrt_llm_subject import (
    IMAGE_ID,
    LLAMA4,
    LLAVA,
    QWEN25,
    RELEASES,
    TRANSCEIVER,
    ask_about,
    engine_config,
    installed,
    instances,
    leaked_handles,
    model_directory,
    picture,
    release,
    script,
    started,
)

BOTH_HALVES = {**TRANSCEIVER, "disable_overlap_scheduler": True}
PLACEHOLDERS = {QWEN25: "<|image_pad|>", LLAVA: "<image>", LLAMA4: "<|image|>"}
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}


__all__ = ["release"]


def how_images_are_taken(info: EngineInfo) -> tuple[bool, bool, bool]:
    """Encoded first by the engine itself; taken as an encode worker's embeddings; taken as a file's."""
    image = info.media["image"]
    return image.encodes, image.takes_encoded, image.takes_files


def config_of(path: Path, architecture: str, role: Role = Role.AGGREGATED, **args: Any) -> Any:
    return engine_config(model_directory(path / architecture, architecture), role, images=True, args=args)


def question(architecture: str, items: list[Any], **options: Any) -> Any:
    return ask_about(items, placeholder=PLACEHOLDERS[architecture], **{**OPTIONS, **options})


# Images


@pytest.mark.asyncio
async def test_images_go_in_decoded_with_text_or_ids_by_release(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25)) as (engine, info):
        assert (info.placeholder_id("image"), info.hidden_size) == (IMAGE_ID, None)
        assert how_images_are_taken(info) == (False, True, False)
        items = [picture(84, 56, 10), picture(56, 56, 20)]
        output = await generate(engine, question(QWEN25, items))
        call = instances()[-1].seen[-1]
        params = call["sampling_params"]
        assert params.add_special_tokens is False
        assert output.usage is not None
        assert output.usage.prompt_tokens == len(question(QWEN25, items).prompt.token_ids) - 2 + 6 + 4
        if release == "1.2.1":
            assert set(call["inputs"]) == {"prompt", "multi_modal_data", "mm_processor_kwargs"}
            assert call["inputs"]["multi_modal_data"]["image"] == [i.image for i in items]


@pytest.mark.asyncio
async def test_the_rendered_text_gives_what_the_ids_give(tmp_path: Path) -> None:
    outputs = []
    for each in RELEASES:
        with installed(each):
            async with started(config_of(tmp_path, QWEN25)) as (engine, _):
                outputs.append((await generate(engine, question(QWEN25, [picture()]))).token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.asyncio
async def test_without_rendered_text_the_ids_are_used(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25)) as (engine, _):
        asked = question(QWEN25, [picture()])
        bare = replace(asked, prompt=replace(asked.prompt, text=None))
        assert (await generate(engine, bare)).token_ids == (await generate(engine, asked)).token_ids


@pytest.mark.asyncio
async def test_other_images_or_another_order_give_other_answers(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, LLAVA)) as (engine, _):
        one, two = picture(56, 56, 10), picture(56, 56, 200)
        outputs = [
            await generate(engine, question(LLAVA, items)) for items in ([one, two], [two, one], [one, one])
        ]
        assert len({tuple(output.token_ids) for output in outputs}) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", [QWEN25, LLAVA, LLAMA4])
async def test_images_over_prefill_and_decode_give_what_one_engine_gives(
    release: str, tmp_path: Path, architecture: str
) -> None:
    async with started(config_of(tmp_path, architecture, **BOTH_HALVES)) as (engine, _):
        asked = question(architecture, [picture(84, 56, 10), picture(140, 84, 20)])
        whole, halves = await generate(engine, asked), await split(engine, asked)
        assert halves.token_ids == whole.token_ids
        assert halves.usage == whole.usage
        assert leaked_handles() == []


@pytest.mark.asyncio
async def test_positions_travel_as_tensors_and_not_as_handles(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25, Role.PREFILL)) as (engine, _):
        prefilled = await engine.prefill(question(QWEN25, [picture()]))
        assert prefilled.state is not None
        tokens = len(prefilled.prompt_token_ids)
        assert {name: tuple(t.shape) for name, t in prefilled.state.tensors.items()} == {
            "mrope_position_ids": (3, 1, tokens),
            "mrope_position_deltas": (1, 1),
        }
        assert [t.dtype for t in prefilled.state.tensors.values()] == [torch.int64, torch.int32]
        assert not [name for name in prefilled.state.meta["params"] if "handle" in name]


@pytest.mark.asyncio
async def test_a_prompt_that_its_images_make_too_long_is_refused_with_both_counts(
    release: str, tmp_path: Path
) -> None:
    async with started(config_of(tmp_path, LLAVA, max_seq_len=32)) as (engine, _):
        with pytest.raises(LimitFault, match=r"has 42 tokens with its media; the context length is 32"):
            await generate(engine, question(LLAVA, [picture(168, 168)]))
        assert instances()[-1].active == set()


@pytest.mark.asyncio
async def test_the_frontends_hashes_name_the_images_where_the_release_takes_them(
    release: str, tmp_path: Path
) -> None:
    async with started(config_of(tmp_path, LLAVA)) as (engine, _):
        await generate(engine, replace(question(LLAVA, [picture()]), media_hashes=("ab" * 8,)))
        inputs = instances()[-1].seen[-1]["inputs"]
        if release == "1.2.1":
            assert "multi_modal_uuids" not in inputs
        else:
            assert inputs.multimodal_params.hashes == ["ab" * 8]


@pytest.mark.asyncio
async def test_options_of_the_processor_reach_it_and_part_the_names_of_what_it_made(
    release: str, tmp_path: Path
) -> None:
    small = replace(picture(140, 140), options={"max_pixels": 28 * 28 * 4}, digest="small")
    async with started(config_of(tmp_path, QWEN25)) as (engine, info):
        pixels = info.media["image"].options["max_pixels"]
        assert (sorted(info.media["image"].options), pixels.least) == (["max_pixels", "min_pixels"], 28 * 28)
        plain, fewer = [
            await generate(engine, question(QWEN25, [each])) for each in (picture(140, 140), small)
        ]
        assert plain.usage is not None
        assert fewer.usage is not None
        assert plain.usage.prompt_tokens - fewer.usage.prompt_tokens == 25 - 4
        inputs = instances()[-1].seen[-1]["inputs"]
        if release != "1.2.1":
            assert inputs.multimodal_params.hashes == ["small"]
    async with started(config_of(tmp_path, QWEN25, Role.ENCODE)) as (encoder, _):
        assert [len((await encoder.encode([each]))[0].token_ids) for each in (picture(140, 140), small)] == [
            25,
            4,
        ]
    async with started(config_of(tmp_path, LLAVA)) as (_, info):
        assert info.media["image"].options == {}


@pytest.mark.asyncio
async def test_a_request_that_goes_no_further_leaves_no_handle_behind(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25, Role.ENCODE)) as (encoder, _):
        encoded = await encoder.encode([picture()])
    async with started(config_of(tmp_path, QWEN25, Role.PREFILL, max_num_tokens=16)) as (engine, _):
        await engine.prefill(question(QWEN25, [picture(28, 28)], max_tokens=1))
        script().fail_at_token = 0
        with pytest.raises(EngineFault):
            await engine.prefill(question(QWEN25, [picture(28, 28)]))
        with pytest.raises(ClientFault):
            await engine.prefill(question(QWEN25, [encoded[0], picture(28, 28)]))
        with pytest.raises(ClientFault):
            await engine.prefill(question(QWEN25, [*encoded, *encoded, *encoded]))
        assert leaked_handles() == []


@pytest.mark.asyncio
async def test_a_text_model_takes_no_images(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, "LlamaForCausalLM")) as (engine, info):
        assert info.placeholder_id("image") is None
        with pytest.raises(ClientFault, match="takes no images"):
            await generate(engine, question(LLAVA, [picture()]))


@pytest.mark.asyncio
async def test_decode_never_sees_media(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25, **BOTH_HALVES)) as (engine, _):
        asked = question(QWEN25, [picture()])
        prefilled = await engine.prefill(asked)
        with pytest.raises(EngineFault, match="decode was given media"):
            await anext(engine.decode(asked, prefilled.first, prefilled.state))


@pytest.mark.asyncio
async def test_a_decode_worker_shows_no_placeholder(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25, Role.DECODE)) as (_, info):
        assert info.placeholder_id("image") is None


# Encoding apart


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", [QWEN25, LLAVA])
async def test_encoded_apart_gives_what_one_engine_gives(
    release: str, tmp_path: Path, architecture: str
) -> None:
    pictures = [picture(84, 56, 10), picture(56, 112, 20), picture(28, 28, 30)]
    if (release, architecture) == ("1.2.1", LLAVA):
        pictures = pictures[:1]  # this release takes one handle a request for it
    async with started(config_of(tmp_path, architecture, Role.ENCODE, max_batch_size=4)) as (encoder, info):
        assert how_images_are_taken(info) == (True, False, architecture == LLAVA)
        encoded = await encoder.encode(pictures)
    async with started(config_of(tmp_path, architecture, **BOTH_HALVES)) as (engine, _):
        whole = await generate(engine, question(architecture, pictures))
        joined = await generate(engine, question(architecture, encoded))
        halves = await split(engine, question(architecture, encoded))
    assert joined.token_ids == halves.token_ids == whole.token_ids
    assert joined.usage == halves.usage == whole.usage
    assert leaked_handles() == []


@pytest.mark.asyncio
async def test_one_engine_with_encoded_images_needs_no_transceiver(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25, Role.ENCODE)) as (encoder, _):
        encoded = await encoder.encode([picture()])
    async with started(config_of(tmp_path, QWEN25)) as (engine, _):
        assert (await generate(engine, question(QWEN25, encoded))).finish == "length"
        assert instances()[-1].seen[-1]["disaggregated_params"].request_type == "context_and_generation"


@pytest.mark.asyncio
async def test_encoded_images_say_how_they_are_laid_out(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, QWEN25, Role.ENCODE)) as (engine, _):
        encoded = await engine.encode([picture(112, 56), picture(28, 84)])
        assert [e.extras["grid"] for e in encoded] == [[1, 2, 4], [1, 3, 1]]
        assert [e.token_ids for e in encoded] == [(IMAGE_ID,) * 8, (IMAGE_ID,) * 3]
        assert [tuple(e.tensors["features"].shape) for e in encoded] == [(8, 8), (3, 8)]
        assert [e.digest for e in encoded] == [picture(112, 56).digest, picture(28, 84).digest]


@pytest.mark.asyncio
async def test_images_of_many_requests_are_under_way_together_up_to_the_batch_size(
    release: str, tmp_path: Path
) -> None:
    async with started(config_of(tmp_path, LLAVA, Role.ENCODE, max_batch_size=4)) as (engine, _):
        script().step_delay_s = 0.05
        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, len(leaked_handles()))
                await asyncio.sleep(0.001)

        looking = asyncio.create_task(look())
        await asyncio.gather(*(engine.encode([picture(56, 56, shade)]) for shade in range(8)))
        looking.cancel()
        assert most == 4
        assert len(instances()[-1].seen) == 8
        assert leaked_handles() == []


@pytest.mark.asyncio
async def test_an_image_that_the_encoder_cannot_take_fails_alone(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, LLAVA, Role.ENCODE, max_batch_size=4)) as (engine, _):
        script().encode_fails_on = "28x28"
        bad, good = await asyncio.gather(
            engine.encode([picture(28, 28)]), engine.encode([picture(56, 56)]), return_exceptions=True
        )
        assert isinstance(bad, EngineFault)
        assert bad.message == "the encoder failed on an image"
        assert len(good[0].token_ids) == 4
        await engine.check_health()


@pytest.mark.asyncio
async def test_an_encoder_without_handles_is_an_engine_fault(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, LLAVA, Role.ENCODE)) as (engine, _):
        script().no_handles = True
        with pytest.raises(EngineFault, match="returned no embeddings"):
            await engine.encode([picture()])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "architecture", ["Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"]
)
async def test_a_model_without_an_encoder_of_its_own_is_refused_in_the_encode_role(
    release: str, tmp_path: Path, architecture: str
) -> None:
    with pytest.raises(
        StartupError, match=f"cannot encode images of {architecture} in a worker of their own"
    ):
        await TensorRTLLMEngine(config_of(tmp_path, architecture, Role.ENCODE)).start()


@pytest.mark.asyncio
async def test_llama4_has_an_encode_role_for_embedding_files_only(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, LLAMA4, Role.ENCODE)) as (engine, info):
        assert how_images_are_taken(info) == (False, False, True)
        special = {"image_special_tokens": [21], "image_special_token_offsets": [1]}
        adopted = engine.adopt_embeddings("image", "file", {"features": torch.ones(1, 3, 8)}, special)
        assert adopted.token_ids == (IMAGE_ID, 21, IMAGE_ID, IMAGE_ID)
        with pytest.raises(EngineFault, match="no encoder of its own"):
            await engine.encode([picture()])
    async with started(config_of(tmp_path, LLAMA4)) as (engine, info):
        assert (info.hidden_size, how_images_are_taken(info)) == (8, (False, False, True))
        assert (await generate(engine, question(LLAMA4, [adopted]))).finish == "length"


@pytest.mark.asyncio
async def test_without_the_private_class_encoding_apart_is_refused(
    release: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm._torch.shared_tensor", None)
    assert not private.handles_supported()
    with pytest.raises(EngineFault):
        private.make_handle(torch.ones(1))
    with pytest.raises(StartupError, match="cannot hand embeddings to another process"):
        await TensorRTLLMEngine(config_of(tmp_path, QWEN25, Role.ENCODE)).start()


# Embeddings from files


@pytest.mark.asyncio
async def test_embeddings_are_attached_beside_the_rendered_text(
    release: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(private, "handles_supported", lambda: False)
    async with started(config_of(tmp_path, LLAVA)) as (engine, _):
        adopted = engine.adopt_embeddings(
            "image", "file", {"features": torch.arange(24.0).reshape(3, 8)}, {"source": "file"}
        )
        asked = question(LLAVA, [adopted])
        output = await generate(engine, asked)
        assert output.usage is not None
        assert output.usage.prompt_tokens == len(asked.prompt.token_ids)
        with pytest.raises(ClientFault, match="need the rendered prompt"):
            await generate(engine, replace(asked, prompt=replace(asked.prompt, text=None)))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 9), r"must be \[tokens, 8\] for this model, not \[3, 9\]"),
        ((2, 3, 8), "holds a batch of 2"),
        ((8,), r"must be \[tokens, 8\] or \[1, tokens, 8\], not \[8\]"),
        ((0, 8), r"must be \[tokens, 8\] or \[1, tokens, 8\], not \[0, 8\]"),
    ],
)
async def test_embeddings_of_another_shape_are_refused(
    release: str, tmp_path: Path, shape: tuple[int, ...], words: str
) -> None:
    async with started(config_of(tmp_path, LLAVA)) as (engine, _):
        with pytest.raises(ClientFault, match=words):
            engine.adopt_embeddings("image", "file", {"features": torch.zeros(shape)}, {})


@pytest.mark.asyncio
async def test_a_model_that_attaches_no_embeddings_says_so(release: str, tmp_path: Path) -> None:
    stray = EncodedMedia("image", "x", {"features": torch.ones(2, 8)}, (IMAGE_ID,) * 2)
    async with started(config_of(tmp_path, "Mistral3ForConditionalGeneration")) as (engine, _):
        for attempt in (lambda: engine.adopt_embeddings("image", "x", stray.tensors, {}),):
            with pytest.raises(ClientFault, match="takes no precomputed embeddings"):
                attempt()
        with pytest.raises(ClientFault, match="takes no precomputed embeddings"):
            await generate(engine, question(LLAVA, [stray]))


@pytest.mark.asyncio
async def test_images_and_embeddings_are_not_mixed(release: str, tmp_path: Path) -> None:
    async with started(config_of(tmp_path, LLAVA)) as (engine, _):
        adopted = engine.adopt_embeddings("image", "file", {"features": torch.ones(3, 8)}, {})
        with pytest.raises(ClientFault, match="cannot be mixed"):
            await generate(engine, question(LLAVA, [adopted, picture()]))


# Facts and formulas


def test_the_placeholder_is_what_the_chat_template_writes(tmp_path: Path) -> None:
    path = model_directory(tmp_path, LLAMA4, image_token_index=200092)
    (path / "tokenizer.json").write_text(
        '{"added_tokens": [{"id": 200090, "content": "<|image|>"}]}', encoding="utf-8"
    )
    assert describe_model(str(path)).placeholder_id == 200090


def test_a_model_that_cannot_be_read_is_described_without_facts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    described = describe_model(str(tmp_path))
    assert (described.architecture, described.placeholder_id, described.max_positions) == (None, None, None)


def test_every_model_in_the_table_names_its_source() -> None:
    assert all(facts.source for facts in MODELS.values())
    assert all(facts.placeholder for facts in MODELS.values() if facts.encodes_apart)


@pytest.mark.parametrize("grids", [[], [(1, 2, 3)], [(1, 4, 2), (1, 1, 1), (1, 3, 5)]])
def test_positions_are_those_of_the_models_own_formula(grids: list[mrope.Grid]) -> None:
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    config = Qwen2VLConfig(image_token_id=10, video_token_id=11, vision_start_token_id=12)
    ids, placed = [1, 2], []
    for grid in grids:
        ids.append(12)
        placed.append((len(ids), grid))
        ids += [10] * (grid[0] * grid[1] * grid[2]) + [13, 3]
    ids += [4, 5]
    holder = type(
        "Holder", (), {"config": config, "get_vision_position_ids": Qwen2VLModel.get_vision_position_ids}
    )()
    thw = torch.tensor([[t, h * 2, w * 2] for t, h, w in grids]) if grids else None
    tensor = torch.tensor([ids])
    kinds = (tensor == 10).int()
    theirs, deltas = Qwen2VLModel.get_rope_index(holder, tensor, mm_token_type_ids=kinds, image_grid_thw=thw)
    positions, delta = mrope.positions(len(ids), placed)
    assert positions.tolist() == theirs.tolist()
    assert delta.tolist() == deltas.reshape(1, 1).tolist()


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 2, 3), (1, 8, 8), (1, 1, 7), (1, 7, 1)])
def test_a_grid_is_found_again_in_the_positions(grid: mrope.Grid) -> None:
    tokens = grid[0] * grid[1] * grid[2]
    positions, _ = mrope.positions(tokens + 3, [(2, grid)])
    assert mrope.grid_of(positions, tokens) == grid
    if tokens > 1:
        assert mrope.grid_of(mrope.positions(tokens + 3, [])[0], tokens) is None


def test_prompts_and_steps_are_plain_values() -> None:
    assert Prompt((1,)).media == ()
    assert Step([1]) == tuple.__new__(Step, ([1], None, None, None, None))
