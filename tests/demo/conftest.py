"""Leaves the demo model's own tests out where the portable engine's dependencies are not installed, and gives
those that train or answer one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

NEEDS_TRANSFORMERS = ["test_artifacts.py", "test_audio_model.py", "test_demo_model.py"]

collect_ignore = [] if find_spec("transformers") and find_spec("torchvision") else NEEDS_TRANSFORMERS


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Several test runs with torch's default number of threads hinder each other badly."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
