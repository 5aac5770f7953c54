"""The TensorRT-LLM double against what is known of the library: images, handles and embeddings.

Each test names the file and the release in which the behaviour was read. `tests/trtllm_double/README.md` has
the list, and says what was inferred.
"""

from __future__ import annotations

import asyncio
import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.tensorrt_llm_library import (
    GEMMA3,
    IMAGE,
    LATER,
    LLAMA4,
    LLAVA,
    QWEN3,
    QWEN25,
    RC29,
    RELEASES,
    Library,
    about,
    library,
    picture,
)

ROWS = 6
"""Tokens of `picture()`."""


def with_handles(lib: Library, architecture: str, *pictures: Any) -> tuple[Any, dict[str, Any]]:
    """A context's parameters with handles that the encoder made, and the question without images."""
    placeholder = "<|image_pad|>" if architecture in (QWEN25, QWEN3) else "<image>"
    asked = about(*pictures, placeholder=placeholder)
    made = lib.encode(lib.encoder(architecture), asked)
    names = [n for n in type(made).__dataclass_fields__ if getattr(made, n) is not None]
    disagg = lib.context(**{name: getattr(made, name) for name in names})
    return disagg, {"prompt": asked["prompt"]}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("architecture", [QWEN25, QWEN3])
def test_qwen_demands_text_beside_handles(release: str, architecture: str, tmp_path: Path) -> None:
    """modeling_qwen2vl.py, modeling_qwen3vl.py, 1.2 and 1.3: ids alone are no prompt; ValueError inside
    `generate_async`."""
    with library(release, tmp_path) as lib:
        disagg, asked = with_handles(lib, architecture, picture())
        engine = lib.split(architecture)
        with pytest.raises(ValueError, match="text"):
            lib.ask(engine, {"prompt_token_ids": [301, IMAGE, 305, 306]}, disagg)
        answer = lib.ask(engine, {**asked, "prompt_token_ids": [301, IMAGE, 305, 306]}, disagg)
        assert len(answer.prompt_token_ids) == 3 + ROWS


def test_llava_demands_text_beside_handles_in_1_2(tmp_path: Path) -> None:
    """modeling_llava_next.py: 1.2 (`get_prompt_token_ids`); that 1.3 reads the ids is inferred."""
    ids = {"prompt_token_ids": [1, 301, IMAGE, 305, 306]}
    with library("1.2.1", tmp_path) as lib:
        disagg, _ = with_handles(lib, LLAVA, picture())
        with pytest.raises(ValueError, match="text"):
            lib.ask(lib.split(LLAVA), ids, disagg)
    with library(RC29, tmp_path) as lib:
        disagg, _ = with_handles(lib, LLAVA, picture())
        assert len(lib.ask(lib.split(LLAVA), ids, disagg).prompt_token_ids) == 4 + ROWS


@pytest.mark.parametrize("architecture", [LLAVA, QWEN3])
def test_one_handle_a_request_in_1_2(architecture: str, tmp_path: Path) -> None:
    """modeling_llava_next.py and the first modeling_qwen3vl.py, 1.2: NotImplementedError."""
    with library("1.2.1", tmp_path) as lib:
        handles = [lib.handle(torch.zeros(ROWS, 8)) for _ in range(2)]
        disagg = lib.context(multimodal_embedding_handles=handles)
        with pytest.raises(NotImplementedError):
            lib.ask(lib.split(architecture), {"prompt": "301 <image> <image>"}, disagg)


@pytest.mark.parametrize("release", RELEASES)
def test_handles_must_fit_the_model_and_the_prompt(release: str, tmp_path: Path) -> None:
    """modeling_qwen2vl.py (RuntimeError), modeling_llava_next.py (AssertionError) for the width; one handle
    for each placeholder (AssertionError); a list (TypeError)."""
    with library(release, tmp_path) as lib:
        wide, narrow = lib.handle(torch.zeros(ROWS, 9)), lib.handle(torch.zeros(ROWS, 8))
        qwen, llava = lib.split(QWEN25), lib.split(LLAVA)
        for engine, handles, prompt, error in (
            (qwen, [wide], "301 <|image_pad|>", RuntimeError),
            (llava, [wide], "301 <image>", AssertionError),
            (qwen, [narrow], "301", AssertionError),
            (llava, [narrow], "301 <image> <image>", AssertionError),
        ):
            with pytest.raises(error):
                lib.ask(engine, {"prompt": prompt}, lib.context(multimodal_embedding_handles=handles))


def test_deepstack_levels_lie_side_by_side(tmp_path: Path) -> None:
    """modeling_qwen3vl.py of 1.3: a row is hidden * (1 + levels) wide."""
    with library(RC29, tmp_path) as lib:
        config = {"vision_config": {"deepstack_visual_indexes": [3, 6]}}
        encoder = lib.root.MultimodalEncoder(lib.model(QWEN3, **config))
        handle = lib.encode(encoder, about(picture())).multimodal_embedding_handles[0]
        assert handle["tensor_size"] == [ROWS, 8 * 3]


@pytest.mark.parametrize("release", RELEASES)
def test_some_models_take_no_handles(release: str, tmp_path: Path) -> None:
    """llmapi/llm.py, all: the model class is not `support_multimodal_disaggregated`; ValueError."""
    with library(release, tmp_path) as lib:
        disagg = lib.context(multimodal_embedding_handles=[lib.handle(torch.zeros(ROWS, 8))])
        with pytest.raises(ValueError, match="no embedding handles"):
            lib.ask(lib.split(GEMMA3), {"prompt": "<start_of_image>"}, disagg)


@pytest.mark.parametrize("release", LATER)
def test_the_forward_pass_demands_int32_deltas(release: str, tmp_path: Path) -> None:
    """modeling_qwen2vl.py of 1.3: deltas go into an int32 cache. The library's own are int32; int64 ones fail
    the request in its first step."""
    with library(release, tmp_path) as lib:
        engine = lib.split(QWEN25)
        disagg, asked = with_handles(lib, QWEN25, picture())
        deltas = lib.view(disagg.mrope_position_deltas_handle)
        assert deltas.dtype == torch.int32
        disagg.mrope_position_deltas_handle = lib.handle(deltas.to(torch.int64))
        with pytest.raises(lib.failed, match="int32"):
            lib.ask(engine, asked, disagg)
        disagg, asked = with_handles(lib, QWEN25, picture())
        assert lib.ask(engine, asked, disagg).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("release", RELEASES)
def test_handles_of_qwen_need_positions(release: str, tmp_path: Path) -> None:
    """modeling_qwen2vl.py, 1.2 and 1.3: `mrope_config` is read without asking."""
    with library(release, tmp_path) as lib:
        disagg, asked = with_handles(lib, QWEN25, picture())
        disagg.mrope_position_ids_handle = disagg.mrope_position_deltas_handle = None
        with pytest.raises(lib.failed, match="mrope"):
            lib.ask(lib.split(QWEN25), asked, disagg)


@pytest.mark.parametrize("release", RELEASES)
def test_llama_4_takes_dictionaries(release: str, tmp_path: Path) -> None:
    """modeling_llama.py, 1.2 and 1.3: rows, and the tokens that stand between them at their offsets."""
    whole = {
        "mm_embeddings": torch.ones(4, 8), "image_special_tokens": [11, 12],
        "image_special_token_offsets": [0, 5],
    }  # fmt: skip
    prompt = "301 <|image|> 305"
    with library(release, tmp_path) as lib:
        engine = lib.llm(LLAMA4)

        def ask(image: Any, text: str = prompt) -> Any:
            return lib.ask(engine, {"prompt": text, "multi_modal_embeddings": {"image": image}})

        span = engine.model.in_vocabulary(ask([whole]).prompt_token_ids)
        assert span == [1, 301, 11, IMAGE, IMAGE, IMAGE, IMAGE, 12, 305]
        for image, said in (
            ([torch.ones(4, 8)], "dictionary"),
            ([{"mm_embeddings": torch.ones(4, 8)}], "lacks"),
            ([{**whole, "mm_embeddings": torch.ones(4, 9)}], "wide"),
            ([{**whole, "image_special_token_offsets": [0, 6]}], "range"),
            ([whole, whole], "placeholders"),
        ):
            with pytest.raises(ValueError, match=said):
                ask(image)
        with pytest.raises(ValueError, match="no placeholder"):
            ask([whole], "301 305")


def test_which_models_take_embeddings(tmp_path: Path) -> None:
    """`attach_multimodal_embeddings`: LLaVA-NeXT and Llama 4 in 1.2; Qwen since 1.3 (modeling_qwen2vl.py, not
    certain of rc29); NotImplementedError elsewhere. Text is demanded."""
    rows = {"image": [torch.ones(ROWS, 8)]}
    for release in RELEASES:
        with library(release, tmp_path) as lib:
            llava = lib.llm(LLAVA)
            assert (
                len(lib.ask(llava, {"prompt": "<image>", "multi_modal_embeddings": rows}).prompt_token_ids)
                == 7
            )
            for architecture in (GEMMA3, QWEN25):
                given = {"prompt": "<start_of_image> <|image_pad|>", "multi_modal_embeddings": rows}
                if architecture == QWEN25 and release in LATER:
                    given["prompt"] = "<|image_pad|>"
                    assert len(lib.ask(lib.llm(architecture), given).prompt_token_ids) == ROWS
                    continue
                with pytest.raises(NotImplementedError):
                    lib.ask(lib.llm(architecture), given)


@pytest.mark.parametrize("release", RELEASES)
def test_ids_beside_images_are_decoded_and_tokenized_again(release: str, tmp_path: Path) -> None:
    """inputs/registry.py of 1.3 and llm.py of 1.2.1: a tokenizer with a BOS then puts a second one in
    front."""
    given = {
        "prompt_token_ids": [1, 301, IMAGE], "multi_modal_data": {"image": [picture()]},
        "mm_processor_kwargs": {},
    }  # fmt: skip
    with library(release, tmp_path) as lib:
        ids = lib.ask(lib.llm(GEMMA3), given).prompt_token_ids
        assert ids[:3] == [1, 1, 301]
        assert len(ids) == 3 + ROWS


@pytest.mark.parametrize("release", LATER)
def test_the_fast_path_uses_ids_as_they_are_and_demands_processor_kwargs(
    release: str, tmp_path: Path
) -> None:
    """inputs/registry.py of 1.3: `supports_token_id_mm_expansion` is LLaVA-NeXT's and Nano's; without a
    dictionary of `mm_processor_kwargs` it is a TypeError."""
    given = {"prompt_token_ids": [1, 301, IMAGE], "multi_modal_data": {"image": [picture()]}}
    with library(release, tmp_path) as lib:
        for engine, answer in ((lib.llm(LLAVA), True), (lib.llm(QWEN25), False)):
            assert engine.input_processor.supports_token_id_mm_expansion is answer
        engine = lib.llm(LLAVA)
        for absent in ({}, {"mm_processor_kwargs": None}):
            with pytest.raises(TypeError):
                lib.ask(engine, {**given, **absent})
        ids = lib.ask(engine, {**given, "mm_processor_kwargs": {}}).prompt_token_ids
        assert ids[:2] == [1, 301]
        assert len(ids) == 2 + ROWS


@pytest.mark.parametrize("release", LATER)
def test_a_failed_first_probe_turns_media_hashing_off_for_good(release: str, tmp_path: Path) -> None:
    """inputs/registry.py of 1.3 (`create_input_processor_with_hash`): names of images never come back, not
    even a caller's own."""
    whole = about(picture(), placeholder="<image>", multi_modal_uuids={"image": ["a" * 64]})
    by_ids = {"prompt_token_ids": [1, IMAGE], "multi_modal_data": whole["multi_modal_data"]}
    with library(release, tmp_path) as lib:
        fine, latched = lib.llm(LLAVA), lib.llm(LLAVA)
        with pytest.raises(TypeError):
            lib.ask(latched, by_ids)
        assert names_in_events(lib, fine, whole) == {"a" * 64}
        assert names_in_events(lib, latched, whole) == set()
        with pytest.raises(TypeError):
            lib.ask(fine, by_ids)
        assert names_in_events(lib, fine, whole) == {"a" * 64}


def names_in_events(lib: Library, engine: Any, inputs: Any) -> set[str]:
    """Names that the engine knows the request's images by."""
    media = engine.preprocess(inputs, lib.sampling(end_id=2)).multimodal_params
    return set(media.hashes or ())


def test_hashing_that_fails_by_itself_is_no_failed_request(tmp_path: Path) -> None:
    """inputs/registry.py of 1.3: the plain processor is tried."""
    with library(RC29, tmp_path, hashing_fails=True) as lib:
        engine = lib.llm(QWEN25)
        lib.ask(engine, about(picture()))
        assert engine.input_processor.multimodal_hashing_supported is False


def test_names_of_images_are_of_1_3_and_one_for_each(tmp_path: Path) -> None:
    """inputs/data.py of 1.3: `multi_modal_uuids`; 1.2.1 has no such key, and ignores it."""
    for release in RELEASES:
        with library(release, tmp_path) as lib:
            known = "multi_modal_uuids" in lib.part("inputs").TextPrompt.__annotations__
            assert known is (release in LATER)


ERRORS = [
    "NotImplementedError",
    "KeyError",
    "RuntimeError",
    "OSError",
    "ValueError",
    "TypeError",
    "IndexError",
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("release", RELEASES)
def test_input_processing_fails_inside_the_call(release: str, error: str, tmp_path: Path) -> None:
    """Processors raise what they like; 1.3 in `preprocess` as well, 1.2.1 in `generate_async` only."""
    with library(release, tmp_path, input_fails_on="84x56", input_error=error) as lib:
        engine = lib.llm(QWEN25)
        assert hasattr(engine, "preprocess") is (release in LATER)
        with pytest.raises(getattr(builtins, error)):
            lib.ask(engine, about(picture()))
        assert lib.ask(engine, about(picture(56, 56))).finished


def test_expanded_prompts_leave_the_vocabulary_in_1_2(tmp_path: Path) -> None:
    """modeling_llava_next.py, modeling_qwen2vl.py of 1.2: `vocab_size + 1`; 1.3 keeps the image token. The
    answers are the same."""
    answers = set()
    for release in RELEASES:
        with library(release, tmp_path) as lib:
            engine = lib.llm(QWEN25)
            answer = lib.ask(engine, about(picture()))
            expected = engine.model.vocab_size + 1 if release == "1.2.1" else IMAGE
            assert answer.prompt_token_ids.count(expected) == ROWS
            tokens = [t for t in answer.outputs[0].token_ids if t != 2]
            answers.add(tuple(tokens))
    assert len(answers) == 1


@pytest.mark.parametrize("release", RELEASES)
def test_answers_depend_on_the_images(release: str, tmp_path: Path) -> None:
    """The double's own: topologies can be compared."""
    with library(release, tmp_path) as lib:
        engine = lib.llm(QWEN25)
        first, second = picture(), picture(shade=200)
        asked = [about(first, second), about(second, first), about(first, first), about(first, second)]
        made = [tuple(lib.ask(engine, each, max_tokens=8).outputs[0].token_ids) for each in asked]
        assert made[0] == made[3]
        assert len(set(made)) == 3


def test_generate_of_the_encoder_raises_after_others_made_handles(tmp_path: Path) -> None:
    """llmapi/mm_encoder.py of rc29: `generate` reads the results one after the other, so what others made is
    out of reach; `generate_async` gives each its own."""
    questions = [about(picture()), about(picture(28, 28)), about(picture(shade=3))]
    with library(RC29, tmp_path, encode_fails_on="28x28") as lib:
        encoder = lib.encoder()
        with pytest.raises(lib.failed):
            encoder.generate(questions)
        assert len(lib.unopened()) >= 2 * 3

        async def each() -> list[Any]:
            results = [encoder.generate_async(question) for question in questions]
            return await asyncio.gather(*(r.aresult() for r in results), return_exceptions=True)

        first, failed, last = asyncio.run(each())
        assert isinstance(failed, lib.failed)
        for made in (first, last):
            assert len(made.disaggregated_params.multimodal_embedding_handles) == 1


def test_an_encode_request_yields_one_handle_in_1_2(tmp_path: Path) -> None:
    """executor/result.py of 1.2.1: one concatenated tensor in a list of one beside a hash for each image,
    so two images in a request are an AssertionError; rc29 has a handle for each."""
    both = about(picture(), picture(shade=3))
    with library("1.2.1", tmp_path) as lib, pytest.raises(AssertionError):
        lib.encode(lib.encoder(), both)
    with library(RC29, tmp_path) as lib:
        assert len(lib.encode(lib.encoder(), both).multimodal_embedding_handles) == 2


@pytest.mark.parametrize("release", RELEASES)
def test_handles_and_hashes_belong_together(release: str, tmp_path: Path) -> None:
    """disaggregated_params.py, 1.2.1 and rc29."""
    with library(release, tmp_path) as lib:
        handles = [lib.handle(torch.zeros(1, 8)) for _ in range(2)]
        made = lib.context(multimodal_embedding_handles=handles).multimodal_hashes
        assert [len(words) for words in made] == [8, 8]
        for hashes in ([[1] * 8], [[1] * 7] * 2, [["a"] * 8] * 2):
            with pytest.raises(AssertionError):
                lib.context(multimodal_embedding_handles=handles, multimodal_hashes=hashes)


@pytest.mark.parametrize("release", RELEASES)
def test_a_handle_is_good_once(release: str, tmp_path: Path) -> None:
    """_torch/shared_tensor: the producer frees its memory once it was opened; a dictionary of another form is
    a KeyError or ValueError."""
    with library(release, tmp_path) as lib:
        handle = lib.handle(torch.arange(6.0).reshape(2, 3))
        assert handle["tensor_size"] == [2, 3]
        assert lib.view(handle).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        with pytest.raises(RuntimeError):
            lib.view(handle)
        with pytest.raises(KeyError):
            lib.view({"tensor_size": [1, 1]})
        with pytest.raises(ValueError, match="kind 9"):
            lib.view({**handle, "method_key": 9})


@pytest.mark.parametrize("release", RELEASES)
def test_stale_handles_fail_the_request(release: str, tmp_path: Path) -> None:
    """inputs/multimodal.py (`to_tensor`), inside what the worker turns into a `RequestError`."""
    with library(release, tmp_path) as lib:
        engine = lib.split(QWEN25)
        disagg, asked = with_handles(lib, QWEN25, picture())
        assert lib.ask(engine, asked, disagg).outputs[0].finish_reason == "length"
        with pytest.raises(lib.failed, match="gone"):
            lib.ask(engine, asked, disagg)


def clip(*shades: int, **metadata: Any) -> Any:
    """A `VideoData` of these frames, five of the clip apart."""
    from tensorrt_llm.inputs import VideoData  # type: ignore[import-not-found, attr-defined]

    indices = [5 * at for at in range(len(shades))]
    known = {"fps": 10.0, "frames_indices": indices, "total_num_frames": 60, "duration": 6.0}
    return VideoData(frames=[picture(84, 56, shade) for shade in shades], metadata={**known, **metadata})


def seen_in(video: Any, **options: Any) -> dict[str, Any]:
    words = "301 <|vision_start|><|video_pad|><|vision_end|> 306"
    return {"prompt": words, "multi_modal_data": {"video": [video]}, "mm_processor_kwargs": options}


@pytest.mark.parametrize("release", LATER)
def test_a_video_is_sampled_again_unless_its_frames_are_said_to_be_chosen(
    release: str, tmp_path: Path
) -> None:
    """modeling_qwen3vl.py: `_decide_do_sample_frames`."""
    with library(release, tmp_path) as lib:
        engine = lib.root.LLM(lib.model(QWEN3, video_token_id=298))
        shades = range(10, 130, 10)
        lengths = [
            len(engine.preprocess(seen_in(clip(*shades), **options), lib.sampling()).prompt_token_ids)
            for options in ({"do_sample_frames": False}, {"num_frames": 12}, {}, {"num_frames": 6})
        ]
        # Marks, rows and time of a pair are ten words: six pairs, all of them, then two, and three.
        assert lengths == [64, 64, 24, 34]


@pytest.mark.parametrize("release", LATER)
def test_a_video_is_named_by_its_frames_and_by_what_was_chosen_of_it(release: str, tmp_path: Path) -> None:
    """inputs/multimodal_data.py: `VideoData.update_hash`."""
    with library(release, tmp_path) as lib:
        engine = lib.root.LLM(lib.model(QWEN3, video_token_id=298))
        videos = [clip(1, 2), clip(1, 2), clip(1, 3), clip(1, 2, fps=20.0), clip(1, 2, frames_indices=[0, 9])]
        prepared = [
            engine.preprocess(seen_in(video, do_sample_frames=False), lib.sampling()) for video in videos
        ]
        names = [each.multimodal_params.multimodal_hashes[0] for each in prepared]
        assert names[0] == names[1]
        assert len(set(names)) == 4
