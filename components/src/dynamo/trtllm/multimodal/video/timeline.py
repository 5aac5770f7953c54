"""When the frames of a clip are shown, read from its packets without decoding one of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo.trtllm.errors import ClientFault, LimitFault

MAX_PACKETS = 500_000
"""Of one clip; 30 minutes at 240 frames a second are 432,000."""
_RATE_TOLERANCE = 0.05
_VP8_SHOWN = 0x10
"""Bit of a VP8 frame's first byte: it is shown, and does not only serve others (RFC 6386, 9.1)."""


class Shown(NamedTuple):
    """A frame: when it is shown, in the stream's units of time,
    and which packet of the stream it comes in."""

    pts: int
    packet: int


@dataclass(frozen=True)
class Timeline:
    """The frames of a clip as its packets have them, in the order in which they are shown."""

    shown: tuple[Shown, ...]
    keyframes: tuple[Shown, ...]
    """Where decoding can begin, in the order of packets."""
    is_whole: bool
    """False when reading ended at damage."""

    def span(self) -> int:
        """From the first frame to the last, in the stream's units of time."""
        return self.shown[-1].pts - self.shown[0].pts

    def start_of(self, frame: Shown) -> int:
        """The packet at which to begin, so that `frame` can be decoded.

        A frame shown before a keyframe may need what came before that keyframe,
        even though it is stored after it.
        """
        at = bisect_right(self.keyframes, frame.packet, key=lambda each: each.packet)
        while at > 0:
            at -= 1
            if self.keyframes[at].pts <= frame.pts:
                break
        return self.keyframes[at].packet


def packets_of(container: Any, stream: Any) -> Iterator[Any]:
    """The packets of `stream` that hold something, in the order of decoding."""
    for packet in container.demux(stream):
        if packet.size:
            yield packet


def read_timeline(container: Any, stream: Any, nothing: str) -> Timeline:
    """Read all packets. Raises `LimitFault` for too many of them, and `ClientFault` of `nothing` where none
    can be shown."""
    from av.error import FFmpegError

    shown: list[Shown] = []
    keyframes: list[Shown] = []
    is_whole = False
    is_vp8 = stream.codec_context.name in ("vp8", "libvpx")
    with suppress(FFmpegError):
        for number, packet in enumerate(packets_of(container, stream)):
            if number >= MAX_PACKETS:
                raise LimitFault(f"the video has more than {MAX_PACKETS} frames, this worker's limit")
            if packet.is_corrupt:
                break
            pts = packet.pts if packet.pts is not None else packet.dts
            if pts is None:
                raise ClientFault("the video does not say when its frames are shown")
            if packet.is_keyframe:
                keyframes.append(Shown(pts, number))
            is_hidden = packet.is_discard or (is_vp8 and not memoryview(packet)[0] & _VP8_SHOWN)
            # What is shown before the first keyframe was left behind when the clip was cut:
            # nothing can decode it.
            if keyframes and pts >= keyframes[0].pts and not is_hidden:
                shown.append(Shown(pts, number))
        else:
            is_whole = True
    if not shown:
        raise ClientFault(nothing)
    return Timeline(tuple(sorted(shown)), tuple(keyframes), is_whole)


def rate_of(stream: Any, timeline: Timeline) -> float:
    """Frames a second, on average: what the file says,
    unless it counts no frames and its packets say otherwise."""
    declared = float(stream.average_rate or 0)
    span_s = float(timeline.span() * stream.time_base)
    measured = (len(timeline.shown) - 1) / span_s if span_s > 0 else 0.0
    if stream.frames and declared > 0:
        return declared
    if measured and abs(declared - measured) > _RATE_TOLERANCE * measured:
        return measured
    return declared or measured or 1.0
