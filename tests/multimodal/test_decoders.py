"""Decoding in processes of their own: the same images and refusals, and an end to what takes too long."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from dynamo.trtllm import metrics
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.core import DecodedImage
from dynamo.trtllm.errors import ClientFault, LimitFault, PartFault
from dynamo.trtllm.multimodal.decode import BROKEN, decode, size_of
from dynamo.trtllm.multimodal.decoders import SMALL_PIXELS, decode_apart
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal.parts import MediaPart
from fakes import eventually
from image_files import encoded
from media_parts import ROOMY, GatedEngine, loader_over, parts, png_url, taking_images

CONFIG = MediaConfig()
SMALL = 1
PASSES = 150


def pixels_of(data: bytes) -> int:
    width, height = size_of(data, CONFIG)
    return width * height


@cache
def slow_image() -> bytes:
    side = int(SMALL_PIXELS**0.5) + 8
    data = encoded(Image.new("L", (side, side)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * PASSES + data[-2:]


def slow_jpeg(number: int) -> bytes:
    """An image that is large and, by its passes, takes a second or more of a processor; each number is
    another one.
    """
    data = slow_image()
    return data[:2] + b"\xff\xfe\0\3" + bytes([number]) + data[2:]


def decoders_of(process: int) -> list[int]:
    """Its children that decode; a test run has other ones as well."""
    tasks = Path(f"/proc/{process}/task")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return [each for each in children if b"decoder_process" in _command_of(each)]


def _command_of(process: int) -> bytes:
    """Empty when it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def ticks_of(process: int) -> int:
    """Processor time of its own, in ticks of the clock; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11])
    except FileNotFoundError:
        return 0


def is_dead(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (Image.effect_noise((67, 31), 80).convert("RGB"), "PNG", {}),
        (Image.effect_noise((1, 1), 80).convert("RGBA"), "WebP", {"lossless": True}),
        (Image.effect_noise((400, 300), 80).convert("CMYK"), "JPEG", {}),
        (Image.effect_noise((33, 257), 80).convert("P"), "GIF", {}),
        (Image.new("RGB", (3000, 2000), (10, 20, 30)), "PNG", {}),
    ],
)
async def test_images_come_back_pixel_by_pixel_as_they_are_decoded_here(
    image: Image.Image, kind: str, options: dict[str, Any]
) -> None:
    data = encoded(image, kind, **options)
    for _ in range(2):
        apart = await decode_apart(data, pixels_of(data), CONFIG)
        here = decode(data, CONFIG)
        assert (apart.mode, apart.size) == ("RGB", image.size)
        assert ImageChops.difference(apart, here).getbbox() is None


@pytest.mark.asyncio
async def test_many_at_once_do_not_mix() -> None:
    images = [Image.new("RGB", (16 + n, 40 - n), (n, 2 * n, 255 - n)) for n in range(24)]
    found = await asyncio.gather(*(decode_apart(encoded(each, "PNG"), SMALL, CONFIG) for each in images))
    for one, other in zip(found, images, strict=True):
        assert (one.size, one.getpixel((1, 1))) == (other.size, other.getpixel((1, 1)))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("data", "words", "fault"),
    [
        (b"", "the image is empty", ClientFault),
        (encoded(Image.effect_noise((64, 64), 80), "PNG")[:-200], BROKEN, ClientFault),
        (
            encoded(Image.new("1", (9000, 9000)), "PNG"),
            "9000 x 9000 pixels exceed this worker's limit",
            LimitFault,
        ),
    ],
)
async def test_refusals_come_back_in_the_same_words(
    data: bytes, words: str, fault: type[ClientFault]
) -> None:
    with pytest.raises(fault) as caught:
        await decode_apart(data, SMALL, CONFIG)
    assert type(caught.value) is fault
    assert caught.value.message.startswith(words)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "data",
    [
        slow_jpeg(40),
        encoded(Image.effect_noise((3000, 3000), 99), "PNG"),
        encoded(Image.effect_noise((2500, 2500), 99).convert("RGB"), "TIFF", compression="tiff_lzw"),
    ],
    ids=["jpeg", "png", "tiff"],
)
async def test_what_takes_longer_than_the_limit_is_refused_and_the_next_image_decoded(data: bytes) -> None:
    width, height = size_of(data, CONFIG)
    with pytest.raises(LimitFault) as caught:
        await decode_apart(data, width * height, replace(CONFIG, decode_timeout_s=0.01))
    assert caught.value.message == "decoding the image takes longer than this worker's limit of 0.01 s"
    assert (await decode_apart(data, width * height, CONFIG)).size == (width, height)


def load(loader: MediaLoader, directory: Path, shade: int) -> asyncio.Task[Any]:
    path = directory / f"{shade}.jpg"
    path.write_bytes(slow_jpeg(shade))
    return asyncio.create_task(loader.load([MediaPart(1, "image", path.as_uri())], ROOMY))


async def slow_loader(directory: Path) -> MediaLoader:
    engine = GatedEngine()
    info = taking_images(await engine.start(), encodes=False)
    return await loader_over(engine, info=info, allowed_local_path=directory, local_files=True)


@pytest.mark.asyncio
async def test_others_images_are_decoded_while_many_slow_ones_are_under_way(tmp_path: Path) -> None:
    loader = await slow_loader(tmp_path)
    slow = [load(loader, tmp_path, shade) for shade in range(8)]
    await eventually(lambda: loader.stats()[metrics.MEDIA_DECODING.of("large")] > 0)
    for shade in range(100, 110):
        (item,) = await loader.load(parts(png_url(shade)), ROOMY)
        assert isinstance(item, DecodedImage)
        assert item.image.getpixel((0, 0)) == (shade,) * 3
    assert not all(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await loader.close()


@pytest.mark.asyncio
async def test_a_client_that_leaves_ends_the_decoding_of_its_image(tmp_path: Path) -> None:
    loader = await slow_loader(tmp_path)
    leaving = [load(loader, tmp_path, shade) for shade in range(20, 26)]
    before = {each: ticks_of(each) for each in decoders_of(os.getpid())}
    await eventually(
        lambda: any(ticks_of(each) > before.get(each, 0) + 5 for each in decoders_of(os.getpid()))
    )
    busy = decoders_of(os.getpid())
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await eventually(lambda: loader.stats()[metrics.MEDIA_DECODING.of("large")] == 0)
    assert any(map(is_dead, busy))
    (item,) = await loader.load(parts(png_url(77)), ROOMY)
    assert isinstance(item, DecodedImage)
    assert item.image.getpixel((0, 0)) == (77,) * 3
    await loader.close()


@pytest.mark.asyncio
async def test_too_long_an_image_is_named_by_its_part(tmp_path: Path) -> None:
    engine = GatedEngine()
    loader = await loader_over(engine, allowed_local_path=tmp_path, local_files=True, decode_timeout_s=0.01)
    path = tmp_path / "slow.jpg"
    path.write_bytes(slow_jpeg(90))
    with pytest.raises(PartFault, match="image 2: decoding the image takes longer than this worker's limit"):
        await loader.load([*parts(png_url(1)), MediaPart(2, "image", path.as_uri())], ROOMY)
    await loader.close()


@pytest.mark.asyncio
async def test_a_decoder_that_was_killed_between_two_images_is_replaced() -> None:
    data = encoded(Image.new("RGB", (4, 4), (1, 2, 3)), "PNG")
    assert (await decode_apart(data, SMALL, CONFIG)).getpixel((0, 0)) == (1, 2, 3)
    killed = decoders_of(os.getpid())
    for child in killed:
        os.kill(child, signal.SIGKILL)
    await eventually(lambda: all(map(is_dead, killed)))
    assert (await decode_apart(data, SMALL, CONFIG)).getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize("busy", [False, True])
def test_decoders_end_with_the_worker_even_when_it_is_killed(busy: bool, tmp_path: Path) -> None:
    picture = tmp_path / "image"
    picture.write_bytes(slow_jpeg(1) if busy else encoded(Image.new("RGB", (4, 4)), "PNG"))
    code = f"""
import asyncio, os, signal
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.multimodal.decode import size_of
from dynamo.trtllm.multimodal.decoders import decode_apart
data = open({str(picture)!r}, "rb").read()
async def main():
    width, height = size_of(data, MediaConfig())
    pixels = width * height
    job = asyncio.create_task(decode_apart(data, pixels, MediaConfig(decode_timeout_s=1.0)))
    if not {busy}:
        await job
    while not (found := children()):
        await asyncio.sleep(0.01)
    print(*found, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
def children():
    tasks = [f"/proc/self/task/{{task}}/children" for task in os.listdir("/proc/self/task")]
    return [child for task in tasks for child in open(task).read().split()]
asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == -signal.SIGKILL, out.stderr
    ended = [int(child) for child in out.stdout.split()]
    assert ended
    asyncio.run(eventually(lambda: all(map(is_dead, ended))))
