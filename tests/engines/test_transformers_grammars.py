"""Guided decoding on the portable engine: answers that follow a JSON schema,
a regular expression, a grammar or a choice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.core import GuidedDecoding, Prompt
from dynamo.trtllm.demo import MODEL_DIR
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.engines.transformers.grammars import Grammars, allowed
from dynamo.trtllm.errors import ClientFault, EngineFault
from engines.contract import generate, request, split

TOKENIZER: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
END = TOKENIZER.eos_token_id
VOCABULARY = 512
IDS = tuple(TOKENIZER.encode("what is in the picture?"))
COLOURS = ["red", "green", "blue"]
THING = {
    "type": "object",
    "properties": {
        "colour": {"enum": COLOURS},
        "sides": {"type": "integer", "minimum": 3, "maximum": 8},
        "big": {"type": "boolean"},
    },
    "required": ["colour", "sides", "big"],
    "additionalProperties": False,
}
WORDS = ("größe", "a star", 'say "x"\n', "😀")
TREE = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 2, "top_k": 5},
]
TOO_COMPLEX = "guided decoding: the regex is too complex; make its repetitions or alternatives fewer"


def is_thing(text: str) -> bool:
    thing = json.loads(text)
    return (
        list(thing) == ["colour", "sides", "big"]
        and thing["colour"] in COLOURS
        and thing["sides"] in range(3, 9)
    )


def is_tree(text: str) -> bool:
    pending = [json.loads(text)]
    while pending:
        node = pending.pop()
        if not isinstance(node, list) or len(node) > 2:
            return False
        pending += node
    return True


CASES: dict[str, tuple[GuidedDecoding, Callable[[str], Any]]] = {
    "schema": (GuidedDecoding(json=THING), is_thing),
    "schema as text": (GuidedDecoding(json=json.dumps(THING)), is_thing),
    "recursive schema": (GuidedDecoding(json=TREE), is_tree),
    "any object": (GuidedDecoding(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "regex": (GuidedDecoding(regex=r"[A-F]{4}-\d{2}(é|😀)"), re.compile(r"[A-F]{4}-\d{2}(é|😀)").fullmatch),
    "grammar": (
        GuidedDecoding(grammar='root ::= "<" [a-c]+ ">" ("!" | "?")'),
        re.compile("<[a-c]+>[!?]").fullmatch,
    ),
    "choice": (GuidedDecoding(choice=WORDS), WORDS.__contains__),
    "choice of one": (GuidedDecoding(choice=("a purple cross",)), "a purple cross".__eq__),
}


@pytest_asyncio.fixture(params=["eager", "static"])
async def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TransformersEngine]:
    """The demo model's engine, decoding as on a CPU and as CUDA graphs record it."""
    static = request.param == "static"
    monkeypatch.setattr(
        "dynamo.trtllm.engines.transformers.engine.decodes_in_graphs", lambda loaded, options: static
    )
    engine = TransformersEngine(EngineConfig(model_path=str(MODEL_DIR)))
    await engine.start()
    yield engine
    await engine.close()


def ask(guided: GuidedDecoding | None, **sampling: Any) -> EngineRequest:
    options: dict[str, Any] = {"max_tokens": 200, "eos_token_ids": frozenset([END]), **sampling}
    return request(IDS, guided=guided, **options)


async def text_of(engine: TransformersEngine, each: EngineRequest) -> str:
    output = await generate(engine, each)
    assert output.finish == "eos"
    return str(TOKENIZER.decode(output.token_ids))


@pytest.mark.asyncio
async def test_answers_follow_their_grammar_whole_and_handed_over(engine: TransformersEngine) -> None:
    for name, (guided, is_right) in CASES.items():
        for sampling in SAMPLINGS:
            each = ask(guided, **sampling)
            whole, parts = await generate(engine, each), await split(engine, each)
            assert is_right(TOKENIZER.decode(whole.token_ids)), (name, sampling, whole)
            assert (whole.finish, parts.finish) == ("eos", "eos")
            assert parts.token_ids == whole.token_ids


@pytest.mark.asyncio
async def test_requests_beside_a_guided_one_get_the_tokens_that_they_get_alone(
    engine: TransformersEngine,
) -> None:
    plain = [
        ask(None, max_tokens=40, ignore_eos=True),
        ask(None, max_tokens=25, temperature=1.0, seed=3, ignore_eos=True),
    ]
    guided = [ask(each) for each, _ in CASES.values()]
    alone = [(await generate(engine, each)).token_ids for each in [*plain, *guided]]
    together = await asyncio.gather(*(generate(engine, each) for each in [*plain, *guided]))
    assert [each.token_ids for each in together] == alone


@pytest.mark.asyncio
async def test_a_complete_answer_ends_whatever_else_is_asked(engine: TransformersEngine) -> None:
    choice = GuidedDecoding(choice=("a star", "a cross and a circle"))
    assert await text_of(engine, ask(choice, ignore_eos=True)) in ("a star", "a cross and a circle")
    assert await text_of(engine, ask(GuidedDecoding(choice=("a star",)), min_tokens=30)) == "a star"
    repeated = GuidedDecoding(regex="(ab){1,20}")
    assert (
        len((await generate(engine, ask(repeated, min_tokens=12, temperature=2.0, seed=1))).token_ids) >= 12
    )
    cut = await generate(engine, ask(GuidedDecoding(regex="x{50}"), max_tokens=3))
    assert (cut.finish, set(TOKENIZER.decode(cut.token_ids))) == ("length", {"x"})


@pytest.mark.asyncio
async def test_log_probabilities_stay_the_models_own(engine: TransformersEngine) -> None:
    free = await generate(engine, ask(None, logprobs=3, max_tokens=1))
    held = await generate(engine, ask(GuidedDecoding(choice=("zzz",)), logprobs=3, max_tokens=1))
    assert held.logprobs[0].top == free.logprobs[0].top
    assert held.logprobs[0].chosen.rank > 1
    assert held.logprobs[0].chosen.logprob < free.logprobs[0].chosen.logprob


@pytest.mark.asyncio
async def test_a_first_token_that_the_grammar_does_not_allow_fails_that_request_alone(
    engine: TransformersEngine,
) -> None:
    free = ask(None, max_tokens=20)
    prefilled = await engine.prefill(free)
    assert prefilled.state is not None
    other = asyncio.create_task(generate(engine, ask(None, max_tokens=60, ignore_eos=True)))
    held = replace(
        free, prompt=Prompt(IDS), sampling=replace(free.sampling, guided=GuidedDecoding(choice=("zz",)))
    )
    async with aclosing(engine.decode(held, prefilled.first, prefilled.state)) as steps:
        with pytest.raises(EngineFault, match="does not allow"):
            await anext(steps)
    assert len((await other).token_ids) == 60


REFUSED: list[tuple[GuidedDecoding, str]] = [
    (
        GuidedDecoding(json={"type": "object", "properties": {"a": {"not": {}}}}),
        "JSON schema uses what is not supported: not",
    ),
    (GuidedDecoding(json={"type": "array", "uniqueItems": True}), "uses what is not supported: uniqueItems"),
    (GuidedDecoding(json={"type": "string", "format": "weird"}), "uses what is not supported: format, weird"),
    (GuidedDecoding(json={"$ref": "http://127.0.0.1:1/schema"}), "the JSON schema"),
    (
        GuidedDecoding(json={"type": "integer", "minimum": 3, "maximum": 1}),
        "nothing can satisfy the JSON schema",
    ),
    (GuidedDecoding(json=[1]), "a JSON schema must be an object"),
    (GuidedDecoding(json="{"), "the JSON schema cannot be read"),
    (GuidedDecoding(json="[" * 100_000), "the JSON schema cannot be read"),
    (GuidedDecoding(regex="["), "the regex is not valid"),
    (GuidedDecoding(regex="(?=a)b"), "the regex is not valid"),
    (GuidedDecoding(regex="((a{100}){100}){100}"), TOO_COMPLEX.partition(": ")[2]),
    (GuidedDecoding(regex="a{1000000}b"), TOO_COMPLEX.partition(": ")[2]),
    (GuidedDecoding(regex="a" * 300_000), "more than 262144 characters"),
    (GuidedDecoding(grammar="root ::= missing"), "the grammar"),
    (GuidedDecoding(grammar=")("), "the grammar"),
    (GuidedDecoding(structural_tag={"type": "structural_tag"}), "structural tags are not supported"),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, frozenset([END]))


@pytest.mark.parametrize(("guided", "words"), REFUSED)
def test_a_grammar_that_cannot_be_followed_is_the_clients_fault_in_our_words(
    guided: GuidedDecoding, words: str, grammars: Grammars
) -> None:
    with pytest.raises(ClientFault) as caught:
        grammars.compile(guided)
    assert words in str(caught.value)
    assert not any(
        word in str(caught.value) for word in ("Error", "lexer", "127.0.0.1", "\n", "Unimplemented", "Tokens")
    )


def test_a_tokenizer_that_grammars_cannot_use_is_said() -> None:
    with pytest.raises(ClientFault, match="not possible with this model's tokenizer"):
        Grammars(lambda: object(), VOCABULARY, frozenset()).compile(GuidedDecoding(regex="a"))


def test_the_end_is_that_of_the_model_or_else_of_its_tokenizer() -> None:
    for ends in (frozenset([END, 7]), frozenset[int]()):
        grammar = Grammars(lambda: TOKENIZER, VOCABULARY, ends).compile(GuidedDecoding(choice=("a",)))
        assert grammar.ends == (ends or {END})


def test_masks_are_read_bit_by_bit() -> None:
    masks = torch.tensor([[1 | 1 << 5, -(1 << 31), 2], [-1, 0, 0]], dtype=torch.int32)
    rows = allowed(masks, 66)
    assert rows.shape == (2, 66)
    assert [row.nonzero()[:, 0].tolist() for row in rows] == [[0, 5, 63, 65], list(range(32))]
