"""The demo models, and what it takes to train and to check them: a very small Qwen2-VL that describes drawn
shapes, and a smaller Qwen2-Audio that describes beeps and tones (`audio/`).

`MODEL_DIR` and `AUDIO_MODEL_DIR` are the Hugging Face directories that `--model-path demo` and `demo-audio`
name. Importing this module loads nothing else.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
AUDIO_MODEL_DIR = Path(__file__).parent / "audio_model"
