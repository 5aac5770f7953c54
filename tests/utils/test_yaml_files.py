from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.yaml_files import read_yaml


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(path) == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a: [1\n", "the engine configuration bad.yaml is not YAML at line 2: correct it"),
        ("- a\n- b\n", "the engine configuration bad.yaml must hold a mapping of engine arguments"),
        (
            "a: 1\nb:\n  c: 1\n  c: 2\n",
            "bad.yaml names the key c twice in the mapping at line 3: keep one of them",
        ),
        (
            "!!python/object/apply:os.getcwd []\n",
            "the engine configuration bad.yaml is not YAML at line 1: correct it",
        ),
        (
            "a: !!bool maybe\n",
            "the engine configuration bad.yaml holds a value that YAML cannot read: correct it",
        ),
        (
            f"a: {'9' * 5000}\n",
            "the engine configuration bad.yaml holds a value that YAML cannot read: correct it",
        ),
        (
            f"a: {'[' * 2000}{']' * 2000}\n",
            "the engine configuration bad.yaml is nested too deeply: correct it",
        ),
        ("a: &a {b: *a}\n", "bad.yaml holds a value that contains itself, at line 1: correct it"),
        (
            "a: &a {b: 1}\nc: {<<: *a, <<: *a}\n",
            "bad.yaml names the key << twice in the mapping at line 2: write <<: [*ONE, *OTHER]",
        ),
        ("a: {<<: 5}\n", "the engine configuration bad.yaml is not YAML at line 1: correct it"),
        (
            f"# {'x' * (256 << 10)}\n",
            "the engine configuration bad.yaml is larger than 256 KiB: give a file of engine arguments",
        ),
    ],
)
def test_a_file_that_holds_no_engine_arguments_is_refused(
    tmp_path: Path, content: str, sentence: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(StartupError) as refusal:
        read_yaml(path)
    assert refusal.value.message == sentence


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"does not exist: give the path of a YAML file$"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(StartupError, match=r"cannot be read: give the path of a YAML file$"):
        read_yaml(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match=r"is a pipe that may never end: give the path of a YAML file$"):
        read_yaml(tmp_path / "pipe")


def nested_aliases(first: str, repeat: str, levels: int) -> str:
    """A file of a few lines whose last value stands for 9 to the power of `levels` copies of the first."""
    lines = [f"a0: &a0 {first}"]
    for level in range(1, levels):
        copies = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {repeat.replace('COPIES', copies)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "content",
    [
        nested_aliases("[x, y]", "[COPIES]", 12),
        nested_aliases("{x: 1}", "{<<: [COPIES]}", 12),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 500)}]\n",
    ],
    ids=["lists", "merged mappings", "a long text"],
)
def test_aliases_that_stand_for_too_much_are_refused_before_anything_is_written_out(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(content)
    with pytest.raises(
        StartupError, match=r"^bomb\.yaml stands for more than 20,000 values once its aliases are written out"
    ):
        read_yaml(path)


def test_merge_keys_are_merged_through_several_levels_and_a_mapping_overrides_what_it_merges(
    tmp_path: Path,
) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(
        "a: &a {x: 1, y: 1, z: 1}\n"
        "b: &b {<<: *a, y: 2}\n"
        "c:\n  <<: [*b, *a]\n  z: 3\n"
        "d: {<<: *b, inner: {<<: *a, x: 4}}\n"
    )  # fmt: skip
    merged = read_yaml(path)
    assert merged["b"] == {"x": 1, "y": 2, "z": 1}
    assert merged["c"] == {"x": 1, "y": 2, "z": 3}
    assert merged["d"] == {"x": 1, "y": 2, "z": 1, "inner": {"x": 4, "y": 1, "z": 1}}


def test_what_yaml_would_read_as_another_number_or_as_a_date_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("a: 1:30\nb: 010\nc: 2026-12-01\nd: [12, -3, +4, 1_000, 0x10, 1.5]\n")
    assert read_yaml(path) == {"a": "1:30", "b": "010", "c": "2026-12-01", "d": [12, -3, 4, 1000, 16, 1.5]}


def test_a_file_of_another_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes("\ufeffmax_batch_size: 2\r\nmax_seq_len: 3\r\n".encode())
    assert read_yaml(path) == {"max_batch_size": 2, "max_seq_len": 3}
