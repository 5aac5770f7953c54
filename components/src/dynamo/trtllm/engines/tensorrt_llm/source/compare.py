"""How a source tree differs from the record of a release."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record import MADE, UNSAID, Release
from dynamo.trtllm.engines.tensorrt_llm.source.facts import ARGUMENTS, SourceFacts

BOTH = frozenset({"backend"})
"""Constructor keys that the library takes beside its fields in every release."""


@dataclass(frozen=True)
class Difference:
    """One fact that the tree and the record do not share. `kind` is `added`, `removed`, `default` or
    `choices`."""

    group: str
    name: str
    kind: str
    found: Any = None
    recorded: Any = None

    def __str__(self) -> str:
        if self.kind == "added":
            return f"{self.group}: only in the source: {self.name}"
        if self.kind == "removed":
            return f"{self.group}: only in the record: {self.name}"
        sides = f"{self.found!r} in the source, {self.recorded!r} in the record"
        return f"{self.group}: {self.kind} of {self.name} is {sides}"


def recorded_groups(record: Release) -> dict[str, Mapping[str, Any]]:
    """The record's names and defaults, in the groups that the reader finds."""
    return {
        ARGUMENTS: dict.fromkeys(record.llm_arguments, UNSAID),
        "LLM.generate_async": record.generate_async,
        "LLM.preprocess": record.preprocess,
        "LLM methods": dict.fromkeys(record.methods, UNSAID),
        "MultimodalEncoder": record.encoder_arguments,
        "MultimodalEncoder.generate_async": record.encoder_generate_async,
        "SamplingParams": record.sampling,
        "GuidedDecodingParams": record.guided,
        "DisaggregatedParams": dict.fromkeys(record.disaggregated),
        **record.nested,
    }


def missing_groups(facts: SourceFacts, record: Release) -> list[str]:
    """Groups of the record that the tree has no file or class for."""
    return [group for group in recorded_groups(record) if group not in facts.groups]


def compare(facts: SourceFacts, record: Release) -> list[Difference]:
    """All differences, group by group. Members of `LLM` that the adapter does not use are no difference."""
    found: list[Difference] = []
    for group, recorded in recorded_groups(record).items():
        if group in facts.groups:
            found += _compare_group(group, facts.groups[group], recorded)
    return [*found, *_compare_choices(facts, record)]


def compare_names(found: Iterable[str], recorded: Iterable[str], group: str) -> list[Difference]:
    """Differences of one group where only names are known."""
    names, known = set(found), set(recorded)
    return [
        *(Difference(group, name, "added") for name in sorted(names - known)),
        *(Difference(group, name, "removed") for name in sorted(known - names)),
    ]


def _compare_group(group: str, found: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[Difference]:
    names = {name for name in found if not name.startswith("*") and not name.startswith("_mpi")}
    for difference in compare_names(names, recorded, group):
        extra = difference.kind == "added" and group == "LLM methods"
        both = group == ARGUMENTS and difference.name in BOTH
        if not extra and not both:
            yield difference
    for name in sorted(names & set(recorded)):
        ours, theirs = recorded[name], found[name]
        if ours is not UNSAID and theirs is not MADE and ours is not MADE and not _same(ours, theirs):
            yield Difference(group, name, "default", theirs, ours)


def _same(ours: Any, theirs: Any) -> bool:
    return bool(ours == theirs) and isinstance(ours, bool) is isinstance(theirs, bool)


def _compare_choices(facts: SourceFacts, record: Release) -> Iterator[Difference]:
    """Values of a fixed set. What the tree types as a plain string has none, whatever its documentation
    lists."""
    for dotted, recorded in record.choices.items():
        found = facts.choices.get(dotted)
        if found is not None and set(_spelled(found)) != set(_spelled(recorded)):
            group, _, name = dotted.rpartition(".")
            yield Difference(group or ARGUMENTS, name, "choices", found, recorded)


def _spelled(values: Iterable[Any]) -> Iterator[Any]:
    return (value.lower() if isinstance(value, str) else value for value in values)
