"""The kinds of media that a model takes here, each with what encodes it:
the one place that names them all."""

from __future__ import annotations

from dynamo.trtllm.engines.transformers.audio import AudioEncoder
from dynamo.trtllm.engines.transformers.encoder import ImageEncoder, MediaEncoder
from dynamo.trtllm.engines.transformers.loading import LoadedModel
from dynamo.trtllm.engines.transformers.video import VideoEncoder


def encoders_of(loaded: LoadedModel) -> dict[str, MediaEncoder]:
    """By the names of the kinds; empty for a model that takes text alone. Raises `StartupError`."""
    found: dict[str, MediaEncoder] = {}
    rules = loaded.family.image if loaded.family is not None else None
    if rules is not None and loaded.image is not None:
        found["image"] = ImageEncoder(loaded, rules, loaded.image)
        if loaded.video is not None:
            found["video"] = VideoEncoder(loaded, rules, loaded.image, loaded.video)
    if loaded.audio is not None:
        found["audio"] = AudioEncoder(loaded, loaded.audio)
    return found
