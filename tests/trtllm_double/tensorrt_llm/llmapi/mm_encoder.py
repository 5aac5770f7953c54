"""The double's `MultimodalEncoder` (llmapi/mm_encoder.py): images to handles.

`generate` submits all requests and then reads them one after the other, so the first that failed raises
although others have made handles. `generate_async` gives each its own result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tensorrt_llm._double.script import release, script
from tensorrt_llm._torch.shared_tensor import to_handle
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.inputs.data import prompt_inputs
from tensorrt_llm.inputs.multimodal import MultimodalParams
from tensorrt_llm.inputs.registry import create_input_processor_with_hash, words_of
from tensorrt_llm.llmapi.llm import BaseLLM

DEFAULT_MAX_NUM_TOKENS = 16384


class MultimodalEncoder(BaseLLM):
    def __init__(
        self,
        model: str,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("max_num_tokens") is None:
            kwargs["max_num_tokens"] = DEFAULT_MAX_NUM_TOKENS
        if kwargs.get("encode_only") is True:
            raise ValueError("an encoder takes no encode_only=True")
        super().__init__(
            model,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            **kwargs,
        )
        if not self.model.architecture.splits:
            raise RuntimeError("Executor worker returned error") from ValueError(
                "this model has no vision encoder of its own"
            )
        self.args.mm_encoder_only = True
        self.batches: list[int] = []

    def generate(self, inputs: Any, use_tqdm: bool = True) -> Any:
        several = isinstance(inputs, list) and not (inputs and isinstance(inputs[0], int))
        requests = [prompt_inputs(each) for each in (inputs if several else [inputs])]
        self.batches.append(len(requests))
        results = [self.generate_async(each) for each in requests]
        for result in results:
            result.result()
        return results if several else results[0]

    def generate_async(self, inputs: Any, sampling_params: Any = None) -> RequestOutput:
        executor = self._require_running()
        self.seen.append({"inputs": inputs, "sampling_params": sampling_params})
        params = self._prepare_sampling_params(sampling_params)
        inputs = prompt_inputs(inputs)
        ids, media = create_input_processor_with_hash(self.input_processor)(dict(inputs), params)
        if len(ids) > self.args.max_num_tokens:
            raise RequestError(f"{len(ids)} prompt tokens, max_num_tokens is {self.args.max_num_tokens}")
        number = next(executor.ids)
        run = _Encoding(number, media, inputs)
        run.result = RequestOutput(number, ids, run.steps(), lambda: None)
        run.start()
        return run.result


class _Encoding:
    """One request: the tower runs as soon as it is submitted, whether or not anybody reads the result."""

    def __init__(self, number: int, media: MultimodalParams | None, inputs: dict[str, Any]) -> None:
        self.number, self.media = number, media
        self.images = (inputs.get("multi_modal_data") or {}).get("image") or []
        self.result: RequestOutput
        self.fault: Exception | None = None
        self.params: Any = None

    def start(self) -> None:
        try:
            self.params = self._encode()
        except Exception as error:
            self.fault = error

    async def steps(self) -> AsyncIterator[None]:
        await asyncio.sleep(script.step_delay_s)
        if self.fault is not None:
            self.result.finished = release.error_finishes
            if release.error_finishes:
                self.result.error = str(self.fault)
            raise self.fault
        self.result.disaggregated_params = self.params
        self.result.outputs[0].disaggregated_params = self.params
        self.result.outputs[0].finish_reason = "length"
        self.result.finished = True
        yield

    def _encode(self) -> Any:
        if any(f"{i.size[0]}x{i.size[1]}" == script.encode_fails_on for i in self.images):
            raise RequestError("the vision tower failed at /some/server/path")
        media = self.media or MultimodalParams()
        if script.no_handles or not media.features:
            return DisaggregatedParams(
                mrope_position_ids_handle=media.mrope[0], mrope_position_deltas_handle=media.mrope[1]
            )
        import torch

        tensors = [torch.cat(media.features)] if release.one_encoder_handle else media.features
        hashes = words_of(media.hashes) if media.hashes is not None else None
        params = DisaggregatedParams(
            multimodal_embedding_handles=[to_handle(rows) for rows in tensors], multimodal_hashes=hashes
        )
        params.mrope_position_ids_handle, params.mrope_position_deltas_handle = media.mrope
        return params


RELEASE = release.version
