"""`SamplingParams` and `GuidedDecodingParams` of the release (sampling_params.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import field, make_dataclass
from typing import Any

from tensorrt_llm._double import tables
from tensorrt_llm._double.release import release

_FILLED_IN = ("_stream_interval", "_stop_word_ids")
GuidedDecodingParams: Any = make_dataclass(
    "GuidedDecodingParams",
    [(name, Any, field(default=default)) for name, default in tables.GUIDED.items()],
    kw_only=True,
)
GuidedDecodingParams.__module__ = __name__


class LogitsProcessor(ABC):
    """Called for each step of a request. The double's engine has no logits and calls none."""

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: Any,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None: ...


def _post_init(self: Any) -> None:
    if self.pad_id is None:
        self.pad_id = self.end_id
    self.best_of = self.best_of or self.n
    if self.best_of < self.n:
        raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
    for name, allowed in (
        ("top_p", self.top_p is None or 0 <= self.top_p <= 1),
        ("top_k", self.top_k is None or self.top_k >= 0),
    ):
        if not allowed:
            raise ValueError(f"require {name} in its range, got {name}={getattr(self, name)}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if self.guided_decoding is not None:
        given = [n for n in tables.GUIDED if getattr(self.guided_decoding, n)]
        if len(given) != 1:
            raise ValueError(f"guided decoding by {given}")


def _setup(self: Any, tokenizer: Any) -> None:
    """What the LLM fills in from its tokenizer: the end token and the ids of stop strings."""
    if self.end_id is None:
        self.end_id = tokenizer.eos_token_id
        self.pad_id = tokenizer.pad_token_id if self.pad_id is None else self.pad_id
    stops = [self.stop] if isinstance(self.stop, str) else self.stop
    if stops:
        self._stop_word_ids = [tokenizer.encode(word, add_special_tokens=False) for word in stops]


def _get_stop_reasons_and_words(self: Any) -> list[tuple[int | str, list[int]]]:
    found: list[tuple[int | str, list[int]]] = [(token, [token]) for token in self.stop_token_ids or ()]
    stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
    if stops and self._stop_word_ids is None:
        raise RuntimeError("no tokenizer has seen the stop strings")
    return found + list(zip(stops, self._stop_word_ids or (), strict=True))


SamplingParams: Any = make_dataclass(
    "SamplingParams",
    [
        *((name, Any, field(default=default)) for name, default in release.sampling.items()),
        *((name, Any, field(default=None, init=False, repr=False)) for name in _FILLED_IN),
    ],
    namespace={
        "__post_init__": _post_init, "_setup": _setup,
        "_get_stop_reasons_and_words": _get_stop_reasons_and_words,
    },
    kw_only=True,
    slots=True,
)  # fmt: skip
SamplingParams.__module__ = __name__
