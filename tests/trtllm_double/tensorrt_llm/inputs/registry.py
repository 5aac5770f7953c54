"""Input processors (inputs/registry.py and the model files under _torch/models), which turn a prompt with
media into token ids.

Refusals have the library's exception types. They are raised where the library raises them: in
`LLM.preprocess`, or in `generate_async` where a release has no `preprocess`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch

from tensorrt_llm._double.model import (
    VIDEO,
    Model,
    Tokenizer,
    hash_words,
    media_hash,
    mrope_positions,
    square_grid,
    video_hash,
)
from tensorrt_llm._double.script import release, script
from tensorrt_llm._torch.shared_tensor import to_handle
from tensorrt_llm.inputs.multimodal import DisaggPrefillMultimodalInputs, MultimodalParams

Processed = tuple[list[int], MultimodalParams | None]


class DefaultInputProcessor:
    """For models without media: it tokenizes text and looks at nothing else (registry.py)."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.multimodal_hashing_supported: bool | None = None

    def __call__(self, inputs: dict[str, Any], sampling_params: Any) -> Processed:
        if self.tokenizer is None:
            raise ValueError("no tokenizer for a text prompt")
        return self.tokenizer.encode(inputs["prompt"], sampling_params.add_special_tokens), None

    def multimodal_hashes(self, inputs: dict[str, Any]) -> list[str]:
        raise NotImplementedError(f"{type(self).__name__} has no processor")


class BaseMultimodalInputProcessor(DefaultInputProcessor):
    """For models that take images. It brings its own tokenizer, whatever `skip_tokenizer_init` says."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None) -> None:
        super().__init__(model, tokenizer or model.tokenizer)
        architecture = model.architecture
        self.supports_token_id_mm_expansion = architecture.token_ids and release.fast_path
        self.support_mm_disagg = architecture.splits

    def get_mm_token_ids(self) -> torch.Tensor | None:
        return None if self.model.image_id is None else torch.tensor([self.model.image_id], dtype=torch.int32)

    def get_vocab_size(self) -> int:
        return self.model.vocab_size

    def get_num_tokens_per_image(self, *, image: Any, **_: Any) -> int:
        return len(self.model.features(image))

    def __call__(self, inputs: dict[str, Any], sampling_params: Any) -> Processed:
        """Token ids beside media: used as they are on the fast path, else decoded and tokenized again
        (registry.py, 1.3)."""
        if inputs.get("prompt") is not None:
            return self.call_with_text_prompt(inputs, sampling_params)
        if self.supports_token_id_mm_expansion:
            return self.call_with_token_ids(inputs, sampling_params)
        text = self.tokenizer.decode(inputs["prompt_token_ids"])  # type: ignore[union-attr]
        return self.call_with_text_prompt({**inputs, "prompt": text}, sampling_params)

    def call_with_text_prompt(self, inputs: dict[str, Any], sampling_params: Any) -> Processed:
        if self.model.architecture.expands_processor_kwargs:
            _require_kwargs(inputs.get("mm_processor_kwargs", {}))
        if (inputs.get("multi_modal_data") or {}).get("video"):
            return self._with_videos(inputs, sampling_params)
        return self._with_images(self._tokenized(inputs["prompt"], sampling_params), inputs)

    def call_with_token_ids(self, inputs: dict[str, Any], sampling_params: Any) -> Processed:
        """1.3: `mm_processor_kwargs` is read without a default, so leaving it out is as bad as None."""
        _require_kwargs(inputs.get("mm_processor_kwargs"))
        return self._with_images(list(inputs["prompt_token_ids"]), inputs)

    def multimodal_hashes(self, inputs: dict[str, Any]) -> list[str]:
        if script.hashing_fails:
            raise NotImplementedError("media hashing failed")
        ((kind, items),) = (inputs["multi_modal_data"] or {"image": []}).items()
        uuids = (inputs.get("multi_modal_uuids") or {}).get(kind) if release.uuids else None
        if uuids is not None and len(uuids) != len(items):
            raise ValueError(f"{len(uuids)} names for {len(items)} items")
        named = video_hash if kind == "video" else media_hash
        return [uuid or named(item) for item, uuid in zip(items, uuids or [None] * len(items), strict=True)]

    def attach_multimodal_embeddings(
        self, inputs: dict[str, Any], embedding: Any, sampling_params: Any
    ) -> Processed:
        attach = {
            "tensors": self._attach_tensors,
            "llama4": self._attach_llama4,
            "qwen": self._attach_qwen,
        }.get(self.model.architecture.attaches or "")
        if attach is None or (attach == self._attach_qwen and not release.fast_path):
            raise NotImplementedError("this model takes no embeddings")
        if not inputs.get("prompt"):
            raise ValueError("the text prompt is missing")
        if not isinstance(embedding, dict):
            raise ValueError("embeddings must be a dictionary")
        if "image" not in embedding:
            raise ValueError("embeddings of images only")
        return attach(inputs, embedding["image"], sampling_params)

    def build_disagg_prefill_multimodal_inputs(
        self, inputs: dict[str, Any], handles: Any
    ) -> DisaggPrefillMultimodalInputs:
        """1.3: modeling_qwen2vl.py, modeling_qwen3vl.py. 1.2 has it as `get_prompt_token_ids`:
        modeling_llava_next.py."""
        architecture = self.model.architecture
        by_text = architecture.text_beside_handles or release.out_of_vocabulary
        if by_text and not inputs.get("prompt"):
            raise ValueError("the text prompt is missing")
        if not isinstance(handles, list):
            raise TypeError("handles must be a list")
        if release.version in architecture.one_handle_in and len(handles) != 1:
            raise NotImplementedError("this model takes one embedding handle a request")
        self._check_widths(handles)
        ids = (
            self.tokenizer.encode(inputs["prompt"])
            if inputs.get("prompt")
            else list(inputs["prompt_token_ids"])
        )  # type: ignore[union-attr]
        lengths = [handle["tensor_size"][0] for handle in handles]
        assert ids.count(self.model.image_id) == len(handles), "one handle for each placeholder"
        return DisaggPrefillMultimodalInputs(self._expanded(ids, lengths), lengths)

    def _check_widths(self, handles: list[dict[str, Any]]) -> None:
        for number, handle in enumerate(handles):
            width = handle["tensor_size"][1]
            if width != self.model.width and not self.model.architecture.mrope:
                raise AssertionError("an embedding is not as wide as the model")
            if width != self.model.width:
                raise RuntimeError(f"embedding {number} is {width} wide, the model {self.model.width}")

    def _tokenized(self, text: str, sampling_params: Any) -> list[int]:
        """Most processors call their tokenizer with its defaults; Llama 4's asks the sampling parameters
        (modeling_llama.py)."""
        special = (
            sampling_params.add_special_tokens if self.model.architecture.honours_add_special_tokens else True
        )
        return self.tokenizer.encode(text, add_special_tokens=special)  # type: ignore[union-attr]

    def _with_images(self, ids: list[int], inputs: dict[str, Any]) -> Processed:
        images = (inputs.get("multi_modal_data") or {}).get("image") or []
        if not images:
            return ids, None
        for image in images:
            _act_out(image)
            if isinstance(image, str):
                raise ValueError("an image must be decoded")
        if self.model.architecture.expands_processor_kwargs:
            images = [
                self.model.sized(image, **(inputs.get("mm_processor_kwargs") or {})) for image in images
            ]
        if ids.count(self.model.image_id) != len(images):
            raise ValueError("the placeholders do not match the images")
        features = [self.model.features(image) for image in images]
        grids = [self.model.grid(image) for image in images]
        expanded = self._expanded(ids, [len(rows) for rows in features])
        return expanded, MultimodalParams(features=features, grids=grids, mrope=self._mrope(expanded, grids))

    def _with_videos(self, inputs: dict[str, Any], sampling_params: Any) -> Processed:
        """modeling_qwen3vl.py, late 1.3: each pair of frames stands behind its time, from the metadata."""
        data, options = inputs["multi_modal_data"], inputs["mm_processor_kwargs"]
        if not self.model.architecture.times_frames or release.out_of_vocabulary or data.get("image"):
            raise NotImplementedError("such videos are not played")
        unknown = set(options) - {"do_sample_frames", "num_frames", "fps"}
        if unknown:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        text, features, grids = inputs["prompt"], [], []
        for video in data["video"]:
            frames, metadata = sampled(video, options)
            pairs = [frames[at : at + 2] for at in range(0, len(frames), 2)]
            written = ""
            for pair, time in zip(pairs, _times(metadata), strict=True):
                rows = self.model.pair_features(pair if len(pair) == 2 else pair * 2)
                features.append(rows)
                grids.append(self.model.grid(pair[0]))
                written += f"<{time:.1f} seconds><|vision_start|>{'<|video_mark|>' * len(rows)}<|vision_end|>"
            if VIDEO not in text:
                raise ValueError("the placeholders do not match the videos")
            text = text.replace(VIDEO, written, 1)
        if VIDEO in text:
            raise ValueError("the placeholders do not match the videos")
        ids = self._tokenized(text.replace("<|video_mark|>", VIDEO), sampling_params)
        positions, deltas = mrope_positions(ids, self.model.video_id, grids)
        mrope = to_handle(positions), to_handle(deltas)
        return ids, MultimodalParams(features=features, grids=grids, mrope=mrope)

    def _mrope(self, ids: list[int], grids: list[tuple[int, int, int]]) -> tuple[Any, Any]:
        if not self.model.architecture.mrope:
            return None, None
        positions, deltas = mrope_positions(self.model.in_vocabulary(ids), self.model.image_id, grids)
        return to_handle(positions), to_handle(deltas)

    def _attach_tensors(self, inputs: dict[str, Any], given: Any, sampling_params: Any) -> Processed:
        ids = self._tokenized(inputs["prompt"], sampling_params)
        assert all(rows.shape[-1] == self.model.hidden for rows in given), (
            "an embedding is not as wide as the model"
        )
        assert ids.count(self.model.image_id) == len(given), "one embedding for each placeholder"
        flat = [rows.reshape(-1, rows.shape[-1]) for rows in given]
        return self._expanded(ids, [len(rows) for rows in flat]), MultimodalParams(features=flat)

    def _attach_llama4(self, inputs: dict[str, Any], given: Any, sampling_params: Any) -> Processed:
        """Each image is a dictionary: its rows, and the ids that stand between them (modeling_llama.py)."""
        if not given or not isinstance(given[0], dict):
            raise ValueError("an image of Llama 4 is a dictionary")
        try:
            parts = [
                (i["mm_embeddings"], i["image_special_tokens"], i["image_special_token_offsets"])
                for i in given
            ]
        except KeyError as error:
            raise ValueError(f"an image of Llama 4 lacks {error}") from error
        for number, (rows, _, _) in enumerate(parts):
            if rows.shape[-1] != self.model.hidden:
                raise ValueError(
                    f"embedding {number} is {rows.shape[-1]} wide, the model {self.model.hidden}"
                )
        spans = [self._llama4_span(*part) for part in parts]
        ids = self._tokenized(inputs["prompt"], sampling_params)
        if ids.count(self.model.image_id) == 0:
            raise ValueError("the prompt has no placeholder")
        if ids.count(self.model.image_id) != len(spans):
            raise ValueError(f"the prompt's placeholders are not {len(spans)}")
        remaining = iter(spans)
        expanded = [
            token for each in ids for token in (next(remaining) if each == self.model.image_id else [each])
        ]
        return expanded, MultimodalParams(features=[rows for rows, _, _ in parts])

    def _llama4_span(self, rows: Any, tokens: Any, offsets: Any) -> list[int]:
        tokens, offsets = [int(t) for t in tokens], [int(o) for o in offsets]
        span = self._expanded([self.model.image_id], [len(rows) + len(tokens)])  # type: ignore[list-item]
        for offset, token in zip(offsets, tokens, strict=False):
            if not 0 <= offset < len(span):
                raise ValueError(
                    f"Image special token offset {offset} is out of range with the total length {len(span)}"
                )
            span[offset] = token
        return span

    def _attach_qwen(self, inputs: dict[str, Any], given: Any, sampling_params: Any) -> Processed:
        """Late 1.3 (modeling_qwen2vl.py): the grid of each image is guessed from its number of rows."""
        given = [given] if isinstance(given, torch.Tensor) else given
        if any(rows.dim() != 2 for rows in given):
            raise ValueError("an embedding must be [tokens, width]")
        built = self.build_disagg_prefill_multimodal_inputs(
            inputs, [{"tensor_size": list(rows.shape)} for rows in given]
        )
        mrope = self._mrope(built.prompt_token_ids, [square_grid(n) for n in built.multimodal_lengths])
        return built.prompt_token_ids, MultimodalParams(features=list(given), mrope=mrope)

    def _expanded(self, ids: list[int], lengths: list[int]) -> list[int]:
        token = self.model.vocab_size + 1 if release.out_of_vocabulary else self.model.image_id
        remaining = iter(lengths)
        return [
            t for each in ids for t in ([token] * next(remaining) if each == self.model.image_id else [each])
        ]  # type: ignore[list-item]


def create_input_processor(
    model_path_or_dir: Any,
    tokenizer: Any,
    checkpoint_format: str | None = "HF",
    trust_remote_code: bool = False,
    **_: Any,
) -> DefaultInputProcessor:
    model = model_path_or_dir if isinstance(model_path_or_dir, Model) else Model(str(model_path_or_dir))
    own = tokenizer if isinstance(tokenizer, Tokenizer) else None
    if model.architecture.placeholder is None:
        return DefaultInputProcessor(model, own)
    return BaseMultimodalInputProcessor(model, own)


def create_input_processor_with_hash(
    processor: DefaultInputProcessor,
) -> Callable[[dict[str, Any], Any], Processed]:
    """Adds the names of media contents (registry.py). A first try that fails turns them off for the
    process's life."""

    def process(inputs: dict[str, Any], sampling_params: Any) -> Processed:
        modalities = list(inputs["multi_modal_data"] or ())
        wanted = len(modalities) == 1 and processor.multimodal_hashing_supported is not False
        if not wanted:
            return processor(inputs, sampling_params)
        try:
            hashes = processor.multimodal_hashes(inputs)
            ids, made = processor(inputs, sampling_params)
            if made is None:
                raise ValueError("this processor knows no media tokens")
        except Exception:
            if processor.multimodal_hashing_supported:
                raise
            processor.multimodal_hashing_supported = False
            return processor(inputs, sampling_params)
        processor.multimodal_hashing_supported = True
        made.hashes = hashes
        return ids, made

    return process


def sampled(video: Any, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The frames that the processor takes of a `VideoData`, and its metadata (modeling_qwen3vl.py,
    `_decide_do_sample_frames` and `_preprocess`).

    Without word to the contrary it samples what it gets once more, as if that were the whole clip.
    """
    frames, metadata = video.frames, {**video.metadata, "total_num_frames": len(video.frames)}
    wanted = options.get("num_frames")
    if "do_sample_frames" in options:
        again = bool(options["do_sample_frames"])
    else:
        again = wanted is None or wanted != len(frames)
    if not again:
        return frames, metadata
    count = wanted or max(4, int(len(frames) / metadata["fps"] * options.get("fps", 2)))
    count = min(count, len(frames))
    chosen = [round(at * (len(frames) - 1) / max(1, count - 1)) for at in range(count)]
    return [frames[at] for at in chosen], {**metadata, "frames_indices": chosen}


def _times(metadata: dict[str, Any]) -> list[float]:
    """The mean of the times of each pair's first and last frame (Transformers, processing_qwen3_vl.py)."""
    times = [index / metadata.get("fps", 24) for index in metadata["frames_indices"]]
    times += times[-1:] * (len(times) % 2)
    return [(times[at] + times[at + 1]) / 2 for at in range(0, len(times), 2)]


def words_of(hashes: list[str]) -> list[list[int]]:
    """The eight numbers of each content; a caller's own name is hashed like a content."""
    return [hash_words(h if len(h) == 64 and _is_hex(h) else media_name(h)) for h in hashes]


def media_name(uuid: str) -> str:
    import hashlib

    return hashlib.sha256(uuid.encode()).hexdigest()


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text.lower())


def _require_kwargs(given: Any) -> None:
    if given is None:
        raise TypeError("mm_processor_kwargs is None")


def _act_out(image: Any) -> None:
    size = (
        f"{image.size[0]}x{image.size[1]}" if hasattr(image, "size") and isinstance(image.size, tuple) else ""
    )
    if script.input_fails_on in ("*", size) and script.input_fails_on:
        raise getattr(builtins, script.input_error)("the input processor failed at /some/server/path")
