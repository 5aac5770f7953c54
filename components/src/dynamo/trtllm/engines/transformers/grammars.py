"""Guided decoding: which tokens a grammar allows next, for JSON schemas,
regular expressions, grammars and choices.

llguidance (https://github.com/guidance-ai/llguidance) compiles a grammar for the model's tokenizer and
follows it token by token; a mask is a bit per token, computed on the host in some 50 microseconds. Its limits
bound the work of a hostile grammar: the first mask, which is most of it, is computed off the engine's thread,
and a later one costs a few milliseconds at most.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynamo.trtllm.core import GuidedDecoding
from dynamo.trtllm.errors import ClientFault, EngineFault, WorkerError

_MAX_TEXT = 1 << 18
"""Characters of a grammar."""
_MAX_KEPT = 64
"""Compiled grammars that are kept: clients ask with the same few schemas again and again."""
_WORD = 32
"""Tokens in a word of a mask."""


class Grammar:
    """One request's way through a grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self.ends = ends
        """Tokens that end an answer: allowed where the grammar is complete."""

    def write_mask(self, address: int, nbytes: int) -> None:
        """Write the tokens that may come next to memory, a bit each.

        Raises `ClientFault` when the grammar has become too complex to follow,
        and `EngineFault` when it was left.
        """
        self._matcher.unsafe_compute_mask_ptr(address, nbytes)
        if self._matcher.is_error():
            if _is_foreign_token(self._matcher.get_error()):
                raise EngineFault("a token was chosen that the request's grammar does not allow")
            raise ClientFault(
                "guided decoding: the grammar is too complex; make its repetitions or alternatives fewer"
            )

    def take(self, token_id: int) -> None:
        """Go on behind `token_id`. Where the grammar does not allow it, the next `allow` says so."""
        self._matcher.consume_token(token_id)


class Masks:
    """What the grammars of a step's rows allow: `bits` [rows, words] int32,
    a bit per token from the lowest; all at first."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.bits: npt.NDArray[np.int32] = np.full((rows, words(vocabulary)), -1, dtype=np.int32)
        self._address = self.bits.ctypes.data
        self._stride = self.bits.strides[0]
        self._vocabulary = vocabulary

    def allow(self, row: int, grammar: Grammar, unwanted: Sequence[int] = ()) -> None:
        """Leave in `row` what `grammar` allows, without `unwanted` if others remain.
        Raises as `Grammar.write_mask`."""
        grammar.write_mask(self._address + row * self._stride, self._stride)
        if unwanted:
            kept = self.bits[row].view(np.uint32).copy()
            for token in unwanted:
                kept[token // _WORD] &= ~np.uint32(1 << token % _WORD)
            if kept.any():
                self.bits[row] = kept.view(np.int32)

    def open(self, row: int) -> None:
        """Allow all tokens in `row` again."""
        self.bits[row] = -1

    def forbidden(self) -> torch.Tensor:
        """[rows, vocabulary] bool."""
        bits = np.unpackbits((~self.bits).view(np.uint8), axis=1, count=self._vocabulary, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))


class Grammars:
    """Compiles grammars for one model. Thread-safe; the tokenizer is read at first use.

    `vocabulary` is the number of tokens that can be chosen, `ends` are those that end an answer.
    """

    def __init__(self, load_tokenizer: Callable[[], Any], vocabulary: int, ends: frozenset[int]) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def compile(self, guided: GuidedDecoding) -> Grammar:
        """A grammar at its start. Takes up to a second for a very complex one. Raises `ClientFault`."""
        text, tokenizer = _source(guided), self._require_tokenizer()
        with self._lock:
            matcher = self._kept.get(text)
        if matcher is None:
            matcher = self._compiled(tokenizer, text, guided)
        with self._lock:
            self._kept[text] = matcher
            self._kept.move_to_end(text)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return Grammar(matcher.deep_copy(), frozenset(tokenizer.eos_tokens))

    def _compiled(self, tokenizer: Any, text: str, guided: GuidedDecoding) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refusal(guided, matcher.get_error())
        mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        first = allowed(mask[None], self._vocabulary)[0].nonzero()
        # A mask that was too much work names tokens that the grammar then refuses.
        probe = matcher.deep_copy()
        if not len(first) or not probe.consume_token(int(first[0])):
            raise _refusal(guided, probe.get_error())
        return matcher

    def _require_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _for_grammars(self._load_tokenizer, self._vocabulary, self._ends)
            return self._tokenizer


def allowed(masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Masks [rows, words] int32 as [rows, vocabulary] bool."""
    bits = torch.arange(_WORD, device=masks.device, dtype=torch.int32)
    return ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


def words(vocabulary: int) -> int:
    """32-bit words of a mask over `vocabulary` tokens."""
    return -(-vocabulary // _WORD)


def _limits() -> Any:
    """What a grammar may cost, in llguidance's units; the defaults allow seconds for one mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=20_000, step_max_items=20_000, verbose_errors=False
    )


def _for_grammars(load: Callable[[], Any], vocabulary: int, ends: frozenset[int]) -> Any:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(load(), n_vocab=vocabulary, eos_token=sorted(ends) or None)
    except Exception as error:  # a tokenizer without a fast form, or of a kind that llguidance cannot read
        raise ClientFault("guided decoding is not possible with this model's tokenizer") from error


def _source(guided: GuidedDecoding) -> str:
    """The grammar in llguidance's own form.
    Raises `ClientFault` for one that is too long or of a kind not followed here."""
    try:
        text = _translated(guided)
    except WorkerError:
        raise
    except Exception as error:  # JSON that is none, nested without end, or a grammar that cannot be read
        raise ClientFault(f"guided decoding: the {_name(guided)} cannot be read") from error
    if len(text) > _MAX_TEXT:
        raise ClientFault(f"guided decoding: the {_name(guided)} has more than {_MAX_TEXT} characters")
    return text


def _translated(guided: GuidedDecoding) -> str:
    from llguidance import LLMatcher, grammar_from

    if guided.structural_tag is not None:
        raise ClientFault(
            "structural tags are not supported by the portable engine; use a JSON schema or a grammar"
        )
    if guided.choice is not None:
        return str(grammar_from("choice", json.dumps(guided.choice)))
    if guided.regex is not None:
        return str(LLMatcher.grammar_from_regex(guided.regex))
    if guided.grammar is not None:
        return str(grammar_from("grammar", guided.grammar))
    schema = {"type": "object"} if guided.json_object else guided.json
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, (dict, bool)):
        raise ClientFault("guided decoding: a JSON schema must be an object")
    # Compact: white space costs tokens, and a small model that may write it writes nothing else.
    return str(
        LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    )


def _name(guided: GuidedDecoding) -> str:
    if guided.choice is not None:
        return "choice"
    if guided.regex is not None:
        return "regex"
    return "grammar" if guided.grammar is not None else "JSON schema"


def _is_foreign_token(error: str) -> bool:
    """Whether the matcher stopped at a token; otherwise it stopped because of the work."""
    return "satisfy the grammar" in error


def _refusal(guided: GuidedDecoding, error: str) -> ClientFault:
    """llguidance's complaint in our words; of its text only words that the client wrote itself are used."""
    name = _name(guided)
    if "too large" in error or "too many" in error or "too complex" in error:
        return ClientFault(
            f"guided decoding: the {name} is too complex; make its repetitions or alternatives fewer"
        )
    if not error or "Unsatisfiable" in error:
        return ClientFault(f"guided decoding: nothing can satisfy the {name}")
    if name == "JSON schema":
        quoted = set(re.findall(r"\w+", error))
        culprits = sorted({word for word in _strings(guided.json) if word in quoted and word.isidentifier()})[
            :5
        ]
        if culprits:
            return ClientFault(
                f"guided decoding: the JSON schema uses what is not supported: {', '.join(culprits)}"
            )
    return ClientFault(f"guided decoding: the {name} is not valid, or uses what is not supported")


def _strings(value: Any) -> Iterator[str]:
    """Keys and strings of a JSON value."""
    pending = [json.loads(value) if isinstance(value, str) else value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
            yield from value
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, str):
            yield value[:80]
