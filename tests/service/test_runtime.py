"""The worker's life in Dynamo: what is registered, the order of shutting down,
and with which code the process ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dynamo.llm import ModelInput, ModelType, WorkerType
from dynamo.llm import exceptions as dynamo

from dynamo.trtllm import model_files
from dynamo.trtllm.config import (
    EngineConfig,
    EngineKind,
    ModelConfig,
    PeerConfig,
    Role,
    RuntimeConfig,
    WorkerConfig,
)
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.engines.port import EngineInfo
from dynamo.trtllm.errors import EngineDead, EngineFault, ShuttingDown, StartupError
from dynamo.trtllm.frontend.endpoint import EndpointServer
from dynamo.trtllm.service import presence, registration, runtime
from dynamo.trtllm.service.metrics_page import MetricsPage
from dynamo.trtllm.service.registration import model_type, needs, runtime_config
from dynamo.trtllm.service.runtime import Pace, Service, health_check_payload
from fakes import FakeContext, FakeSender, collect, outcome, until

INFO = EngineInfo(
    context_length=100, kv_block_size=16, total_kv_blocks=3, max_num_seqs=4, max_num_batched_tokens=5
)
ENCODE = PeerConfig(encode_endpoint="dyn://n.tensorrt_llm_encode.generate")


class FakeEndpoint:
    """Serves until `ended` is set; `served` says that it does. A client of its own, which shows `ids`."""

    def __init__(self) -> None:
        self.served = asyncio.Event()
        self.ended = asyncio.Event()
        self.options: dict[str, Any] = {}
        self.handler: Callable[..., Any] | None = None
        self.ids = [7]
        self.back = asyncio.Event()

    async def client(self) -> FakeEndpoint:
        return self

    def instance_ids(self) -> list[int]:
        return self.ids

    async def wait_for_instances_by_runtime_data(self, *args: Any) -> list[int]:
        return self.ids

    async def register_endpoint_instance(self) -> None:
        self.ids = [7]
        self.back.set()

    def connection_id(self) -> int:
        return 7

    async def serve_endpoint(self, handler: Callable[..., Any], **options: Any) -> None:
        self.handler, self.options = handler, options
        self.served.set()
        await self.ended.wait()


class FakeRuntime:
    def __init__(self) -> None:
        self.made = FakeEndpoint()
        self.names: list[str] = []

    def endpoint(self, name: str) -> FakeEndpoint:
        self.names.append(name)
        return self.made

    def shutdown(self) -> None:
        self.made.ended.set()


class Engine(DoubleEngine):
    """The double with a health that tests set; `looked` counts the looks at it."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(kind=EngineKind.DOUBLE))
        self.health: list[Exception] = []
        self.looked = 0

    async def check_health(self) -> None:
        self.looked += 1
        if self.health:
            raise self.health.pop(0)


class NoHandler:
    async def respond(self, raw: Mapping[str, Any], context: Any) -> Any:
        raise NotImplementedError


class World:
    """A service over fakes. `steps` holds in order what happened."""

    def __init__(self, role: Role = Role.AGGREGATED, model: ModelConfig | None = None) -> None:
        self.runtime = FakeRuntime()
        self.engine = Engine()
        self.steps: list[str] = []
        self.grace_s: list[float] = []
        self.last_resorts_s: list[float] = []
        config = WorkerConfig(role=role, model=model or ModelConfig(served_names=("m", "alias")))
        self.config = replace(config, engine=replace(config.engine, model_path="/models/m"))
        fake: Any = self.runtime
        self.service = Service(fake, self.config, self.engine, INFO, Pace(health_s=0.0, cancel_s=0.001))
        self.server = EndpointServer(NoHandler(), on_dead=self.service.died)
        self.registered: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    async def drained(self) -> None:
        self.steps.append(f"drained, accepting={self.server.accepting}")

    async def register(self, *args: Any, **options: Any) -> None:
        self.steps.append("registered")
        self.registered = args, options

    async def leave(
        self,
        made: FakeRuntime,
        endpoints: list[Any],
        *,
        grace_period_s: float,
        drain_callback: Callable[[], Awaitable[None]],
    ) -> None:
        """Dynamo's graceful shutdown, without its waits."""
        assert endpoints == [made.made]
        self.grace_s.append(grace_period_s)
        await drain_callback()
        self.steps.append(f"left, accepting={self.server.accepting}")
        made.shutdown()

    running: asyncio.Task[int]

    def run(self) -> asyncio.Task[int]:
        metrics = MetricsPage(Role.AGGREGATED)
        return asyncio.create_task(
            self.service.run(self.server, metrics, self.drained, self.engine.check_health)
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(registration, "register_model", made.register)
    monkeypatch.setattr(runtime, "graceful_shutdown_with_discovery", made.leave)
    monkeypatch.setattr(MetricsPage, "expose", lambda self, endpoint, config: made.steps.append("metrics"))
    monkeypatch.setattr(runtime, "exit_after", made.last_resorts_s.append)
    for name in ("LOOK_S", "CARD_PAUSE_S"):
        monkeypatch.setattr(presence, name, 0.001)
    return made


@pytest.mark.asyncio
async def test_a_worker_registers_its_model_and_serves_it_with_a_canary(world: World) -> None:
    running = world.run()
    await world.runtime.made.served.wait()
    assert world.registered is not None
    args, options = world.registered
    assert (args[0], args[2:]) == (ModelInput.Tokens, (world.runtime.made, "/models/m", "m"))
    assert (options["worker_type"], options["needs"], options["kv_cache_block_size"]) == (
        WorkerType.Aggregated,
        [],
        16,
    )
    assert (options["model_aliases"], options["ignore_weights"]) == (["alias"], True)
    assert world.runtime.made.handler == world.server.serve
    assert world.runtime.made.options["health_check_payload"] == health_check_payload(RuntimeConfig())
    assert world.runtime.made.options["metrics_labels"] == [("model", "m")]
    assert (world.service.instance_id, world.runtime.names) == (7, ["dyn://dynamo.tensorrt_llm.generate"])
    signal.raise_signal(signal.SIGTERM)
    assert await running == 0


@pytest.mark.asyncio
async def test_a_signal_drains_and_only_then_refuses_requests_and_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "1.5")
    running = world.run()
    await world.runtime.made.served.wait()
    signal.raise_signal(signal.SIGTERM)
    assert await running == 0
    assert world.steps == ["metrics", "registered", "drained, accepting=True", "left, accepting=False"]
    assert world.grace_s == [1.5]


@pytest.mark.asyncio
async def test_draining_waits_for_requests_in_flight(world: World) -> None:
    (asked,) = await ask_waiting(world, 1)
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: bool(world.grace_s))
    assert world.steps == ["metrics", "registered"]
    asked.cancel()
    assert await world.running == 0
    assert world.steps[2:] == ["drained, accepting=True", "left, accepting=False"]


@pytest.mark.asyncio
async def test_a_dead_engine_ends_the_process_with_an_error_once_and_without_grace(world: World) -> None:
    running = world.run()
    await world.runtime.made.served.wait()
    world.service.died(EngineDead("the engine died"))
    world.service.died(EngineDead("the engine died"))
    assert await running == 1
    assert (world.grace_s, world.last_resorts_s) == ([0.0], [5.0])


class Waiting:
    """A handler whose requests wait for ever; `started` counts them."""

    def __init__(self) -> None:
        self.started = 0

    async def respond(self, raw: Mapping[str, Any], context: Any) -> Any:
        self.started += 1
        await asyncio.Event().wait()


async def ask_waiting(world: World, count: int) -> list[asyncio.Task[Any]]:
    """So many requests in flight that nothing answers."""
    handler = Waiting()
    world.server = EndpointServer(handler, on_dead=world.service.died)
    world.running = world.run()
    await world.runtime.made.served.wait()
    serve = world.server.serve
    streams = [serve({}, FakeContext(str(i)), response_sender=FakeSender()) for i in range(count)]
    asked = [asyncio.create_task(collect(stream)) for stream in streams]
    await until(lambda: handler.started == count)
    return asked


@pytest.mark.asyncio
async def test_a_dead_engine_ends_the_requests_in_flight_and_leaves_little_time_for_hand_overs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0.01")
    monkeypatch.setattr(world, "drained", asyncio.Event().wait)
    asked = await ask_waiting(world, 6)
    world.engine.health = [EngineDead("the engine died")]
    assert {type(await outcome(each)) for each in asked} == {dynamo.EngineShutdown}
    assert await world.running == 1
    assert world.last_resorts_s == [3.0]


@pytest.mark.asyncio
async def test_an_engine_that_dies_while_the_worker_drains_ends_its_requests_too(world: World) -> None:
    asked = await ask_waiting(world, 2)
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: bool(world.grace_s))
    world.service.died(EngineDead("the engine died"))
    assert {str(await outcome(each)) for each in asked} == {"the engine died"}
    assert await world.running == 1
    assert world.last_resorts_s == [65.0, 5.0]


@pytest.mark.asyncio
async def test_requests_that_outlast_the_drain_are_given_up_to_other_workers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def impatient(
        made: FakeRuntime, endpoints: Any, drain_callback: Callable[[], Any], **rest: Any
    ) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(drain_callback(), 0.001)
        made.shutdown()

    monkeypatch.setattr(runtime, "graceful_shutdown_with_discovery", impatient)
    asked = await ask_waiting(world, 2)
    signal.raise_signal(signal.SIGTERM)
    raised = [await outcome(each) for each in asked]
    assert {type(each) for each in raised} == {dynamo.EngineShutdown}
    assert {str(each) for each in raised} == {"this worker is shutting down"}
    assert await world.running == 0


@pytest.mark.asyncio
async def test_an_engine_that_dies_while_nobody_asks_is_found_by_the_health_watch(world: World) -> None:
    world.engine.health = [
        EngineFault("hiccup"),
        RuntimeError("the check is broken"),
        EngineDead("the engine died"),
    ]
    assert await world.run() == 1
    assert world.engine.looked == 3


@pytest.mark.asyncio
async def test_a_runtime_that_stops_serving_by_itself_is_an_error(world: World) -> None:
    running = world.run()
    await world.runtime.made.served.wait()
    world.runtime.shutdown()
    assert await running == 1


@pytest.mark.asyncio
async def test_a_worker_that_discovery_has_lost_registers_its_card_and_its_instance_again(
    world: World,
) -> None:
    running = world.run()
    await world.runtime.made.served.wait()
    assert world.registered is not None
    first = world.registered[1]
    world.registered = None
    world.runtime.made.ids = []
    await asyncio.wait_for(world.runtime.made.back.wait(), 20)
    assert world.registered is not None
    again = world.registered[1]
    assert (again["runtime_config"], again["needs"]) == (first["runtime_config"], first["needs"])
    signal.raise_signal(signal.SIGTERM)
    assert await running == 0


@pytest.mark.asyncio
async def test_a_worker_that_cannot_register_again_leaves_with_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    running = world.run()
    await world.runtime.made.served.wait()
    monkeypatch.setattr(presence, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(registration, "register_model", full)
    world.runtime.made.ids = []
    assert await running == 1
    assert (world.grace_s, world.last_resorts_s) == ([0.0], [60.0])


@pytest.mark.asyncio
async def test_a_worker_that_leaves_does_not_come_back(world: World) -> None:
    await ask_waiting(world, 1)
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: bool(world.grace_s))
    world.registered = None
    world.runtime.made.ids = []
    await asyncio.sleep(20 * presence.LOOK_S)  # twenty looks of a watch that must be over
    assert (world.registered, world.runtime.made.ids) == (None, [])
    world.server.end_all(ShuttingDown("the end of the test"))
    assert await world.running == 0


@pytest.mark.asyncio
async def test_a_second_signal_exits_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(runtime.os, "_exit", codes.append)
    monkeypatch.setattr(runtime.logging, "shutdown", lambda: None)
    await ask_waiting(world, 1)
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: bool(world.grace_s))
    assert codes == []
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: bool(codes))
    assert codes == [70]
    world.server.end_all(ShuttingDown("the end of the test"))
    await world.running


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StartupError("no"), "no"),
        (Exception("no such directory"), "cannot register with discovery etcd: no such directory"),
    ],
)
async def test_a_registration_that_fails_ends_the_run_in_one_sentence_and_its_health_watch(
    error: Exception, words: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(registration, "register_model", refused)
    ended = await outcome(world.run())
    assert isinstance(ended, StartupError)
    assert str(ended) == words
    await until(lambda: not any(task.get_name() == "engine-health" for task in asyncio.all_tasks()))


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        (Role.AGGREGATED, ModelType.Chat | ModelType.Completions),
        (Role.DECODE, ModelType.Chat | ModelType.Completions),
        (Role.PREFILL, ModelType.Prefill),
        (Role.ENCODE, ModelType.Empty),
    ],
)
def test_each_role_is_registered_for_what_the_frontend_may_send_it(role: Role, kind: ModelType) -> None:
    assert str(model_type(role, RuntimeConfig())) == str(kind)


def test_endpoint_types_narrow_what_is_served() -> None:
    assert str(model_type(Role.AGGREGATED, RuntimeConfig(endpoint_types=("chat",)))) == str(ModelType.Chat)


@pytest.mark.parametrize(
    ("role", "peers", "expected"),
    [
        (Role.AGGREGATED, PeerConfig(), []),
        (Role.AGGREGATED, ENCODE, [[WorkerType.Encode]]),
        (Role.AGGREGATED, replace(ENCODE, encode_fallback=True), []),
        (Role.PREFILL, PeerConfig(), [[WorkerType.Decode]]),
        (Role.PREFILL, ENCODE, [[WorkerType.Decode, WorkerType.Encode]]),
        (Role.PREFILL, replace(ENCODE, encode_fallback=True), [[WorkerType.Decode]]),
        (Role.DECODE, PeerConfig(), [[WorkerType.Prefill]]),
        (Role.ENCODE, PeerConfig(), [[WorkerType.Prefill, WorkerType.Decode], [WorkerType.Aggregated]]),
    ],
)
def test_each_role_needs_the_peers_without_which_it_cannot_answer(
    role: Role, peers: PeerConfig, expected: list[list[WorkerType]]
) -> None:
    assert needs(role, peers) == expected


def test_the_model_card_tells_the_engines_limits_and_the_schema() -> None:
    config = RuntimeConfig(default_thinking_mode="on", kv_state_endpoint="dyn://a.b.c")
    card = runtime_config(
        INFO, config, ModelConfig(tool_call_parser="hermes", reasoning_parser="basic"), Role.PREFILL
    )
    assert (card.context_length, card.total_kv_blocks, card.max_num_seqs, card.max_num_batched_tokens) == (
        100,
        3,
        4,
        5,
    )
    assert (card.tool_call_parser, card.reasoning_parser, card.enable_local_indexer) == (
        "hermes",
        "basic",
        True,
    )
    data = {key: json.loads(value) for key, value in card.runtime_data.items()}
    assert data["dynamo_trtllm_schema"] == "2"
    assert data["default_thinking_mode"] == "on"
    assert data["token_budget"] == {
        "combined_limit": 100,
        "reject_prompt_overflow": False,
        "reject_total_overflow": False,
    }


def test_a_decode_worker_keeps_no_index_of_kv_events() -> None:
    assert runtime_config(INFO, RuntimeConfig(), ModelConfig(), Role.DECODE).enable_local_indexer is False


def test_the_canary_asks_for_one_token_and_a_payload_of_the_user_replaces_it() -> None:
    payload = health_check_payload(RuntimeConfig())
    assert (payload["_HEALTH_CHECK"], payload["token_ids"], payload["stop_conditions"]["max_tokens"]) == (
        True,
        [1],
        1,
    )
    own = health_check_payload(RuntimeConfig(health_check_payload={"token_ids": [4]}))
    assert own == {"_HEALTH_CHECK": True, "token_ids": [4]}


def test_what_dynamos_rust_side_reads_from_the_environment_is_set_before_joining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, str | None] = {}

    def join(*args: Any, **options: Any) -> None:
        seen.update(
            {name: os.environ.get(name) for name in ("DYN_ENGINE_REQUEST_LIMIT", "DYN_TCP_TLS_INSECURE")}
        )
        raise Exception("no etcd")

    monkeypatch.setattr(runtime, "create_runtime", join)
    monkeypatch.setenv("DYN_ENGINE_REQUEST_LIMIT", "1")
    monkeypatch.setenv("DYN_TCP_TLS_INSECURE", "1")
    with pytest.raises(StartupError):
        runtime.connect(
            RuntimeConfig(environment={"DYN_ENGINE_REQUEST_LIMIT": "9", "DYN_TCP_TLS_INSECURE": None})
        )
    assert seen == {"DYN_ENGINE_REQUEST_LIMIT": "9", "DYN_TCP_TLS_INSECURE": None}


def test_a_runtime_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise Exception("no etcd")

    monkeypatch.setattr(runtime, "create_runtime", refuse)
    with pytest.raises(StartupError, match="cannot join Dynamo with discovery etcd and request plane tcp"):
        runtime.connect(RuntimeConfig())


@pytest.mark.asyncio
async def test_a_model_is_a_directory_the_demo_or_a_name_that_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dynamo.llm

    async def fetch(name: str) -> str:
        if name == "org/known":
            return "/cache/known"
        raise OSError("https://hub.example/404")

    monkeypatch.setattr(dynamo.llm, "fetch_model", fetch)
    assert await model_files.resolve_model(str(tmp_path)) == str(tmp_path)
    assert await model_files.resolve_model("demo") == str(model_files.DEMO_DIRECTORY)
    assert await model_files.resolve_model("org/known") == "/cache/known"
    with pytest.raises(
        StartupError, match="is neither a directory nor a model that can be fetched"
    ) as caught:
        await model_files.resolve_model("org/unknown")
    assert "hub.example" not in caught.value.message
    with pytest.raises(StartupError, match="is not a directory on this machine"):
        await model_files.resolve_model(str(tmp_path / "none"))


def test_the_demo_models_are_shipped() -> None:
    shipped = [name for name, path in model_files.DEMO_MODELS.items() if (path / "config.json").is_file()]
    assert shipped == ["demo", "demo-audio"]


@pytest.mark.asyncio
async def test_an_endpoint_that_cannot_be_served_ends_the_run_in_one_sentence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: Any, **options: Any) -> None:
        raise Exception("Failed to resolve configured TCP RPC host")

    monkeypatch.setattr(FakeEndpoint, "serve_endpoint", refused)
    ended = await outcome(world.run())
    assert isinstance(ended, StartupError)
    assert (
        str(ended)
        == "cannot serve dyn://dynamo.tensorrt_llm.generate: Failed to resolve configured TCP RPC host"
    )
