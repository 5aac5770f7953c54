"""Whether the weights of a model are whole:
as many and as long as they say themselves, and no pointers of Git LFS."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from dynamo.trtllm.model_files import AGAIN, IS_POINTER, POINTER_START, find_json_fault, read_object

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
_INDEXES = {"model.safetensors.index.json": "*.safetensors", "pytorch_model.bin.index.json": "*.bin"}
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_SHARD = re.compile(r"(.*-)(\d{2,6})-of-(\d{2,6})(\..*)")
_MOST_SHARDS = 10_000
_PICKLE_START, _ZIP_START = b"\x80", b"PK\x03\x04"


def find_weight_faults(directory: Path, whose: str) -> Iterator[str]:
    """One sentence for each file of weights that is missing or not whole; `whose` names the directory.

    Those of an index, or else all that an engine would load; consolidated ones are a second copy that no
    engine here reads.
    """
    index = next((name for name in _INDEXES if (directory / name).is_file()), None)
    if index is not None:
        fault = find_json_fault(directory / index)
        if fault is not None:
            yield f"{index} of {whose} {fault}"
            return
        shards = read_object(directory / index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            yield f"{index} of {whose} names no weights: {AGAIN}"
            return
        names = sorted({str(name) for name in shards.values()})
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield f"{whose} has no {missing[0]}{more}, which {index} names: download the complete model"
        files = [directory / name for name in names if name not in missing]
    else:
        files = _files(directory)
        if not files:
            yield f"{whose} has no weights ({', '.join(_PATTERNS)}): download the complete model"
        yield from _missing_shards({file.name for file in files}, whose)
    for file in files:
        fault = find_weight_fault(file)
        if fault is not None:
            yield f"{file.name} of {whose} {fault}"


def _missing_shards(names: set[str], whose: str) -> Iterator[str]:
    """Shards say in their names how many there are: `model-00002-of-00005.safetensors`."""
    numbered = [match for match in map(_SHARD.fullmatch, sorted(names)) if match is not None]
    for start, count, end in sorted({(match[1], match[3], match[4]) for match in numbered}):
        every = (
            f"{start}{number:0{len(count)}d}-of-{count}{end}"
            for number in range(1, min(int(count), _MOST_SHARDS) + 1)
        )
        missing = [name for name in every if name not in names]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield f"{whose} has no {missing[0]}{more}, one of {int(count)} parts: download the complete model"


def _files(directory: Path) -> list[Path]:
    for name in _SINGLE:
        if (directory / name).is_file():
            return [directory / name]
    for pattern in _PATTERNS:
        found = sorted(file for file in directory.glob(pattern) if file.is_file())
        if found:
            return [file for file in found if not file.name.startswith("consolidated")] or found
    return []


def find_weight_fault(file: Path) -> str | None:
    """What is wrong with a file of weights, as the end of a sentence. Reads its header, not its tensors."""
    try:
        with file.open("rb") as opened:
            start = opened.read(max(8, len(POINTER_START)))
        if start.startswith(POINTER_START):
            return IS_POINTER
        size = file.stat().st_size
        if not size:
            return f"is empty: {AGAIN}"
        if file.suffix == ".safetensors":
            return _safetensors_fault(file, size)
        if start.startswith(_ZIP_START):
            return None if zipfile.is_zipfile(file) else f"was cut short: {AGAIN}"
        return None if start.startswith(_PICKLE_START) else f"holds no weights that PyTorch wrote: {AGAIN}"
    except OSError:
        return "cannot be read: check its permissions"


def _safetensors_fault(file: Path, size: int) -> str | None:
    """The format: the header's length as 8 bytes, little-endian; the header as JSON with the tensors'
    offsets; the tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            return f"was cut short or holds no tensors: {AGAIN}"
        header = opened.read(length)
    try:
        tensors = json.loads(header)
        ends = [int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError):
        return f"has a damaged header: {AGAIN}"
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        return f"was cut short, {size:,} of {expected:,} bytes are there: {AGAIN}"
    return None if size == expected else f"is {size - expected:,} bytes longer than its header says: {AGAIN}"
