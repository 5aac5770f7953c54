"""Makes the engine adapter that was chosen, and imports no other. `roles.EngineKind` lists them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.engines.port import Engine
from dynamo.trtllm.errors import StartupError


def require_installed(kind: EngineKind) -> None:
    """Raise `StartupError` when the engine's library is not there, before a model is fetched for it.
    Imports nothing of it."""
    if kind.library is not None and find_spec(kind.library) is None:
        raise StartupError(kind.missing)


def create_engine(config: EngineConfig) -> Engine:
    """The adapter that `config.kind` names, not started.
    Raises `StartupError` when its library is missing."""
    module, _, name = config.kind.adapter.partition(":")
    try:
        adapter = getattr(import_module(f"{__package__}.{module}"), name)
    except ImportError as error:
        raise StartupError(config.kind.missing) from error
    engine: Engine = adapter(config)
    return engine
