"""From a parsed request to engine inputs: parts -> fetched bytes -> decoded or encoded media -> the expanded prompt.

The frontend's token ids are the prompt; each image placeholder in them is expanded in place. All parts of a request or none.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.trtllm.config import MediaConfig, Modality
from dynamo.trtllm.engines.port import Engine, EngineInfo, Prompt
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.request import Request


class MultimodalProcessor:
    """Prepares prompts for one engine. Shared by requests: the fetcher and the media cache."""

    def __init__(self, engine: Engine, info: EngineInfo, media: MediaConfig, modality: Modality) -> None:
        self._engine = engine
        self._info = info
        self._media = media
        self._modality = modality

    async def prepare(self, request: Request) -> Prompt:
        """The prompt of `request`, media in place. Raises `ClientFault` naming the part at fault."""
        if not request.media:
            return Prompt(request.token_ids)
        raise ClientFault("this worker takes no images: it serves text only")

    def stats(self) -> Mapping[str, float]:
        return {}
