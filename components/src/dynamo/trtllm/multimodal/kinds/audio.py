"""Audio."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedAudio, MediaShape
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.kinds.kind import MediaKind


def _url_of_input_audio(part: Mapping[str, Any]) -> str:
    """`{"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}` as a data URL (OpenAI's API)."""
    sound = part.get("input_audio")
    data = sound.get("data") if isinstance(sound, Mapping) else None
    if not isinstance(data, str):
        raise ClientFault("its input_audio needs data: the sound's bytes in base64")
    return f"data:audio;base64,{data}"


class AudioKind(MediaKind):
    """No decoder reads it yet, so no engine may say that it takes it."""

    name = "audio"
    plural = "audio"
    part_type = "audio_url"
    message_parts = MappingProxyType({"input_audio": _url_of_input_audio})
    accept = "audio/*,*/*;q=0.5"

    def inspect(self, data: bytes, rule: Any, config: MediaConfig) -> MediaShape | None:
        raise ClientFault("this worker reads no audio")

    async def decode(
        self, data: bytes, digest: str, shape: MediaShape | None, rule: Any, config: MediaConfig
    ) -> DecodedAudio:
        raise ClientFault("this worker reads no audio")
