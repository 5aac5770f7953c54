"""The transports by name, and the transfer that a worker's configuration asks for.

Another transport is a module with a `Transport` and a line here.
Modules are imported when they are chosen, so none needs another one's library.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from dynamo.trtllm.config import TransferConfig
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.transfer.port import Transfer
from dynamo.trtllm.transfer.transport import Transport

TRANSPORTS: Mapping[str, str] = {
    "nixl": "dynamo.trtllm.transfer.nixl:NixlTransport",
    "local": "dynamo.trtllm.transfer.local:LocalTransport",
}


def create_transport(name: str) -> Transport:
    """A transport that is not connected yet. Raises `StartupError` for a name that is not listed."""
    if name not in TRANSPORTS:
        raise StartupError(f"there is no transfer backend '{name}'; choose one of {', '.join(TRANSPORTS)}")
    module, _, attribute = TRANSPORTS[name].partition(":")
    made: Transport = getattr(import_module(module), attribute)()
    return made


def create_transfer(config: TransferConfig) -> Transfer:
    """The transfer of a worker, not started yet."""
    from dynamo.trtllm.transfer.pooled import PooledTransfer

    return PooledTransfer(
        create_transport(config.backend),
        pool_bytes=config.pool_bytes,
        time_to_live_s=config.time_to_live_s,
        stage_cuda_on_host=config.through_host,
    )
