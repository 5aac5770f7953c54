"""What stands behind an `LLM`: whether the ranks live, what they recorded, and the requests that they work
on."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from tensorrt_llm._double.model import BOS, Model, request_key
from tensorrt_llm._double.script import release, script
from tensorrt_llm.executor.result import IterationResult, pending

WINDOW = 16
"""A second attention window, smaller than the context, of which KV events tell as well."""
BLOCK = 32
_IBS = [
    "numScheduledRequests",
    "numContextRequests",
    "numCtxTokens",
    "numCtxKvTokens",
    "numGenRequests",
    "numGenKvTokens",
    "numQueuedContextRequests",
    "numQueuedCtxTokens",
    "numQueuedGenRequests",
    "numQueuedGenKvTokens",
    "numPausedRequests",
    "numPausedKvTokens",
    "microBatchId",
]


class Executor:
    """Proxy to the ranks. `_fatal_error` is what ended them (1.3); `is_shutdown` whether this side has given
    up."""

    def __init__(self, args: Any, model: Model, max_seq_len: int) -> None:
        self.args, self.model, self.max_seq_len = args, model, max_seq_len
        self.active: set[int] = set()
        self.aborted: list[tuple[int, int]] = []
        """(request id, tokens that it had made) of every abort that reached a request."""
        self.parked: list[asyncio.Future[None]] = []
        """Steps that will never be made."""
        self.ids = itertools.count(1)
        self._iterations = itertools.count()
        self.started = False
        self.doing_shutdown = False
        self._dead: BaseException | None = None
        self._born = time.monotonic()
        self._events_made: dict[int, itertools.count[int]] = {}
        self.stats = IterationResult()
        self.events = IterationResult()

    @property
    def dead(self) -> BaseException | None:
        """What killed the ranks, if anything has; whether anybody can see it is another matter."""
        after = script.dies_idle_after_s
        if self._dead is None and after is not None and time.monotonic() - self._born >= after:
            self._dead = RuntimeError("MPI rank 0 exited unexpectedly")
        return self._dead

    def kill(self, error: BaseException) -> None:
        self._dead = self._dead or error

    @property
    def _fatal_error(self) -> BaseException | None:
        return self.dead if release.health_sees_death else None

    def check_health(self) -> bool:
        """1.3 asks the ranks, which can block; before there was no such method on the executor."""
        if self.dead is None:
            return not self.doing_shutdown
        if script.health_blocks_s:
            time.sleep(script.health_blocks_s)
        return False

    def is_shutdown(self) -> bool:
        return self.doing_shutdown

    def shutdown(self) -> None:
        """May be called from any thread, and more than once."""
        self.doing_shutdown = True
        for step in list(pending):
            step.get_loop().call_soon_threadsafe(step.cancel)

    def abort_request(self, client_id: int) -> None:
        """Of a request that is over it does nothing (base_worker.py)."""

    def record(self, ids: list[int], names: list[str] | None, salt: str | None, rank: int | None) -> None:
        """Stats of one iteration and the KV cache events of the prompt's blocks, as far as they are switched
        on."""
        ranks = self.args.tensor_parallel_size if self.args.enable_attention_dp else 1
        if self.args.enable_iter_perf_stats:
            for row in range(ranks if release.dp_statistics else 1):
                self.stats.queue.put(self._row(row, len(ids) if row == (rank or 0) else 0, ranks))
        cache = self.args.kv_cache_config
        if not cache.event_buffer_max_size or cache.enable_block_reuse is False:
            return
        for window in (self.max_seq_len, WINDOW):
            self._event(window, rank, {"type": "created", "num_blocks_per_cache_level": [128, 0]})
            blocks = [self._block(ids, at, names, salt) for at in range(0, len(ids), BLOCK)]
            self._event(window, rank, {"type": "stored", "parent_hash": None, "blocks": blocks})
        self.events.queue.put({})

    def _row(self, rank: int, tokens: int, ranks: int) -> dict[str, Any]:
        blocks = {
            "usedNumBlocks": tokens // BLOCK,
            "maxNumBlocks": 128,
            "freeNumBlocks": 128,
            "tokensPerBlock": BLOCK,
            "cacheHitRate": 0.0,
        }
        row: dict[str, Any] = {
            "iter": next(self._iterations), "iterLatencyMS": 1.0, "numActiveRequests": len(self.active),
            "numQueuedRequests": 0,
            "kvCacheStats": blocks, "inflightBatchingStats": dict.fromkeys(_IBS, 0),
        }  # fmt: skip
        return {**row, "attentionDpRank": rank} if ranks > 1 and release.dp_statistics else row

    def _event(self, window: int, rank: int | None, data: dict[str, Any]) -> None:
        event: dict[str, Any] = {
            "event_id": next(self._events_made.setdefault(rank or 0, itertools.count())), "data": data,
            "window_size": window,
        }  # fmt: skip
        if rank is not None and self.args.enable_attention_dp:
            event["attention_dp_rank"] = rank
        self.events.queue.put(event)

    def _block(self, ids: list[int], at: int, names: list[str] | None, salt: str | None) -> dict[str, Any]:
        tokens = ids[at : at + BLOCK]
        block: dict[str, Any] = {
            "type": "stored_block",
            "block_hash": request_key([BOS, *map(ord, salt or ""), *ids[: at + BLOCK]], []) + (1 << 63),
            "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
            "cache_level": 0,
            "priority": 35,
        }
        if release.salted_events and salt is not None:
            block["cache_salt"] = salt
        if release.media_keys and names and self.model.media_ids & set(tokens):
            block["mm_keys"] = [{"type": "mm_key", "hash": name, "start_offset": 0} for name in names]
        return block
