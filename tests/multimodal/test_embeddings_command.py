"""The command that writes embedding files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import EncodedMedia
from dynamo.trtllm.embeddings import file_content, main, parse
from dynamo.trtllm.multimodal.decode import decode_image
from dynamo.trtllm.multimodal.embedding_files import load_embedding_file
from engines.families import make_tiny_engine

DOUBLE = ("--engine", "double", "--override-engine-args", '{"double": {"placeholder_ids": {"image": 7}}}')


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (56, 56), "red").save(path)
    return path


def test_a_file_holds_levels_and_grid_in_the_form_that_a_worker_reads_back(tmp_path: Path) -> None:
    features, deeper = torch.rand(4, 8, dtype=torch.float16), torch.rand(4, 8, dtype=torch.float16)
    encoded = EncodedMedia(
        "image", "d", {"features": features, "features.1": deeper}, (7,) * 4, {"image_grid_thw": [1, 4, 4]}
    )
    content = file_content(encoded)
    assert {key: tuple(tensor.shape) for key, tensor in content.items()} == {
        "mm_embeddings": (1, 4, 8),
        "mm_embeddings.1": (1, 4, 8),
        "image_grid_thw": (1, 3),
    }
    torch.save(content, tmp_path / "x.pt")
    safetensors.torch.save_file(content, tmp_path / "x.safetensors")
    for suffix in (".pt", ".safetensors"):
        loaded = load_embedding_file((tmp_path / f"x{suffix}").read_bytes(), suffix, 1 << 20)
        assert torch.equal(loaded.tensors["features"], features)
        assert torch.equal(loaded.tensors["features.1"], deeper)
        assert loaded.auxiliary == {"image_grid_thw": [[1, 4, 4]]}


def test_one_image_gives_one_file_of_either_format(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = []
    for name in ("x.pt", "x.safetensors"):
        output = tmp_path / name
        assert main([str(picture), "-o", str(output), *DOUBLE]) == 0
        contents.append(load_embedding_file(output.read_bytes(), output.suffix, 1 << 20).tensors["features"])
        tokens, hidden = contents[-1].shape
        assert capsys.readouterr().out == f"{output}: {tokens} tokens of {hidden} from {picture}\n"
    assert torch.equal(*contents)


def test_several_images_give_files_in_a_directory_named_after_them(picture: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    arguments = [
        str(picture),
        str(picture),
        "http://host/b.jpeg?x=1",
        "data:image/png;base64,AAAA",
        "-o",
        str(tmp_path / "out"),
    ]
    outputs = parse([*arguments, "--suffix", ".safetensors"]).outputs
    assert [path.name for path in outputs] == [
        "a.safetensors",
        "a-2.safetensors",
        "b.safetensors",
        "image.safetensors",
    ]
    assert main([str(picture), str(picture), "-o", str(tmp_path / "out"), *DOUBLE]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a-2.pt", "a.pt"]


@pytest.mark.parametrize(
    ("images", "output", "code", "words"),
    [
        (
            ["{picture}", "{picture}"],
            "x.pt",
            2,
            "-o must be an existing directory when there are several images",
        ),
        (["{picture}"], "x.npy", 2, "-o must end in .pt or .safetensors, or be an existing directory"),
        (["{root}/none.png"], "x.pt", 1, "{root}/none.png cannot be read"),
        (["{root}/text.png"], "x.pt", 1, "{root}/text.png: the type text is not accepted"),
        (["{picture}"], "none/x.pt", 2, "none/x.pt cannot be written"),
        (
            ["{picture}", "--override-engine-args=7"],
            "x.pt",
            2,
            "--override-engine-args must be a JSON object",
        ),
        (
            ["{picture}", "--override-engine-args={{"],
            "x.pt",
            2,
            "--override-engine-args must be a JSON object",
        ),
    ],
)
def test_a_bad_call_is_told_in_one_sentence(
    images: list[str],
    output: str,
    code: int,
    words: str,
    picture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.png").write_text("hello")
    given = [image.format(picture=picture, root=tmp_path) for image in images]
    assert main([*DOUBLE, *given, "-o", str(tmp_path / output)]) == code
    error = capsys.readouterr().err
    assert words.format(root=tmp_path) in error
    assert "Traceback" not in error


def test_an_engine_that_encodes_no_images_is_refused_in_one_sentence(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(picture), "-o", str(tmp_path / "x.pt"), "--engine", "double"]) != 0
    assert "this model's images cannot be encoded by themselves with this engine" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "mistral3"])
def test_a_file_made_with_the_portable_engine_is_adopted_as_what_the_engine_encodes(
    family: str, picture: Path, tmp_path: Path
) -> None:
    engine = make_tiny_engine(tmp_path / "model", family)
    (tmp_path / "out").mkdir()
    for suffix in (".pt", ".safetensors"):
        arguments = ["-o", str(tmp_path / "out"), "--suffix", suffix, "--model-path", str(tmp_path / "model")]
        assert main([str(picture), *arguments, "--device", "cpu"]) == 0

    image = decode_image(picture.read_bytes(), MediaConfig())
    files = {suffix: (tmp_path / "out" / f"a{suffix}").read_bytes() for suffix in (".pt", ".safetensors")}

    async def adopted_beside_encoded() -> None:
        await engine.start()
        try:
            (encoded,) = await engine.encode([image])
            for suffix, data in files.items():
                loaded = load_embedding_file(data, suffix, 1 << 20)
                adopted = engine.adopt_embeddings("image", encoded.digest, loaded.tensors, loaded.auxiliary)
                assert adopted.token_ids == encoded.token_ids
                assert adopted.extras == encoded.extras
                assert sorted(adopted.tensors) == sorted(encoded.tensors)
                assert all(
                    torch.equal(adopted.tensors[name], tensor) for name, tensor in encoded.tensors.items()
                )
        finally:
            await engine.close()

    asyncio.run(adopted_beside_encoded())
