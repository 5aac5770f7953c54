"""Builds the handler of a role; the only place that branches by role."""

from __future__ import annotations

from dynamo.trtllm.config import Role, WorkerConfig
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal_processor import MultimodalProcessor
from dynamo.trtllm.request_handlers.aggregated import AggregatedHandler
from dynamo.trtllm.request_handlers.handler_base import HandlerBase


def create_handler(config: WorkerConfig, engine: Engine, info: EngineInfo) -> HandlerBase:
    """The handler for `config.role` over a started engine."""
    if config.role is Role.AGGREGATED:
        media = MediaLoader(engine, info, config.media, config.model.modality)
        return AggregatedHandler(engine, info, MultimodalProcessor(info, media))
    raise StartupError(f"the {config.role.value} role is not available yet; use --disaggregation-mode agg")
