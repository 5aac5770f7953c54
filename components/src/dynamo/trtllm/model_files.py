"""Where a model's files are: a directory, the shipped demo model, or a Hugging Face name that Dynamo fetches."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dynamo.trtllm.errors import StartupError

DEMO_MODEL = "demo"
DEMO_DIRECTORY = Path(__file__).parent / "demo" / "model"


async def resolve_model(path: str) -> str:
    """The local directory of `path`. Raises `StartupError` when there is none and none can be fetched."""
    if path == DEMO_MODEL:
        return str(DEMO_DIRECTORY)
    local = await asyncio.to_thread(_find_directory, path)
    if local is not None:
        return local
    if path.startswith(("/", "./", "../", "~")):
        raise StartupError(f"--model-path {path} is not a directory on this machine")
    from dynamo.llm import fetch_model

    try:
        return str(await fetch_model(path))
    except Exception as error:
        raise StartupError(
            f"--model-path {path} is neither a directory nor a model that can be fetched; check the name and the network"
        ) from error


def _find_directory(path: str) -> str | None:
    return str(Path(path).resolve()) if Path(path).is_dir() else None
