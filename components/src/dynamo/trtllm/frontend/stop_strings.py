"""Ends an answer at one of the request's stop strings, with its usage, as the engines end it at a stop token.

Dynamo's frontend looks for stop strings as well and drops the stream when it finds one. Of a dropped stream
the worker would not know whether the answer was complete or the client has left, and would go on computing;
so it ends the stream itself, at the very token where the frontend does. This module knows text and token ids,
nothing of media, engines or Dynamo.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from dynamo.trtllm.core import Step, Usage
from dynamo.trtllm.frontend.request import Request
from dynamo.trtllm.frontend.response import Output

logger = logging.getLogger(__name__)

_CONTEXT_TOKENS = 5
"""Prompt tokens before the answer that its first tokens are read with:
some tokenizers drop the space of a text's first word."""
_INCOMPLETE = "\ufffd"
"""What a tokenizer writes for bytes that are not a whole character yet."""

Decode = Callable[[list[int], bool], str]
"""Token ids to text; True leaves special tokens out."""


class Found(NamedTuple):
    """A stop string, and how many of the step's tokens belong to the answer,
    the one that completed it included."""

    text: str
    tokens: int


class StopFinder:
    """Reads one answer token by token and finds the first of `stops` in it,
    by the rules of Dynamo's frontend.

    A stop string counts from output token `min_tokens` on, and text before that cannot be a part of it.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str], prompt_ids: Sequence[int], min_tokens: int, skip: bool
    ) -> None:
        self._decode = decode
        self._stops = stops
        self._longest = max(map(len, stops))
        self._min_tokens = min_tokens
        self._skip = skip
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._from, self._read = 0, len(self._ids)
        self._tail = ""
        self.tokens = 0

    def find(self, token_ids: Sequence[int]) -> Found | None:
        """Take the next step's tokens. None: none of the stop strings is complete with them."""
        for at, token in enumerate(token_ids):
            self.tokens += 1
            text = self._next_text(token)
            if not text or self.tokens < self._min_tokens:
                continue
            self._tail += text
            for stop in self._stops:
                if stop in self._tail:
                    return Found(stop, at + 1)
            self._tail = self._tail[-self._longest :]
        return None

    def _next_text(self, token: int) -> str:
        """The text that `token` adds: what is longer when it is read together with the tokens before it."""
        self._ids.append(token)
        before = self._decode(self._ids[self._from : self._read], self._skip)
        after = self._decode(self._ids[self._from :], self._skip)
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        del self._ids[: self._read]
        self._read, self._from = len(self._ids), 0
        return after[len(before) :]


class StopStrings:
    """Watches the answers of requests that have stop strings. Shared by them:
    the tokenizer, loaded for the first of them.

    Without a tokenizer (`tokenizer.json` in `model_path`, and the `tokenizers` package)
    the frontend alone ends such answers.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._loading: asyncio.Task[Decode | None] | None = None

    async def watch(
        self, request: Request, outputs: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[Output, None]:
        """`outputs`, the answer to `request`, ended at the first of its stop strings;
        as they are where it has none."""
        if not request.stop_strings:
            return outputs
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(_load, self._model_path), name="tokenizer")
        try:
            decode = await asyncio.shield(self._loading)
        except BaseException:
            await outputs.aclose()
            raise
        return outputs if decode is None else _until_stop(outputs, _finder(decode, request))


def _finder(decode: Decode, request: Request) -> StopFinder:
    asked = request.engine_request
    return StopFinder(
        decode,
        request.stop_strings,
        asked.prompt.token_ids,
        asked.sampling.min_tokens,
        request.skips_special_tokens,
    )


async def _until_stop(
    outputs: AsyncGenerator[Output, None], finder: StopFinder
) -> AsyncGenerator[Output, None]:
    opening: Usage | None = None
    async with aclosing(outputs):
        async for output in outputs:
            step = Step(output) if isinstance(output, list) else output
            if isinstance(step, dict):
                yield step
                continue
            opening = opening or step.usage
            before = finder.tokens
            found = finder.find(step.token_ids)
            if found is None or step.finish is not None:
                yield output
                continue
            yield _last(step, found, before, opening)
            return


def _last(step: Step, found: Found, before: int, opening: Usage | None) -> Step:
    """`step` as the answer's last, up to the token that completed the stop string;
    `before` tokens came before it."""
    usage = None if opening is None else opening._replace(completion_tokens=before + found.tokens)
    logprobs = None if step.logprobs is None else step.logprobs[: found.tokens]
    return Step(step.token_ids[: found.tokens], logprobs, "stop", found.text, usage)


def _load(model_path: str) -> Decode | None:
    file = Path(model_path) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        logger.warning(
            "answers with stop strings are ended by the frontend alone, and counted as cancelled: %s", error
        )
        return None
    return lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))
