"""The double's `LLM` (llmapi/llm.py): construction, input processing by release, and an engine whose model
is a hash."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._double.executor import Executor
from tensorrt_llm._double.model import Model
from tensorrt_llm._double.run import Run
from tensorrt_llm._double.script import release, script
from tensorrt_llm._double.signatures import signature
from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY, GenerationRequest
from tensorrt_llm.executor.result import GenerationResult, IterationResult, RequestOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.inputs.data import prompt_inputs
from tensorrt_llm.inputs.multimodal import MultimodalParams
from tensorrt_llm.inputs.registry import (
    DefaultInputProcessor,
    create_input_processor,
    create_input_processor_with_hash,
)
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams

GENERATE = signature(release.generate)
REFUSED_KEYS = (
    "encoder_inputs",
    "encoder_input_token_ids",
    "decoder_input_token_ids",
    "multi_item_part_lens",
)
instances: list[Any] = []
"""Every engine made in this process, for tests to look into."""


@dataclass
class PreprocessedInputs:
    """Result of `preprocess`, and what `generate_async` takes in place of a prompt (1.3)."""

    prompt_token_ids: Any
    query_token_ids: list[int] | None = None
    multimodal_params: MultimodalParams | None = None
    encoder_input_token_ids: list[int] | None = None


class BaseLLM:
    """What `LLM` and `MultimodalEncoder` share."""

    def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in TorchLlmArgs.model_fields and key not in ("backend", "_mpi_session"):
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        kwargs.pop("_mpi_session", None)
        self.args: Any = TorchLlmArgs(model=str(model), tokenizer=tokenizer, **kwargs)
        wanted = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        if wanted > script.gpus:
            raise RuntimeError(f"Only {script.gpus} GPUs are available, but {wanted} are required.")
        self.model = Model(str(model))
        self._tokenizer = None if self.args.skip_tokenizer_init else self.model.tokenizer
        self.input_processor: DefaultInputProcessor = create_input_processor(self.model, self._tokenizer)
        self._start_worker()
        self._executor: Executor | None = Executor(
            self.args, self.model, self.args.max_seq_len or self.model.max_positions
        )
        self._engine = self._executor
        self.seen: list[dict[str, Any]] = []
        self.prepared: list[Any] = []
        """Arguments of every `generate_async` call."""
        instances.append(self)

    def _start_worker(self) -> None:
        """Loads the model in the ranks; what goes wrong there comes back as the cause of a `RuntimeError`
        (proxy.py)."""
        try:
            if (
                os.environ.get("TLLM_MULTIMODAL_DISAGGREGATED", "0") == "1"
                and not self.model.architecture.loads_split
            ):
                raise NotImplementedError("this model cannot be loaded with TLLM_MULTIMODAL_DISAGGREGATED=1")
            section = self.args.cache_transceiver_config
            runtime = getattr(section, "transceiver_runtime", None)
            if runtime == "auto" and script.transceiver_runtime is None:
                runtime = release.default_runtime
            if (
                section is not None
                and runtime == "PYTHON"
                and section.backend not in ("DEFAULT", "NIXL", None)
            ):
                raise ValueError(f"the Python transceiver takes NIXL or DEFAULT, not {section.backend}")
        except Exception as error:
            raise RuntimeError("Executor worker returned error") from error

    @property
    def tokenizer(self) -> Any:
        return self.input_processor.tokenizer

    @property
    def llm_id(self) -> str:
        return f"double-{os.getpid()}-{id(self):x}"

    @property
    def is_shutdown(self) -> bool:
        return self._engine.doing_shutdown

    @property
    def active(self) -> set[int]:
        return self._engine.active

    @property
    def aborted(self) -> list[tuple[int, int]]:
        return self._engine.aborted

    def shutdown(self) -> None:
        self._engine.shutdown()
        self._executor = None

    def _check_health(self) -> bool:
        """1.2.1: only whether somebody shut it down. 1.3: the executor asks the ranks."""
        if self._executor is None:
            return False
        return (
            self._executor.check_health() if release.health_sees_death else not self._executor.is_shutdown()
        )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> bool:
        self.shutdown()
        return False

    def _require_running(self) -> Executor:
        """A dead engine is noticed while submitting by 1.2.1 only, which looks into its error queue then
        (executor.py)."""
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if self._executor.dead is not None and not release.health_sees_death:
            self._executor.doing_shutdown = True
            raise self._executor.dead
        return self._executor

    def _prepare_sampling_params(self, params: Any) -> Any:
        """The library writes into the parameters that it is given."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params of type {type(params).__name__}")
        if params.end_id is None:
            if self.tokenizer is None:
                raise ValueError("no end_id and no tokenizer to ask")
            params._setup(self.tokenizer)
        if params._stream_interval is None:
            params._stream_interval = self.args.stream_interval
        return params

    def _submit(
        self, executor: Executor, ids: Any, media: MultimodalParams | None, params: Any, disagg: Any
    ) -> GenerationResult:
        request = GenerationRequest(ids, params)
        number = next(executor.ids)
        run = Run(executor, number, request.prompt_token_ids, media, deepcopy(params), disagg, self)
        result = RequestOutput(number, request.prompt_token_ids, run.steps(), run.abort, max(1, params.n))
        result.disaggregated_params = disagg
        run.result = result
        executor.active.add(number)
        executor.started = True
        return result


class LLM(BaseLLM):
    def generate_async(self, *args: Any, **kwargs: Any) -> RequestOutput:
        bound = GENERATE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        executor = self._require_running()
        self.seen.append(call)
        disagg = call["disaggregated_params"]
        params = call["sampling_params"] = self._prepare_sampling_params(call["sampling_params"])
        kind = disagg.request_type if disagg is not None else None
        if kind == "context_only":
            params.max_tokens = 1
        inputs = call["inputs"]
        if release.preprocess and isinstance(inputs, PreprocessedInputs):
            ids, prompt, media = inputs.prompt_token_ids, None, inputs.multimodal_params
        else:
            ids, prompt, media = self._preprocess(inputs, params, disagg)
        if (
            not self.args.enable_chunked_prefill
            and kind != "generation_only"
            and len(ids) > self.args.max_num_tokens
        ):
            raise RequestError(f"{len(ids)} prompt tokens, max_num_tokens is {self.args.max_num_tokens}")
        if not 0.0 <= call.get("priority", DEFAULT_REQUEST_PRIORITY) <= 1.0:
            raise ValueError(f"priority {call['priority']} is not within 0 and 1")
        result = self._submit(executor, ids, media, params, disagg)
        result.prompt = prompt
        scheduling = call["scheduling_params"]
        rank = (
            scheduling.attention_dp_rank if scheduling is not None and self.args.enable_attention_dp else None
        )
        names = media.hashes if media is not None else None
        executor.record(self.model.in_vocabulary(result.prompt_token_ids), names, call["cache_salt"], rank)
        return result

    generate_async.__signature__ = GENERATE  # type: ignore[attr-defined]

    def generate(
        self, inputs: Any, sampling_params: Any = None, use_tqdm: bool = True, **options: Any
    ) -> Any:
        several = isinstance(inputs, list) and not (inputs and isinstance(inputs[0], int))
        results = [
            self.generate_async(each, sampling_params, **options)
            for each in (inputs if several else [inputs])
        ]
        for result in results:
            result.result()
        return results if several else results[0]

    def _preprocess(
        self, inputs: Any, params: Any, disagg: Any
    ) -> tuple[Any, str | None, MultimodalParams | None]:
        """Token ids, text and media of a prompt, by the branches of the release."""
        inputs = dict(inputs) if isinstance(inputs, dict) else inputs
        self._refuse_form(inputs)
        inputs = prompt_inputs(inputs)
        own = (
            isinstance(self.input_processor, DefaultInputProcessor)
            and type(self.input_processor) is not DefaultInputProcessor
        )
        beside = inputs.get("multi_modal_data") or inputs.get("multi_modal_embeddings")
        if (
            not release.fast_path
            and own
            and beside
            and not inputs.get("prompt")
            and inputs.get("prompt_token_ids")
        ):
            text = self.tokenizer.decode(inputs["prompt_token_ids"])
            inputs = {"prompt": text, "multi_modal_data": inputs.get("multi_modal_data"),
                      "mm_processor_kwargs": inputs.get("mm_processor_kwargs")}  # fmt: skip
            params.add_special_tokens = False
        if disagg is not None and disagg.multimodal_embedding_handles is not None:
            return self._from_handles(inputs, disagg)
        by_ids = "prompt_token_ids" in inputs
        if by_ids and (not release.fast_path or _without_media(inputs)):
            return inputs["prompt_token_ids"], None, self._mrope_of(disagg)
        if "prompt" in inputs or by_ids:
            return self._from_prompt(inputs, params, disagg)
        raise TypeError(f"inputs of type {type(inputs).__name__}")

    def _refuse_form(self, inputs: Any) -> None:
        if not release.preprocess:
            return
        if isinstance(inputs, dict):
            for key in REFUSED_KEYS:
                if key in inputs:
                    raise ValueError(f"{key} is not supported.")
        if inputs is None or (
            isinstance(inputs, dict) and "prompt" not in inputs and "prompt_token_ids" not in inputs
        ):
            raise TypeError(f"inputs of type {type(inputs).__name__}")

    def _from_handles(self, inputs: dict[str, Any], disagg: Any) -> tuple[Any, str | None, MultimodalParams]:
        processor: Any = self.input_processor
        if not getattr(processor, "support_mm_disagg", False):
            raise ValueError("this model takes no embedding handles")
        handles = disagg.multimodal_embedding_handles
        built = processor.build_disagg_prefill_multimodal_inputs(inputs, handles)
        if disagg.request_type == "generation_only":
            raise ValueError("embedding handles beside generation_only")
        mrope = self._mrope_of(disagg, refuses=AssertionError)
        media = mrope or MultimodalParams()
        media.embedding_handles = list(handles)
        media.hashes = [
            "".join((n & 0xFFFFFFFF).to_bytes(4, "big").hex() for n in words)
            for words in disagg.multimodal_hashes
        ]
        return built.prompt_token_ids, inputs.get("prompt"), media

    def _mrope_of(self, disagg: Any, refuses: type[Exception] = RuntimeError) -> MultimodalParams | None:
        if disagg is None or disagg.mrope_position_ids_handle is None:
            return None
        if disagg.mrope_position_deltas_handle is None:
            raise refuses("one mRoPE handle without the other")
        return MultimodalParams(mrope=(disagg.mrope_position_ids_handle, disagg.mrope_position_deltas_handle))

    def _from_prompt(
        self, inputs: dict[str, Any], params: Any, disagg: Any
    ) -> tuple[Any, str | None, MultimodalParams | None]:
        """With images of an mRoPE model the handles that the rank opens are written into the given
        parameters as well."""
        processor: Any = self.input_processor
        if "multi_modal_data" in inputs:
            ids, media = create_input_processor_with_hash(processor)(inputs, params)
        elif "multi_modal_embeddings" in inputs:
            ids, media = processor.attach_multimodal_embeddings(
                inputs, inputs["multi_modal_embeddings"], params
            )
        else:
            ids, media = processor(inputs, params)
        if media is not None and disagg is not None and media.mrope[0] is not None:
            disagg.mrope_position_ids_handle, disagg.mrope_position_deltas_handle = media.mrope
        return ids, inputs.get("prompt"), media

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return _again(self._engine.stats if self._engine.started else IterationResult(), timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        assert self._engine.started, "no events before the first request"
        return _again(self._engine.events, timeout)


if release.preprocess:

    def _preprocess(
        self: LLM, inputs: Any, sampling_params: Any = None, disaggregated_params: Any = None
    ) -> PreprocessedInputs:
        params = self._prepare_sampling_params(sampling_params)
        self.prepared.append(inputs)
        ids, _, media = self._preprocess(inputs, params, disaggregated_params)
        return PreprocessedInputs(prompt_token_ids=ids, multimodal_params=media)

    LLM.preprocess = _preprocess  # type: ignore[attr-defined]

if release.capacity:

    def _capacity(self: LLM) -> dict[str, int]:
        return {"maxNumBlocks": 128, "tokensPerBlock": 32, "maxNumTokens": 4096}

    LLM.get_kv_cache_capacity = _capacity  # type: ignore[attr-defined]


def _without_media(inputs: dict[str, Any]) -> bool:
    return inputs.get("multi_modal_data") is None and inputs.get("multi_modal_embeddings") is None


def _again(result: IterationResult, timeout: float | None) -> IterationResult:
    """Waits at most a twentieth of a second, so that tests need not."""
    result.timeout = 0.05 if timeout is None else min(timeout, 0.05)
    return result


__all__ = ["LLM", "BaseLLM", "RequestOutput", "SamplingParams"]
if not release.preprocess:
    del PreprocessedInputs
