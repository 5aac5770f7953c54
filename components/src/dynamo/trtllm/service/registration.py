"""What Dynamo is told of this worker: its model's card, its type and the peers that it needs."""

from __future__ import annotations

from dynamo.common.token_budget import TokenBudget, publish_token_budget
from dynamo.common.utils.endpoint_types import parse_endpoint_types
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import Endpoint

from dynamo.trtllm.config import ModelConfig, PeerConfig, Role, RuntimeConfig, WorkerConfig
from dynamo.trtllm.engines.port import Engine, EngineInfo
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.peers.messages import SCHEMA_KEY, SCHEMA_VERSION
from dynamo.trtllm.service.presence import Republished

_WORKER_TYPES = {
    Role.AGGREGATED: WorkerType.Aggregated,
    Role.PREFILL: WorkerType.Prefill,
    Role.DECODE: WorkerType.Decode,
    Role.ENCODE: WorkerType.Encode,
}


class Registration:
    """Registers one worker, and again after discovery has lost it: with the same card."""

    def __init__(self, endpoint: Endpoint, config: WorkerConfig, engine: Engine, info: EngineInfo) -> None:
        self._endpoint = endpoint
        self._config = config
        self._engine = engine
        self._info = info
        self._card: ModelRuntimeConfig | None = None
        self._publishers: list[Republished] = []

    async def first(self) -> None:
        """Before the worker serves. Raises `StartupError`."""
        try:
            await self._register()
        except StartupError:
            raise
        except Exception as error:  # the binding raises plain Exception
            backend = self._config.runtime.discovery_backend
            raise StartupError(f"cannot register with discovery {backend}: {error}") from error

    async def again(self) -> None:
        """While the worker serves: the model, its instance, and the publishers of KV cache events."""
        await self._register()
        await self._endpoint.register_endpoint_instance()
        for publisher in self._publishers:
            publisher.renew()

    async def _register(self) -> None:
        config, model = self._config, self._config.model
        if self._card is None:
            self._card = runtime_config(self._info, config.runtime, model, config.role)
            self._card.kv_event_publishing_enabled = self._engine.attach_kv_publisher(self._kv_publisher)
        await register_model(
            ModelInput.Tokens,
            model_type(config.role, config.runtime),
            self._endpoint,
            config.engine.model_path,
            model.name,
            worker_type=_WORKER_TYPES[config.role],
            needs=needs(config.role, config.peers),
            kv_cache_block_size=self._info.kv_block_size,
            runtime_config=self._card,
            custom_template_path=model.custom_jinja_template,
            model_aliases=list(model.served_names[1:]) or None,
            ignore_weights=True,
        )

    def _kv_publisher(self, dp_rank: int) -> Republished:
        runtime = self._config.runtime
        publisher = Republished(
            lambda: KvEventPublisher(
                self._endpoint,
                kv_block_size=self._info.kv_block_size,
                dp_rank=dp_rank,
                enable_local_indexer=runtime.enable_local_indexer,
                image_token_id=self._info.placeholder_id("image"),
                kv_state_endpoint=runtime.kv_state_endpoint,
            )
        )
        self._publishers.append(publisher)
        return publisher


def model_type(role: Role, config: RuntimeConfig) -> ModelType:
    """What the frontend may send here: OpenAI to aggregated and decode,
    prefill by its marker, nothing to encode."""
    if role.decodes:
        return parse_endpoint_types(",".join(config.endpoint_types))
    return ModelType.Prefill if role.prefills else ModelType.Empty


def needs(role: Role, peers: PeerConfig) -> list[list[WorkerType]]:
    """The peers without which the model is not ready: a list of alternatives,
    each a list of worker types that must all live."""
    encode = [WorkerType.Encode] if peers.encode_endpoint and not peers.encode_fallback else []
    return {
        Role.AGGREGATED: [encode] if encode else [],
        Role.PREFILL: [[WorkerType.Decode, *encode]],
        Role.DECODE: [[WorkerType.Prefill]],
        Role.ENCODE: [[WorkerType.Prefill, WorkerType.Decode], [WorkerType.Aggregated]],
    }[role]


def runtime_config(
    info: EngineInfo, runtime: RuntimeConfig, model: ModelConfig, role: Role
) -> ModelRuntimeConfig:
    """The model card's facts that routers and the frontend use."""
    card = ModelRuntimeConfig()
    card.context_length = info.context_length
    if info.total_kv_blocks is not None:
        card.total_kv_blocks = info.total_kv_blocks
    card.max_num_seqs = info.max_num_seqs
    card.max_num_batched_tokens = info.max_num_batched_tokens
    card.tool_call_parser = model.tool_call_parser
    card.reasoning_parser = model.reasoning_parser
    card.exclude_tools_when_tool_choice_none = runtime.exclude_tools_when_tool_choice_none
    card.enable_local_indexer = runtime.enable_local_indexer and role.reads_media
    card.data_parallel_size = info.data_parallel_size
    if runtime.structural_tag is not None:
        card.set_structural_tag(dict(runtime.structural_tag))
    if runtime.default_thinking_mode:
        card.set_engine_specific("default_thinking_mode", f'"{runtime.default_thinking_mode}"')
    if runtime.kv_state_endpoint:
        card.kv_state_endpoint = runtime.kv_state_endpoint
    card.set_engine_specific(SCHEMA_KEY, f'"{SCHEMA_VERSION}"')
    # The frontend's own refusal reads "Invalid request"; ours names both counts, so it is left to us.
    publish_token_budget(
        card, TokenBudget(info.context_length, reject_prompt_overflow=False, reject_total_overflow=False)
    )
    return card
