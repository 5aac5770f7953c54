"""Request ids that are unique over workers (llmapi/disagg_utils.py); 1.2.1 has none.

Since rc22 a worker is a node (8 bits) and a process on it (6 bits); up to rc21 it was one machine id (10
bits).
"""

from __future__ import annotations

import itertools
import time

from tensorrt_llm._double.release import release

MIN_GLOBAL_ID = 1 << 40
_MAX_INT64 = (1 << 63) - 1
_counter = itertools.count()

if release.request_ids == "node":

    def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
        if node_id not in range(1 << 8):
            raise ValueError("node_id must be in range [0, 256)")
        if process_id not in range(1 << 6):
            raise ValueError("process_id must be in range [0, 64)")
        now = int(time.monotonic() * 1000) & ((1 << 39) - 1)
        number = now << 24 | node_id << 16 | process_id << 10 | next(_counter) & 1023
        return number % (_MAX_INT64 - MIN_GLOBAL_ID) + MIN_GLOBAL_ID

elif release.request_ids == "machine":

    def get_global_disagg_request_id(machine_id: int) -> int:  # type: ignore[misc]
        if machine_id not in range(1 << 10):
            raise ValueError("machine_id must be in range [0, 1024)")
        now = int(time.monotonic() * 1000) & ((1 << 41) - 1)
        number = now << 22 | machine_id << 12 | next(_counter) & 4095
        return number % (_MAX_INT64 - MIN_GLOBAL_ID) + MIN_GLOBAL_ID
