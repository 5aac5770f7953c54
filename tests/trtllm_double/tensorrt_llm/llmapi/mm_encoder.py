"""The double's `MultimodalEncoder`: images to handles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensorrt_llm._double.model import mrope_positions
from tensorrt_llm._double.script import release, script
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import BaseLLM


class MultimodalEncoder(BaseLLM):
    def __init__(
        self, model: str, trust_remote_code: bool = False, tensor_parallel_size: int = 1, dtype: str = "auto", **kwargs: Any
    ) -> None:
        if "tokenizer" in kwargs or "skip_tokenizer_init" in kwargs:
            raise TypeError("an encoder has no tokenizer of its own")
        super().__init__(
            model, trust_remote_code=trust_remote_code, tensor_parallel_size=tensor_parallel_size, dtype=dtype, **kwargs
        )
        if not self.model.facts.encodes_apart:
            raise ValueError("this model has no encoder of its own")
        self.batches: list[int] = []

    def generate(self, inputs: Any, use_tqdm: bool = True) -> Any:
        if self.is_shutdown:
            raise RuntimeError("LLM is shutting down")
        requests = inputs if isinstance(inputs, list) else [inputs]
        self.batches.append(len(requests))
        outputs = [self._encode(each) for each in requests]
        return outputs if isinstance(inputs, list) else outputs[0]

    def _encode(self, inputs: dict[str, Any]) -> Any:
        (image,) = inputs["multi_modal_data"]["image"]
        if f"{image.size[0]}x{image.size[1]}" == script.encode_fails_on:
            raise RequestError("the vision tower failed")
        model = self.model
        ids = model.tokenize(inputs["prompt"], True)
        assert ids.count(model.image_id) == 1, "one placeholder for one image"
        features = model.features(image)
        at = ids.index(model.image_id)
        ids[at : at + 1] = [model.image_id] * len(features)
        params = DisaggregatedParams()
        if not script.no_handles:
            params.multimodal_embedding_handles = [SharedTensorContainer.from_tensor(features).dump_to_dict()]
            params.multimodal_hashes = [[1, 2, 3, 4, 5, 6, 7, 8]]
        if model.facts.mrope:
            positions, deltas = mrope_positions(ids, model.image_id, [model.grid(image)])
            params.mrope_position_ids_handle = SharedTensorContainer.from_tensor(positions.contiguous()).dump_to_dict()
            params.mrope_position_deltas_handle = SharedTensorContainer.from_tensor(deltas).dump_to_dict()
        return SimpleNamespace(disaggregated_params=params, outputs=[SimpleNamespace(disaggregated_params=params)])


RELEASE = release.version
