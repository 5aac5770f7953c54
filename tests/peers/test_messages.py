"""Messages between our workers: what is written is read, and anything else is refused in words."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any, Literal, NamedTuple

import pytest

from dynamo.trtllm import core
from dynamo.trtllm.core import Step, StepLogprobs, TokenLogprob, Usage
from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.peers import messages
from dynamo.trtllm.peers.messages import (
    EncodeReply,
    EncodeRequest,
    Handoff,
    Message,
    wire_logprobs,
)
from dynamo.trtllm.transfer.descriptor import PeerIdentity, TensorSpec, TransferDescriptor

DESCRIPTOR = TransferDescriptor(
    transport="local",
    sender=PeerIdentity(name="a", incarnation="b"),
    address=4096,
    length=1024,
    generation=7,
    time_to_live_s=60.0,
    tensors=(TensorSpec(name="features", dtype="float32", shape=(2, 3), nbytes=24, offset=256),),
)
LOGPROBS = (StepLogprobs(TokenLogprob(301, -0.5, 1), (TokenLogprob(301, -0.5, 1), TokenLogprob(9, -2.0, 2))),)


def handoff(**fields: Any) -> Handoff:
    given = {
        "engine": "DoubleEngine",
        "prompt_token_ids": (1, 2, 3),
        "first_token_ids": (301,),
        "meta": {"key": 4},
        **fields,
    }
    return Handoff(**given)


def through_json(message: Any) -> Any:
    return json.loads(json.dumps(message.model_dump(mode="json")))


def test_a_handoff_comes_back_as_it_was_written() -> None:
    sent = handoff(logprobs=wire_logprobs(LOGPROBS), cached_tokens=2, seed=11, transfer=DESCRIPTOR)
    read = Handoff.parse(through_json(sent), "prefill")
    assert read == sent
    assert read.logprobs is not None
    assert read.logprobs[0].top[1].rank == 2
    assert read.transfer == DESCRIPTOR


def test_the_first_step_is_final_only_when_prefill_finished_the_request() -> None:
    going_on = handoff(logprobs=wire_logprobs(LOGPROBS), cached_tokens=2)
    assert going_on.first_step() == Step((301,), LOGPROBS, usage=Usage(3, 1, 2))
    ended = Handoff.parse(
        through_json(handoff(finish="stop", stop_reason=301, first_token_ids=(), cached_tokens=2)), "prefill"
    )
    assert ended.first_step() == Step((), None, "stop", 301, Usage(3, 0, 2))


ENCODE = EncodeRequest(
    kind="image",
    position=2,
    url="https://x/y.png",
    uuid="u",
    options={"max_pixels": 784},
    text_tokens=5,
    context_length=64,
)
ENCODED = EncodeReply(
    kind="image", digest="d", token_ids=(1, 1), extras={"grid": [1, 2, 3]}, transfer=DESCRIPTOR
)


def test_encode_messages_come_back_as_they_were_written() -> None:
    assert EncodeRequest.parse(through_json(ENCODE), "calling") == ENCODE
    assert EncodeReply.parse(through_json(ENCODED), "encode") == ENCODED


DESCRIPTOR_JSON = (
    '{"version": 2, "transport": "local", "sender": {"name": "a", "incarnation": "b", "metadata": ""}, '
    '"device": "cpu", "device_index": 0, "address": 4096, "length": 1024, "acknowledge_at": 0, '
    '"generation": 7, "time_to_live_s": 60.0, "tensors": [{"name": "features", "dtype": "float32", '
    '"shape": [2, 3], "nbytes": 24, "offset": 256}]}'
)
LOGPROBS_JSON = "[[[301, -0.5, 1], [[301, -0.5, 1], [9, -2.0, 2]]]]"
GOING_ON_JSON = (
    '{"schema_version": 2, "engine": "DoubleEngine", "prompt_token_ids": [1, 2, 3], "first_token_ids": '
    f'[301], "logprobs": {LOGPROBS_JSON}, "cached_tokens": 2, "finish": null, "stop_reason": null, '
    f'"seed": 11, "meta": {{"key": 4}}, "transfer": {DESCRIPTOR_JSON}}}'
)
ENDED_JSON = (
    '{"schema_version": 2, "engine": "DoubleEngine", "prompt_token_ids": [1, 2, 3], "first_token_ids": [], '
    '"logprobs": null, "cached_tokens": 0, "finish": "stop", "stop_reason": "done", "seed": null, '
    '"meta": {"key": 4}, "transfer": null}'
)
ENCODE_JSON = (
    '{"schema_version": 2, "kind": "image", "position": 2, "url": "https://x/y.png", "uuid": '
    '"u", "tenant": null, "options": {"max_pixels": 784}, "text_tokens": 5, "context_length": 64}'
)
ENCODED_JSON = (
    '{"schema_version": 2, "kind": "image", "digest": "d", "token_ids": [1, 1], "extras": '
    f'{{"grid": [1, 2, 3]}}, "transfer": {DESCRIPTOR_JSON}}}'
)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            handoff(logprobs=wire_logprobs(LOGPROBS), cached_tokens=2, seed=11, transfer=DESCRIPTOR),
            GOING_ON_JSON,
        ),
        (handoff(finish="stop", stop_reason="done", first_token_ids=()), ENDED_JSON),
        (ENCODE, ENCODE_JSON),
        (ENCODED, ENCODED_JSON),
    ],
    ids=["handoff", "handoff-at-its-end", "encode-request", "encode-reply"],
)
def test_the_json_of_each_message_is_this_release_s_byte_for_byte(message: Message, text: str) -> None:
    assert json.dumps(message.model_dump(mode="json")) == text
    assert type(message).parse(json.loads(text), "other") == message


class OtherTokenLogprob(NamedTuple):
    rank: int
    logprob: float
    token_id: int
    text: str = "new"


class OtherStepLogprobs(NamedTuple):
    top: tuple[OtherTokenLogprob, ...]
    chosen: OtherTokenLogprob
    entropy: float = 0.0


class OtherUsage(NamedTuple):
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@pytest.fixture
def over_another_core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The messages as they would be if `core` had other nouns:
    fields in another order, more of them, more ways to end."""
    monkeypatch.setattr(core, "TokenLogprob", OtherTokenLogprob)
    monkeypatch.setattr(core, "StepLogprobs", OtherStepLogprobs)
    monkeypatch.setattr(core, "Usage", OtherUsage)
    monkeypatch.setattr(core, "FinishReason", Literal["stop", "length", "tool"])
    spec = importlib.util.spec_from_file_location("messages_over_another_core", messages.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_changed_noun_of_core_does_not_change_the_wire(over_another_core: ModuleType) -> None:
    one, two = OtherTokenLogprob(1, -0.5, 301), OtherTokenLogprob(2, -2.0, 9)
    written = over_another_core.Handoff(
        engine="DoubleEngine",
        prompt_token_ids=(1, 2, 3),
        first_token_ids=(301,),
        logprobs=over_another_core.wire_logprobs((OtherStepLogprobs((one, two), one),)),
        cached_tokens=2,
        seed=11,
        meta={"key": 4},
        transfer=DESCRIPTOR,
    )
    assert json.dumps(written.model_dump(mode="json")) == GOING_ON_JSON
    read = over_another_core.Handoff.parse(json.loads(GOING_ON_JSON), "prefill").first_step()
    assert read.logprobs == (OtherStepLogprobs((one, two), one),)
    assert (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.cached_tokens) == (3, 1, 2)
    for finish, is_known in (("eos", True), ("tool", False)):
        raw = {**json.loads(ENDED_JSON), "finish": finish}
        if is_known:
            assert over_another_core.Handoff.parse(raw, "prefill").first_step().finish == finish
        else:
            with pytest.raises(PeerFault, match="another schema"):
                over_another_core.Handoff.parse(raw, "prefill")


def broken(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = through_json(handoff(transfer=DESCRIPTOR))
    return {**raw, **changes}


@pytest.mark.parametrize(
    "raw",
    [
        broken(schema_version=1),
        broken(schema_version="2"),
        broken(surprise=1),
        broken(transfer={**through_json(DESCRIPTOR), "version": 1}),
        broken(transfer={**through_json(DESCRIPTOR), "surprise": 1}),
        broken(prompt_token_ids="no"),
        {key: value for key, value in broken().items() if key != "meta"},
        {},
    ],
)
def test_a_handoff_of_another_release_is_a_peers_fault_without_the_librarys_words(
    raw: dict[str, Any],
) -> None:
    with pytest.raises(PeerFault) as caught:
        Handoff.parse(raw, "prefill")
    assert caught.value.message == (
        "the prefill worker speaks another schema than this one; run the same release on all workers"
    )
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "raw", [{"schema_version": 1, "items": []}, {**through_json(ENCODED), "more": 1}, {"token_ids": []}]
)
def test_an_encode_reply_of_another_release_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(PeerFault, match="the encode worker speaks another schema"):
        EncodeReply.parse(raw, "encode")
