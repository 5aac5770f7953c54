"""The kinds of media that the engine takes, each with what encodes it: the one place that names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynamo.trtllm.engines.transformers.audio import AudioEncoder
from dynamo.trtllm.engines.transformers.encoder import ImageEncoder, MediaEncoder
from dynamo.trtllm.engines.transformers.loading import LoadedModel
from dynamo.trtllm.engines.transformers.video import VideoEncoder

ENCODERS: Mapping[str, Callable[[LoadedModel], MediaEncoder]] = {
    "image": ImageEncoder,
    "video": VideoEncoder,
    "audio": AudioEncoder,
}


def encoders_of(loaded: LoadedModel) -> dict[str, MediaEncoder]:
    """Those of the kinds that `loaded` takes; none where it takes text alone. Raises `StartupError`."""
    return {kind: ENCODERS[kind](loaded) for kind in loaded.tokens}
