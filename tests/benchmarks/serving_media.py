#!/usr/bin/env python3
"""What a new and a repeated image cost before generation; run by `serving.py` in a process of its own.

Calls `MediaLoader.load`, as the aggregated and the encode worker do, with a photograph-like JPEG by http,
data and file URL: first one that was never seen, then the same again. Once over the double, which encodes in
no time, so that fetching, hashing, decoding and the cache are left; once over the portable engine, whose
vision tower then counts, too. Every round takes other images. Prints a JSON object per round: seconds of CPU
of the process and of those that decode for it, and of the clock.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "components" / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import uvloop  # noqa: E402
from PIL import Image  # noqa: E402

from dynamo.trtllm.config import EngineConfig, EngineKind, MediaConfig, Modality  # noqa: E402
from dynamo.trtllm.engines.factory import create_engine  # noqa: E402
from dynamo.trtllm.model_files import resolve_model  # noqa: E402
from dynamo.trtllm.multimodal.loader import MediaLoader, TokenBudget  # noqa: E402
from dynamo.trtllm.multimodal.parts import MediaPart  # noqa: E402

SIZE = (1024, 768)
SOURCES = ("http", "data", "file")
REPEATS = 3
BUDGET = TokenBudget(16, 1 << 20)
WEB_SERVERS: set[int] = set()
"""Processes that stand for other machines: their CPU does not count."""


def photograph(seed: int, size: tuple[int, int] = SIZE) -> bytes:
    """A JPEG of quality 85 with the texture of a photograph:
    smooth patches of several scales and some grain."""
    rng = np.random.default_rng(seed)
    width, height = size
    canvas = np.full((height, width, 3), 128.0)
    for cells, strength in ((4, 90.0), (16, 50.0), (64, 25.0), (256, 10.0)):
        patch = rng.uniform(0, 255, (max(2, cells * height // width), cells, 3)).astype(np.uint8)
        smooth = Image.fromarray(patch).resize(size, Image.Resampling.BICUBIC)
        canvas += (np.asarray(smooth, dtype=np.float64) - 128.0) * (strength / 128.0)
    canvas += rng.normal(0.0, 3.0, canvas.shape)
    sink = io.BytesIO()
    Image.fromarray(canvas.clip(0, 255).astype(np.uint8)).save(sink, "JPEG", quality=85)
    return sink.getvalue()


class _QuietHandler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _serve(directory: str, pipe: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_QuietHandler, directory=directory))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    try:
        pipe.recv()
    except EOFError:
        server.shutdown()


@contextmanager
def web_server(directory: Path) -> Iterator[str]:
    """Serves `directory` from a process of its own, whose CPU time is not the loader's; yields the URL."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(str(directory), theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    WEB_SERVERS.add(process.pid)
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join()


def url_of(source: str, image: Path, base: str) -> str:
    """The URL by which the client would send `image`."""
    if source == "http":
        return f"{base}/{image.name}"
    if source == "file":
        return image.as_uri()
    return "data:image/jpeg;base64," + base64.b64encode(image.read_bytes()).decode()


def children_cpu_s() -> float:
    """Seconds of CPU that the process's descendants have used,
    from the kernel's scheduler (proc(5), `schedstat`)."""
    own = str(os.getpid())
    seconds, pending = 0.0, [own]
    while pending:
        process = pending.pop()
        for task in Path(f"/proc/{process}/task").glob("*"):
            children = (task / "children").read_text().split()
            pending += [child for child in children if int(child) not in WEB_SERVERS]
            if process != own:
                seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


async def timed_load(loader: MediaLoader, url: str) -> tuple[float, float]:
    """Seconds of CPU and of the clock for one load."""
    part = MediaPart(1, "image", url)
    cpu, wall = time.process_time() + children_cpu_s(), time.perf_counter()
    await loader.load([part], BUDGET)
    return time.process_time() + children_cpu_s() - cpu, time.perf_counter() - wall


async def run_round(
    loaders: Mapping[str, MediaLoader], number: int, directory: Path, base: str
) -> dict[str, Any]:
    """New and repeated image by every kind of URL and over both engines;
    `repeated` is the mean of three loads."""
    result: dict[str, Any] = {}
    for at, (source, (name, loader)) in enumerate(itertools.product(SOURCES, loaders.items())):
        image = directory / f"{number}-{at}.jpeg"
        image.write_bytes(photograph(number * 100 + at))
        url = url_of(source, image, base)
        new = await timed_load(loader, url)
        again = [await timed_load(loader, url) for _ in range(REPEATS)]
        cpu, wall = (sum(column) / len(again) for column in zip(*again, strict=True))
        measured = {"new": {"cpu": new[0], "wall": new[1]}, "repeated": {"cpu": cpu, "wall": wall}}
        result.setdefault(name, {})[source] = measured
        image.unlink()
    return result


async def main(model_path: str, rounds: int) -> None:
    directory = await resolve_model(model_path)
    portable = EngineConfig(
        kind=EngineKind.TRANSFORMERS,
        model_path=directory,
        modality=Modality.MULTIMODAL,
        device="cpu",
        torch_threads=1,
    )
    double = EngineConfig(kind=EngineKind.DOUBLE, double_script={"placeholder_ids": {"image": 5}})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="photographs-")))
        base = stack.enter_context(web_server(folder))
        media = MediaConfig(allowed_local_path=folder, local_files=True, allow_internal=True)
        loaders = {}
        for name, config in (("decode", double), ("encode", portable)):
            engine = create_engine(config)
            stack.push_async_callback(engine.close)
            loaders[name] = MediaLoader(engine, await engine.start(), media, Modality.MULTIMODAL)
            stack.push_async_callback(loaders[name].close)
        await run_round(loaders, 0, folder, base)
        for number in range(1, rounds + 1):
            print(json.dumps(await run_round(loaders, number, folder, base)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    uvloop.run(main(options.model_path, options.rounds))
