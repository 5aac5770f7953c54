"""Runs `dynamo.trtllm` with the given arguments, in a process in which NIXL
does not return once the file named first exists."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from nixl import _api

from dynamo.trtllm.transfer import nixl_thread

HANGS = Path(sys.argv.pop(1))
PATIENCE_S = 1.0


class HangingAgent(_api.nixl_agent):  # type: ignore[misc]
    """NIXL's agent."""

    def get_new_notifs(self, *arguments: Any) -> Any:
        while HANGS.exists():
            time.sleep(0.1)
        return super().get_new_notifs(*arguments)


_api.nixl_agent = HangingAgent
nixl_thread.LONGEST_CALL_S = PATIENCE_S
runpy.run_module("dynamo.trtllm", run_name="__main__", alter_sys=True)
