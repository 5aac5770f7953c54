"""Ids of disaggregated requests, made by the library's own helper: prefill and decode know a request by them.

The helper puts a worker's number into each id, beside the time and a counter. Up to 1.3.0rc21 that is one
machine id; since 1.3.0rc22 it is a node and a process. Source: `tensorrt_llm/llmapi/disagg_utils.py` of
either side.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable

MACHINES = 1021
"""Machine ids have ten bits; this prime is what the library's other users take."""
NODES, PROCESSES = 256, 64
"""Most nodes, and processes of a node, that an id can name."""


def id_maker(helper: Callable[..., int]) -> Callable[[], int]:
    """A function that gives a new id at each call, for this worker's number.

    A worker cannot know the others' numbers, so it draws its own from all that the helper takes: two workers
    with one number still differ by time and counter, unless they start a request in the same millisecond.
    """
    if "process_id" in inspect.signature(helper).parameters:
        node, process = secrets.randbelow(NODES), secrets.randbelow(PROCESSES)
        return lambda: helper(node, process)
    machine = secrets.randbelow(MACHINES)
    return lambda: helper(machine)
