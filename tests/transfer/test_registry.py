"""A transport is chosen by its name, and the transfer over it gets all that was configured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamo.trtllm.config import TransferConfig
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.transfer import pooled
from dynamo.trtllm.transfer.registry import TRANSPORTS, create_transfer, create_transport


@pytest.mark.asyncio
async def test_a_transfer_has_the_backend_the_memory_and_the_time_to_live_that_were_configured() -> None:
    transfer = create_transfer(TransferConfig(backend="local", pool_bytes=1 << 16, time_to_live_s=3.0))
    await transfer.start()
    offer = await transfer.offer({"x": torch.zeros(4)})
    assert transfer.stats().pool_bytes == 1 << 16
    assert (offer.descriptor.transport, offer.descriptor.time_to_live_s) == ("local", 3.0)
    await transfer.close()


@pytest.mark.parametrize("through_host", [True, False])
def test_staging_on_the_host_is_passed_on(monkeypatch: pytest.MonkeyPatch, through_host: bool) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        pooled, "PooledTransfer", lambda transport, **options: asked.append(options["stage_cuda_on_host"])
    )
    create_transfer(TransferConfig(backend="local", through_host=through_host))
    assert asked == [through_host]


def test_every_listed_transport_goes_by_the_name_in_its_descriptors() -> None:
    assert {name: create_transport(name).name for name in TRANSPORTS} == {name: name for name in TRANSPORTS}


def test_an_unknown_backend_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(StartupError, match="no transfer backend 'carrier-pigeon'; choose one of nixl, local"):
        create_transport("carrier-pigeon")
