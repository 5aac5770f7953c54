"""Work between the layers of a long forward pass, so that running requests do not wait until it has ended.

A GPU works through what was launched in order. A large picture in the vision tower, or a long prompt, is
tens of milliseconds of it; a decode step that is launched after every few layers takes its turn in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PARTS = 4
"""Of a stack of layers: some 10 ms each for 1,400 tokens in a model of 7 billion parameters."""


class Interleave:
    """Within `block`, calls `call` after every few layers of `model`. For one thread.

    An error of what is called does not pass through the model, where it would look like the model's: it is
    kept in `error`, and nothing more is called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.call: Callable[[], None] | None = None
        self.error: Exception | None = None
        self._open = False
        for stack in model.modules():
            if isinstance(stack, torch.nn.ModuleList) and len(stack) >= _PARTS:
                size = -(-len(stack) // _PARTS)
                for layer in list(stack)[size - 1 : -1 : size]:
                    layer.register_forward_hook(self._after)

    @contextmanager
    def block(self, long: bool) -> Iterator[None]:
        """A forward pass, which is interrupted if it is `long`."""
        self._open = long
        try:
            yield
        finally:
            self._open = False

    def _after(self, *_: Any) -> None:
        if not self._open or self.call is None or self.error is not None:
            return
        self._open = False  # what is called may run layers of its own
        try:
            self.call()
        except Exception as error:
            self.error = error
        finally:
            self._open = True
