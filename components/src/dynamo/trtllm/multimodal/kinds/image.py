"""Images: files of the types that `decode` reads, or embedding files that stand for them."""

from __future__ import annotations

from typing import Any

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedImage, MediaShape
from dynamo.trtllm.metrics import Readings
from dynamo.trtllm.multimodal import decoders
from dynamo.trtllm.multimodal.decode import size_of
from dynamo.trtllm.multimodal.kinds.kind import MediaKind


class ImageKind(MediaKind):
    """Reads the header here, and decodes in a process of its own."""

    name = "image"
    plural = "images"
    part_type = "image_url"
    accept = "image/*,*/*;q=0.5"
    embedding_files = True

    def inspect(self, data: bytes, rule: Any, config: MediaConfig) -> MediaShape:
        return MediaShape(self.name, size_of(data, config))

    async def decode(
        self, data: bytes, digest: str, shape: MediaShape | None, rule: Any, config: MediaConfig
    ) -> DecodedImage:
        width, height = (shape or self.inspect(data, rule, config)).sizes
        return DecodedImage(digest, await decoders.decode_apart(data, width * height, config))

    def start(self) -> None:
        decoders.start_decoder()

    def stats(self) -> Readings:
        return decoders.stats()
