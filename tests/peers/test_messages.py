"""Messages between our workers: what is written is read, and anything else is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.trtllm.core import Step, StepLogprobs, TokenLogprob, Usage
from dynamo.trtllm.errors import PeerFault
from dynamo.trtllm.peers.messages import EncodedItem, EncodeItem, EncodeReply, EncodeRequest, Handoff
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
    given = {"engine": "DoubleEngine", "prompt_token_ids": (1, 2, 3), "first_token_ids": (301,), "meta": {"key": 4}, **fields}
    return Handoff(**given)


def through_json(message: Any) -> Any:
    return json.loads(json.dumps(message.model_dump(mode="json")))


def test_a_handoff_comes_back_as_it_was_written() -> None:
    sent = handoff(logprobs=LOGPROBS, cached_tokens=2, seed=11, transfer=DESCRIPTOR)
    read = Handoff.parse(through_json(sent), "prefill")
    assert read == sent
    assert read.logprobs == LOGPROBS
    assert read.logprobs is not None
    assert read.logprobs[0].top[1].rank == 2
    assert read.transfer == DESCRIPTOR


def test_the_first_step_is_final_only_when_prefill_finished_the_request() -> None:
    assert handoff(logprobs=LOGPROBS, cached_tokens=2).first_step() == Step((301,), LOGPROBS, usage=Usage(3, 1, 2))
    ended = Handoff.parse(through_json(handoff(finish="stop", stop_reason=301, first_token_ids=(), cached_tokens=2)), "prefill")
    assert ended.first_step() == Step((), None, "stop", 301, Usage(3, 0, 2))


def test_encode_messages_come_back_as_they_were_written() -> None:
    request = EncodeRequest(items=(EncodeItem(position=2, url="https://x/y.png"),), text_tokens=5, context_length=64)
    assert EncodeRequest.parse(through_json(request), "calling") == request
    reply = EncodeReply(items=(EncodedItem(digest="d", token_ids=(1, 1), extras={"grid": [1, 2, 3]}, transfer=DESCRIPTOR),))
    assert EncodeReply.parse(through_json(reply), "encode") == reply


def broken(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = through_json(handoff(transfer=DESCRIPTOR))
    return {**raw, **changes}


@pytest.mark.parametrize(
    "raw",
    [
        broken(schema_version=2),
        broken(schema_version="1"),
        broken(surprise=1),
        broken(transfer={**through_json(DESCRIPTOR), "version": 1}),
        broken(transfer={**through_json(DESCRIPTOR), "surprise": 1}),
        broken(prompt_token_ids="no"),
        {key: value for key, value in broken().items() if key != "meta"},
        {},
    ],
)
def test_a_handoff_of_another_release_is_a_peers_fault_without_the_librarys_words(raw: dict[str, Any]) -> None:
    with pytest.raises(PeerFault) as caught:
        Handoff.parse(raw, "prefill")
    assert caught.value.message == ("the prefill worker speaks another schema than this one; run the same release on all workers")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("raw", [{"schema_version": 2, "items": []}, {"items": [], "more": 1}, {"token_ids": []}])
def test_an_encode_reply_of_another_release_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(PeerFault, match="the encode worker speaks another schema"):
        EncodeReply.parse(raw, "encode")
