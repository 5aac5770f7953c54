"""A decoded video in the form that the library takes: `VideoData`, and word that its frames are chosen.

Sources: `VideoData` of `inputs/multimodal_data.py`; `_preprocess` of `_torch/models/modeling_qwen3vl.py`,
which hands frames and metadata to Transformers' processor. That has the times of the frames from
`frames_indices` and `fps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.trtllm.core import DecodedVideo

CHOSEN = {"do_sample_frames": False}
"""In `mm_processor_kwargs`: the processor takes all the frames that it gets, and no others."""


def engine_form(make: Any, video: DecodedVideo, together: int) -> Any:
    """`video` as `make`, the library's `VideoData`, for a model that takes `together` frames at once.

    A clip of fewer frames than that shows its last one again.
    """
    from PIL import Image

    frames: list[Any] = [Image.fromarray(frame) for frame in video.frames]
    indices = list(video.frame_indices)
    missing = max(together - len(frames), 0)
    return make(
        frames=frames + frames[-1:] * missing,
        metadata={
            "fps": video.fps,
            "frames_indices": indices + indices[-1:] * missing,
            "total_num_frames": video.total_frames,
            "duration": video.duration_s,
        },
    )


def names_of(videos: Sequence[DecodedVideo], given: Sequence[str]) -> list[str]:
    """What the library shall call `videos` in KV events: the frontend's hashes, where one for each is `given`
    and the request does not say which frames; else names of content and chosen frames."""
    if len(given) == len(videos) and not any(video.options for video in videos):
        return list(given)
    return [video.digest for video in videos]
