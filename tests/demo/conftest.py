"""Leaves the demo model's own tests out where the portable engine's dependencies are not installed."""

from __future__ import annotations

from importlib.util import find_spec

NEEDS_TRANSFORMERS = ["test_artifacts.py", "test_audio_model.py", "test_demo_model.py"]

collect_ignore = [] if find_spec("transformers") and find_spec("torchvision") else NEEDS_TRANSFORMERS
