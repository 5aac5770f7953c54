"""Videos: from chosen frames to features in batches, and what stands for them in a prompt.

The frames were chosen before (`multimodal.kinds.video`). As in `encoder.py`, `preprocess` and `tokens_of` may
run in any thread and touch no weights; `encode` belongs to the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynamo.trtllm.core import DecodedMedia, DecodedVideo, EncodedMedia
from dynamo.trtllm.engines.frame_options import FRAME_OPTIONS
from dynamo.trtllm.engines.port import MediaInput
from dynamo.trtllm.engines.transformers.encoder import FeatureCall, TowerInputs, image_side
from dynamo.trtllm.engines.transformers.loading import LoadedModel
from dynamo.trtllm.engines.transformers.tokens import VideoTokens
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.frame_rules import QWEN2_VL, QWEN3_VL, FrameRule


def frame_rule(video: VideoTokens) -> FrameRule:
    """The model's own choice of frames."""
    rule = QWEN3_VL if video.write is not None else QWEN2_VL
    return replace(rule, temporal_patch_size=video.together)


class VideoEncoder:
    """The video side of one model, which says of sizes what its image side does."""

    def __init__(self, loaded: LoadedModel) -> None:
        tokens = loaded.tokens["video"]
        assert isinstance(tokens, VideoTokens)
        self._loaded, self._video = loaded, tokens
        self._rules, self._image = image_side(loaded)
        self._features = FeatureCall(loaded, "get_video_features")
        self._processor = loaded.processor.video_processor

    def input(self, context_length: int) -> MediaInput:
        """How the engine takes videos, in prompts of at most `context_length` tokens."""
        return MediaInput(
            placeholder_id=self._video.feature,
            rule=frame_rule(self._video),
            encodes=True,
            takes_encoded=True,
            options={**self._rules.options(self._image, context_length), **FRAME_OPTIONS},
        )

    def preprocess(self, item: DecodedMedia) -> TowerInputs:
        """Resize and normalise. Raises `ClientFault` for frames whose shape the model does not take."""
        if not isinstance(item, DecodedVideo):
            raise ClientFault(f"this model takes no {item.kind}")
        asked = self._rules.call(self._processor, item.options).preparing
        place = {"device": self._loaded.device} if self._loaded.device.type == "cuda" else {}
        frames = self._whole_patches(item.frames)
        try:
            output = self._processor(
                videos=[frames], do_sample_frames=False, return_tensors="pt", **place, **asked
            )
        except (ValueError, ZeroDivisionError) as error:
            size = f"{item.frames.shape[2]} x {item.frames.shape[1]}"
            wanted = "use a larger or less elongated one"
            raise ClientFault(f"this model cannot take a video of {size} pixels; {wanted}") from error
        grid = output["video_grid_thw"][0].tolist()
        extras: dict[str, Any] = {"video_grid_thw": grid}
        if self._video.paced:
            extras["second_per_grid_ts"] = self._video.together / _sampled_fps(item)
        ids = self._video.expand(grid, self._times_s(item))
        return TowerInputs(item.digest, self._features.inputs_in(output), extras, ids)

    def _whole_patches(self, frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A clip of fewer frames than the model takes together shows its last one again."""
        missing = self._video.together - len(frames)
        return np.concatenate([frames, *[frames[-1:]] * missing]) if missing > 0 else frames

    def _times_s(self, item: DecodedVideo) -> list[float]:
        """The time of each temporal patch: the mean of its first and its last frame's."""
        together, times = self._video.together, list(item.timestamps_s)
        times += times[-1:] * (-len(times) % together)
        return [(times[at] + times[at + together - 1]) / 2 for at in range(0, len(times), together)]

    def encode(self, videos: Sequence[TowerInputs]) -> list[EncodedMedia]:
        """Features of `videos` in one pass through the vision tower."""
        return [
            EncodedMedia("video", video.digest, tensors, video.token_ids, video.extras)
            for video, tensors in zip(videos, self._features(videos), strict=True)
        ]

    def tokens_of(self, sizes: tuple[int, ...], options: Mapping[str, Any]) -> int | None:
        """Length of the expansion of (frames, width, height),
        or None when their shape is not one that the model takes.

        Where times stand in the prompt it is the least length: how long they are is known with the frames.
        """
        frames, width, height = sizes
        asked = self._rules.call(self._processor, options).preparing
        frames = max(frames, self._video.together)
        try:
            patches = self._processor.get_num_of_video_patches(frames, height, width, dict(asked))
        except (ValueError, ZeroDivisionError):
            return None
        pairs = math.ceil(frames / self._video.together)
        return int(patches) // self._video.merge**2 + pairs * self._video.around


def _sampled_fps(item: DecodedVideo) -> float:
    """As Transformers' `VideoMetadata.sampled_fps` has it."""
    return len(item.frame_indices) / item.total_frames * item.fps
