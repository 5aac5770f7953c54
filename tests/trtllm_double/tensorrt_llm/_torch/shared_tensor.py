"""Handles of tensors. They travel as JSON, are good on one host, and each must be opened exactly once."""

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


class SharedTensorContainer:
    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> SharedTensorContainer:
        assert tensor.is_contiguous()
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        name = f"{os.getpid()}-{next(_numbers)}"
        made[name] = tensor
        payload = base64.b64encode(buffer.getvalue()).decode()
        return cls({"method_key": 1, "name": name, "tensor_size": list(tensor.shape), "storage_handle": payload})

    def dump_to_dict(self) -> dict[str, Any]:
        return dict(self._fields)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SharedTensorContainer:
        return cls(fields)

    def get_local_view(self) -> torch.Tensor:
        name = self._fields["name"]
        if name in opened:
            raise RuntimeError("this handle has been opened before")
        opened.add(name)
        made.pop(name, None)
        tensor: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(self._fields["storage_handle"])), weights_only=True)
        return tensor
