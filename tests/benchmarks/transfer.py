#!/usr/bin/env python3
"""Time of handing one embedding tensor from one process to another, for sizes from 0.1 to 64 MB.

Compares our transfer over NIXL with Dynamo's own `NixlRead` and `NixlWrite` pairs and with the floor: one
READ into memory that was registered beforehand on both sides, metadata exchanged once, no progress thread.
Each method runs in two fresh processes that talk over the same kind of pipe; a hand-over is: sender prepares,
descriptor over the pipe, reader has the tensor, reader's word over the pipe. Before each one all methods rest
alike. Rounds alternate between the methods, so that a busy spell of the machine does not fall on one of them.
Prints a table and the two bars at 4.7 MB, draws `transfer.png`, and exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from dynamo.trtllm.transfer.pooled import PooledTransfer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "components" / "src"))

HIDDEN = 4096
ROWS = (16, 64, 192, 576, 1152, 2304, 4608, 8192)
BAR_ROWS = 576
POOL_BYTES = 256 << 20
METHODS = {
    "ours": "this project",
    "host": "this project, through host memory",
    "floor": "floor: one READ",
    "write": "Dynamo NixlWrite",
    "read": "Dynamo NixlRead",
}
DEFAULT_METHODS = ["ours", "floor", "write", "read"]
PEERS = ("read", "write")
WARMUP = 5
STEP_TIMEOUT_S = 30.0
PAUSE_S = 0.003
"""Rest before each hand-over, the same for all: some methods end a hand-over after the reader's word,
outside of its time, and one that starts again without any rest finds its memory in the CPU's cache.
"""

Times = dict[tuple[str, int], list[float]]
Step = Callable[[torch.Tensor], Awaitable[Awaitable[Any] | None]]


class Channel:
    """The control channel of all methods: a pipe whose reading leaves the event loop free."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    async def receive(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)


def nbytes(rows: int) -> int:
    """Bytes of a bfloat16 tensor `[rows, HIDDEN]`."""
    return rows * HIDDEN * 2


async def started(through_host: bool) -> PooledTransfer:
    from dynamo.trtllm.transfer.nixl import NixlTransport
    from dynamo.trtllm.transfer.pooled import PooledTransfer

    transfer = PooledTransfer(NixlTransport(), pool_bytes=POOL_BYTES, stage_cuda_on_host=through_host)
    await transfer.start()
    return transfer


async def ours_sender(channel: Channel, device: str, through_host: bool = False) -> Step:
    transfer = await started(through_host)

    async def step(tensor: torch.Tensor) -> Awaitable[Any]:
        offer = await transfer.offer({"features": tensor}, 10.0)
        channel.send(offer.descriptor.model_dump_json())
        return offer.settled(10.0)

    return step


async def ours_reader(channel: Channel, device: str, through_host: bool = False) -> None:
    from dynamo.trtllm.transfer.descriptor import TransferDescriptor

    transfer = await started(through_host)
    while (message := await channel.receive()) is not None:
        descriptor = TransferDescriptor.model_validate_json(message)
        async with await transfer.fetch(
            descriptor, 10.0, device=device if through_host else None
        ) as received:
            channel.send(probe(received.tensors["features"]))
    await transfer.close()


def dynamo_sender(kind: str) -> Callable[[Channel, str], Awaitable[Step]]:
    async def prepare(channel: Channel, device: str) -> Step:
        from dynamo.common.multimodal import embedding_transfer

        sender = getattr(embedding_transfer, f"Nixl{kind}EmbeddingSender")()

        async def step(tensor: torch.Tensor) -> Awaitable[Any]:
            request, sent = await sender.send_embeddings(tensor, stage_embeddings=True)
            channel.send(request.model_dump_json())
            return asyncio.wait_for(sent, 10.0)

        return step

    return prepare


def dynamo_reader(kind: str) -> Callable[[Channel, str], Awaitable[None]]:
    async def receive(channel: Channel, device: str) -> None:
        from dynamo.common.multimodal import embedding_transfer

        cls = getattr(embedding_transfer, f"Nixl{kind}EmbeddingReceiver")
        receiver = cls(buffer_size=POOL_BYTES) if kind == "Write" else cls()
        while (message := await channel.receive()) is not None:
            request = embedding_transfer.TransferRequest.model_validate_json(message)
            tensor_id, tensor = await receiver.receive_embeddings(request)
            channel.send(probe(tensor))
            receiver.release_tensor(tensor_id)

    return receive


def floor_agent(name: str, device: str) -> tuple[Any, torch.Tensor]:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, device=device)
    agent.register_memory(pool)
    return agent, pool


async def floor_sender(channel: Channel, device: str) -> Step:
    agent, pool = floor_agent("sender", device)
    channel.send(agent.get_agent_metadata())
    # Without a progress thread the first READ ends only while this side looks, too.
    channel.send((pool.data_ptr(), nbytes(1)))
    connected = asyncio.ensure_future(channel.receive())
    while not connected.done():
        agent.get_new_notifs()
        await asyncio.sleep(0)

    async def step(tensor: torch.Tensor, agent: Any = agent) -> None:
        pool[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        if pool.is_cuda:
            torch.cuda.synchronize()
        channel.send((pool.data_ptr(), tensor.nbytes))

    return step


async def floor_reader(channel: Channel, device: str) -> None:
    agent, pool = floor_agent("reader", device)
    peer = agent.add_remote_agent(await channel.receive())
    kind = "VRAM" if pool.is_cuda else "DRAM"
    while (message := await channel.receive()) is not None:
        address, length = message
        target = agent.get_xfer_descs([(pool.data_ptr(), length, 0)], mem_type=kind)
        source = agent.get_xfer_descs([(address, length, 0)], mem_type=kind)
        handle = agent.initialize_xfer("READ", target, source, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        channel.send(probe(pool[:length].view(torch.bfloat16).view(-1, HIDDEN)))


SENDERS: dict[str, Callable[[Channel, str], Awaitable[Step]]] = {
    "ours": ours_sender,
    "host": partial(ours_sender, through_host=True),
    "read": dynamo_sender("Read"),
    "write": dynamo_sender("Write"),
    "floor": floor_sender,
}
READERS: dict[str, Callable[[Channel, str], Awaitable[None]]] = {
    "ours": ours_reader,
    "host": partial(ours_reader, through_host=True),
    "read": dynamo_reader("Read"),
    "write": dynamo_reader("Write"),
    "floor": floor_reader,
}


def probe(tensor: torch.Tensor) -> tuple[int, float, float]:
    """What the reader says it received: rows, first and last element. Cheap, so that it does not count."""
    return tensor.shape[0], float(tensor[0, 0]), float(tensor[-1, -1])


async def run_sender(
    method: str, pipe: Connection, results: Connection, rows_list: Sequence[int], count: int, device: str
) -> None:
    channel = Channel(pipe)
    step = await SENDERS[method](channel, device)
    for rows in rows_list:
        tensor = torch.randn(rows, HIDDEN).to(torch.bfloat16).to(device)
        times = []
        for turn in range(WARMUP + count):
            tensor[0, 0] = turn
            await asyncio.sleep(PAUSE_S)
            start = time.perf_counter()
            sent = await step(tensor)
            answer = await channel.receive()
            times.append(time.perf_counter() - start)
            if answer != (rows, float(turn), float(tensor[-1, -1])):
                raise RuntimeError("the reader received something else")
            if sent is not None:
                await sent
        results.send((rows, times[WARMUP:]))
    channel.send(None)


async def serve(method: str, pipe: Connection, device: str) -> None:
    await READERS[method](Channel(pipe), device)


def child(
    method: str, pipe: Connection, results: Connection | None, rows: Sequence[int], count: int, device: str
) -> None:
    """A process of one method. Its own noise goes nowhere: a failure shows as a closed pipe."""
    if device == "cpu":
        _keep_to_one_cpu(0 if results is None else -1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    work = (
        serve(method, pipe, device)
        if results is None
        else run_sender(method, pipe, results, rows, count, device)
    )
    asyncio.run(_to_the_end(work))


def _keep_to_one_cpu(index: int) -> None:
    """Where the scheduler puts the two processes, and whether it moves them, decides about a factor of two
    on memory copies; so each has a CPU of its own, in every method.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        os.sched_setaffinity(0, {cpus[index]})


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Leave at once, whatever happens: Dynamo's receivers keep threads
    that outlive the loop and would hold the pipe open."""
    try:
        await work
    finally:
        os._exit(0)


def measure(
    method: str, rows: Sequence[int], count: int, device: str, times: Times, done: Callable[[], None]
) -> None:
    """One round of a method. Where it fails at a size, the next sizes get new processes,
    and later rounds leave that one out."""
    remaining = [size for size in rows if times.get((method, size)) != []]
    for _ in range(len(rows) - len(remaining)):
        done()
    while remaining:
        finished = _run_pair(method, remaining, count, device, times, done)
        remaining = remaining[finished:]
        if remaining:
            times.setdefault((method, remaining.pop(0)), [])
            done()


def _run_pair(
    method: str, rows: Sequence[int], count: int, device: str, times: Times, done: Callable[[], None]
) -> int:
    """Returns how many of the sizes were measured before a failure."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    results, results_end = context.Pipe(duplex=False)
    pair = [
        context.Process(target=child, args=(method, ours, results_end, rows, count, device)),
        context.Process(target=child, args=(method, theirs, None, rows, count, device)),
    ]
    finished = 0
    try:
        for process in pair:
            process.start()
        for end in (ours, theirs, results_end):
            end.close()
        with contextlib.suppress(EOFError):
            while finished < len(rows) and results.poll(STEP_TIMEOUT_S):
                size, measured = results.recv()
                times.setdefault((method, size), []).extend(measured)
                finished += 1
                done()
    finally:
        for process in pair:
            process.join(2.0)
            process.kill()
            process.join()
    return finished


def show(console: Console, methods: Sequence[str], rows: Sequence[int], times: Times) -> None:
    table = Table(title="hand-over between two processes: median (best), ms")
    table.add_column("MB", justify="right")
    for method in methods:
        table.add_column(METHODS[method], justify="right")
    for size in rows:
        cells = []
        for method in methods:
            measured = sorted(times.get((method, size), []))
            cells.append(
                f"{statistics.median(measured) * 1e3:.2f} ({measured[0] * 1e3:.2f})" if measured else "fails"
            )
        table.add_row(f"{nbytes(size) / 1e6:.2f}", *cells)
    console.print(table)


def check_bars(console: Console, times: Times) -> bool:
    """Print the two bars at 4.7 MB; true when both hold."""
    median = {
        method: statistics.median(values)
        for (method, rows), values in times.items()
        if rows == BAR_ROWS and values
    }
    peers = [median[method] for method in PEERS if method in median]
    bars = []
    if "ours" in median and peers:
        bars.append(("of the best Dynamo peer", median["ours"] / min(peers), 0.5))
    if "ours" in median and "floor" in median:
        bars.append(("of the floor", median["ours"] / median["floor"], 2.0))
    for name, ratio, bar in bars:
        console.print(f"{'pass' if ratio <= bar else 'FAIL'}: 4.7 MB takes {ratio:.2f} {name} (bar {bar})")
    return bool(bars) and all(ratio <= bar for _, ratio, bar in bars)


def plot(path: Path, methods: Sequence[str], rows: Sequence[int], times: Times, device: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for method in methods:
        points = [
            (nbytes(size) / 1e6, statistics.median(times[method, size]) * 1e3)
            for size in rows
            if times.get((method, size))
        ]
        if points:
            axes.loglog(
                *zip(*points, strict=True),
                marker="o",
                label=METHODS[method],
                linestyle="--" if method == "floor" else "-",
            )
    axes.set(
        xlabel="tensor, MB",
        ylabel="hand-over, ms (median)",
        title=f"Embedding hand-over between two processes ({device})",
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="folder of the image")
    parser.add_argument("--count", type=int, default=20, help="hand-overs per size and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), help=f"rows of {HIDDEN} bfloat16 numbers"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=DEFAULT_METHODS)
    parser.add_argument("--device", default="cpu", help="where the tensors are: cpu or cuda:N")
    return parser.parse_args()


def main() -> int:
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console()
    times: Times = {}
    with Progress(console=console) as progress:
        for number in range(options.rounds):
            order = options.methods if number % 2 == 0 else options.methods[::-1]
            for method in order:
                task = progress.add_task(f"round {number + 1}: {METHODS[method]}", total=len(options.rows))
                measure(
                    method,
                    options.rows,
                    options.count,
                    options.device,
                    times,
                    lambda task=task: progress.advance(task),
                )  # type: ignore[misc]
    show(console, options.methods, options.rows, times)
    held = check_bars(console, times)
    plot(options.out / "transfer.png", options.methods, options.rows, times, options.device)
    console.print(
        f"image: {options.out / 'transfer.png'}; CPUs: {os.cpu_count()}; load: {os.getloadavg()[0]:.1f}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
