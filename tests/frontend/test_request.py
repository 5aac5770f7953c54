"""Parsing of the frontend's dict: every field by value, and every refusal in words."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from dynamo.trtllm.core import GuidedDecoding, Prompt, Sampling
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.frontend.request import Request, parse_request
from dynamo.trtllm.multimodal.parts import MediaPart
from fakes import FakeContext

IDS = "must hold token ids: whole numbers that are not negative and fit 32 bits"


PARTS = "a content part is text, image_url, video_url, audio_url or input_audio"


def parsed_of(raw: Any) -> Request:
    return parse_request(raw, FakeContext("r", {"traceparent": "00-1"}))


def bare(*token_ids: int) -> Request:
    asked = EngineRequest(
        request_id="r", prompt=Prompt(token_ids), sampling=Sampling(), trace_headers={"traceparent": "00-1"}
    )
    return Request(model="", engine_request=asked)


def messages(kind: object, role: str = "user", before: int = 0) -> dict[str, Any]:
    """A request's messages with a part of `kind` beside an image, as the frontend sends them along."""
    image = {"type": "image_url", "image_url": {"url": ""}}
    content = [{"type": "text", "text": "hi"}, image, {"type": kind, "data": "AAAA"}]
    earlier = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}][:before]
    return {"extra_args": {"messages": [*earlier, {"role": role, "content": content}]}}


def test_messages_of_text_and_images_are_taken_in_every_role() -> None:
    for kind in ("text", "refusal", "image_url", "video_url"):
        for role in ("system", "developer", "user", "assistant", "tool"):
            parsed = parsed_of({"token_ids": [1], **messages(kind, role)})
            assert parsed.engine_request.prompt.token_ids == (1,)


def test_a_bare_request_has_every_default() -> None:
    assert parsed_of({"token_ids": [1, 2]}) == bare(1, 2)


def test_nulls_are_as_good_as_missing_fields() -> None:
    raw: dict[str, Any] = dict.fromkeys(
        (
            "stop_conditions",
            "sampling_options",
            "output_options",
            "routing",
            "multi_modal_data",
            "multi_modal_uuids",
            "extra_args",
        )
    )
    raw |= {"token_ids": [5], "prefill_result": None, "mm_processor_kwargs": None, "eos_token_ids": None}
    assert parsed_of(raw) == bare(5)


ECHO = (
    "echo is not supported: neither the prompt nor log probabilities of its tokens are given back; "
    "leave out echo and prompt_logprobs"
)


@pytest.mark.parametrize(
    ("group", "raw", "field", "value"),
    [
        ("sampling_options", {"temperature": 1}, "temperature", 1.0),
        ("sampling_options", {"temperature": 0.0}, "temperature", 0.0),
        ("sampling_options", {"top_p": 0.5}, "top_p", 0.5),
        ("sampling_options", {"top_k": 7}, "top_k", 7),
        ("sampling_options", {"top_k": 7.0}, "top_k", 7),
        ("sampling_options", {"top_k": 0}, "top_k", None),
        ("sampling_options", {"top_k": -1}, "top_k", None),
        ("sampling_options", {"min_p": 0.25}, "min_p", 0.25),
        ("sampling_options", {"seed": -3}, "seed", -3),
        ("sampling_options", {"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ("sampling_options", {"presence_penalty": -2}, "presence_penalty", -2.0),
        ("sampling_options", {"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ("sampling_options", {"n": 1, "best_of": 1, "use_beam_search": False}, "guided", None),
        ("sampling_options", {"top_k": (1 << 31) - 1}, "top_k", (1 << 31) - 1),
        ("sampling_options", {"seed": (1 << 64) - 1}, "seed", (1 << 64) - 1),
        ("stop_conditions", {"max_tokens": 3}, "max_tokens", 3),
        ("stop_conditions", {"max_tokens": (1 << 32) - 1}, "max_tokens", (1 << 31) - 1),
        ("stop_conditions", {"max_tokens": 1e300}, "max_tokens", (1 << 31) - 1),
        ("stop_conditions", {"min_tokens": 4}, "min_tokens", 4),
        ("stop_conditions", {"min_tokens": -4}, "min_tokens", 0),
        (
            "stop_conditions",
            {"stop_token_ids": [1], "stop_token_ids_visible": [2]},
            "stop_token_ids",
            frozenset({1, 2}),
        ),
        ("stop_conditions", {"stop_token_ids_hidden": [9]}, "eos_token_ids", frozenset({9})),
        (
            "stop_conditions",
            {"stop_token_ids": [1, 9], "stop_token_ids_hidden": [9]},
            "stop_token_ids",
            frozenset({1}),
        ),
        ("stop_conditions", {"ignore_eos": True}, "ignore_eos", True),
        ("output_options", {"logprobs": 0}, "logprobs", 0),
        ("output_options", {"logprobs": 100}, "logprobs", 100),
    ],
)
def test_each_option_reaches_its_field(group: str, raw: dict[str, Any], field: str, value: object) -> None:
    parsed = getattr(parsed_of({"token_ids": [1], group: raw}).engine_request.sampling, field)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_requests_own_eos_ids_go_before_the_hidden_ones() -> None:
    raw = {
        "token_ids": [1],
        "eos_token_ids": [8],
        "stop_conditions": {"stop_token_ids_hidden": [9], "stop_token_ids": [8, 9]},
    }
    sampling = parsed_of(raw).engine_request.sampling
    assert (sampling.eos_token_ids, sampling.stop_token_ids) == (frozenset({8}), frozenset({9}))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"json": {"type": "object"}}, GuidedDecoding(json={"type": "object"})),
        ({"regex": "a+", "json": None, "choice": []}, GuidedDecoding(regex="a+")),
        ({"grammar": "root"}, GuidedDecoding(grammar="root")),
        ({"choice": ["a", "b"]}, GuidedDecoding(choice=("a", "b"))),
        ({"json_object": True}, GuidedDecoding(json_object=True)),
        ({"structural_tag": {"t": 1}}, GuidedDecoding(structural_tag={"t": 1})),
        ({"backend": "x"}, None),
        ({}, None),
    ],
)
def test_guided_decoding_keeps_the_one_grammar_that_was_given(
    raw: dict[str, Any], expected: GuidedDecoding | None
) -> None:
    parsed = parsed_of({"token_ids": [1], "sampling_options": {"guided_decoding": raw}})
    assert parsed.engine_request.sampling.guided == expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"token_ids": []}, "the prompt is empty"),
        ({"token_ids": None}, "the prompt is empty"),
        ({"token_ids": "12"}, "the prompt is empty"),
        ({"token_ids": b""}, "the prompt is empty"),
        ({"token_ids": b"\1\0\0"}, "the prompt's packed token ids are not whole 32-bit numbers"),
        ({"stop_conditions": {"max_tokens": 0}}, "max_tokens must be at least 1, not 0"),
        ({"stop_conditions": {"max_tokens": 1.5}}, "max_tokens must be a whole number"),
        ({"stop_conditions": {"max_tokens": True}}, "max_tokens must be a whole number"),
        ({"stop_conditions": {"max_tokens": float("inf")}}, "max_tokens must be a whole number"),
        ({"stop_conditions": {"max_tokens": -(10**30)}}, "max_tokens must be at least 1"),
        ({"stop_conditions": {"min_tokens": "3"}}, "min_tokens must be a whole number"),
        (
            {"stop_conditions": {"min_tokens": 1 << 64}},
            f"min_tokens must be between {-(1 << 63)} and {(1 << 64) - 1}",
        ),
        ({"stop_conditions": {"ignore_eos": "false"}}, "ignore_eos must be true or false"),
        ({"stop_conditions": {"stop_token_ids": 7}}, "stop_token_ids must be a list"),
        ({"stop_conditions": {"stop_token_ids": [7, 1.5]}}, f"stop_token_ids {IDS}"),
        ({"stop_conditions": {"stop_token_ids_visible": [-1]}}, f"stop_token_ids_visible {IDS}"),
        ({"stop_conditions": {"stop_token_ids_hidden": [[2]]}}, f"stop_token_ids_hidden {IDS}"),
        ({"eos_token_ids": [True]}, f"eos_token_ids {IDS}"),
        ({"eos_token_ids": "2"}, "eos_token_ids must be a list"),
        ({"stop_conditions": [1]}, "stop_conditions must be an object"),
        ({"sampling_options": {"temperature": -0.5}}, "temperature must be at least 0, not -0.5"),
        ({"sampling_options": {"temperature": "hot"}}, "temperature must be a number"),
        ({"sampling_options": {"temperature": float("nan")}}, "temperature must be a number"),
        ({"sampling_options": {"temperature": float("inf")}}, "temperature must be a number"),
        ({"sampling_options": {"top_p": 1.5}}, "top_p must be between 0 and 1, not 1.5"),
        ({"sampling_options": {"min_p": -1}}, "min_p must be between 0 and 1, not -1"),
        ({"sampling_options": {"seed": "a"}}, "seed must be a whole number"),
        (
            {"sampling_options": {"seed": 1e30}},
            "seed must be between -9223372036854775808 and 18446744073709551615, not 1e+30",
        ),
        ({"sampling_options": {"top_k": 1e30}}, "top_k must be between -1 and 2147483647, not 1e+30"),
        (
            {"sampling_options": {"top_k": 1 << 63}},
            "top_k must be between -1 and 2147483647, not 9223372036854775808",
        ),
        ({"sampling_options": {"top_k": 10**5000}}, "top_k must be between -1 and 2147483647"),
        ({"sampling_options": {"top_k": -2}}, "top_k must be at least -1, not -2"),
        ({"sampling_options": {"top_k": 2.5}}, "top_k must be a whole number"),
        ({"sampling_options": {"top_k": [3]}}, "top_k must be a whole number"),
        ({"sampling_options": {"temperature": 1e30}}, "temperature must be between 0 and 1000000, not 1e+30"),
        ({"sampling_options": {"temperature": 10**400}}, "temperature must be a number"),
        ({"sampling_options": {"temperature": True}}, "temperature must be a number"),
        ({"sampling_options": {"min_p": {}}}, "min_p must be a number"),
        (
            {"sampling_options": {"repetition_penalty": 1e300}},
            "repetition_penalty must be between 0 and 1000000, not 1e+300",
        ),
        ({"sampling_options": {"repetition_penalty": 0}}, "repetition_penalty must be greater than 0"),
        ({"sampling_options": {"presence_penalty": 3}}, "presence_penalty must be between -2 and 2, not 3"),
        (
            {"sampling_options": {"frequency_penalty": -3}},
            "frequency_penalty must be between -2 and 2, not -3",
        ),
        ({"sampling_options": {"n": 0}}, "n must be between 1 and 128, not 0"),
        ({"sampling_options": {"n": 1000000.0}}, "n must be between 1 and 128, not 1000000"),
        ({"sampling_options": {"best_of": 129}}, "best_of must be between 1 and 128, not 129"),
        ({"sampling_options": {"n": 3, "best_of": 2}}, "best_of must be at least n, which is 3"),
        ({"sampling_options": {"use_beam_search": True}}, "beam search is not supported"),
        ({"output_options": {"prompt_logprobs": 1}}, ECHO),
        ({"output_options": {"logprobs": 2, "prompt_logprobs": 0}}, ECHO),
        ({"sampling_options": {"guided_decoding": "x"}}, "guided_decoding must be an object"),
        (
            {"sampling_options": {"guided_decoding": {"regex": "a", "json": {}}}},
            "only one kind of guided decoding is possible at once, not json and regex",
        ),
        ({"sampling_options": {"n": 1e300}}, "n must be between 1 and 128, not 1e+300"),
        ({"sampling_options": {"guided_decoding": {"regex": 5}}}, "regex must be a string"),
        (
            {"sampling_options": {"guided_decoding": {"json": {}, "whitespace_pattern": " "}}},
            "guided_whitespace_pattern is not supported; leave it out",
        ),
        ({"sampling_options": {"guided_decoding": {"choice": 5}}}, "choice must be a list"),
        ({"sampling_options": {"guided_decoding": {"choice": ["a", 5]}}}, "choice must hold strings"),
        ({"token_ids": [1, 2.0]}, f"token_ids {IDS}"),
        ({"token_ids": [1, -2]}, f"token_ids {IDS}"),
        ({"token_ids": [1, 1 << 32]}, f"token_ids {IDS}"),
        ({"token_ids": [1, None]}, f"token_ids {IDS}"),
        ({"token_ids": [1, "2"]}, f"token_ids {IDS}"),
        ({"token_ids": [False, True]}, f"token_ids {IDS}"),
        ({"token_ids": {"0": 1}}, "the prompt is empty"),
        ({"routing": {"cache_salt": 5}}, "cache_salt must be a string"),
        ({"routing": {"dp_rank": -1}}, "dp_rank must be at least 0, not -1"),
        ({"routing": {"dp_rank": 1e30}}, "dp_rank must be between 0 and 2147483647, not 1e+30"),
        ({"extra_args": {"mm_hashes": 5}}, "mm_hashes must be a list"),
        ({"extra_args": {"mm_hashes": [5]}}, "mm_hashes must hold strings"),
        ({"extra_args": {"formatted_prompt": ["hello"]}}, "formatted_prompt must be a string"),
        ({"prefill_result": {"disaggregated_params": [1]}}, "disaggregated_params must be an object"),
        ({"multi_modal_data": {"image_url": "http://x/y.png"}}, "image_url must be a list"),
        ({"multi_modal_uuids": {"image_url": 5}}, "image_url must be a list"),
        ({"output_options": {"logprobs": 101}}, "logprobs must be between 0 and 100, not 101"),
        ({"output_options": {"prompt_logprobs": -1}}, "prompt_logprobs must be between 0 and 100, not -1"),
        ({"routing": {"lora_name": "l"}}, "LoRA adapters are not supported; ask for the base model"),
        ({"routing": {"priority": "high"}}, "priority must be a number"),
        (
            {"multi_modal_data": {"image_url": ["a", "b"]}, "multi_modal_uuids": {"image_url": [None, 5]}},
            "image 2: its uuid must be a text of 1 to 256 characters",
        ),
        (
            {"multi_modal_data": {"video_url": [{"UuidOnly": "u" * 257}]}},
            "video 1: its uuid must be a text of 1 to 256 characters",
        ),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs must be an object"),
        (
            {"media_io_kwargs": {"video": {"fps": 1}}},
            "media_io_kwargs is not supported; say what to read of media in mm_processor_kwargs",
        ),
        ({"multi_modal_data": []}, "multi_modal_data must be an object"),
        (
            {"multi_modal_data": {"image_url": [{"Url": "a"}, {"Decoded": {}}]}},
            "image 2: media decoded by the frontend is not supported; send its URL",
        ),
        (messages("input_audio"), "audio 1: its input_audio needs data: the sound's bytes in base64"),
        (messages("file", role="tool"), f"message 1, part 3: file is not supported; {PARTS}"),
        (messages("hologram", before=2), f"message 3, part 3: hologram is not supported; {PARTS}"),
        (messages(["text"]), f"message 1, part 3: a part of this type is not supported; {PARTS}"),
        (messages({}), f"message 1, part 3: a part of this type is not supported; {PARTS}"),
        (messages(None), f"message 1, part 3: a part of this type is not supported; {PARTS}"),
        (messages("<b>\n"), f"message 1, part 3: a part of this type is not supported; {PARTS}"),
        (
            {
                "extra_args": {
                    "messages": [
                        {"role": "user", "content": "hi"},
                        {"role": "assistant", "audio": {"id": "a"}},
                    ]
                }
            },
            f"message 2: an answer's audio is not supported; {PARTS}",
        ),
        ({"extra_args": {"messages": {"role": "user"}}}, "messages must be a list"),
        ({"extra_args": {"messages": ["hi"]}}, "message 1: it must be an object"),
        (
            {"multi_modal_data": {"text_file": [], "image_embeds": []}},
            f"content parts of type image_embeds, text_file are not supported; {PARTS}",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ClientFault) as caught:
        parsed_of({"token_ids": [1], **raw})
    assert caught.value.message == words


def test_packed_token_ids_are_little_endian_32_bit() -> None:
    parsed = parsed_of({"token_ids": struct.pack("<3i", 1, 70000, 7)})
    assert parsed.engine_request.prompt.token_ids == (1, 70000, 7)
    assert parsed_of({"token_ids": bytearray(b"\1\0\0\0")}).engine_request.prompt.token_ids == (1,)


def test_media_parts_keep_their_order_and_each_kind_counts_from_one() -> None:
    media = {"audio_url": [{"Url": "c"}], "image_url": [{"Url": "a"}, "b"]}
    assert parsed_of({"token_ids": [1], "multi_modal_data": media}).media == (
        MediaPart(1, "image", "a"),
        MediaPart(2, "image", "b"),
        MediaPart(1, "audio", "c"),
    )


def test_a_sound_that_is_in_the_messages_alone_stands_between_those_that_the_frontend_extracted() -> None:
    def sound(kind: str, **field: str) -> dict[str, Any]:
        return {"type": kind, kind: field}

    content = [
        sound("audio_url", url=""),
        sound("input_audio", data="AAAA", format="wav"),
        sound("audio_url", url=""),
    ]
    later = [sound("input_audio", data="BBBB", format="mp3"), sound("image_url", url="")]
    asked = [{"role": "user", "content": content}, {"role": "user", "content": later}]
    media = {"audio_url": [{"Url": "a"}, {"Url": "c"}], "image_url": [{"Url": "p"}]}
    parsed = parsed_of({"token_ids": [1], "multi_modal_data": media, "extra_args": {"messages": asked}})
    assert parsed.media == (
        MediaPart(1, "image", "p"),
        MediaPart(1, "audio", "a"),
        MediaPart(2, "audio", "data:audio;base64,AAAA"),
        MediaPart(3, "audio", "c"),
        MediaPart(4, "audio", "data:audio;base64,BBBB"),
    )


def test_a_uuid_field_without_uuids_is_taken() -> None:
    assert (
        parsed_of({"token_ids": [1], "multi_modal_uuids": {"image_url": [None], "video_url": None}}).media
        == ()
    )


def test_a_part_has_the_clients_own_name_for_it_among_those_of_its_tenant() -> None:
    data = {"image_url": [{"Url": "a"}, {"UuidOnly": "v"}, {"Url": "c"}], "video_url": [{"Url": "d"}]}
    uuids = {"image_url": ["u", "v", None]}
    raw = {
        "token_ids": [1],
        "multi_modal_data": data,
        "multi_modal_uuids": uuids,
        "routing": {"cache_salt": "t"},
    }
    assert parsed_of(raw).media == (
        MediaPart(1, "image", "a", "u", "t"),
        MediaPart(2, "image", "", "v", "t"),
        MediaPart(3, "image", "c", None, "t"),
        MediaPart(1, "video", "d", None, "t"),
    )


def test_options_of_the_processor_are_kept_as_they_came() -> None:
    kwargs = {"max_pixels": 1, "size": {"longest_edge": [2]}}
    assert parsed_of({"token_ids": [1], "mm_processor_kwargs": kwargs}).processor_options == kwargs


def test_what_travels_beside_the_prompt_is_kept() -> None:
    request = parsed_of(
        {
            "model": "m",
            "token_ids": [1],
            "routing": {"priority": 2, "cache_salt": "s", "dp_rank": 3},
            "extra_args": {"formatted_prompt": "hello", "mm_hashes": ["0f", "1e"]},
            "prefill_result": {
                "disaggregated_params": {"a": 1},
                "prompt_tokens_details": {"cached_tokens": 5},
            },
            "_HEALTH_CHECK": True,
        }
    )
    asked = request.engine_request
    assert (request.model, asked.prompt.text, asked.request_id) == ("m", "hello", "r")
    assert (asked.priority, asked.cache_salt, asked.dp_rank) == (2.0, "s", 3)
    assert asked.trace_headers == {"traceparent": "00-1"}
    assert request.handoff == {"a": 1}
    assert request.is_health_check


def test_the_frontends_hashes_go_with_media_only() -> None:
    hashes = {"extra_args": {"mm_hashes": ["0f"]}}
    imaged = parsed_of({"token_ids": [1], "multi_modal_data": {"image_url": ["a"]}, **hashes})
    assert imaged.engine_request.media_hashes == ("0f",)
    assert parsed_of({"token_ids": [1], **hashes}).engine_request.media_hashes == ()


@pytest.mark.parametrize(
    ("conditions", "output", "strings", "skips"),
    [
        ({}, {}, (), True),
        ({"stop": None}, {"skip_special_tokens": None}, (), True),
        ({"stop": ["", "b", "a"]}, {"skip_special_tokens": True}, ("b", "a"), True),
        ({"stop": ("x",)}, {"skip_special_tokens": False}, ("x",), False),
    ],
)
def test_what_ends_the_answers_text_is_parsed_with_the_rest(
    conditions: dict[str, Any], output: dict[str, Any], strings: tuple[str, ...], skips: bool
) -> None:
    request = parsed_of({"token_ids": [1], "stop_conditions": conditions, "output_options": output})
    assert (request.stop_strings, request.skips_special_tokens) == (strings, skips)


def test_a_prefill_result_may_leave_everything_out() -> None:
    assert parsed_of({"token_ids": [1], "prefill_result": {}}).handoff is None
