"""Where an answer ends at a stop string:
the token at which Dynamo's frontend ends it too, and with what usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.core import Step, StepLogprobs, TokenLogprob, Tokens, Usage
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.frontend.endpoint import EndpointServer
from dynamo.trtllm.frontend.response import Chunk
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.model_files import DEMO_DIRECTORY
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.request_handlers.aggregated import AggregatedHandler
from fakes import FakeContext, FakeSender, collect, ignore_death
from media_parts import loader_over

TEXT = "a red circle on a blue background, drawn with care."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))


class Answering(DoubleEngine):
    """An engine that gives the steps it was made with, and says whether its stream was closed."""

    def __init__(self, steps: list[Step | Tokens]) -> None:
        super().__init__(EngineConfig(kind=EngineKind.DOUBLE))
        self.steps = steps
        self.given = 0
        self.closed = False

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Step | Tokens, None]:
        try:
            for step in self.steps:
                self.given += 1
                yield step
        finally:
            self.closed = True


def one_by_one(ids: list[int], prompt: int = 82, cached: int = 64) -> list[Step | Tokens]:
    """Steps of one token each, as engines give them: the first with usage, the last with a finish reason."""
    middle: list[Step | Tokens] = [[each] for each in ids[1:-1]]
    last = Step((ids[-1],), None, "length", None, Usage(prompt, len(ids), cached))
    return [Step((ids[0],), usage=Usage(prompt, 1, cached)), *middle, last]


async def ask(
    engine: Answering, stop: list[str], model_path: str = str(DEMO_DIRECTORY), **rest: Any
) -> list[Chunk]:
    raw = {
        "token_ids": rest.pop("token_ids", [5, 6]),
        "stop_conditions": {"stop": stop, **rest.pop("conditions", {})},
        **rest,
    }
    info, media = await engine.start(), await loader_over(engine)
    handler = AggregatedHandler(engine, info, MultimodalProcessor(info, media), StopStrings(model_path))
    server, sender = EndpointServer(handler, on_dead=ignore_death), FakeSender()
    assert await collect(server.serve(raw, FakeContext(), response_sender=sender)) == []
    assert dict(server.outcomes) == {"completed": 1}
    assert sender.closed
    assert engine.closed
    return sender.chunks


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["circle"], "a red circle"),
        (["red circle"], "a red circle"),
        (["e o", "drawn"], "a red circle on"),
        (["never", "background,"], "a red circle on a blue background,"),
        (["a"], "a"),
    ],
)
async def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    tokenizer: Tokenizer, stop: list[str], shown: str
) -> None:
    ids = tokenizer.encode(TEXT).ids
    handler = Answering(one_by_one(ids))
    chunks = await ask(handler, stop)
    kept = tokens(chunks)
    assert kept == ids[: len(kept)]
    assert tokenizer.decode(kept).startswith(shown)
    assert not any(each in tokenizer.decode(kept[:-1]) for each in stop)
    assert handler.given == len(kept)  # the engine is asked for nothing more
    assert chunks[-1]["finish_reason"] == "stop"
    assert chunks[-1]["stop_reason"] in stop
    assert chunks[-1]["completion_usage"] == {
        "prompt_tokens": 82,
        "completion_tokens": len(kept),
        "total_tokens": 82 + len(kept),
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    assert [chunk.get("finish_reason") for chunk in chunks[:-1]] == [None] * (len(kept) - 1)


@pytest.mark.asyncio
async def test_an_answer_without_its_stop_strings_passes_as_it_is(tokenizer: Tokenizer) -> None:
    steps = one_by_one(tokenizer.encode(TEXT).ids)
    with_stop = await ask(Answering(list(steps)), ["purple", "triangles"])
    without = await ask(Answering(list(steps)), [])
    assert with_stop == without


@pytest.mark.asyncio
async def test_of_a_step_with_several_tokens_those_after_the_stop_string_are_left_out(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode(TEXT).ids
    entries = tuple(StepLogprobs(TokenLogprob(each, -0.5, 1), ()) for each in ids)
    whole = Step(tuple(ids), entries, None, None, Usage(9, len(ids)))
    alone = await ask(Answering(one_by_one(ids, prompt=9, cached=0)), ["circle"])
    (chunk,) = await ask(Answering([whole]), ["circle"])
    assert list(chunk["token_ids"]) == tokens(alone)
    assert len(chunk["log_probs"]) == len(tokens(alone))
    assert chunk["completion_usage"] == alone[-1]["completion_usage"]


@pytest.mark.asyncio
async def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("on and on and on and on").ids
    first = len(tokens(await ask(Answering(one_by_one(ids)), ["on"])))
    late = tokens(await ask(Answering(one_by_one(ids)), ["on"], conditions={"min_tokens": first + 1}))
    assert first < len(late)
    assert tokenizer.decode(late).count("on") == 2


@pytest.mark.asyncio
async def test_special_tokens_are_no_text_unless_the_request_asks_for_them(tokenizer: Tokenizer) -> None:
    marker = "<|vision_start|>"
    special = tokenizer.token_to_id(marker)
    ids = [*tokenizer.encode("a red").ids, special, *tokenizer.encode(" circle").ids]
    assert tokens(await ask(Answering(one_by_one(ids)), [marker])) == ids
    shown = await ask(Answering(one_by_one(ids)), [marker], output_options={"skip_special_tokens": False})
    assert tokens(shown)[-1] == special


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "text", ["größer 🙂 schöner", "日本語のテキスト。", "naïve café — déjà vu", "👩‍🚀👩‍🚀 !"]
)
async def test_characters_of_several_tokens_are_read_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text + " and more").ids
    stream, said, ends = DecodeStream(skip_special_tokens=True), "", {}
    for number, token in enumerate(ids, 1):
        said += stream.step(tokenizer, token) or ""
        for character in set(said):
            ends.setdefault(character, number)
    for character, number in ends.items():
        assert len(tokens(await ask(Answering(one_by_one(ids)), [character]))) == number, character


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
async def test_the_first_word_is_read_behind_the_prompt(tmp_path: Path, packed: bool) -> None:
    """Tokenizers with word-start marks drop the space of a text's first word; behind a prompt it is there."""
    from tokenizers.decoders import Metaspace

    model = Tokenizer(BPE({"\u2581say": 0, "\u2581yes": 1, "\u2581no": 2}, []))
    model.decoder = Metaspace()
    model.add_special_tokens([AddedToken("<end>", special=True)])
    model.save(str(tmp_path / "tokenizer.json"))
    prompt: Any = b"\0\0\0\0" if packed else [0]
    given = await ask(Answering(one_by_one([1, 2, 1])), [" yes"], str(tmp_path), token_ids=prompt)
    assert tokens(given) == [1]


@pytest.mark.asyncio
async def test_without_a_tokenizer_the_answer_passes_and_the_log_says_what_that_means(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokenizer.encode(TEXT).ids
    assert tokens(await ask(Answering(one_by_one(ids)), ["circle"], str(tmp_path))) == ids
    assert [r.message for r in caplog.records if "ended by the frontend alone" in r.message]


@pytest.mark.asyncio
async def test_prefills_reply_passes_untouched() -> None:
    reply = {"token_ids": [300], "finish_reason": "length", "disaggregated_params": {"a": 1}}
    assert await ask(Answering([reply]), ["anything"]) == [reply]
