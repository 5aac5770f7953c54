"""Starts one worker over TensorRT-LLM's double and writes down its calls into the library.

usage: run_worker.py ours|theirs RECORD [WORKER-ARGUMENT...]

`ours` is this project's package, `theirs` the component of the same name inside the `ai-dynamo` wheel, which
an import finds once this project's source is no longer ahead of it on the path and nothing of it is imported.
The double has to be on PYTHONPATH.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def is_ours(folder: str) -> bool:
    """True for a folder of the import path that holds this project's `dynamo/trtllm`."""
    package = Path(folder, "dynamo", "trtllm")
    return package.is_dir() and not Path(folder, "dynamo", "frontend").is_dir()


def main() -> None:
    which, record, *arguments = sys.argv[1:]
    if which == "theirs":
        sys.path[:] = [folder for folder in sys.path if not is_ours(folder)]
        for name in [
            name for name in sys.modules if name == "dynamo.trtllm" or name.startswith("dynamo.trtllm.")
        ]:
            del sys.modules[name]
    import torch.cuda

    from oracle.recorder import record_calls

    torch.cuda.device_count = lambda: 1  # theirs refuses to start without a GPU; the double needs none
    record_calls(Path(record))
    sys.argv = ["python -m dynamo.trtllm", *arguments]
    runpy.run_module("dynamo.trtllm", run_name="__main__")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    main()
