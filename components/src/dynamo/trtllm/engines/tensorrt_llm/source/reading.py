"""One reading of a source tree: its facts beside a record, and the verdicts of all rules; as text and as
JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.record import RECORD, Release, nearest_release
from dynamo.trtllm.engines.tensorrt_llm.source.compare import (
    Difference,
    compare,
    missing_groups,
    recorded_groups,
)
from dynamo.trtllm.engines.tensorrt_llm.source.facts import SourceFacts, read_facts
from dynamo.trtllm.engines.tensorrt_llm.source.models import ModelSource
from dynamo.trtllm.engines.tensorrt_llm.source.rules import Outcome, Verdict, judge_all
from dynamo.trtllm.engines.tensorrt_llm.source.tree import SourceTree

UNKNOWN_VERSION = "of unknown version"


@dataclass(frozen=True)
class Reading:
    """What `read` found. `note` says why another release's record was taken."""

    path: Path
    facts: SourceFacts
    record: Release
    note: str | None
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    """Groups of the record that the tree has nothing for."""
    verdicts: tuple[Verdict, ...]

    def of(self, outcome: Outcome) -> list[Verdict]:
        """The verdicts with that outcome."""
        return [verdict for verdict in self.verdicts if verdict.outcome is outcome]


def read(path: Path, release: str | None = None) -> Reading:
    """Read the tree at `path` and hold it against the record of `release`, or of the tree's own version.

    Raises `ValueError` when there is no tree, or no record of `release`.
    """
    tree = SourceTree.open(path)
    if release is not None and release not in RECORD:
        raise ValueError(f"there is no record of {release}: give one of {', '.join(RECORD)}")
    version = tree.version or UNKNOWN_VERSION
    record, note = nearest_release(version) if release is None else (RECORD[release], None)
    facts = read_facts(tree)
    return Reading(
        path=tree.package,
        facts=facts,
        record=record,
        note=note,
        differences=tuple(compare(facts, record)),
        missing=tuple(missing_groups(facts, record)),
        verdicts=tuple(judge_all(tree, record.version)),
    )


def render(reading: Reading) -> Iterator[str]:
    """The reading as lines of text: facts, models, rules, and a last line that sums up."""
    yield f"TensorRT-LLM {reading.facts.version or UNKNOWN_VERSION} in {reading.path}"
    origin = (
        "documentation" if reading.record.read_from == "documentation" else "its source and documentation"
    )
    yield f"beside the record of {reading.record.version}, read from {origin}"
    if reading.note is not None:
        yield reading.note
    yield from (f"cannot be parsed: {file}: {reason}" for file, reason in reading.facts.unreadable.items())
    yield from (
        "",
        *render_facts(reading),
        "",
        *render_models(reading),
        "",
        *render_rules(reading.verdicts),
        "",
    )
    yield summary(reading)


def render_facts(reading: Reading) -> Iterator[str]:
    """One line for each group, and below it every difference."""
    yield f"{'facts':<34} {'found':>6} {'recorded':>9}"
    for group, recorded in recorded_groups(reading.record).items():
        found = reading.facts.groups.get(group)
        yield f"  {group:<32} {'not found' if found is None else len(found):>6} {len(recorded):>9}"
        yield from (f"    {d}" for d in reading.differences if d.group == group)


def render_models(reading: Reading) -> Iterator[str]:
    """One line for each registered model."""
    yield f"{'models with images':<46} {'split':<6} {'ids kept':<9} placeholder of an image"
    for model in reading.facts.models:
        split, kept = ("yes" if value else "no" for value in (model.splits, model.fast_path))
        yield f"  {model.architecture:<44} {split:<6} {kept:<9} {model.placeholders.get('image', 'none')}"
    if not reading.facts.models:
        yield "  none found"


def render_rules(verdicts: tuple[Verdict, ...]) -> Iterator[str]:
    """One line for each rule; for one that does not hold also what relies on it and what breaks."""
    yield "rules that the adapter relies on"
    for verdict in verdicts:
        rule = verdict.rule
        yield f"  {verdict.outcome.value:<10} {rule.name:<28} {verdict.form or rule.file}"
        if verdict.outcome is Outcome.OTHER:
            yield f"    recorded: {verdict.expected}; the adapter takes either"
        if verdict.outcome in (Outcome.BROKEN, Outcome.NOT_FOUND):
            yield f"    relied on: {rule.relies}"
            yield f"    looked at: {rule.seen} in {rule.file}"
        if verdict.outcome is Outcome.BROKEN:
            yield f"    what breaks: {rule.breaks}"


def summary(reading: Reading) -> str:
    """Counts in one line."""
    counts = {outcome: len(reading.of(outcome)) for outcome in Outcome}
    return (
        f"{len(reading.differences)} differences from the record, {len(reading.missing)} groups not found; "
        f"{counts[Outcome.HOLDS] + counts[Outcome.OTHER]} rules hold, {counts[Outcome.BROKEN]} broken, "
        f"{counts[Outcome.NOT_FOUND]} not found"
    )


def as_json(reading: Reading) -> dict[str, Any]:
    """The reading as JSON. Defaults that JSON has no value for are their names."""
    return {
        "version": reading.facts.version,
        "path": str(reading.path),
        "record": reading.record.version,
        "note": reading.note,
        "unreadable": dict(reading.facts.unreadable),
        "groups": {
            group: {n: _as_json(v) for n, v in names.items()} for group, names in reading.facts.groups.items()
        },
        "choices": {name: list(values) for name, values in reading.facts.choices.items()},
        "models": [_model(model) for model in reading.facts.models],
        "missing": list(reading.missing),
        "differences": [
            {
                "group": d.group,
                "name": d.name,
                "kind": d.kind,
                "found": _as_json(d.found),
                "recorded": _as_json(d.recorded),
            }
            for d in reading.differences
        ],
        "rules": [_rule(verdict) for verdict in reading.verdicts],
    }


def _model(model: ModelSource) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "model_type": model.model_type,
        "file": model.file,
        "processor": model.processor,
        "split": model.splits,
        "ids_kept": model.fast_path,
        "placeholders": dict(model.placeholders),
    }


def _rule(verdict: Verdict) -> dict[str, Any]:
    rule = verdict.rule
    return {
        "name": rule.name,
        "outcome": verdict.outcome.value,
        "form": verdict.form,
        "recorded": verdict.expected,
        "relies": rule.relies,
        "file": rule.file,
        "seen": rule.seen,
        "breaks": rule.breaks,
    }


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, (list, tuple, set)) else repr(value)
