"""Images: from pixels to features in batches, from files to features, and how many tokens an image takes.
Videos are prepared in `video.py`, and encoded in the same way.

`preprocess`, `tokens_of` and `adopt` may run in any thread and touch no weights; `encode` belongs to the
engine's thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from dynamo.trtllm.core import DecodedImage, DecodedMedia, EncodedMedia
from dynamo.trtllm.engines.embedding_shape import rows_of_one_item
from dynamo.trtllm.engines.port import MediaInput
from dynamo.trtllm.engines.transformers.families import ImageRules
from dynamo.trtllm.engines.transformers.loading import LoadedModel
from dynamo.trtllm.engines.transformers.tokens import ImageTokens
from dynamo.trtllm.engines.transformers.vision import derived, moved
from dynamo.trtllm.errors import ClientFault, require_room


@dataclass(frozen=True)
class TowerInputs:
    """One item as the vision or audio tower takes it: the processor's tensors, the first dimension counts
    images, patches or sounds.
    """

    digest: str
    tensors: Mapping[str, torch.Tensor]
    extras: Mapping[str, Any] = field(default_factory=dict)
    """`EncodedMedia.extras` and `token_ids`, where they are known before the features are."""
    token_ids: tuple[int, ...] = ()


class MediaEncoder(Protocol):
    """One kind's side of one model."""

    def input(self, context_length: int) -> MediaInput: ...
    def preprocess(self, item: DecodedMedia) -> TowerInputs: ...
    def encode(self, items: Sequence[TowerInputs]) -> list[EncodedMedia]: ...
    def tokens_of(self, sizes: tuple[int, ...], options: Mapping[str, Any]) -> int | None: ...


class FeatureCall:
    """A model's method from pixels to features, `get_image_features` or `get_video_features`, for items in
    batches.
    """

    def __init__(self, loaded: LoadedModel, method: str) -> None:
        self._loaded = loaded
        self._features_of = getattr(loaded.model.base_model, method)
        self._inputs = set(inspect.signature(self._features_of).parameters) - {"kwargs"}
        with_grids = loaded.device.type == "cuda" and loaded.family is not None and loaded.family.grid
        self._tower = loaded.model.base_model.visual if with_grids else None
        """Given its sizes on the host."""

    def inputs_in(self, output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the method takes of a processor's output."""
        return {
            name: value
            for name, value in output.items()
            if name in self._inputs and isinstance(value, torch.Tensor)
        }

    def __call__(self, items: Sequence[TowerInputs]) -> list[dict[str, torch.Tensor]]:
        """The levels of features of each item, as `EncodedMedia.tensors`."""
        inputs = {name: _stack([item.tensors[name] for item in items]) for name in items[0].tensors}
        given: dict[str, torch.Tensor] = {}
        for name, tensor in inputs.items():
            kind, is_grid, _ = name.partition("_grid_thw")
            if self._tower is not None and is_grid:
                # A keyword with the kind's name before it goes to the tower.
                inputs[name] = tensor.cpu()
                found = derived(self._tower, inputs[name], self._loaded.device)
                given = {f"{kind}_{key}": each for key, each in found.items()}
                continue
            dtype = (
                self._loaded.dtype if tensor.is_floating_point() and name.startswith("pixel_values") else None
            )
            inputs[name] = tensor.to(self._loaded.device, dtype)
        output = self._features_of(**inputs, **given, return_dict=True)
        levels = [output.pooler_output, *(output.deepstack_features if self._loaded.levels else ())]
        return [
            {_level_name(number): level[at].contiguous() for number, level in enumerate(levels)}
            for at in range(len(items))
        ]


def image_side(loaded: LoadedModel) -> tuple[ImageRules, ImageTokens]:
    """How a model that takes images takes them."""
    tokens = loaded.tokens["image"]
    assert loaded.family is not None
    assert loaded.family.image is not None
    assert isinstance(tokens, ImageTokens)
    return loaded.family.image, tokens


class ImageEncoder:
    """The image side of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._rules, self._image = image_side(loaded)
        self._features = FeatureCall(loaded, "get_image_features")

    def input(self, context_length: int) -> MediaInput:
        """How the engine takes images, in prompts of at most `context_length` tokens."""
        return MediaInput(
            placeholder_id=self._image.placeholder,
            encodes=True,
            takes_encoded=True,
            takes_files=True,
            options=self._rules.options(self._image, context_length),
        )

    def preprocess(self, item: DecodedMedia) -> TowerInputs:
        """Resize and normalise. Raises `ClientFault` for an image whose shape the model does not take."""
        if not isinstance(item, DecodedImage):
            raise ClientFault(f"this model takes no {item.kind}")
        processor = self._loaded.processor.image_processor
        asked = {**self._processor_options(), **self._rules.call(processor, item.options).preparing}
        image: Any = item.image
        if "device" in asked:
            # Given there, it is neither laid out nor copied by a thread that others wait for.
            image = moved(torch.from_numpy(np.array(image)), self._loaded.device).permute(2, 0, 1)
            asked["input_data_format"] = "channels_first"
        try:
            output = processor(images=[image], return_tensors="pt", **asked)
        except (ValueError, ZeroDivisionError) as error:
            size = f"{item.image.width} x {item.image.height}"
            raise ClientFault(
                f"this model cannot take an image of {size} pixels; use a larger or less elongated one"
            ) from error
        return TowerInputs(item.digest, self._features.inputs_in(output))

    def _processor_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self._image.row_end is not None:
            options["patch_size"] = self._image.patch * self._image.merge
        backend = getattr(self._loaded.processor.image_processor, "backend", None)
        if self._loaded.device.type == "cuda" and backend == "torchvision":
            options["device"] = self._loaded.device
        return options

    def encode(self, images: Sequence[TowerInputs]) -> list[EncodedMedia]:
        """Features of `images` in one pass through the vision tower."""
        key = self._rules.size_key
        sizes = [{} if key is None else {key: image.tensors[key][0].tolist()} for image in images]
        encoded = zip(images, self._features(images), sizes, strict=True)
        return [self._assemble(image.digest, tensors, extras) for image, tensors, extras in encoded]

    def _assemble(
        self, digest: str, tensors: Mapping[str, torch.Tensor], extras: dict[str, Any]
    ) -> EncodedMedia:
        rows = int(tensors["features"].shape[0])
        return EncodedMedia("image", digest, tensors, self._rules.expand(self._image, rows, extras), extras)

    def tokens_of(self, sizes: tuple[int, ...], options: Mapping[str, Any]) -> int | None:
        """Length of the expansion of an image of (width, height), or None when the model does not take its
        shape.
        """
        width, height = sizes
        rows = self._rows_of(width, height, options)
        if rows is None:
            return None
        return rows + len(self._image.begin) + (len(self._image.end) if self._image.row_end is None else 0)

    def _rows_of(self, width: int, height: int, options: Mapping[str, Any]) -> int | None:
        """Tokens as the processor counts them: rows of features, with the breaks between them where a model
        has such.
        """
        processor = self._loaded.processor
        asked = self._rules.call(processor.image_processor, options).counting
        try:
            counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width)], **asked)
        except (ValueError, ZeroDivisionError):
            return None
        return int(counts.num_image_tokens[0])

    def adopt(
        self, digest: str, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any]
    ) -> EncodedMedia:
        """Check features from a file and lay out their expansion. Raises `ClientFault` saying what does not
        fit.
        """
        names = [_level_name(i) for i in range(self._loaded.levels + 1)]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ClientFault(
                f"this model needs {len(names)} levels of embeddings; {', '.join(missing)} is missing"
            )
        levels = [self._level(name, tensors[name]) for name in names]
        rows = int(levels[0].shape[0])
        if any(level.shape[0] != rows for level in levels):
            raise ClientFault("all levels of embeddings must have the same number of rows")
        require_room(rows, self._loaded.context_length, with_media=True)
        self._require_rows(rows)
        tensors_by_name = {name: level.contiguous() for name, level in zip(names, levels, strict=True)}
        return self._assemble(digest, tensors_by_name, self._rules.adopt(self._image, rows, extras))

    def _level(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        flat = rows_of_one_item(name, tensor, self._loaded.hidden_size)
        if not flat.is_floating_point():
            raise ClientFault(
                f"{name} must be floating point, not {str(tensor.dtype).removeprefix('torch.')}"
            )
        cast = flat.detach().to(self._loaded.dtype)
        if not bool(torch.isfinite(cast).all()):
            raise ClientFault(f"{name} holds values that are not finite in the model's type")
        return cast

    def _require_rows(self, rows: int) -> None:
        """Models with one size for all images take no other number of rows."""
        if self._rules.size_key is not None:
            return
        expected = self._rows_of(self._image.patch, self._image.patch, {})
        if expected is not None and rows != expected:
            raise ClientFault(f"this model takes {expected} rows of embeddings per image, not {rows}")


def _level_name(level: int) -> str:
    return "features" if level == 0 else f"features.{level}"


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the first dimension, padding the others with zeros to the largest."""
    sizes = [max(t.shape[d] for t in tensors) for d in range(1, tensors[0].dim())]
    padded = []
    for tensor in tensors:
        missing = [most - have for most, have in zip(sizes, tensor.shape[1:], strict=True)]
        if any(missing):
            tensor = F.pad(tensor, [n for m in reversed(missing) for n in (0, m)])
        padded.append(tensor)
    return torch.cat(padded) if len(padded) > 1 else padded[0]
