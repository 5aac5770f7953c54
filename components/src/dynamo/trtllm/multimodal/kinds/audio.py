"""Audio: sounds of the types that `multimodal.audio` reads, in a process of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dynamo.trtllm import metrics
from dynamo.trtllm.audio_rule import AudioRule
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedAudio, MediaShape
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal import clips
from dynamo.trtllm.multimodal.audio.container import kind_of
from dynamo.trtllm.multimodal.kinds.kind import MediaKind


def _url_of_input_audio(part: Mapping[str, Any]) -> str:
    """`{"type": "input_audio", "input_audio": {"data": BASE64, "format":
    "wav"}}` as a data URL (OpenAI's API)."""
    sound = part.get("input_audio")
    data = sound.get("data") if isinstance(sound, Mapping) else None
    if not isinstance(data, str):
        raise ClientFault("its input_audio needs data: the sound's bytes in base64")
    return f"data:audio;base64,{data}"


class AudioKind(MediaKind):
    """Only decoding tells how long a sound is. The model's rule is an `AudioRule`."""

    name = "audio"
    plural = "audio"
    part_type = "audio_url"
    message_parts = MappingProxyType({"input_audio": _url_of_input_audio})
    accept = "audio/*,*/*;q=0.5"

    def inspect(self, data: bytes, rule: Any, config: MediaConfig) -> MediaShape | None:
        kind_of(data)
        return None

    async def decode(
        self, data: bytes, digest: str, shape: MediaShape | None, rule: AudioRule, config: MediaConfig
    ) -> DecodedAudio:
        longest_s = min(rule.max_duration_s, config.audio.max_duration_s)
        sound = await clips.read_audio_apart(data, rule.rate, replace(config.audio, max_duration_s=longest_s))
        return replace(sound, digest=digest)

    def stats(self) -> metrics.Readings:
        return clips.stats(self.name)
