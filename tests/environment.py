"""Fixtures for tests that parse a command line or check a configuration;
they, or their conftest, import them."""

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
    """Take this project's variables out of the environment, and put all back afterwards:
    Dynamo's own validation writes some."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("DYN_", "NATS_TLS")) or name in GUIDE_VARIABLES:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def on_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks speak of x86_64, whatever the machine is: NIXL and KV transfers differ by it."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
