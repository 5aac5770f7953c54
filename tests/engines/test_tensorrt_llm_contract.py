"""The engine port's contract, held against the TensorRT-LLM adapter
over the double of both recorded releases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines.contract import Subject
from engines.tensorrt_llm_subject import (
    RELEASES,
    TRANSCEIVER,
    engine_config,
    installed,
    model_directory,
    started,
)
from engines.test_contract import (  # noqa: F401 - the suite runs here with this module's subject
    TEXT_IDS,
    test_a_closed_engine_says_that_it_is_dead,
    test_a_prompt_over_the_context_length_is_refused_with_both_counts,
    test_a_request_cancelled_in_prefill_leaves_nothing_behind,
    test_a_request_gets_the_same_tokens_alone_and_beside_others,
    test_a_sampled_request_with_a_seed_repeats_itself_and_another_seed_differs,
    test_a_stop_token_ends_the_output_and_is_not_part_of_it,
    test_closing_a_stream_frees_its_slot_and_leaves_others_alone,
    test_end_of_sequence_waits_for_min_tokens,
    test_logprobs_come_one_per_token_with_ranks_from_one,
    test_output_without_a_limit_ends_at_the_context_length,
    test_prefill_and_decode_give_what_generate_gives,
    test_the_first_step_says_the_usage_so_far_and_the_last_says_all_of_it,
    test_usage_counts_the_prompt_and_the_output,
)


@pytest_asyncio.fixture(params=RELEASES)
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    args = {**TRANSCEIVER, "disable_overlap_scheduler": True}
    with installed(request.param):
        async with started(engine_config(model_directory(tmp_path), args=args)) as (engine, info):
            yield Subject(engine, info, TEXT_IDS)
