"""Model directories for tests: complete, with the dimensions
of a known model and weights that hold no tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path

FACTS = Path(__file__).parent / "engine_configs" / "facts"
NO_TENSORS = b"{}"
FILES = {
    "tokenizer.json": json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}),
    "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
    "preprocessor_config.json": "{}",
}


def make_model_directory(directory: Path, name: str) -> Path:
    """Everything that a check of the model `name` looks for, in `directory`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps(json.loads((FACTS / f"{name}.json").read_text())["config"])
    )
    for file, content in FILES.items():
        (directory / file).write_text(content)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(NO_TENSORS)) + NO_TENSORS)
    return directory
