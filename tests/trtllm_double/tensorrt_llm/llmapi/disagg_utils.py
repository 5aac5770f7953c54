"""Request ids that are unique over workers; 1.2.1 has none."""

from __future__ import annotations

import itertools

from tensorrt_llm._double.script import release

MIN_GLOBAL_ID = 1 << 42
_counter = itertools.count(1)

if "disagg_request_id" in release.disaggregated:

    def get_global_disagg_request_id(machine_id: int, process_id: int = 0) -> int:
        assert 0 <= machine_id < 1024
        return MIN_GLOBAL_ID + (machine_id << 20) + next(_counter)
