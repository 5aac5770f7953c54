"""What a kind of media is to this worker: the contract of the files beside this one.

A kind is a subclass of `MediaKind` in a file of its own and a line in `registry`. It says how clients write
items of the kind, and turns their bytes into what the model should take. Which token stands for an item in
the prompt, and what the model makes of it, is the engine's to say (`engines.port.MediaInput`). Fetching,
caching, limits per request and the place in the prompt are the same for all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedMedia, MediaShape
from dynamo.trtllm.metrics import Readings

UrlOf = Callable[[Mapping[str, Any]], str]
"""Raises `ClientFault`, without the part's position."""


class MediaKind(ABC):
    """One kind of media. Has no state of requests."""

    name: ClassVar[str]
    """As in `DecodedMedia.kind` and in messages: `image 2: ...`."""
    plural: ClassVar[str]
    part_type: ClassVar[str]
    """Type of the content parts that Dynamo's frontend knows as this kind. It is their field, too, and the
    frontend's key for them: `{"type": "image_url", "image_url": {"url": ...}}` arrives as
    `multi_modal_data["image_url"]`."""
    message_parts: ClassVar[Mapping[str, UrlOf]] = MappingProxyType({})
    """Types of content parts that the frontend leaves among the messages, each with what reads such a part as
    a URL.
    """
    accept: ClassVar[str]
    """What a web server is asked for: the `Accept` header."""
    embedding_files: ClassVar[bool] = False
    """Whether a file of precomputed embeddings may stand for an item."""

    def rule(self, model: Any, options: Mapping[str, Any], config: MediaConfig) -> Any:
        """What of an item is read: the model's own rule (`MediaInput.rule`) with what a request's options
        say.

        Its `repr` is part of the item's name in every cache. Raises `ClientFault` for options that do not go
        together.
        """
        return model

    @abstractmethod
    def inspect(self, data: bytes, rule: Any, config: MediaConfig) -> MediaShape | None:
        """The size of the item in `data`, before anything expensive is done with it; None: only decoding
        tells.

        Cheap, and blocking. Raises `ClientFault` for what is no item of this kind, or exceeds a limit of
        `config`.
        """

    @abstractmethod
    async def decode(
        self, data: bytes, digest: str, shape: MediaShape | None, rule: Any, config: MediaConfig
    ) -> DecodedMedia:
        """The item in `data` under the name `digest`. A caller that is cancelled ends the work.

        Raises `ClientFault`, `LimitFault`, and `Overloaded` where memory runs out.
        """

    def start(self) -> None:
        """Make ready what decoding needs, so that the first item need not wait for it. Returns at once."""
        return

    def stats(self) -> Readings:
        """The metrics of this kind's decoding."""
        return {}
