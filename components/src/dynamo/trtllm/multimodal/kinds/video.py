"""Videos."""

from __future__ import annotations

from typing import Any

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedVideo, MediaShape
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.kinds.kind import MediaKind


class VideoKind(MediaKind):
    """No decoder reads them yet, so no engine may say that it takes them."""

    name = "video"
    plural = "videos"
    part_type = "video_url"
    accept = "video/*,*/*;q=0.5"

    def inspect(self, data: bytes, rule: Any, config: MediaConfig) -> MediaShape | None:
        raise ClientFault("this worker reads no videos")

    async def decode(
        self, data: bytes, digest: str, shape: MediaShape | None, rule: Any, config: MediaConfig
    ) -> DecodedVideo:
        raise ClientFault("this worker reads no videos")
