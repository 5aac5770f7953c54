"""`python -m dynamo.trtllm.embeddings IMAGE...
-o OUTPUT` writes embedding files with a model's own vision encoder.

One image gives one file, in the form that a worker reads back (see `multimodal.embedding_files`):
`mm_embeddings` `[1, tokens, hidden]`, `mm_embeddings.1` and so on for further feature levels, and what the
processor says beside them, such as `image_grid_thw`. The file fits the model that made it and no other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.trtllm.config import MEBIBYTE, EngineConfig, EngineKind, MediaConfig, Modality, Role
from dynamo.trtllm.errors import ClientFault, StartupError, WorkerError

if TYPE_CHECKING:
    import torch

    from dynamo.trtllm.core import DecodedImage, EncodedMedia
    from dynamo.trtllm.multimodal.fetch import Fetcher

SUFFIXES = (".pt", ".safetensors")
_URL_PREFIXES = ("http://", "https://", "data:")


@dataclass(frozen=True)
class Options:
    """What the command line asks for; `outputs` has one file for each of `images`."""

    images: tuple[str, ...]
    outputs: tuple[Path, ...]
    engine: EngineConfig
    media: MediaConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files and print a line for each. Returns the exit code:
    1 for a bad image, 2 for a bad call or model."""
    try:
        return asyncio.run(write_all(parse(arguments)))
    except WorkerError as error:
        print(f"dynamo.trtllm.embeddings: {error.message}", file=sys.stderr)
        return 1 if isinstance(error, ClientFault) else 2


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises `StartupError` for an output that does not suit the images."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamo.trtllm.embeddings", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a path or an http(s) or data URL")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        help="the file to write, .pt or .safetensors; for several images an existing directory",
    )
    parser.add_argument(
        "--model-path",
        default="demo",
        help="a directory, a Hugging Face name, or the word demo (the default)",
    )
    parser.add_argument(
        "--engine", choices=[kind.value for kind in EngineKind], default=EngineKind.TRANSFORMERS.value
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--override-engine-args",
        default="{}",
        metavar="JSON",
        help="engine arguments, as the worker takes them",
    )
    parser.add_argument(
        "--suffix", choices=SUFFIXES, default=SUFFIXES[0], help="format of the files in a directory"
    )
    parser.add_argument(
        "--max-file-size-mb", type=int, default=MediaConfig.max_file_bytes // MEBIBYTE, help="largest image"
    )
    given = parser.parse_args(arguments)
    engine_args = _json_object(given.override_engine_args)
    return Options(
        images=tuple(given.images),
        outputs=_outputs(given.images, Path(given.output), given.suffix),
        engine=EngineConfig(
            kind=EngineKind(given.engine),
            model_path=given.model_path,
            modality=Modality.MULTIMODAL,
            role=Role.ENCODE,
            device=given.device,
            double_script=engine_args.pop("double", {}),
            args=engine_args,
        ),
        media=MediaConfig(allow_internal=True, max_file_bytes=given.max_file_size_mb * MEBIBYTE),
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StartupError("--override-engine-args must be a JSON object") from error
    if not isinstance(value, dict):
        raise StartupError("--override-engine-args must be a JSON object")
    return value


def _outputs(images: Sequence[str], output: Path, suffix: str) -> tuple[Path, ...]:
    """`output` itself for one image, else files inside it, named after the images."""
    if not output.is_dir():
        if len(images) > 1:
            raise StartupError("-o must be an existing directory when there are several images")
        if output.suffix.lower() not in SUFFIXES:
            raise StartupError(f"-o must end in {' or '.join(SUFFIXES)}, or be an existing directory")
        return (output,)
    names: list[str] = []
    for image in images:
        stem = "image" if image.startswith("data:") else Path(image.partition("?")[0]).stem or "image"
        name, count = stem, 1
        while name in names:
            count += 1
            name = f"{stem}-{count}"
        names.append(name)
    return tuple(output / f"{name}{suffix}" for name in names)


async def write_all(options: Options) -> int:
    """Start the engine, encode the images one after the other and write their files."""
    from dataclasses import replace

    from dynamo.trtllm.engines.factory import create_engine
    from dynamo.trtllm.model_files import resolve_model
    from dynamo.trtllm.multimodal.blocking import run_blocking
    from dynamo.trtllm.multimodal.fetch import Fetcher

    if options.engine.kind is EngineKind.DOUBLE:
        directory = options.engine.model_path
    else:
        directory = await resolve_model(options.engine.model_path)
    async with AsyncExitStack() as stack:
        fetcher = Fetcher(options.media)
        stack.push_async_callback(fetcher.close)
        images = [await _load(image, fetcher, options.media) for image in options.images]
        engine = create_engine(replace(options.engine, model_path=directory))
        stack.push_async_callback(engine.close)
        info = await engine.start()
        if "image" not in info.media or not info.media["image"].encodes:
            raise StartupError(
                "this model's images cannot be encoded by themselves with this engine, so no file can be made"
            )
        for name, image, output in zip(options.images, images, options.outputs, strict=True):
            (encoded,) = await engine.encode([image])
            await run_blocking(write_file, output, encoded)
            tokens, hidden = encoded.tensors["features"].shape
            print(f"{output}: {tokens} tokens of {hidden} from {_shorten(name)}")
    return 0


async def _load(image: str, fetcher: Fetcher, media: MediaConfig) -> DecodedImage:
    from dynamo.trtllm.multimodal.blocking import run_blocking
    from dynamo.trtllm.multimodal.decode import decode_image
    from dynamo.trtllm.multimodal.parts import MediaPart, classify

    try:
        if image.lower().startswith(_URL_PREFIXES):
            data = await fetcher.fetch(classify(MediaPart(1, "image", image), media))
        else:
            data = await run_blocking(Path(image).read_bytes)
        return await run_blocking(decode_image, data, media)
    except OSError as error:
        raise ClientFault(f"{_shorten(image)} cannot be read") from error
    except ClientFault as error:
        raise ClientFault(f"{_shorten(image)}: {error.message}") from error


def write_file(output: Path, encoded: EncodedMedia) -> None:
    """Write `encoded` to `output`, whose suffix names the format.
    Raises `StartupError` when it cannot be written."""
    import safetensors.torch
    import torch

    content = file_content(encoded)
    try:
        if output.suffix.lower() == ".safetensors":
            safetensors.torch.save_file(content, output)
        else:
            torch.save(content, output)
    except (OSError, RuntimeError) as error:
        raise StartupError(f"{output} cannot be written") from error


def file_content(encoded: EncodedMedia) -> dict[str, torch.Tensor]:
    """The dictionary of an embedding file: tensors on the CPU, each with a first dimension of one image."""
    import torch

    from dynamo.trtllm.multimodal.embedding_files import MAIN_KEY

    content = {}
    for name, tensor in encoded.tensors.items():
        content[name.replace("features", MAIN_KEY, 1)] = tensor.detach().to("cpu").contiguous()[None].clone()
    for name, value in encoded.extras.items():
        content[name] = torch.tensor([value])
    return content


def _shorten(image: str) -> str:
    from dynamo.trtllm.multimodal.parts import describe

    return describe(image)


if __name__ == "__main__":
    sys.exit(main())
