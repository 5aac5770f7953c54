"""Decoding the chosen frames of a clip, and no more of it than they need.

Of the packets those are fed to the decoder that lie between a chosen frame and the keyframe before it; of the
decoded frames only the chosen ones are converted and kept. Frames come out upright, RGB, alpha over white.
"""

from __future__ import annotations

import gc
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.trtllm.config import VideoLimits
from dynamo.trtllm.errors import ClientFault, LimitFault
from dynamo.trtllm.multimodal.video.timeline import Shown, Timeline, packets_of

Allocate = Callable[[tuple[int, int, int, int]], NDArray[np.uint8]]
"""Gives memory for `[frames, height, width, 3]`."""
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""FFmpeg's own decoders of these leave alpha out."""
_PIXEL_SLACK = 1 << 16
"""Codecs pad a frame to whole blocks."""
_COLLECTED_PIXELS = 16_000_000
"""So many are kept before the frames that they came from are freed: a frame of PyAV 18 refers to itself once
its side data was read, so only the collector frees it, and that counts objects and not their size.
"""


class ChosenFrames:
    """Decodes the frames of `wanted` (indices into the clip, ascending) from one pass over its packets."""

    def __init__(
        self, stream: Any, timeline: Timeline, wanted: Sequence[int], limits: VideoLimits, allocate: Allocate
    ) -> None:
        self._timeline = timeline
        self._wanted = wanted
        self._limits = limits
        self._allocate = allocate
        self._codec = _decoder_for(stream, limits)
        self._places: dict[int, list[int]] = defaultdict(list)
        """For each time at which a chosen frame is shown: its places in the result that are still empty."""
        for place, index in enumerate(wanted):
            self._places[timeline.shown[index].pts].append(place)
        self._kept: NDArray[np.uint8] | None = None
        self._uncollected = 0

    def decode(self, container: Any, stream: Any) -> tuple[NDArray[np.uint8], list[int]]:
        """The frames, uint8 `[frames, height, width, 3]`, and the places in it that could not be filled.

        Raises `ClientFault` when not a single one could be decoded.
        """
        runs = _runs([self._timeline.shown[index] for index in self._wanted], self._timeline)
        first, last = next(runs)
        packets = enumerate(packets_of(container, stream))
        for number, packet in packets:
            if number < first:
                continue
            self._feed(packet)
            if number == last:
                self._feed(None)
                self._codec.flush_buffers()
                following = next(runs, None)
                if following is None:
                    break
                first, last = following
        missing = sorted(place for places in self._places.values() for place in places)
        if self._kept is None:
            raise ClientFault("none of the video's chosen frames can be decoded")
        return self._kept, missing

    def _feed(self, packet: Any) -> None:
        """Give one packet to the decoder, or its end, and keep what comes out and was chosen."""
        from av.error import FFmpegError

        if packet is not None:
            # A frame that is not chosen is left out where no other refers to it.
            self._codec.skip_frame = "DEFAULT" if packet.pts in self._places else "NONREF"
        try:
            decoded = self._codec.decode(packet)
        except FFmpegError:
            return
        for frame in decoded:
            places = self._places.get(frame.pts)
            if places and not frame.is_corrupt:
                self._keep(frame, places.pop(0))

    def _keep(self, frame: Any, place: int) -> None:
        if self._kept is None:
            check_frame(frame.width, frame.height, len(self._wanted), self._limits)
        kept = self._kept
        size = (frame.width, frame.height) if kept is None else _stored_size(frame, kept)
        image = upright(as_rgb(frame, *size), frame)
        if kept is None:
            height, width = image.shape[:2]
            kept = self._kept = self._allocate((len(self._wanted), height, width, 3))
        kept[place] = image
        self._uncollected += frame.width * frame.height
        if self._uncollected > _COLLECTED_PIXELS:
            gc.collect()
            self._uncollected = 0


def check_frame(width: int, height: int, frames: int, limits: VideoLimits) -> None:
    """Raise `LimitFault` for frames that are too large, each or together."""
    if width * height > limits.max_frame_pixels:
        raise LimitFault(
            f"{width} x {height} pixels a frame exceed this worker's limit of "
            f"{limits.max_frame_pixels / 1e6:g} million pixels"
        )
    if width * height * frames > limits.max_pixels:
        raise LimitFault(
            f"{frames} frames of {width} x {height} pixels exceed this worker's limit of "
            f"{limits.max_pixels / 1e6:g} million pixels for one video; ask for fewer frames"
        )


def as_rgb(frame: Any, width: int, height: int) -> NDArray[np.uint8]:
    """The pixels of `frame`, uint8 `[height, width, 3]`, by FFmpeg's conversion; alpha over white."""
    if not _has_alpha(frame):
        return _pixels(frame, width, height, "rgb24")
    rgba = _pixels(frame, width, height, "rgba").astype(np.uint16)
    alpha = rgba[..., 3:]
    return ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def upright(image: NDArray[np.uint8], frame: Any) -> NDArray[np.uint8]:
    """`image` as the display matrix of `frame` turns it:
    by quarter turns and mirroring, else `ClientFault`.

    The matrix maps stored to shown places: x' = a x + c y, y' = b x + d y (ISO/IEC 14496-12, 6.2.2).
    """
    side = frame.side_data.get("DISPLAYMATRIX")
    if side is None:
        return image
    a, b, _, c, d = struct.unpack("=5i", bytes(side)[:20])
    if a and d and not b and not c:
        across, down = a < 0, d < 0
    elif b and c and not a and not d:
        image = image.swapaxes(0, 1)
        across, down = c < 0, b < 0
    else:
        raise ClientFault("the video is turned by something else than quarter turns")
    return image[:: -1 if down else 1, :: -1 if across else 1]


def _runs(frames: Sequence[Shown], timeline: Timeline) -> Iterator[tuple[int, int]]:
    """First and last packet of each stretch that has to be decoded for `frames`."""
    first = last = -1
    for start, end in sorted((timeline.start_of(frame), frame.packet) for frame in frames):
        if start > last and last >= 0:
            yield first, last
            first = -1
        first = start if first < 0 else first
        last = max(last, end)
    yield first, last


def _decoder_for(stream: Any, limits: VideoLimits) -> Any:
    """The decoder of `stream`: one thread, an error for damage instead of guessed pixels."""
    import av

    codec = stream.codec_context
    has_alpha = stream.metadata.get("alpha_mode") == "1"
    other = _ALPHA_DECODERS.get(codec.name) if has_alpha else None
    if other is not None and other in av.codecs_available:
        codec = av.CodecContext.create(other, "r")
    codec.thread_count = 1
    codec.options = {"err_detect": "explode", "max_pixels": str(2 * limits.max_frame_pixels + _PIXEL_SLACK)}
    return codec


def _has_alpha(frame: Any) -> bool:
    return frame.format.name == "pal8" or any(each.is_alpha for each in frame.format.components)


def _pixels(frame: Any, width: int, height: int, kind: str) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = frame.to_ndarray(format=kind, width=width, height=height)
    return pixels


def _stored_size(frame: Any, kept: NDArray[np.uint8]) -> tuple[int, int]:
    """Width and height to which `frame` is brought, so that all frames
    of the clip have the size of the first."""
    height, width = kept.shape[1:3]
    side = frame.side_data.get("DISPLAYMATRIX")
    is_turned = side is not None and not struct.unpack("=i", bytes(side)[:4])[0]
    return (height, width) if is_turned else (width, height)
