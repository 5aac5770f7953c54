"""The command line as text: its parser, `--help`, and what was given of our own flags."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.flag import Flag
from dynamo.trtllm.utils.flags import GROUPS
from dynamo.trtllm.utils.settings import Given, Level

_CLIENTS = """What clients can send: /v1/chat/completions, /v1/completions and /v1/responses; /v1/messages
(Anthropic) when the frontend runs with DYN_ENABLE_ANTHROPIC_API=true, images in base64. Dynamo's frontend
refuses tools: [] and stop: [], and fields that it does not know (verbosity, safety_identifier) unless it runs
with DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS=true; it drops logit_bias and suffix. echo is refused.
response_format, a tool_choice that forces a tool, and guided_json, guided_regex, guided_grammar and
guided_choice give the answer its form; TensorRT-LLM needs --guided-decoding-backend for them."""

_GENERATION = """--quant-algo --quant-dynamic --enable-teacache --teacache-use-ret-steps --teacache-thresh
    --disable-torch-compile --enable-fullgraph --enable-cuda-graph --attn-backend --dit-ulysses-size
    --dit-ring-size --dit-cfg-size --enable-layerwise-nvtx-marker --skip-warmup --default-height
    --default-width --default-num-inference-steps --default-guidance-scale --default-num-frames
    --default-num-images-per-prompt"""
_FOREIGN = {
    **dict.fromkeys(_GENERATION.split(), "it is for generating images and videos"),
    "--torch-dtype": "use --dtype",
    "--revision": "download the revision and give its directory as --model-path",
    "--conversation-affinity": "this worker leaves routing to the frontend",
    "--conversation-affinity-dp-rank-source": "this worker leaves routing to the frontend",
    "--frontend-decoding": "this worker fetches and decodes media itself",
    "--model-loader-extra-config": "this worker has no GPU memory service",
    "--router-mode": "set routing on the frontend",
}
"""Flags of Dynamo 1.6's own TensorRT-LLM component that mean nothing here, with what to do instead."""


class _Record(argparse.Action):
    """Keeps every spelling and text of a flag in the order given."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: Flag[Any], **options: Any) -> None:
        self.flag = flag
        super().__init__(option_strings, dest, **options)

    def __call__(
        self, _parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        spelling = str(option_string)
        text = ("false" if spelling.startswith("--no-") else "true") if self.flag.is_switch else str(values)
        given: list[Given] = getattr(namespace, "given", [])
        namespace.given = [*given, Given(self.flag, text, spelling, Level.COMMAND_LINE)]


class _Help(argparse.HelpFormatter):
    """Wraps each line of a help text by itself, so that Dynamo's two-line texts stay two lines."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.splitlines() for part in textwrap.wrap(line, width)]


class Parser(argparse.ArgumentParser):
    """Raises `StartupError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message.removeprefix('argument ')} (--help lists every flag)")


def build_parser() -> Parser:
    """A parser of the worker's own flags alone; Dynamo's runtime group is added by the caller."""
    parser = Parser(
        prog="python -m dynamo.trtllm",
        usage="%(prog)s [--FLAG VALUE]...",
        description="Dynamo worker for TensorRT-LLM: aggregated, prefill, decode or encode. "
        "--override-engine-args beats the command line, which beats the environment, which beats the file of "
        "--extra-engine-args, which beats the defaults.",
        epilog=_CLIENTS,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="Print the version and where the package was loaded from, and end.",
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: Any, flag: Flag[Any]) -> None:
    spellings = [*flag.spellings, *(f"--no-{each[2:]}" for each in flag.spellings if flag.is_switch)]
    options: dict[str, Any] = {"nargs": 0} if flag.is_switch else {"metavar": flag.kind.metavar}
    group.add_argument(
        *spellings,
        action=_Record,
        flag=flag,
        dest="given",
        default=argparse.SUPPRESS,
        help=_help_of(flag),
        **options,
    )


def _help_of(flag: Flag[Any]) -> str:
    facts = []
    if flag.variables:
        facts.append("env var: " + ", ".join([*flag.variables, *([flag.shared] if flag.shared else [])]))
    if flag.shown_default is not None:
        facts.append(f"default: {flag.shown_default}")
    return "\n".join([flag.help, *([" | ".join(facts)] if facts else [])]).replace("%", "%%")


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise `StartupError` for the first argument that no flag took. `known` are all spellings there are."""
    if not unknown:
        return
    flag = unknown[0].partition("=")[0]
    if not flag.startswith("--"):
        raise StartupError(
            f"the argument {flag!r} belongs to no flag: remove it, or write the flag before it"
        )
    positive = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag
    reason = _FOREIGN.get("--router-mode" if positive.startswith("--router-") else positive)
    if reason is not None:
        raise StartupError(
            f"{flag} is a flag of Dynamo's own component that this worker does not have: {reason}"
        )
    near = difflib.get_close_matches(flag, known, n=1)
    advice = f"did you mean {near[0]}?" if near else "--help lists every flag"
    raise StartupError(f"{flag} is not a flag of this worker: {advice}")
