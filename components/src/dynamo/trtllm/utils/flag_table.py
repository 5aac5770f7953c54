"""README's tables of flags, made by `python -m dynamo.trtllm.utils.flag_table README.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dynamo.trtllm.flag import Flag
from dynamo.trtllm.roles import EngineKind, Role
from dynamo.trtllm.utils.flags import GROUPS

START, END = "<!-- flags: made from config.py -->\n", "<!-- end of flags -->\n"
_FLAG_NAME = re.compile(r"--[a-zA-Z.-]*[a-zA-Z]")


def flag_table() -> str:
    """One Markdown table for each group of flags."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, flags in GROUPS.items():
        yield from ("", f"**{title}**", "")
        yield from (
            "| flag | shared variable | default | read by | meaning |",
            "| --- | --- | --- | --- | --- |",
        )
        yield from (_row(each) for each in flags)
    yield from ("", "")


def _row(flag: Flag[Any]) -> str:
    value = "" if flag.is_switch else f" {flag.kind.metavar}"
    readers = [role.value for role in Role if flag.roles and role in flag.roles]
    readers += [
        f"`--engine {engine.value}`" for engine in EngineKind if flag.engines and engine in flag.engines
    ]
    cells = (
        ", ".join(f"`{spelling}{value}`" for spelling in flag.spellings),
        f"`{flag.shared}`" if flag.shared else "",
        flag.shown_default or "",
        ", ".join(readers),
        _FLAG_NAME.sub(r"`\g<0>`", flag.help),
    )
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def with_flag_table(text: str) -> str:
    """`text` with the present tables between its two marks. Raises ValueError where it has no marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no place for the flags: write {START.strip()} and {END.strip()}")
    return before + start + flag_table() + end + after


def main(arguments: Sequence[str]) -> None:
    """Write the tables into each file named."""
    for path in map(Path, arguments):
        path.write_text(with_flag_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
