"""What each release does with a video, by architecture, as far as it was read.

The frames of a video are chosen before they come here, by the model's own rule and with their times. A model
is served only where the library takes chosen frames as they are, places their times, and counts the video's
tokens rightly: by that count it keeps one video's KV cache blocks from answering for another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VIDEO_PLACEHOLDER = "<|video_pad|>"
"""What the chat templates of the models that are served write once for each video."""


@dataclass(frozen=True)
class VideoFacts:
    """What one release does with videos of one architecture. `why_not` is for clients: why the adapter serves
    none, "" where it does; `why_not_apart`: why an encode worker encodes none. `source`: keys of `SOURCES`.
    """

    why_not: str
    why_not_apart: str
    source: str

    @property
    def served(self) -> bool:
        """True: aggregated and prefill workers take decoded frames."""
        return not self.why_not


UNREAD = "what it does with a video of this model is not recorded"
NO_VIDEO = "the model sees none"
_COUNTED_AS_IMAGES = (
    "it counts a video's tokens by the size limits of images, so its cache could give one video's answer "
    "for another"
)
_NO_TIMES = "it writes the frames of a video that was encoded elsewhere without their times"
_QWEN3 = VideoFacts("", _NO_TIMES, "V-qwen3, V-reg")
_QWEN2 = VideoFacts(_COUNTED_AS_IMAGES, _COUNTED_AS_IMAGES, "V-qwen2, V-reg")

NOT_READ = VideoFacts(UNREAD, UNREAD, "inferred")
VIDEOS_SINCE_13: Mapping[str, VideoFacts] = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
}
"""Releases since 1.3.0rc29. Of 1.2.1 no text was found that is near enough to say."""
