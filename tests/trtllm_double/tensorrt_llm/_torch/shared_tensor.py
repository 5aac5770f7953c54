"""Handles of tensors: they travel as JSON and are good on one host (`tensorrt_llm/_torch/shared_tensor`, 1.2
to 1.3).

The real one holds CUDA IPC or shared memory, which its producer frees once a consumer has opened it. So here
each handle must be opened exactly once: opened never it is a leak, opened again it is gone.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
from typing import Any

import torch

_numbers = itertools.count(1)
opened: set[str] = set()
made: dict[str, Any] = {}
"""Handles that this process made -> their tensor, until they are opened. What stays here is a leak."""
_METHOD = 2


class SharedTensorContainer:
    def __init__(self, method_key: int, tensor_handle: dict[str, Any]) -> None:
        self.method_key = method_key
        self.tensor_handle = tensor_handle

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> SharedTensorContainer:
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)
        name = f"{os.getpid()}-{next(_numbers)}"
        made[name] = tensor
        payload = base64.b64encode(buffer.getvalue()).decode()
        return cls(
            _METHOD,
            {
                "name": name,
                "tensor_size": list(tensor.shape),
                "tensor_stride": list(tensor.stride()),
                "storage_dtype": str(tensor.dtype),
                "storage_handle": payload,
            },
        )

    def dump_to_dict(self) -> dict[str, Any]:
        return {"method_key": self.method_key, **self.tensor_handle}

    @classmethod
    def from_dict(cls, tensor_info: dict[str, Any]) -> SharedTensorContainer:
        """Raises `KeyError` for a dictionary that is no handle, `ValueError` for one of an unknown kind."""
        key = tensor_info["method_key"]
        if key not in (1, _METHOD):
            raise ValueError(f"a handle of kind {key}")
        missing = [name for name in ("name", "tensor_size", "storage_handle") if name not in tensor_info]
        if missing:
            raise KeyError(f"a handle without {missing[0]}")
        return cls(key, {name: value for name, value in tensor_info.items() if name != "method_key"})

    def get_local_view(self) -> torch.Tensor:
        name = self.tensor_handle["name"]
        if name in opened:
            raise RuntimeError(f"the shared memory of handle {name} is gone")
        opened.add(name)
        made.pop(name, None)
        raw = base64.b64decode(self.tensor_handle["storage_handle"])
        tensor: torch.Tensor = torch.load(io.BytesIO(raw), weights_only=True)
        return tensor


def to_handle(tensor: torch.Tensor) -> dict[str, Any]:
    return SharedTensorContainer.from_tensor(tensor.contiguous()).dump_to_dict()


def to_tensor(handle: dict[str, Any]) -> torch.Tensor:
    return SharedTensorContainer.from_dict(handle).get_local_view()
