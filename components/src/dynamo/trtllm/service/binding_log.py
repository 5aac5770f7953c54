"""Keeps out of the log what was logged already:
Dynamo's binding prints the traceback of every exception that a handler raises.

It does so through `sys.stderr`, for a refused request as for a fault, and offers no switch. Here the one
printing of an exception that `hide` was told of is dropped; everything else that is written passes, other
exceptions' tracebacks included.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_HEADER = "Traceback (most recent call last):"
_MAX_HIDDEN = 4096
"""Exceptions that were announced and not printed yet; the oldest are forgotten."""
_MAX_HELD = 1 << 16
"""Characters of one traceback that are held back at most."""


class LoggedErrors:
    """Standing in for a text stream. Threads share the announced exceptions;
    what is held back is each thread's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._hidden: OrderedDict[str, int] = OrderedDict()
        self._held = threading.local()

    @classmethod
    @contextmanager
    def on_stderr(cls) -> Iterator[LoggedErrors]:
        """In place of `sys.stderr` while the block runs."""
        before = sys.stderr
        hidden = cls(before)
        sys.stderr = hidden
        try:
            yield hidden
        finally:
            sys.stderr = before

    def hide(self, error: BaseException) -> None:
        """Drop the next printing of `error`'s traceback."""
        line = _last_line(error)
        with self._lock:
            self._hidden[line] = self._hidden.pop(line, 0) + 1
            if len(self._hidden) > _MAX_HIDDEN:
                self._hidden.popitem(last=False)

    def write(self, text: str) -> int:
        held = getattr(self._held, "text", "")
        if not held and not (self._hidden and text.startswith(_HEADER)):
            return self._stream.write(text)
        held += text
        # A traceback comes piece by piece;
        # it is over with the first whole line that is no header and not indented.
        last = held.rstrip("\n").rpartition("\n")[2]
        is_whole = held.endswith("\n") and not last.startswith((" ", _HEADER))
        if not is_whole and len(held) <= _MAX_HELD:
            self._held.text = held
            return len(text)
        self._held.text = ""
        if not self._take(last):
            self._stream.write(held)
        return len(text)

    def flush(self) -> None:
        held, self._held.text = getattr(self._held, "text", ""), ""
        if held:
            self._stream.write(held)
        self._stream.flush()

    def _take(self, line: str) -> bool:
        with self._lock:
            count = self._hidden.pop(line, 0)
            if count > 1:
                self._hidden[line] = count - 1
            return count > 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last_line(error: BaseException) -> str:
    """How a traceback of `error` ends."""
    kind, words = type(error), str(error)
    return f"{kind.__module__}.{kind.__qualname__}{': ' if words else ''}{words}".rpartition("\n")[2]
