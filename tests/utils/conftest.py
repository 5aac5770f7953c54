"""Command-line tests start from an environment without this project's variables, and give the old one back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

GUIDE_VARIABLES = (
    "MODEL_PATH",
    "SERVED_MODEL_NAME",
    "MODALITY",
    "ENCODE_ENDPOINT",
    "ALLOWED_LOCAL_MEDIA_PATH",
    "MAX_FILE_SIZE_MB",
)


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Dynamo's own validation writes variables, so all of them are put back afterwards."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("DYN_", "NATS_TLS")) or name in GUIDE_VARIABLES:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)
