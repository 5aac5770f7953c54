"""The demo model: a very small Qwen2-VL that describes drawn shapes, and what it takes to train and to check
it.

`MODEL_DIR` is the Hugging Face directory that `--model-path demo` names. Importing this module loads nothing
else.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
