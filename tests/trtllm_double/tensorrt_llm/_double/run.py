"""One request in the engine: its steps, its hand-over and its end."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch

from tensorrt_llm._double import pins
from tensorrt_llm._double.executor import Executor
from tensorrt_llm._double.model import FIRST_ID, SPAN, natural_length, request_key, token_at
from tensorrt_llm._double.script import release, script
from tensorrt_llm._torch.shared_tensor import to_handle, to_tensor
from tensorrt_llm.executor.result import CompletionOutput, GenerationResult, Logprob
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.inputs.multimodal import MultimodalParams

MAGIC = b"\x00\xff"
TRANSFER_FAILED = "Error in kv cache transfer for generation requests"
MIN_GLOBAL_ID, MAX_GLOBAL_ID = 1 << 40, (1 << 63) - 1


class Run:
    """See the module. `media` is what the input processor made; handles in it are opened here, as the rank
    does."""

    def __init__(
        self,
        executor: Executor,
        number: int,
        ids: list[int],
        media: MultimodalParams | None,
        params: Any,
        disagg: Any,
        llm: Any,
    ) -> None:
        self.executor, self.number, self.ids, self.params, self.disagg, self.llm = (
            executor,
            number,
            ids,
            params,
            disagg,
            llm,
        )
        self.model = executor.model
        self.result: GenerationResult
        self.made = 0
        self.cancelled = False
        self.kind = disagg.request_type if disagg is not None else None
        self.media = media
        self.mrope: tuple[torch.Tensor, torch.Tensor] | None = None
        self.fault: str | None = None
        self.features = self._open(media)
        self.key = request_key(self.model.in_vocabulary(ids), self.features)
        self.stops = (
            []
            if params.ignore_eos and release.ignore_eos_drops_stops
            else params._get_stop_reasons_and_words()
        )
        self.end_id = -1 if params.ignore_eos else params.end_id

    def abort(self) -> None:
        self.executor.aborted.append((self.number, self.made))
        self.executor.active.discard(self.number)
        self.cancelled = True

    async def steps(self) -> AsyncIterator[None]:
        try:
            await self._refuse()
            if self.kind == "generation_only":
                await asyncio.sleep(script.step_delay_s)
                self._import_state()
                first = self.disagg.first_gen_tokens[0]
                for output in self.result.outputs:
                    self._append(output, first, with_logprobs=bool(self._first_logprobs()))
                self.made += 1
                self._detokenize()
                if self.made >= self.limit:
                    self._finish_all("length")
                yield
            while not self.result.finished:
                await asyncio.sleep(script.step_delay_s)
                await self._act()
                if self.cancelled:
                    self._finish_all("cancelled")
                else:
                    self._step()
                self._detokenize()
                yield
        except RequestError as error:
            self._failed(error)
            raise

    @property
    def limit(self) -> int:
        """`_deduce_max_tokens` (base_worker.py): lowered to what the context leaves."""
        room = self.executor.max_seq_len - len(self.ids)
        wanted = self.params.max_tokens
        return room if wanted is None else min(wanted, room)

    def _open(self, media: MultimodalParams | None) -> list[torch.Tensor]:
        """`MultimodalParams.to_tensor`, inside what the worker turns into a `RequestError`."""
        if media is None:
            return []
        try:
            if media.embedding_handles is not None:
                media.features = [to_tensor(handle) for handle in media.embedding_handles]
            positions, deltas = media.mrope
            if positions is not None and deltas is not None:
                self.mrope = to_tensor(positions), to_tensor(deltas)
        except Exception as error:
            self.fault = str(error)
        return list(media.features)

    async def _refuse(self) -> None:
        """What the worker finds before or in the first forward pass."""
        if self.executor.dead is not None:
            await self._hang()
        section = self.executor.args.cache_transceiver_config
        if self.kind in ("context_only", "generation_only") and (section is None or section.backend is None):
            self._die(AssertionError("this engine has no KV cache transceiver"))
        if (
            self.kind == "context_only"
            and release.overlap_refused
            and not self.executor.args.disable_overlap_scheduler
        ):
            self._die(ValueError("a context-only request beside the overlap scheduler"))
        if self.limit <= 0:
            raise RequestError(f"the prompt leaves room for {self.limit} tokens")
        if self.fault is not None:
            raise RequestError(self.fault)
        if self.params.guided_decoding is not None and self.executor.args.guided_decoding_backend is None:
            raise RequestError("Guided decoding is not enabled")
        self._forward_media()

    def _forward_media(self) -> None:
        """modeling_qwen2vl.py: positions of the whole prompt, and deltas for the int32 cache."""
        if (
            self.model.architecture.mrope
            and self.media is not None
            and self.media.embedding_handles is not None
            and self.mrope is None
        ):
            raise RequestError("'mrope_config'")
        if self.mrope is None:
            return
        positions, deltas = self.mrope
        ids = self.model.in_vocabulary(self.ids)
        if release.int32_deltas and deltas.dtype != torch.int32:
            raise RequestError("the delta cache is int32 and the given deltas are not")
        if tuple(positions.shape) != (3, 1, len(ids)) or tuple(deltas.shape) != (1, 1):
            raise RequestError("the positions are for another prompt")
        if int(positions.max()) + 1 - len(ids) != int(deltas):
            raise RequestError("deltas do not fit the positions")
        text = [i for i, token in enumerate(ids) if token not in self.model.media_ids]
        if not all(len(set(positions[:, 0, i].tolist())) == 1 for i in text):
            raise RequestError("text has the position of an image")

    async def _act(self) -> None:
        if self.made == script.hang_at_token or self.executor.dead is not None:
            await self._hang()
        if self.made == script.fail_at_token:
            raise RequestError("the engine failed at /some/server/path")
        if self.made == script.handling_fails_at_token:
            raise {"AssertionError": AssertionError, "ValueError": ValueError}[script.handling_error](
                "Unknown finish reason"
            )
        if self.made == script.fatal_at_token:
            self._die(RuntimeError("CUDA error: an illegal memory access was encountered"))

    async def _hang(self) -> None:
        """A step that the engine never makes."""
        parked = asyncio.get_running_loop().create_future()
        self.executor.parked.append(parked)
        await parked

    def _die(self, error: BaseException) -> None:
        """The proxy shuts down first and raises in whoever steps; others wait for ever, or end with it."""
        self.executor.kill(error)
        self.executor.doing_shutdown = True
        if release.error_finishes:
            self.result._terminal_error = error
        for parked in self.executor.parked if script.fatal_ends_others else ():
            if not parked.done():
                parked.set_exception(error)
        raise error

    def _failed(self, error: RequestError) -> None:
        self.executor.active.discard(self.number)
        self.result.finished = release.error_finishes
        if release.error_finishes:
            self.result.error = str(error)

    def _step(self) -> None:
        seed = self.params.seed if self.params.temperature else None
        for output in self.result.outputs:
            if output.finish_reason is None:
                self._advance(output, token_at(self.key, self.made, seed, output.index))
        self.made += 1
        if all(output.finish_reason is not None for output in self.result.outputs):
            self._over()

    def _advance(self, output: CompletionOutput, token: int) -> None:
        ends = self.made >= natural_length(self.key) and self.end_id != -1
        may_end = self.made >= (self.params.min_tokens or 0)
        if may_end and self.end_id != -1 and (ends or token == self.end_id):
            if release.ends_with_end_id:
                self._append(output, self.end_id)
            self._finish(output, "stop")
            return
        self._append(output, token)
        if self.kind == "context_only":
            self._finish(output, script.context_reason)
            self._export_state(output)
        elif self.made + 1 >= self.limit:
            self._finish(output, "length")
        else:
            self._look_for_stop_words(output)

    def _look_for_stop_words(self, output: CompletionOutput) -> None:
        """Of the reasons to end a request this is the weakest: the end token comes first, then the length
        (_torch/pyexecutor/sampler.py). So a context's only token is never found to be a stop word."""
        for reason, words in self.stops:
            if words and output.token_ids[-len(words) :] == words:
                self._trim(output, len(words))
                self._finish(output, "stop", reason)
                return

    def _trim(self, output: CompletionOutput, count: int) -> None:
        if self.params.include_stop_str_in_output:
            return
        output.token_ids = output.token_ids[:-count]
        if release.trims_logprobs and output.logprobs:
            output.logprobs = output.logprobs[:-count]

    def _append(self, output: CompletionOutput, token: int, with_logprobs: bool = True) -> None:
        output._last_token_ids_len, output._last_logprobs_len = len(output.token_ids), len(output.logprobs)
        output.token_ids.append(token)
        if self.params.logprobs is not None and with_logprobs:
            output.logprobs.append(self._logprobs(token))

    def _logprobs(self, token: int) -> dict[int, Logprob]:
        count = max(1, self.params.logprobs)
        others = [FIRST_ID + (token - FIRST_ID + k) % SPAN for k in range(count)]
        return {t: Logprob(-0.5 - k, k + 1) for k, t in enumerate(others)}

    def _detokenize(self) -> None:
        if self.params.detokenize and self.llm.tokenizer is not None:
            for output in self.result.outputs:
                output._last_text_len = len(output.text)
                output.text = self.llm.tokenizer.decode(output.token_ids)

    def _finish_all(self, reason: str) -> None:
        for output in self.result.outputs:
            if output.finish_reason is None:
                self._finish(output, reason)
        self._over()

    def _finish(self, output: CompletionOutput, reason: str, stop_reason: int | str | None = None) -> None:
        if script.shrink_last:
            output.token_ids = output.token_ids[: -script.shrink_last]
        output.finish_reason, output.stop_reason = reason, stop_reason

    def _over(self) -> None:
        self.result.finished = True
        self.result.metrics_dict["finished_reason"] = self.result.outputs[0].finish_reason
        self.executor.active.discard(self.number)

    def _export_state(self, output: CompletionOutput) -> None:
        """What was given, with the context's fields put in (executor/result.py): hashes and ids stay,
        embedding handles go."""
        state = {
            "key": self.key,
            "prompt": request_key(self.ids, []),
            "images": bool(self.features),
            "pin": self._pin_name(),
        }
        packed = json.dumps(state).encode()
        fields: dict[str, Any] = {
            "request_type": "context_only", "first_gen_tokens": list(output.token_ids),
            "ctx_request_id": self.number,
            "opaque_state": MAGIC + packed, "draft_tokens": None, "multimodal_embedding_handles": None,
        }  # fmt: skip
        if "ctx_info_endpoint" in release.disaggregated:
            fields |= {"ctx_dp_rank": 0, "ctx_info_endpoint": None}
        if self.runtime == "PYTHON":
            endpoint = "tcp://127.0.0.1:0/" + base64.urlsafe_b64encode(packed).decode()
            kept = {"none": None, "empty": b"", "bytes": MAGIC + packed}[script.opaque_state]
            fields |= {"ctx_info_endpoint": endpoint, "opaque_state": kept}
        made = replace(self.disagg, **fields)
        if "first_gen_log_probs" in release.disaggregated and output.logprobs:
            made.first_gen_log_probs = [output.logprobs[0]]
        if "first_gen_logits" in release.disaggregated and self.params.return_generation_logits:
            made.first_gen_logits = [torch.zeros(1, 2)]
        if release.fresh_mrope and self.mrope is not None:
            made.mrope_position_ids_handle, made.mrope_position_deltas_handle = map(to_handle, self.mrope)
        pins.hold(state["pin"], self.executor.args.cache_transceiver_config.kv_transfer_timeout_ms)
        output.disaggregated_params = self.result.disaggregated_params = made

    @property
    def runtime(self) -> str:
        """Which cache transceiver this engine has."""
        section = self.executor.args.cache_transceiver_config
        chosen = getattr(section, "transceiver_runtime", None)
        return script.transceiver_runtime or release.default_runtime if chosen == "auto" else chosen or "CPP"

    def _pin_name(self) -> str:
        return f"{os.getpid()}-{id(self.executor):x}-{self.number}"

    def _import_state(self) -> None:
        """Decode fetches the context's blocks, after which they are held no longer."""
        state = self._state()
        if script.transfer_fails or state is None or not self.disagg.first_gen_tokens:
            raise RequestError(TRANSFER_FAILED)
        number = getattr(self.disagg, "disagg_request_id", None)
        if release.request_ids is not None and (
            number is None or not MIN_GLOBAL_ID <= number < MAX_GLOBAL_ID
        ):
            raise RequestError(TRANSFER_FAILED)
        if state["prompt"] != request_key(self.ids, []):
            raise RequestError("the prompt is not the one that was prefilled")
        if state["images"] and self.model.architecture.mrope and self.mrope is None:
            raise RequestError("'mrope_config'")
        if not pins.release(state["pin"]):
            raise RequestError(TRANSFER_FAILED)
        self.key = state["key"]

    def _state(self) -> dict[str, Any] | None:
        """The C++ transceiver asks `opaque_state`, the Python one the context's endpoint."""
        if self.runtime == "PYTHON":
            endpoint = getattr(self.disagg, "ctx_info_endpoint", None)
            ranked = getattr(self.disagg, "ctx_dp_rank", None) is not None
            return (
                json.loads(base64.urlsafe_b64decode(endpoint.rsplit("/", 1)[1]))
                if endpoint and ranked
                else None
            )
        raw = self.disagg.opaque_state
        return json.loads(raw[len(MAGIC) :]) if isinstance(raw, bytes) and raw.startswith(MAGIC) else None

    def _first_logprobs(self) -> Any:
        rows = getattr(self.disagg, "first_gen_log_probs", None)
        if rows and self.params.logprobs is not None:
            assert all(isinstance(p, Logprob) for row in rows for p in row.values()), (
                "logprobs must be the library's own"
            )
        return rows
