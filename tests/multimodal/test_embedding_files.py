"""Embedding files: what PyTorch and safetensors write is read;
what attacks, breaks or bloats is refused in fixed words."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal import embedding_files
from dynamo.trtllm.multimodal.embedding_files import (
    BIG_ENDIAN,
    DAMAGED,
    DEFLATED,
    LEGACY,
    NOT_PLAIN,
    LoadedEmbeddings,
    load_embedding_file,
)
from dynamo.trtllm.multimodal.tensor_pickle import RefusedPickle, read_tensor_pickle

LIMIT = 1 << 20
FEATURES = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def load(value: Any, suffix: str = ".pt") -> LoadedEmbeddings:
    data = safetensors.torch.save(value) if suffix == ".safetensors" else saved(value)
    return load_embedding_file(data, suffix, LIMIT)


def message_of(data: bytes, suffix: str = ".pt", limit: int = LIMIT) -> str:
    with pytest.raises(ClientFault) as caught:
        load_embedding_file(data, suffix, limit)
    return caught.value.message


def rewritten(
    data: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """The archive `data` with each member changed by `change(name, content)`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return stream.getvalue()


def with_pickle(content: bytes) -> bytes:
    """An archive as of `torch.save`, with `content` for its pickle and one storage of 8 floats."""
    return rewritten(saved(torch.zeros(8)), lambda name, old: content if name.endswith("data.pkl") else old)


class TestFormats:
    """Every documented form gives the same tensors."""

    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_simple_tensor_and_dictionary_in_each_dtype(
        self, suffix: str, batched: bool, dtype: torch.dtype
    ) -> None:
        tensor = FEATURES.to(dtype).reshape(1, 4, 6) if batched else FEATURES.to(dtype)
        simple: Any = {"any_name": tensor} if suffix == ".safetensors" else tensor
        dictionary = {"mm_embeddings": tensor, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        for value, auxiliary in ((simple, {}), (dictionary, {"image_grid_thw": [[1, 4, 4]]})):
            loaded = load(value, suffix)
            assert list(loaded.tensors) == ["features"]
            assert loaded.tensors["features"].dtype is dtype
            assert torch.equal(loaded.tensors["features"], FEATURES.to(dtype))
            assert loaded.auxiliary == auxiliary

    def test_auxiliary_data_keep_their_keys_and_become_json(self) -> None:
        loaded = load(
            {
                "mm_embeddings": FEATURES,
                "special_tokens": [128256, 128257],
                "image_token_offsets": [[0, 576]],
                "nested": {"size": (1, 2.5, None, True, "é"), "ordered": OrderedDict(a=1 << 40)},
                "mask": torch.tensor([True, False]),
                "shape": torch.zeros(3, 4).shape,
                "half": torch.tensor(0.5, dtype=torch.bfloat16),
            }
        )
        assert loaded.auxiliary == {
            "special_tokens": [128256, 128257],
            "image_token_offsets": [[0, 576]],
            "nested": {"size": [1, 2.5, None, True, "é"], "ordered": {"a": 1 << 40}},
            "mask": [True, False],
            "shape": [3, 4],
            "half": 0.5,
        }

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    def test_feature_levels_stand_beside_the_main_tensor(self, suffix: str) -> None:
        loaded = load(
            {
                "mm_embeddings": FEATURES,
                "mm_embeddings.1": FEATURES + 1,
                "mm_embeddings.2": FEATURES[None] + 2,
            },
            suffix,
        )
        assert {key: float(tensor[0, 0]) for key, tensor in loaded.tensors.items()} == {
            "features": 0.0,
            "features.1": 1.0,
            "features.2": 2.0,
        }
        assert {tuple(tensor.shape) for tensor in loaded.tensors.values()} == {(4, 6)}

    def test_parameters_views_and_shared_storages_become_contiguous_tensors_without_gradients(self) -> None:
        big = torch.arange(100, dtype=torch.float32)
        for tensor in (
            torch.nn.Parameter(FEATURES),
            FEATURES.clone().requires_grad_(),
            FEATURES.t().contiguous().t(),
            torch.cat([FEATURES, FEATURES])[2:6].roll(2, 0) * 1,
            big.as_strided((4, 6), (6, 1), 10) - 10,
        ):
            loaded = load({"mm_embeddings": tensor, "mm_embeddings.1": tensor}).tensors
            for name in ("features", "features.1"):
                assert type(loaded[name]) is torch.Tensor
                assert loaded[name].is_contiguous()
                assert not loaded[name].requires_grad
                assert loaded[name].device.type == "cpu"
            assert torch.equal(loaded["features"], tensor.detach())
        sliced = load(big.as_strided((4, 6), (6, 1), 10)).tensors["features"]
        assert torch.equal(sliced, FEATURES + 10)
        assert sliced.untyped_storage().nbytes() == sliced.nbytes

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_older_pickle_protocols_are_read(self, protocol: int) -> None:
        data = saved({"mm_embeddings": FEATURES}, pickle_protocol=protocol)
        assert torch.equal(load_embedding_file(data, ".pt", LIMIT).tensors["features"], FEATURES)

    @pytest.mark.parametrize("device", ["cuda:7", "xla:0", "x" * 1000])
    def test_a_tensor_saved_on_another_device_is_read_to_the_cpu(self, device: str) -> None:
        def relocate(name: str, content: bytes) -> bytes:
            old = b"X\x03\0\0\0cpu"
            if not name.endswith("data.pkl"):
                return content
            assert old in content
            return content.replace(old, b"X" + len(device).to_bytes(4, "little") + device.encode())

        loaded = load_embedding_file(rewritten(saved(FEATURES), relocate), ".pt", LIMIT)
        assert loaded.tensors["features"].device.type == "cpu"
        assert torch.equal(loaded.tensors["features"], FEATURES)


class Runs:
    """Pickles as a call of `os.mkdir(path)`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


class TestHostileFiles:
    """Nothing of a file runs, and nothing is allocated for it beyond the limit."""

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    def test_a_pickle_that_calls_something_calls_nothing(self, tmp_path: Path, protocol: int) -> None:
        attack = Runs(tmp_path / "ran")
        for value in (attack, {"mm_embeddings": FEATURES, "x": attack}, [attack], OrderedDict(a=attack)):
            assert message_of(with_pickle(pickle.dumps(attack, protocol))) == NOT_PLAIN
            assert message_of(saved(value, pickle_protocol=max(protocol, 2))) == NOT_PLAIN
            assert message_of(pickle.dumps(attack, protocol)) in (LEGACY, DAMAGED)
        assert not (tmp_path / "ran").exists()
        pickle.loads(pickle.dumps(attack, protocol))
        assert (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "content",
        [
            b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x10\x85R.",
            b"\x80\x02ctorch\nTensor\n\x8a\x05\0\0\0\0\x10\x85R.",
            b"\x80\x02c_codecs\nencode\nX\1\0\0\0aX\6\0\0\0latin1\x86R.",
            b"\x80\x02cbuiltins\nset\n]\x85R.",
            b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n.",
            b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n.",
            b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n.",
            b"\x80\x02ccollections\nOrderedDict\n)\x81.",
            b"\x80\x02ccollections\nOrderedDict\n)R}b.",
            b"\x80\x02ccollections\nOrderedDict\n.",
            b"\x80\x02(ccollections\nOrderedDict\no.",
            b"\x80\x02(icollections\nOrderedDict\n.",
            b"\x80\x02\x82\x01.",
            b"\x80\x02X\3\0\0\0absQ.",
            b"\x80\x02K\1Q.",
            b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
            b"\x80\x02}K\1K\2s.",
            b"\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\1.",
            b"\x80\x02X\3\0\0\0\xed\xa0\x80.",
            b"\x80\x02]q\0h\0a.",
            b"\x80\x02(.",
            b"\x80\x02h\x07.",
            b"\x80\x02\x85R.",
            b"\x80\x02K\1K\2.",
            b"\x80\x02r\xff\xff\xff\x7f.",
            b"\x80\x02X\xff\xff\xff\xffa.",
            b"",
            b".",
            b"\xff",
        ],
    )
    def test_every_other_opcode_and_global_is_refused(self, content: bytes) -> None:
        assert message_of(with_pickle(content)) == NOT_PLAIN

    def test_shared_lists_that_would_multiply_are_refused(self) -> None:
        value: list[Any] = []
        for _ in range(12):
            value = [value] * 10
        assert message_of(saved({"mm_embeddings": FEATURES, "x": value})) == NOT_PLAIN

    def test_deep_nesting_and_very_long_pickles_are_refused(self) -> None:
        deep: Any = 0
        for _ in range(200):
            deep = [deep]
        assert message_of(saved({"mm_embeddings": FEATURES, "x": deep})) == NOT_PLAIN
        assert message_of(saved({"mm_embeddings": FEATURES, "x": list(range(250_000))})) == NOT_PLAIN
        with pytest.raises(RefusedPickle, match="too long"):
            read_tensor_pickle(bytes(5 << 20))

    def test_a_tiny_file_that_expands_to_a_gibibyte_is_refused_by_its_logical_size(self) -> None:
        data = saved(torch.ones(1).expand(1, 1 << 16, 1 << 12))
        assert len(data) < 2000
        words = "the tensors of the embedding file are larger than this worker's limit of 50 MiB"
        assert message_of(data, limit=50 << 20) == words

    def test_one_tensor_mentioned_many_times_counts_each_time(self) -> None:
        many = [torch.ones(1).expand(1000)] * 300
        words = "the tensors of the embedding file are larger than this worker's limit of 1 MiB"
        assert message_of(saved({"mm_embeddings": FEATURES, "x": many})) == words
        assert message_of(saved({"mm_embeddings": torch.zeros(600, 512)})) == words

    def test_a_tensor_that_reaches_out_of_its_storage_is_refused_and_reads_no_other_memory(self) -> None:
        storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0\x30X\3\0\0\0cpuK\x08tQ"
        head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage
        tail = b"\x89ccollections\nOrderedDict\n)RtR."
        for layout in (
            b"K\0K\3K\3\x86K\3K\1\x86",
            b"K\1K\2K\4\x86K\4K\1\x86",
            b"K\0K\1K\2\x86K\0K\x08\x86",
            b"K\0K\1J\xff\xff\xff\x7f\x86K\1K\1\x86",
            b"J\0\0\0\x7fK\1K\1\x86K\1K\1\x86",
        ):
            assert message_of(with_pickle(head + layout + tail), limit=1 << 40) == DAMAGED
        for layout in (
            b"J\xff\xff\xff\xffK\1K\1\x86K\1K\1\x86",
            b"K\0J\xff\xff\xff\xffK\1\x86K\1K\1\x86",
            b"K\0K\1K\1\x86J\xff\xff\xff\xffK\1\x86",
            b"K\0K\1K\1\x86K\1\x85",
            b"K\0G\x3f\xf0\0\0\0\0\0\0K\1\x86K\1K\1\x86",
        ):
            assert message_of(with_pickle(head + layout + tail)) == NOT_PLAIN
        fits = load_embedding_file(with_pickle(head + b"K\0K\2K\4\x86K\4K\1\x86" + tail), ".pt", LIMIT)
        assert fits.tensors["features"].shape == (2, 4)

    def test_a_deflated_archive_is_refused_before_anything_is_inflated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = rewritten(
            saved(torch.zeros(64 << 20 >> 2).reshape(1, -1)), lambda _, content: content, zipfile.ZIP_DEFLATED
        )
        assert len(data) < 1 << 20
        monkeypatch.setattr(zipfile.ZipFile, "read", None)
        assert message_of(data) == DEFLATED

    def test_members_that_claim_to_be_larger_than_the_file_or_share_bytes_are_refused(self) -> None:
        data = bytearray(saved(FEATURES))
        entry = data.index(b"PK\1\2")
        data[entry + 20 : entry + 28] = (1 << 30).to_bytes(4, "little") * 2
        assert message_of(bytes(data)) == DAMAGED

    def test_sparse_quantized_meta_complex_nested_and_other_tensors_are_refused(self) -> None:
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0, 1], [0, 1]]), torch.ones(2), (4, 6), check_invariants=True
        )
        for tensor in (
            sparse,
            torch.empty(4, 6, device="meta"),
            torch.zeros(4, 6, dtype=torch.complex64),
            torch.zeros(4, 6).to(torch.float8_e4m3fn),
            torch.complex(FEATURES, FEATURES).conj().imag,
            torch.zeros(4, dtype=torch.uint16),
        ):
            assert message_of(saved({"mm_embeddings": tensor})) == NOT_PLAIN

    def test_bad_sparse_indices_are_never_looked_at(self) -> None:
        indices = torch.tensor([[1 << 40, -5], [0, 1]])
        bad = torch.sparse_coo_tensor(indices, torch.ones(2), (1 << 41, 6), check_invariants=False)
        assert message_of(saved({"mm_embeddings": FEATURES, "x": bad})) == NOT_PLAIN


class TestContent:
    """Shapes, dtypes and values, each refusal naming what is wrong."""

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_values_that_are_not_finite(self, suffix: str, bad: float) -> None:
        tensor = FEATURES.clone()
        tensor[3, 5] = bad
        value = {"mm_embeddings": tensor, "other": FEATURES}
        data = safetensors.torch.save(value) if suffix == ".safetensors" else saved(value)
        assert message_of(data, suffix) == "mm_embeddings holds values that are not finite"

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
    def test_numbers_that_are_not_floating_point(self, dtype: torch.dtype) -> None:
        words = "mm_embeddings must hold floating-point numbers of 16, 32 or 64 bits"
        assert message_of(saved(torch.ones(4, 6, dtype=dtype))) == words
        assert (
            message_of(safetensors.torch.save({"x": torch.ones(4, 6, dtype=dtype)}), ".safetensors") == words
        )

    @pytest.mark.parametrize("shape", [(), (6,), (1, 1, 4, 6), (0, 6), (4, 0), (1, 0, 6)])
    def test_other_shapes(self, shape: tuple[int, ...]) -> None:
        words = f"mm_embeddings must be [tokens, hidden] or [1, tokens, hidden], not {list(shape)}"
        assert message_of(saved(torch.ones(shape))) == words

    def test_a_batch_of_several_images(self) -> None:
        assert (
            message_of(saved(torch.ones(2, 4, 6)))
            == "mm_embeddings holds a batch of 2; send one image per part"
        )

    @pytest.mark.parametrize(
        "value", [{}, [], None, 7, "x", [FEATURES], {"embeddings": FEATURES}, {"mm_embeddings": [FEATURES]}]
    )
    def test_a_file_without_the_main_tensor_is_told_the_key(self, value: Any) -> None:
        words = (
            "the embedding file must hold one tensor, or a dictionary "
            "with a tensor under the key mm_embeddings"
        )
        assert message_of(saved(value)) == words

    def test_a_safetensors_file_with_several_tensors_needs_the_key(self) -> None:
        data = safetensors.torch.save({"a": FEATURES, "b": FEATURES + 1})
        assert "under the key mm_embeddings" in message_of(data, ".safetensors")

    def test_feature_levels_have_no_gap_and_one_number_of_tokens(self) -> None:
        gap = (
            "feature levels of an embedding file are numbered mm_embeddings.1, "
            "mm_embeddings.2 and so on, without a gap"
        )
        assert message_of(saved({"mm_embeddings": FEATURES, "mm_embeddings.2": FEATURES})) == gap
        assert message_of(saved({"mm_embeddings": FEATURES, "mm_embeddings.x": FEATURES})) == gap
        differ = "the feature levels of the embedding file differ in their number of tokens"
        assert message_of(saved({"mm_embeddings": FEATURES, "mm_embeddings.1": FEATURES[:3]})) == differ
        assert "mm_embeddings.1 of the embedding file must be a tensor" in message_of(
            saved({"mm_embeddings": FEATURES, "mm_embeddings.1": [1.0]})
        )

    def test_auxiliary_data_are_finite_and_limited(self) -> None:
        for extra in (float("nan"), [float("inf")], torch.tensor([float("nan")])):
            assert "not finite" in message_of(saved({"mm_embeddings": FEATURES, "x": extra}))
        large = torch.zeros(embedding_files.MAX_AUXILIARY_NUMBERS + 1, dtype=torch.uint8)
        words = "the auxiliary tensors of the embedding file hold more than 131072 numbers"
        assert message_of(saved({"mm_embeddings": FEATURES, "x": large})) == words


class TestDamage:
    """Whatever is broken is an answer, never a crash."""

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    def test_empty_foreign_and_cut_files(self, suffix: str) -> None:
        assert message_of(b"", suffix) == "the embedding file is empty"
        whole = safetensors.torch.save({"x": FEATURES}) if suffix == ".safetensors" else saved(FEATURES)
        for data in (b"x", b"hello, world", bytes(100), b"\xff" * 100, b"PK", b"PK\5\6" + bytes(18)):
            assert message_of(data, suffix) == DAMAGED
        for length in (1, 7, 100, len(whole) // 2, len(whole) - 1):
            assert message_of(whole[:length], suffix) == DAMAGED

    def test_formats_under_a_wrong_suffix(self) -> None:
        assert message_of(saved(FEATURES), ".safetensors") == DAMAGED
        assert message_of(safetensors.torch.save({"x": FEATURES}), ".pt") == DAMAGED

    def test_the_old_format_and_foreign_byte_order_are_named(self) -> None:
        assert message_of(saved(FEATURES, _use_new_zipfile_serialization=False)) == LEGACY
        big = rewritten(saved(FEATURES), lambda name, old: b"big" if name.endswith("byteorder") else old)
        assert message_of(big) == BIG_ENDIAN

    def test_a_missing_or_short_storage(self) -> None:
        short = rewritten(saved(FEATURES), lambda name, old: old[:40] if name.endswith("data/0") else old)
        assert message_of(short) == DAMAGED
        odd = rewritten(saved(FEATURES), lambda name, old: old + b"x" if name.endswith("data/0") else old)
        assert message_of(odd) == DAMAGED
        renamed = rewritten(
            saved(FEATURES), lambda name, old: old.replace(b"X\1\0\0\0\x30", b"X\1\0\0\0\x31")
        )
        assert message_of(renamed) == DAMAGED

    def test_a_safetensors_header_that_lies_is_refused(self) -> None:
        for header in (
            b'{"x":{"dtype":"F32","shape":[1073741824,4],"data_offsets":[0,8]}}',
            b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}',
            b'{"x":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
            b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"y":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            b"[1]",
            b"{",
        ):
            assert (
                message_of(len(header).to_bytes(8, "little") + header + bytes(8), ".safetensors") == DAMAGED
            )
        assert message_of((1 << 62).to_bytes(8, "little") + bytes(8), ".safetensors") == DAMAGED

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    def test_every_mutant_is_embeddings_or_a_refusal(self, suffix: str) -> None:
        chance = random.Random(f"mutants of {suffix}")
        value = {
            "mm_embeddings": FEATURES,
            "grid": torch.tensor([[1, 2, 3]]),
            "mm_embeddings.1": FEATURES + 1,
        }
        seed = (
            safetensors.torch.save(value)
            if suffix == ".safetensors"
            else saved({**value, "x": [1, {"y": "z"}]})
        )
        refused = 0
        for _ in range(500):
            mutant = bytearray(seed)
            for _ in range(chance.choice((1, 2, 8))):
                mutant[chance.randrange(len(mutant))] = chance.randrange(256)
            try:
                loaded = load_embedding_file(bytes(mutant), suffix, LIMIT)
            except ClientFault:
                refused += 1
            else:
                assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.tensors.values())
        assert 0 < refused < 500
