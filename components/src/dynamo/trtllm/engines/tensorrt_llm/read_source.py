"""`python -m dynamo.trtllm.engines.tensorrt_llm.read_source PATH`: a tree of TensorRT-LLM's source beside the
record.

Exit codes: 0 all rules hold, 1 a rule is broken, 3 none is broken and one could not be looked at, 2 there
is no tree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dynamo.trtllm.engines.tensorrt_llm.record import RECORD
from dynamo.trtllm.engines.tensorrt_llm.source.reading import as_json, read, render
from dynamo.trtllm.engines.tensorrt_llm.source.rules import Outcome

EXIT_BROKEN, EXIT_NO_TREE, EXIT_NOT_FOUND = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Print the reading of the tree that the command line names; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        reading = read(args.path, args.release)
    except ValueError as error:
        print(f"read_source: {error}", file=sys.stderr)
        return EXIT_NO_TREE
    print(json.dumps(as_json(reading), indent=2) if args.json else "\n".join(render(reading)))
    if reading.of(Outcome.BROKEN):
        return EXIT_BROKEN
    return EXIT_NOT_FOUND if reading.of(Outcome.NOT_FOUND) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dynamo.trtllm.engines.tensorrt_llm.read_source",
        description="Reads TensorRT-LLM's source without importing it, says how it differs from what this "
        "package has "
        "recorded of that release, and judges it by the rules that the adapter relies on.",
        epilog="Exit codes: 0 all rules hold; 1 a rule is broken; 3 none is broken and at least one could "
        "not be looked "
        "at, because its file or definition is not there; 2 there is no source at PATH.",
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a checkout of TensorRT-LLM, or the directory of the installed package",
    )
    parser.add_argument(
        "--release", help=f"compare with this record ({', '.join(RECORD)}) and not with the tree's own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
