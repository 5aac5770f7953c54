"""Builds the handler of a role; the only place that branches by role."""

from __future__ import annotations

import logging
from typing import Any

from dynamo.trtllm.config import Role, TransferConfig, WorkerConfig
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.frontend.stop_strings import StopStrings
from dynamo.trtllm.multimodal.kinds.registry import in_words, plural_of
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.peers.client import connect
from dynamo.trtllm.peers.encode import RemoteEncoder
from dynamo.trtllm.peers.prefill import PrefillPeers
from dynamo.trtllm.peers.split_media import SplitMedia
from dynamo.trtllm.request_handlers.aggregated import AggregatedHandler
from dynamo.trtllm.request_handlers.decode import DecodeHandler
from dynamo.trtllm.request_handlers.encode import EncodeHandler
from dynamo.trtllm.request_handlers.handler_base import HandlerBase
from dynamo.trtllm.request_handlers.prefill import PrefillHandler
from dynamo.trtllm.transfer.port import Transfer
from dynamo.trtllm.transfer.registry import create_transfer

logger = logging.getLogger(__name__)


async def create_handler(config: WorkerConfig, engine: Engine, info: EngineInfo, runtime: Any) -> HandlerBase:
    """The handler for `config.role` over a started engine;
    starts the transfer where the role hands over or receives tensors.

    `runtime` is Dynamo's `DistributedRuntime`.
    Raises `StartupError` when the transfer cannot be used on this machine.
    """
    if config.role is Role.ENCODE and not any(
        kind.encodes or kind.takes_files for kind in info.media.values()
    ):
        raise StartupError(
            "this model has no separate encoder: drop the encode worker and let prefill encode"
        )
    if config.role is Role.AGGREGATED and config.peers.encode_endpoint is None:
        return AggregatedHandler(
            engine, info, await _processor(config, engine, info, runtime, None), _stops(config)
        )
    transfer = await _start_transfer(config.transfer)
    try:
        return await _handler_over(transfer, config, engine, info, runtime)
    except BaseException:
        await transfer.close()
        raise


async def _handler_over(
    transfer: Transfer, config: WorkerConfig, engine: Engine, info: EngineInfo, runtime: Any
) -> HandlerBase:
    if config.role is Role.AGGREGATED:
        processor = await _processor(config, engine, info, runtime, transfer)
        return AggregatedHandler(engine, info, processor, _stops(config), transfer)
    if config.role is Role.PREFILL:
        processor = await _processor(config, engine, info, runtime, transfer)
        return PrefillHandler(engine, info, processor, transfer)
    if config.role is Role.DECODE:
        client = await connect(runtime, config.peers.prefill_endpoint, "prefill")
        prefill = PrefillPeers(client, config.peers.timeout_s)
        return DecodeHandler(engine, info, transfer, prefill, _stops(config))
    return EncodeHandler(engine, info, _loader(config, engine, info), transfer)


async def _processor(
    config: WorkerConfig, engine: Engine, info: EngineInfo, runtime: Any, transfer: Transfer | None
) -> MultimodalProcessor:
    if config.peers.encode_endpoint is None or transfer is None:
        return MultimodalProcessor(info, _loader(config, engine, info))
    if not any(kind.takes_encoded or kind.takes_files for kind in info.media.values()):
        raise StartupError("this model takes no embeddings from an encode worker: remove --encode-endpoint")
    fallback = _loader(config, engine, info) if config.peers.encode_fallback else None
    client = await connect(runtime, config.peers.encode_endpoint, "encode")
    remote = RemoteEncoder(client, transfer, config.peers, config.media, fallback)
    here = [plural_of(name) for name, kind in info.media.items() if not kind.takes_encoded]
    if not here:
        return MultimodalProcessor(info, remote)
    logger.warning(
        "%s of this model are encoded here; --encode-endpoint is asked for the rest, and for embedding files",
        in_words(here),
    )
    return MultimodalProcessor(info, SplitMedia(_loader(config, engine, info), remote, info.media))


def _loader(config: WorkerConfig, engine: Engine, info: EngineInfo) -> MediaLoader:
    return MediaLoader(engine, info, config.media, config.model.modality)


def _stops(config: WorkerConfig) -> StopStrings:
    return StopStrings(config.engine.model_path)


async def _start_transfer(config: TransferConfig) -> Transfer:
    transfer = create_transfer(config)
    await transfer.start()
    return transfer
