"""The double's `LLM`: argument checks, input processing by release, and an engine whose model is a hash."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch

from tensorrt_llm._double.model import EOS, FIRST_ID, SPAN, Model, mrope_positions, natural_length, request_key, token_at
from tensorrt_llm._double.script import release, script
from tensorrt_llm._double.signatures import signature
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import IterationResult, Logprob, RequestOutput, pending
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams

GENERATE = signature(release.generate_async, keyword_after="streaming")
BY_IDS = release.behaviours["images with token ids"][0].startswith("used")
REFUSED_INPUTS = {"encoder_inputs", "encoder_input_token_ids", "decoder_input_token_ids", "multi_item_part_lens"}
instances: list[Any] = []
"""Every engine made in this process, for tests to look into."""


class Preprocessed:
    """Result of `preprocess`: the expanded prompt and its embeddings."""

    def __init__(self, ids: list[int], features: list[torch.Tensor], grids: list[tuple[int, int, int]], params: Any) -> None:
        self.prompt_token_ids, self.features, self.grids, self.params = ids, features, grids, params


class BaseLLM:
    """What `LLM` and `MultimodalEncoder` share: construction."""

    def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in TorchLlmArgs.model_fields and key not in ("backend", "_mpi_session"):
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        self.args = TorchLlmArgs(model=str(model), tokenizer=tokenizer, **kwargs)
        wanted = (self.args.tensor_parallel_size or 1) * (self.args.pipeline_parallel_size or 1)
        if wanted > script.gpus:
            raise RuntimeError(f"Only {script.gpus} GPUs are available, but {wanted} are required.")
        self.model = Model(str(model))
        self.is_shutdown = False
        instances.append(self)

    def shutdown(self) -> None:
        """May be called from any thread, and more than once."""
        self.is_shutdown = True
        for step in list(pending):
            step.get_loop().call_soon_threadsafe(step.cancel)


class LLM(BaseLLM):
    def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, tokenizer, **kwargs)
        self.tokenizer = None if self.args.skip_tokenizer_init else SimpleNamespace(eos_token_id=EOS, encode=self.model.tokenize)
        self.args.max_seq_len = self.args.max_seq_len or self.model.max_positions
        self.args.max_num_tokens = self.args.max_num_tokens or 8192
        self.aborted: list[tuple[int, int]] = []
        """(request id, steps that it had made) of every abort."""
        self.active: set[int] = set()
        self.seen: list[dict[str, Any]] = []
        """Arguments of every `generate_async` call."""
        self._ids = itertools.count(1)
        self._events = IterationResult()
        self._stats = IterationResult()
        self._started = False
        self._fatal = False

    def generate_async(self, *args: Any, **kwargs: Any) -> RequestOutput:
        bound = GENERATE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        if self.is_shutdown:
            raise RuntimeError("LLM is shutting down")
        self.seen.append(call)
        params, disagg = call["sampling_params"], call["disaggregated_params"]
        assert type(params).__name__ == "SamplingParams"
        self._prepare(params, disagg)
        inputs = call["inputs"]
        ready = inputs if isinstance(inputs, Preprocessed) else self._process(inputs, params, disagg)
        self._check(ready, params, disagg)
        return self._start(ready, params, disagg, call["streaming"])

    generate_async.__signature__ = GENERATE  # type: ignore[attr-defined]

    def get_stats_async(self, timeout: float | None = 2) -> Any:
        return self._again(self._stats if self._started else IterationResult(), timeout if self._started else 0.01)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> Any:
        assert self._started, "no events before the first request"
        return self._again(self._events, timeout)

    def _again(self, result: IterationResult, timeout: float | None) -> IterationResult:
        result.timeout = min(timeout or 2.0, 0.05)
        return result

    def _prepare(self, params: Any, disagg: Any) -> None:
        """The library writes into the parameters that it is given."""
        if params.end_id is None:
            if self.tokenizer is None:
                raise ValueError("tokenizer is required to reset end_id if it is None")
            params.end_id = self.tokenizer.eos_token_id
        params._stream_interval = 1
        if disagg is not None and disagg.request_type == "context_only":
            params.max_tokens = 1
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("guided decoding is not enabled")

    def _process(self, inputs: Any, params: Any, disagg: Any) -> Preprocessed:
        if isinstance(inputs, (str, list)):
            inputs = {"prompt": inputs} if isinstance(inputs, str) else {"prompt_token_ids": inputs}
        assert inputs.get("prompt") is not None or inputs.get("prompt_token_ids") is not None
        unknown = set(inputs) - {
            "prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_embeddings", "mm_processor_kwargs", "query",
            *(("multi_modal_uuids",) if BY_IDS else ()),
        }  # fmt: skip
        if unknown:
            raise ValueError(f"inputs hold {sorted(unknown)}")
        if not isinstance(inputs.get("prompt_token_ids", []), list):
            raise TypeError("prompt_token_ids must be a list")
        handles = disagg.multimodal_embedding_handles if disagg is not None else None
        if handles is not None:
            return self._from_handles(inputs, params, disagg, handles)
        payload = inputs.get("multi_modal_data") or inputs.get("multi_modal_embeddings")
        if not BY_IDS and payload and "prompt" not in inputs:
            text = self.model.detokenize(inputs["prompt_token_ids"])
            inputs = {"prompt": text, "multi_modal_data": inputs.get("multi_modal_data")}
            params.add_special_tokens = False
        if "prompt_token_ids" in inputs and (not BY_IDS or not payload):
            return Preprocessed(list(inputs["prompt_token_ids"]), [], [], None)
        ids = self._ids_of(inputs, params)
        if inputs.get("multi_modal_data"):
            return self._from_images(ids, inputs, disagg)
        if inputs.get("multi_modal_embeddings"):
            return self._from_embeddings(ids, inputs)
        return Preprocessed(ids, [], [], None)

    def _ids_of(self, inputs: dict[str, Any], params: Any) -> list[int]:
        if inputs.get("prompt") is not None:
            return self.model.tokenize(inputs["prompt"], params.add_special_tokens)
        return list(inputs["prompt_token_ids"])

    def _from_images(self, ids: list[int], inputs: dict[str, Any], disagg: Any) -> Preprocessed:
        if self.args.skip_tokenizer_init:
            raise ValueError("the input processor needs the tokenizer")
        if "I" not in self.model.facts.modalities:
            raise ValueError("this model takes no images")
        images = inputs["multi_modal_data"]["image"]
        for image in images:
            if isinstance(image, str):
                raise TypeError("an image must be decoded")
        uuids = (inputs.get("multi_modal_uuids") or {}).get("image")
        assert uuids is None or len(uuids) == len(images)
        grids = [self.model.grid(image) for image in images]
        features = [self.model.features(image) for image in images]
        made = Preprocessed(self._expand(ids, [len(f) for f in features]), features, grids, disagg)
        if self.model.facts.mrope and disagg is not None:
            positions, deltas = mrope_positions(made.prompt_token_ids, self.model.image_id, grids)
            disagg.mrope_position_ids_handle = SharedTensorContainer.from_tensor(positions.contiguous()).dump_to_dict()
            disagg.mrope_position_deltas_handle = SharedTensorContainer.from_tensor(deltas).dump_to_dict()
        return made

    def _from_embeddings(self, ids: list[int], inputs: dict[str, Any]) -> Preprocessed:
        if not self.model.facts.attaches_embeddings:
            raise AttributeError("this model's input processor cannot attach embeddings")
        if inputs.get("prompt") is None:
            raise KeyError("prompt")
        given = inputs["multi_modal_embeddings"]
        if not isinstance(given, dict) or set(given) != {"image"} or not isinstance(given["image"], list):
            raise ValueError("multimodal_embedding must be a dictionary of lists")
        return Preprocessed(self._expand(ids, [len(t) for t in given["image"]]), list(given["image"]), [], None)

    def _from_handles(self, inputs: dict[str, Any], params: Any, disagg: Any, handles: list[Any]) -> Preprocessed:
        if not self.model.facts.encodes_apart:
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        if disagg.request_type == "generation_only":
            raise ValueError("Generation-only mode should not need multimodal parameters")
        features = [SharedTensorContainer.from_dict(handle).get_local_view() for handle in handles]
        ids = self._expand(self._ids_of(inputs, params), [len(f) for f in features])
        if self.model.facts.mrope:
            self._check_mrope(ids, disagg)
        return Preprocessed(ids, features, [], disagg)

    def _check_mrope(self, ids: list[int], disagg: Any) -> None:
        """Positions must be those of the whole expanded prompt; text moves on by one, whatever the grids are."""
        assert disagg.mrope_position_ids_handle is not None, "mrope position ids are missing"
        assert disagg.mrope_position_deltas_handle is not None, "mrope deltas are missing"
        positions = SharedTensorContainer.from_dict(disagg.mrope_position_ids_handle).get_local_view()
        deltas = SharedTensorContainer.from_dict(disagg.mrope_position_deltas_handle).get_local_view()
        assert positions.shape == (3, 1, len(ids)), "positions are for another prompt"
        assert deltas.shape == (1, 1)
        assert int(positions.max()) + 1 - len(ids) == int(deltas), "deltas do not fit the positions"
        text = [i for i, token in enumerate(ids) if token != self.model.image_id]
        assert all(len(set(positions[:, 0, i].tolist())) == 1 for i in text), "text has the position of an image"
        if disagg.request_type == "context_only":
            disagg.mrope_position_ids_handle = SharedTensorContainer.from_tensor(positions).dump_to_dict()
            disagg.mrope_position_deltas_handle = SharedTensorContainer.from_tensor(deltas).dump_to_dict()

    def _expand(self, ids: list[int], lengths: list[int]) -> list[int]:
        if ids.count(self.model.image_id) != len(lengths):
            raise ValueError("the prompt's placeholders do not match its images")
        out: list[int] = []
        remaining = iter(lengths)
        for token in ids:
            out += [token] * next(remaining) if token == self.model.image_id else [token]
        return out

    def _check(self, ready: Preprocessed, params: Any, disagg: Any) -> None:
        count = len(ready.prompt_token_ids)
        if not self.args.enable_chunked_prefill and count > self.args.max_num_tokens:
            raise ValueError("the prompt exceeds max_num_tokens")
        if count >= self.args.max_seq_len + (64 if ready.features else 0):
            raise ValueError("the prompt exceeds max_seq_len")
        params.max_tokens = min(params.max_tokens or self.args.max_seq_len, max(1, self.args.max_seq_len - count))

    def _start(self, ready: Preprocessed, params: Any, disagg: Any, streaming: bool) -> RequestOutput:
        self._started = True
        number = next(self._ids)
        run = _Run(self, number, ready, params, disagg)
        result = RequestOutput(number, list(ready.prompt_token_ids), run.steps(), run.abort)
        run.result = result
        self.active.add(number)
        self._record(ready)
        return result

    def _record(self, ready: Preprocessed) -> None:
        """Stats of one iteration and the KV cache events of the prompt's full blocks, as far as they are switched on."""
        if self.args.enable_iter_perf_stats:
            blocks = {"usedNumBlocks": len(ready.prompt_token_ids) // 32, "maxNumBlocks": 128}
            self._stats.queue.put_nowait({"numActiveRequests": len(self.active), "numQueuedRequests": 0, "kvCacheStats": blocks})
        cache = self.args.kv_cache_config
        if cache is None or not cache.event_buffer_max_size or cache.enable_block_reuse is False:
            return
        for window in (self.args.max_seq_len, 16):
            self._events.queue.put_nowait({"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [128, 0]},
                                           "window_size": window})  # fmt: skip
            blocks = [self._block(ready, at) for at in range(0, len(ready.prompt_token_ids), 32)]
            data = {"type": "stored", "parent_hash": None, "blocks": blocks}
            self._events.queue.put_nowait({"event_id": 1, "data": data, "window_size": window})
        self._events.queue.put_nowait({})

    def _block(self, ready: Preprocessed, at: int) -> dict[str, Any]:
        tokens = ready.prompt_token_ids[at : at + 32]
        block: dict[str, Any] = {
            "type": "stored_block",
            "block_hash": request_key(ready.prompt_token_ids[: at + 32], []) + (1 << 63),
            "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
        }
        if ready.features and self.model.image_id in tokens:
            block["mm_keys"] = [{"type": "mm_key", "hash": "0f" * 32, "start_offset": 0}]
        return block


if "preprocess" in release.methods:

    def _preprocess(self: LLM, inputs: Any, sampling_params: Any = None, disaggregated_params: Any = None) -> Preprocessed:
        self._prepare(sampling_params, disaggregated_params)
        return self._process(inputs, sampling_params, disaggregated_params)

    def _capacity(self: LLM) -> dict[str, int]:
        return {"maxNumBlocks": 128, "tokensPerBlock": 32, "maxNumTokens": 4096}

    LLM.preprocess = _preprocess  # type: ignore[attr-defined]
    LLM.get_kv_cache_capacity = _capacity  # type: ignore[attr-defined]


class _Run:
    """One request in the engine."""

    def __init__(self, llm: LLM, number: int, ready: Preprocessed, params: Any, disagg: Any) -> None:
        self.llm, self.number, self.ready, self.params, self.disagg = llm, number, ready, params, disagg
        self.result: RequestOutput
        self.made = 0
        self.cancelled = False
        self.kind = disagg.request_type if disagg is not None else None
        self.key = request_key(ready.prompt_token_ids, ready.features)

    def abort(self) -> None:
        self.llm.aborted.append((self.number, self.made))
        self.llm.active.discard(self.number)
        self.cancelled = True

    async def steps(self) -> AsyncIterator[None]:
        try:
            self._refuse()
            if self.kind == "generation_only":
                await asyncio.sleep(script.step_delay_s)
                self._import_state()
                self._append(self.disagg.first_gen_tokens[0], with_logprobs=bool(self._first_logprobs()))
                yield
            while True:
                await asyncio.sleep(script.step_delay_s)
                await self._act()
                if self.cancelled:
                    self._finish("cancelled")
                    yield
                    return
                self._step()
                yield
                if self.result.finished:
                    return
        except RequestError:
            self.llm.active.discard(self.number)
            self.result.finished = release.behaviours["error sets finished"][0]
            raise

    def _refuse(self) -> None:
        if self.llm._fatal:
            raise RequestError("the engine is gone")
        section = self.llm.args.cache_transceiver_config
        if self.kind in ("context_only", "generation_only") and (section is None or section.backend is None):
            raise RequestError("kv_cache_transceiver is disabled")
        strict = release.behaviours["context_only with the overlap scheduler"][0] == "ValueError"
        if self.kind == "context_only" and strict and not self.llm.args.disable_overlap_scheduler:
            raise RequestError("Context only requests are not supported in pytorch backend when overlap is enabled.")

    async def _act(self) -> None:
        if self.made == script.hang_at_token or self.llm._fatal:
            await asyncio.get_running_loop().create_future()
        if self.made == script.fail_at_token:
            raise RequestError("the engine failed at /some/server/path")
        if self.made == script.fatal_at_token:
            self.llm._fatal = self.llm.is_shutdown = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _step(self) -> None:
        params, output = self.params, self.result.outputs[0]
        seed = params.seed if params.temperature else None
        token = token_at(self.key, self.made, seed)
        ends = self.made >= natural_length(self.key) and params.end_id != -1
        may_end = not params.ignore_eos and self.made >= (params.min_tokens or 0)
        if may_end and (ends or token == params.end_id):
            if release.version == "1.2.1":
                self._append(params.end_id)
            self._finish("stop")
            return
        self._append(token)
        if token in (params.stop_token_ids or ()):
            output.token_ids = output.token_ids[:-1]
            self._finish("stop", token)
        elif self.kind == "context_only":
            self._finish("not_finished")
            self._export_state()
        elif self.made >= params.max_tokens:
            self._finish("length")

    def _append(self, token: int, with_logprobs: bool = True) -> None:
        output = self.result.outputs[0]
        output.token_ids.append(token)
        self.made += 1
        if self.params.logprobs is not None and with_logprobs:
            output.logprobs.append(self._logprobs(token))

    def _logprobs(self, token: int) -> dict[int, Logprob]:
        count = max(1, self.params.logprobs)
        others = [FIRST_ID + (token - FIRST_ID + k) % SPAN for k in range(count)]
        return {t: Logprob(-0.5 - k, k + 1) for k, t in enumerate(others)}

    def _finish(self, reason: str, stop_reason: int | None = None) -> None:
        output = self.result.outputs[0]
        if script.shrink_last:
            output.token_ids = output.token_ids[: -script.shrink_last]
        output.finish_reason, output.stop_reason = reason, stop_reason
        self.result.finished = True
        self.llm.active.discard(self.number)

    def _export_state(self) -> None:
        """The opaque state carries the key: without it decode cannot know the images."""
        output = self.result.outputs[0]
        images = bool(self.ready.features)
        state = {"key": self.key, "prompt": request_key(self.ready.prompt_token_ids, []), "images": images}
        made = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(output.token_ids),
            ctx_request_id=self.number,
            opaque_state=b"\x00\xff" + json.dumps(state).encode(),
        )
        if release.version != "1.2.1":
            made.disagg_request_id = self.disagg.disagg_request_id
            made.first_gen_log_probs = list(output.logprobs) or None
            made.first_gen_logits = [torch.zeros(2)]
        if release.version != "1.2.1" or self.disagg.multimodal_embedding_handles is not None:
            made.mrope_position_ids_handle = self.disagg.mrope_position_ids_handle
            made.mrope_position_deltas_handle = self.disagg.mrope_position_deltas_handle
        output.disaggregated_params = made
        self.result.disaggregated_params = made

    def _import_state(self) -> None:
        raw = self.disagg.opaque_state
        if script.transfer_fails or not isinstance(raw, bytes) or raw[:2] != b"\x00\xff" or not self.disagg.first_gen_tokens:
            raise RequestError("Error in kv cache transfer for generation requests")
        if release.version != "1.2.1" and self.disagg.disagg_request_id is None:
            raise RequestError("Error in kv cache transfer for generation requests")
        state = json.loads(raw[2:])
        if state["prompt"] != request_key(self.ready.prompt_token_ids, []):
            raise RequestError("the prompt is not the one that was prefilled")
        if state["images"] and self.llm.model.facts.mrope:
            self.llm._check_mrope(self.ready.prompt_token_ids, self.disagg)
        self.key = state["key"]

    def _first_logprobs(self) -> Any:
        rows = getattr(self.disagg, "first_gen_log_probs", None)
        if rows and self.params.logprobs is not None:
            assert all(isinstance(p, Logprob) for row in rows for p in row.values()), "logprobs must be the library's own"
        return rows


__all__ = ["LLM", "SamplingParams"]
