"""What has no public way: TensorRT-LLM's shared-memory handles of tensors.

Embeddings and mRoPE positions leave and enter the library as such handles only, and a handle works on its own host only.
Everything that depends on the private class is here. A release without it can still serve what needs no hand-over of tensors.
Source: `SharedTensorContainer` in `tensorrt_llm/_torch/shared_tensor` (record key S-ker).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.errors import EngineFault

if TYPE_CHECKING:
    import torch

_ABSENT = "this TensorRT-LLM release cannot hand tensors over between processes"


def handles_supported() -> bool:
    """True when the installed release has the class that opens and makes handles."""
    return _container() is not None


def open_handle(handle: Mapping[str, Any]) -> torch.Tensor:
    """The tensor behind `handle`, copied out of the shared memory.

    A handle is opened exactly once: its producer frees the memory afterwards, and a handle that nobody opens is never freed.
    """
    container = _container()
    if container is None:
        raise EngineFault(_ABSENT)
    view: torch.Tensor = container.from_dict(dict(handle)).get_local_view()
    return view.clone()


def make_handle(tensor: torch.Tensor) -> dict[str, Any]:
    """A handle to `tensor` for an engine on this host. The caller keeps `tensor` alive until the engine has opened it."""
    container = _container()
    if container is None:
        raise EngineFault(_ABSENT)
    return dict(container.from_tensor(tensor.contiguous()).dump_to_dict())


def discard_handles(handles: Iterable[Mapping[str, Any] | None]) -> None:
    """Open handles that nobody will use, so that their memory is freed. One that has been opened is no fault."""
    for handle in handles:
        if handle is not None:
            with suppress(Exception):
                open_handle(handle)


def _container() -> Any | None:
    try:
        return getattr(import_module("tensorrt_llm._torch.shared_tensor"), "SharedTensorContainer", None)
    except ImportError:
        return None
