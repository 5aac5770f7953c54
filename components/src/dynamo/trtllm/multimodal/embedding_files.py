"""Precomputed embeddings from a file:
`.pt`, `.pth` and `.bin` as `torch.save` writes them, and `.safetensors`.

A file holds one image: a tensor `[tokens, hidden]` or `[1, tokens, hidden]`, or a dictionary with it under
`mm_embeddings`. Further feature levels stand beside it as `mm_embeddings.1`, `mm_embeddings.2` and so on; all
other keys are auxiliary data. A `.safetensors` file with a single tensor may name it as it likes. No code of
a file runs, and nothing is allocated that its checked sizes do not cover. Blocking; call it in the media
pool. Shapes and grids are for `Engine.adopt_embeddings` to judge.
"""

from __future__ import annotations

import io
import logging
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.engines.embedding_shape import rows_of_one_item
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.tensor_pickle import (
    Plain,
    RefusedPickle,
    StorageRecord,
    TensorRecord,
    read_tensor_pickle,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAIN_KEY = "mm_embeddings"
MAX_LEVELS = 16
MAX_AUXILIARY_NUMBERS = 1 << 17
"""Elements of all auxiliary tensors of one file: they travel as JSON beside the embeddings."""
_MAX_MEMBERS = 4096

DAMAGED = "the embedding file is damaged or not of the format that its suffix names"
NOT_PLAIN = (
    "the embedding file holds something other than plain dense tensors, "
    "numbers, strings, lists and dictionaries"
)
LEGACY = (
    "the embedding file has PyTorch's old format; "
    "write it with torch.save of PyTorch 1.6 or later, or as .safetensors"
)
DEFLATED = "the embedding file is a compressed archive; write it with torch.save, which compresses nothing"
BIG_ENDIAN = "the embedding file was written on a big-endian machine"

_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class LoadedEmbeddings:
    """What a file holds. `tensors["features"]`, `tensors["features.1"]` and so on are `[tokens, hidden]`,
    floating point, finite, contiguous and on the CPU; `auxiliary` is JSON, its tensors as nested lists."""

    tensors: Mapping[str, torch.Tensor]
    auxiliary: Mapping[str, Any]


def load_embedding_file(data: bytes, suffix: str, max_logical_bytes: int) -> LoadedEmbeddings:
    """Read the content of a file with that `suffix` (`.pt`, `.pth`, `.bin`, `.safetensors`).

    `max_logical_bytes` bounds elements times element size over all its tensors,
    however small the file. Raises `ClientFault`.
    """
    if not data:
        raise ClientFault("the embedding file is empty")
    content = _read_safetensors(data) if suffix == ".safetensors" else _read_torch(data, max_logical_bytes)
    return _select(content, suffix)


def _read_safetensors(data: bytes) -> dict[str, Any]:
    """All tensors of the file; the format's own rules tie every tensor
    to bytes of the file, without overlap."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(data))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ClientFault(DAMAGED) from error


def _read_torch(data: bytes, max_logical_bytes: int) -> Any:
    """The content of a `torch.save` file, with its tensors built from checked descriptions."""
    if not data.startswith(b"PK"):
        raise ClientFault(LEGACY if data.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04")) else DAMAGED)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _checked_members(archive, len(data))
            content = read_tensor_pickle(archive.read(members["data.pkl"]))
            _check_logical_size(content, max_logical_bytes)
            return _Builder(archive, members).build(content)
    except ClientFault:
        raise
    except RefusedPickle as error:
        logger.info("an embedding file was refused: %r", error)
        raise ClientFault(NOT_PLAIN) from error
    except Exception as error:
        raise ClientFault(DAMAGED) from error


def _checked_members(archive: zipfile.ZipFile, file_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by their name below its one top folder;
    stored, unencrypted, and no larger together than the file."""
    infos = archive.infolist()
    if any(
        info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos
    ):
        raise ClientFault(DEFLATED)
    if len(infos) > _MAX_MEMBERS or sum(info.file_size for info in infos) > file_bytes:
        raise ClientFault(DAMAGED)
    members = {info.filename.partition("/")[2]: info for info in infos}
    if len(members) != len(infos) or "data.pkl" not in members or any(info.flag_bits & 1 for info in infos):
        raise ClientFault(DAMAGED)
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise ClientFault(BIG_ENDIAN)
    return members


def _check_logical_size(content: Plain, max_logical_bytes: int) -> None:
    """Add up all tensors before the first is built:
    a small file can describe large ones, and one of them many times."""
    import torch

    total = 0
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, TensorRecord):
            dtype: torch.dtype = getattr(torch, _DTYPES[value.storage.storage_type])
            total += math.prod(value.size) * dtype.itemsize
    if total > max_logical_bytes:
        limit = max_logical_bytes / (1 << 20)
        raise ClientFault(
            f"the tensors of the embedding file are larger than this worker's limit of {limit:g} MiB"
        )


class _Builder:
    """Builds the tensors of one archive; each storage is read once."""

    def __init__(self, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]) -> None:
        self._archive = archive
        self._members = members
        self._storages: dict[StorageRecord, torch.Tensor] = {}

    def build(self, value: Plain) -> Any:
        if isinstance(value, dict):
            return {key: self.build(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.build(item) for item in value]
        return self._tensor(value) if isinstance(value, TensorRecord) else value

    def _tensor(self, record: TensorRecord) -> torch.Tensor:
        """A contiguous tensor of its own memory, with the record's bounds checked against its storage."""
        import torch

        storage = self._storage(record.storage)
        if 0 in record.size:
            return torch.empty(record.size, dtype=storage.dtype)
        last = record.offset + sum(
            (size - 1) * stride for size, stride in zip(record.size, record.stride, strict=True)
        )
        if last >= storage.numel():
            raise ClientFault(DAMAGED)
        view = storage.as_strided(record.size, record.stride, record.offset)
        whole = view.is_contiguous() and view.numel() == storage.numel()
        return view if whole else view.clone(memory_format=torch.contiguous_format)

    def _storage(self, record: StorageRecord) -> torch.Tensor:
        """A one-dimensional tensor over the storage's bytes, wherever it was when it was saved."""
        import torch

        if record not in self._storages:
            raw = bytearray(self._archive.read(self._members[f"data/{record.key}"]))
            dtype: torch.dtype = getattr(torch, _DTYPES[record.storage_type])
            # A byte other than 0 and 1 in a boolean tensor is undefined behaviour,
            # so booleans are made from bytes.
            stored = torch.uint8 if dtype is torch.bool else dtype
            elements = torch.frombuffer(raw, dtype=stored) if raw else torch.empty(0, dtype=stored)
            self._storages[record] = elements != 0 if dtype is torch.bool else elements
        return self._storages[record]


def _select(content: Any, suffix: str) -> LoadedEmbeddings:
    """Tell embeddings from auxiliary data and check both."""
    import torch

    if isinstance(content, dict) and suffix == ".safetensors" and len(content) == 1:
        content = next(iter(content.values()))
    if isinstance(content, torch.Tensor):
        content = {MAIN_KEY: content}
    if not isinstance(content, dict) or not isinstance(content.get(MAIN_KEY), torch.Tensor):
        raise ClientFault(
            f"the embedding file must hold one tensor, or a dictionary with a tensor under the key {MAIN_KEY}"
        )
    tensors = {"features": _checked(content.pop(MAIN_KEY), MAIN_KEY)}
    for level in range(1, MAX_LEVELS):
        key = f"{MAIN_KEY}.{level}"
        if key not in content:
            break
        tensors[f"features.{level}"] = _checked(content.pop(key), key)
    if any(key.startswith(f"{MAIN_KEY}.") for key in content):
        raise ClientFault(
            f"feature levels of an embedding file are numbered {MAIN_KEY}.1, "
            f"{MAIN_KEY}.2 and so on, without a gap"
        )
    if len({tensor.shape[0] for tensor in tensors.values()}) > 1:
        raise ClientFault("the feature levels of the embedding file differ in their number of tokens")
    return LoadedEmbeddings(tensors, _Auxiliary().to_json(content))


def _checked(value: Any, key: str) -> torch.Tensor:
    """`value` as `[tokens, hidden]`. Raises `ClientFault` for another shape or dtype,
    and for values that are not finite."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ClientFault(f"{key} of the embedding file must be a tensor")
    if value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ClientFault(f"{key} must hold floating-point numbers of 16, 32 or 64 bits")
    rows = rows_of_one_item(key, value)
    if not bool(torch.isfinite(value).all()):
        raise ClientFault(f"{key} holds values that are not finite")
    return rows


class _Auxiliary:
    """Turns auxiliary data into JSON values, with a bound on the numbers that its tensors hold."""

    def __init__(self) -> None:
        self._numbers = 0

    def to_json(self, value: Any) -> Any:
        import torch

        if isinstance(value, dict):
            return {key: self.to_json(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.to_json(item) for item in value]
        if isinstance(value, torch.Tensor):
            self._numbers += value.numel()
            if self._numbers > MAX_AUXILIARY_NUMBERS:
                raise ClientFault(
                    "the auxiliary tensors of the embedding file hold more "
                    f"than {MAX_AUXILIARY_NUMBERS} numbers"
                )
            if value.is_complex() or not bool(torch.isfinite(value.double()).all()):
                raise ClientFault(
                    "an auxiliary tensor of the embedding file holds values that are not finite real numbers"
                )
            return value.tolist()
        if isinstance(value, float) and not math.isfinite(value):
            raise ClientFault("the auxiliary data of the embedding file hold a number that is not finite")
        return value
