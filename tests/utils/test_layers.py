from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.layers import Layer, find_value, merge_layers, nested, split_dotted


def test_a_later_layer_changes_only_the_keys_it_names() -> None:
    args, origins = merge_layers(
        [
            Layer(
                "file",
                {
                    "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.3},
                    "dtype": "auto",
                },
            ),
            Layer("override", {"kv_cache_config": {"free_gpu_memory_fraction": 0.5}}),
        ]
    )
    assert args == {
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.5},
        "dtype": "auto",
    }
    assert origins == {
        "kv_cache_config.enable_block_reuse": "file",
        "kv_cache_config.free_gpu_memory_fraction": "override",
        "dtype": "file",
    }


@pytest.mark.parametrize(
    ("over", "args", "origins"),
    [
        ({"a": None}, {"a": None}, {"a": "over"}),
        ({"a": 3}, {"a": 3}, {"a": "over"}),
        ({"a": [1]}, {"a": [1]}, {"a": "over"}),
        ({"a": {}}, {"a": {"b": {"c": 1}, "d": 2}}, {"a.b.c": "under", "a.d": "under"}),
        ({"a": {"b": 5}}, {"a": {"b": 5, "d": 2}}, {"a.b": "over", "a.d": "under"}),
        ({"a": {"d": {"e": 1}}}, {"a": {"b": {"c": 1}, "d": {"e": 1}}}, {"a.b.c": "under", "a.d.e": "over"}),
    ],
)
def test_a_value_replaces_a_mapping_and_a_mapping_replaces_a_value(
    over: dict[str, object], args: dict[str, object], origins: dict[str, str]
) -> None:
    assert merge_layers([Layer("under", {"a": {"b": {"c": 1}, "d": 2}}), Layer("over", over)]) == (
        args,
        origins,
    )


def test_an_empty_mapping_is_kept_with_its_origin_until_something_fills_it() -> None:
    assert merge_layers([Layer("file", {"moe_config": {}})]) == ({"moe_config": {}}, {"moe_config": "file"})
    filled = merge_layers(
        [Layer("file", {"moe_config": {}}), Layer("override", {"moe_config": {"backend": "CUTLASS"}})]
    )
    assert filled == ({"moe_config": {"backend": "CUTLASS"}}, {"moe_config.backend": "override"})


def test_merging_leaves_its_sources_as_they_were() -> None:
    first, second = {"a": {"b": [1]}}, {"a": {"c": 2}}
    args, _ = merge_layers([Layer("first", first), Layer("second", second)])
    args["a"]["b"].append(2)
    assert (first, second) == ({"a": {"b": [1]}}, {"a": {"c": 2}})


_TREES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers() | st.none(), max_size=3),
    max_leaves=8,
)


@given(st.lists(_TREES, max_size=4))
def test_every_merged_value_has_exactly_one_origin_that_really_said_it(
    trees: list[dict[str, object]],
) -> None:
    args, origins = merge_layers([Layer(str(number), tree) for number, tree in enumerate(trees)])

    def leaves(tree: dict[str, object], path: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in tree.items():
            found.update(
                leaves(value, f"{path}{key}.")
                if isinstance(value, dict) and value
                else {f"{path}{key}": value}
            )
        return found

    assert set(leaves(args)) == set(origins)
    for dotted, value in leaves(args).items():
        assert find_value(trees[int(origins[dotted])], dotted) == value


def test_a_dotted_name_is_a_path_through_mappings() -> None:
    assert nested("a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert find_value({"a": {"b": {"c": 1}}}, "a.b.c") == 1
    assert find_value({"a": 1}, "a.b") is None
    assert find_value({}, "a") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7),
        ("8", 8),
        ("true", True),
        ("False", False),
        ("none", None),
        ("null", None),
        ("NIXL", "NIXL"),
        ("[1, 2]", [1, 2]),
        ("-3", -3),
        ("1e-3", 0.001),
    ],
)
def test_dotted_flags_infer_the_type_of_their_value(text: str, value: object) -> None:
    for arguments in (["--trtllm.a.b", text], [f"--trtllm.a.b={text}"]):
        assert split_dotted(["--x", *arguments, "y"]) == (
            ["--x", "y"],
            [Layer("--trtllm.a.b", {"a": {"b": value}})],
        )


@pytest.mark.parametrize("arguments", [["--trtllm.a.b"], ["--trtllm.a.b", "--model-path"]])
def test_a_dotted_flag_without_a_value_is_refused(arguments: list[str]) -> None:
    with pytest.raises(StartupError, match=r"^--trtllm\.a\.b needs a value: write --trtllm\.a\.b VALUE$"):
        split_dotted(arguments)


@pytest.mark.parametrize("flag", ["--trtllm.", "--trtllm.a..b", "--trtllm.a."])
def test_a_dotted_flag_with_an_empty_name_is_refused(flag: str) -> None:
    with pytest.raises(StartupError, match=r"names no engine argument: write --trtllm\.GROUP\.KEY VALUE$"):
        split_dotted([flag, "1"])


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(StartupError, match=r"^file x\.yaml: the key 3 must be a text$"):
        merge_layers([Layer("file x.yaml", {"a": {3: 1}})])  # type: ignore[dict-item]
