"""What has no public way: handles of tensors, signs of death, and what a loaded model's input processor can
do.

Embeddings and mRoPE positions leave and enter the library as shared-memory handles only, and a handle works
on its own host only. Everything that depends on a private name is here; a release without it loses that one
thing. Sources: `_torch/shared_tensor`, `llmapi/llm.py` and `executor/executor.py` of the library.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.errors import EngineFault

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ABSENT = "this TensorRT-LLM release cannot hand tensors over between processes"
_NOT_THERE = object()


def handles_supported() -> bool:
    """True when the installed release has the class that opens and makes handles."""
    return _container() is not None


def open_handle(handle: Mapping[str, Any]) -> torch.Tensor:
    """The tensor behind `handle`, copied out of the shared memory.

    A handle is opened exactly once: its producer frees the memory afterwards, and a handle that nobody opens
    is never freed.
    """
    container = _container()
    if container is None:
        raise EngineFault(_ABSENT)
    view: torch.Tensor = container.from_dict(dict(handle)).get_local_view()
    return view.clone()


def make_handle(tensor: torch.Tensor) -> dict[str, Any]:
    """A handle to `tensor` for an engine on this host. The caller keeps `tensor` alive until the engine
    has opened it."""
    container = _container()
    if container is None:
        raise EngineFault(_ABSENT)
    return dict(container.from_tensor(tensor.contiguous()).dump_to_dict())


def discard_handles(holders: Any) -> None:
    """Open all handles within `holders` (dictionaries and lists), which nobody will use, so that their memory
    is freed.

    Each once, in however many places it stands; one that has been opened before is no fault.
    """
    found: dict[int, Mapping[str, Any]] = {}
    pending = [holders]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping) and "method_key" in value:
            found[id(value)] = value
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    for handle in found.values():
        with suppress(Exception):
            open_handle(handle)


def cause_of_death(llm: Any) -> str | None:
    """Why `llm` serves no more, as the library has noted it itself; None while it has noted nothing.

    Reads attributes only, so it never blocks; the library notes a death when something has asked or sent.
    """
    executor = getattr(llm, "_executor", _NOT_THERE)
    if executor is None:
        return "it was shut down"
    fatal = getattr(executor, "_fatal_error", None)
    if fatal is not None:
        return f"{type(fatal).__name__}: {fatal}"
    return "it is shutting down" if getattr(executor, "doing_shutdown", False) is True else None


def died_by_an_error(llm: Any) -> bool:
    """True: ranks are gone, so that telling them to stop would wait for ever."""
    return getattr(getattr(llm, "_executor", None), "_fatal_error", None) is not None


def ask_health(llm: Any) -> bool:
    """Whether `llm` can serve, by its own check. May block while a message to a dead rank is stuck: call
    it on a thread."""
    check = getattr(llm, "_check_health", None) or getattr(
        getattr(llm, "_executor", None), "check_health", None
    )
    return bool(check()) if callable(check) else True


def takes_ids_beside_images(llm: Any) -> bool:
    """True: the loaded model's input processor expands token ids. False: it would decode them and tokenize
    the text again."""
    return bool(getattr(getattr(llm, "input_processor", None), "supports_token_id_mm_expansion", False))


def takes_handles(llm: Any) -> bool | None:
    """Whether the loaded model's prefill takes another process's embeddings; None when the release does
    not say."""
    processor = getattr(llm, "input_processor", None)
    return None if processor is None else bool(getattr(processor, "support_mm_disagg", False))


def front_of_a_text(llm: Any) -> str:
    """What the engine's tokenizer puts in front of every text by itself, a beginning-of-sequence token;
    empty for none."""
    tokenizer: Any = getattr(llm, "tokenizer", None)
    if tokenizer is None:
        return ""
    try:
        given, bare = (list(tokenizer.encode("\n", add_special_tokens=special)) for special in (True, False))
        starts = (n for n in range(len(given)) if given[n : n + len(bare)] == bare)
        front = given[: next(starts, 0)] if bare else given
        return str(tokenizer.decode(front, skip_special_tokens=False)) if front else ""
    except Exception as error:
        logger.info("The engine's tokenizer does not tell its first token: %s", error)
        return ""


def _container() -> Any | None:
    try:
        return getattr(import_module("tensorrt_llm._torch.shared_tensor"), "SharedTensorContainer", None)
    except ImportError:
        return None
