"""The one table from our errors to Dynamo's: which exception, with which text, and never a cause's words."""

from __future__ import annotations

import asyncio

import pytest
from dynamo.llm import exceptions as dynamo

from dynamo.trtllm import errors
from dynamo.trtllm.errors import PartFault, WorkerError, to_dynamo

TABLE: list[tuple[type[WorkerError], type[BaseException]]] = [
    (errors.WorkerError, dynamo.Unknown),
    (errors.ClientFault, dynamo.InvalidArgument),
    (errors.LimitFault, dynamo.InvalidArgument),
    (errors.PeerFault, dynamo.CannotConnect),
    (errors.PeerUnavailable, dynamo.CannotConnect),
    (errors.PeerTimeout, dynamo.ConnectionTimeout),
    (errors.Overloaded, dynamo.ConnectionTimeout),
    (errors.EngineFault, dynamo.Unknown),
    (errors.WorkerDead, dynamo.EngineShutdown),
    (errors.EngineDead, dynamo.EngineShutdown),
    (errors.TransferDead, dynamo.EngineShutdown),
    (errors.ShuttingDown, dynamo.EngineShutdown),
    (errors.RequestCancelled, dynamo.Cancelled),
    (errors.StartupError, dynamo.Unknown),
]


@pytest.mark.parametrize(("ours", "theirs"), TABLE, ids=lambda each: each.__name__)
def test_each_error_becomes_dynamos_with_our_words_only(
    ours: type[WorkerError], theirs: type[BaseException]
) -> None:
    error = ours("our words")
    error.__cause__ = OSError("connect to 10.1.2.3:4 failed, /srv/secret")
    translated = to_dynamo(error)
    assert type(translated) is theirs
    assert str(translated) == "our words"


def test_the_table_names_every_error_of_the_tree() -> None:
    def tree(root: type[WorkerError]) -> set[type[WorkerError]]:
        return {root}.union(*(tree(each) for each in root.__subclasses__()))

    ours = {each for each in tree(WorkerError) if each.__module__ == errors.__name__}
    assert ours == {each for each, _ in TABLE} | {PartFault}


def test_a_part_is_named_by_kind_and_position() -> None:
    translated = to_dynamo(PartFault(2, "not an image", kind="video"))
    assert type(translated) is dynamo.InvalidArgument
    assert str(translated) == "video 2: not an image"
    assert PartFault(1, "x", kind="image").position == 1


@pytest.mark.parametrize(
    "error", [ValueError("/srv/secret"), KeyError("x"), asyncio.TimeoutError("t"), ZeroDivisionError()]
)
def test_what_is_not_ours_is_a_500_that_says_nothing(error: Exception) -> None:
    translated = to_dynamo(error)
    assert type(translated) is dynamo.Unknown
    assert str(translated) == "the worker failed on this request"


def test_dynamos_own_exceptions_pass_as_they_are() -> None:
    error = dynamo.ConnectionTimeout("late")
    assert to_dynamo(error) is error


def test_a_prompt_without_room_for_an_answer_is_refused_with_both_counts() -> None:
    with pytest.raises(errors.LimitFault) as bare:
        errors.require_room(8, 8)
    with pytest.raises(errors.LimitFault) as with_media:
        errors.require_room(9, 8, with_media=True)
    assert bare.value.message == "the prompt has 8 tokens; the context length is 8"
    assert with_media.value.message == "the prompt has 9 tokens with its media; the context length is 8"
    errors.require_room(7, 8)
