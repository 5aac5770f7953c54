"""The adapter held against what TensorRT-LLM's own source says: a test for each row of the audit, named after
what the library does. Select them with `pytest tests/engines -k audit`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import tensorrt_llm_audit as audit
from engines.tensorrt_llm_audit import Place
from engines.tensorrt_llm_subject import ALL_RELEASES, installed

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=ALL_RELEASES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with installed(request.param):
        yield Place(tmp_path, request.param)


async def test_row_1_the_request_id_helper_takes_a_node_and_a_process(place: Place) -> None:
    await audit.request_ids(place)


async def test_row_2_prefill_with_embedding_handles_reads_the_text_of_the_prompt(place: Place) -> None:
    await audit.prompt_beside_handles(place)


async def test_row_3_the_model_copies_position_deltas_into_an_int32_cache(place: Place) -> None:
    await audit.int32_deltas(place)


async def test_row_4_input_processors_raise_anything_and_result_handling_asserts(place: Place) -> None:
    await audit.requests_end_alone(place)


async def test_row_5_llama4_takes_embeddings_as_dictionaries_with_special_tokens(place: Place) -> None:
    await audit.dictionary_of_llama4(place)


async def test_row_6_the_python_transceiver_leaves_the_opaque_state_empty(place: Place) -> None:
    await audit.state_without_bytes(place)


async def test_row_7_token_ids_beside_images_are_decoded_and_tokenized_again(place: Place) -> None:
    await audit.one_beginning(place)


async def test_row_8_processor_arguments_must_be_a_dictionary_or_hashing_stays_off(place: Place) -> None:
    await audit.processor_arguments(place)


async def test_row_9_ignore_eos_drops_all_stop_words(place: Place) -> None:
    await audit.stop_tokens_under_ignore_eos(place)


async def test_row_10_a_contexts_blocks_are_held_until_decode_fetched_them(place: Place) -> None:
    await audit.nothing_stays_held(place)


async def test_row_10_a_context_whose_first_token_is_a_stop_word_is_held_as_well(place: Place) -> None:
    await audit.first_tokens_that_end(place)


async def test_row_9_the_length_wins_over_stop_words(place: Place) -> None:
    await audit.a_stop_token_at_the_limit(place)


async def test_row_11_a_dead_engine_leaves_its_requests_waiting(place: Place) -> None:
    await audit.death_is_asked_for(place)


async def test_row_11_a_dead_idle_engine_says_so_only_when_asked(place: Place) -> None:
    await audit.idle_death_is_found(place)


async def test_row_12_the_encoders_generate_raises_after_others_have_made_handles(place: Place) -> None:
    await audit.images_end_alone(place)


async def test_row_13_stored_blocks_carry_their_cache_salt(place: Place) -> None:
    await audit.salted_blocks(place)


async def test_row_14_scheduling_params_may_be_in_a_module_of_their_own(place: Place) -> None:
    await audit.ranks_are_told(place)


async def test_row_15_importing_and_constructing_happen_on_the_main_thread(place: Place) -> None:
    await audit.main_thread(place)


async def test_row_16_the_python_transceiver_takes_nixl_or_default_only(place: Place) -> None:
    await audit.transceivers_that_fit(place)
