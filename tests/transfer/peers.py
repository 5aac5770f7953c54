"""What the transfer tests share: a clock that is set by hand,
and a real process that offers and fetches on command."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing as mp
import os
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from dynamo.trtllm.errors import WorkerError
from dynamo.trtllm.transfer.descriptor import TransferDescriptor
from dynamo.trtllm.transfer.nixl import NixlTransport
from dynamo.trtllm.transfer.pooled import PooledTransfer
from dynamo.trtllm.transfer.port import Offer, OfferState

ANSWER_TIMEOUT_S = 120.0

# Importing torch takes longest; a fork server does it once for all peer processes.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "pydantic"])


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def over_nixl(**options: Any) -> PooledTransfer:
    return PooledTransfer(NixlTransport(), **options)


class PeerProcess:
    """A process of its own with one transfer over NIXL. `ask` sends a command and returns the answer.

    Leaving the block ends the process.
    """

    def __init__(self, **options: Any) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_main, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    async def ask(self, command: str, *args: Any) -> Any:
        self._pipe.send((command, args))
        return await asyncio.get_running_loop().run_in_executor(None, self._answer)

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the peer process does not answer")
        return self._pipe.recv()

    async def offer(self, value: int, nbytes: int) -> TransferDescriptor:
        """Let the process offer `nbytes` bytes of `value` under the name `x`."""
        return TransferDescriptor.model_validate_json(await self.ask("offer", value, nbytes))

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


class _Commands:
    """The commands that a peer process understands."""

    def __init__(self, transfer: PooledTransfer) -> None:
        self._transfer = transfer
        self._offers: dict[int, Offer] = {}
        self._reader: PooledTransfer | None = None

    async def offer(self, value: int, nbytes: int) -> str:
        offer = await self._transfer.offer({"x": torch.full((nbytes,), value, dtype=torch.uint8)}, 30.0)
        self._offers[offer.descriptor.generation] = offer
        return offer.descriptor.model_dump_json()

    async def reuse(self, generation: int, value: int, nbytes: int) -> None:
        """Use the segment of an offer again at once, as if a reader had said that it is done with it."""
        await self._acknowledge(self._offers[generation])
        await self.offer(value, nbytes)

    async def forget_all(self) -> None:
        """Free all open offers at once."""
        for offer in self._offers.values():
            if offer.state is OfferState.OPEN:
                await self._acknowledge(offer)

    async def _acknowledge(self, offer: Offer) -> None:
        if self._reader is None:
            self._reader = over_nixl(pool_bytes=1 << 20)
            await self._reader.start()
        await self._reader.discard(offer.descriptor)
        await offer.settled(30.0)

    async def fetch(self, descriptor: str) -> str | tuple[int, int]:
        """Smallest and largest byte that arrived, or the name of the error."""
        try:
            async with await self._transfer.fetch(
                TransferDescriptor.model_validate_json(descriptor), 30.0
            ) as received:
                return int(received.tensors["x"].min()), int(received.tensors["x"].max())
        except WorkerError as error:
            return type(error).__name__

    async def used(self) -> int:
        """Bytes of the pool that are taken once all offers are settled."""
        await self._transfer.drain(30.0)
        return self._transfer.stats().pool_used_bytes

    async def resources(self) -> tuple[int, int]:
        return resources()


def resources() -> tuple[int, int]:
    """Resident bytes and open file descriptors of this process."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def _main(pipe: Connection, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, options))


async def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    transfer = over_nixl(**options)
    await transfer.start()
    commands = _Commands(transfer)
    loop = asyncio.get_running_loop()
    while True:
        try:
            command, args = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            break
        pipe.send(await getattr(commands, command)(*args))
    await transfer.close()
