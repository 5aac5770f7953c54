"""Videos: clips of the types that `multimodal.video` reads, in a process of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedVideo, MediaShape
from dynamo.trtllm.frame_rules import FrameRule
from dynamo.trtllm.multimodal import clips
from dynamo.trtllm.multimodal.kinds.kind import MediaKind
from dynamo.trtllm.multimodal.video.container import demuxer_of

_CHOICE = ("fps", "num_frames", "min_frames", "max_frames")
"""Keys of `mm_processor_kwargs` that say which frames are chosen."""


class VideoKind(MediaKind):
    """Only decoding tells how many frames a clip has. The model's rule is a `FrameRule`."""

    name = "video"
    plural = "videos"
    part_type = "video_url"
    accept = "video/*,*/*;q=0.5"

    def rule(self, model: FrameRule, options: Mapping[str, Any], config: MediaConfig) -> FrameRule:
        """As the model's, with no more frames than the worker's limit unless the request asks for more."""
        most = min(model.max_frames, config.video.max_frames)
        bounded = replace(model, max_frames=most, min_frames=min(model.min_frames, most))
        return bounded.asked(**{name: options[name] for name in _CHOICE if name in options})

    def inspect(self, data: bytes, rule: Any, config: MediaConfig) -> MediaShape | None:
        demuxer_of(data)
        return None

    async def decode(
        self, data: bytes, digest: str, shape: MediaShape | None, rule: FrameRule, config: MediaConfig
    ) -> DecodedVideo:
        video = await clips.read_video_apart(data, rule, config.video)
        return replace(video, digest=digest)

    def stats(self) -> metrics.Readings:
        return clips.stats(self.name)
