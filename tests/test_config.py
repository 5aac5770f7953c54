from __future__ import annotations

import dataclasses

import pytest

from dynamo.trtllm.config import (
    MediaConfig,
    ModelConfig,
    Role,
    TransferConfig,
    WorkerConfig,
    default_endpoint,
)
from dynamo.trtllm.engine_flags import DEFAULT_ENGINE_ARGS
from dynamo.trtllm.invocation import Invocation


@pytest.mark.parametrize(
    ("role", "endpoint"),
    [
        (Role.AGGREGATED, "dyn://n.tensorrt_llm.generate"),
        (Role.DECODE, "dyn://n.tensorrt_llm.generate"),
        (Role.PREFILL, "dyn://n.prefill.generate"),
        (Role.ENCODE, "dyn://n.tensorrt_llm_encode.generate"),
    ],
)
def test_each_role_has_an_endpoint_of_its_own(role: Role, endpoint: str) -> None:
    assert default_endpoint(role, "n") == endpoint


def test_the_first_served_name_is_the_models_and_the_path_stands_in_for_it() -> None:
    assert ModelConfig(path="p").name == "p"
    assert ModelConfig(path="p", served_names=("a", "b")).name == "a"


def test_every_layer_is_frozen() -> None:
    config = WorkerConfig()
    for layer in (
        config,
        config.runtime,
        config.model,
        config.media,
        config.engine,
        config.peers,
        config.transfer,
        Invocation(config=config),
    ):
        field = dataclasses.fields(layer)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layer, field, None)


def test_documented_defaults_hold() -> None:
    assert (MediaConfig.max_file_bytes, MediaConfig.max_request_bytes) == (50 << 20, 200 << 20)
    assert (TransferConfig.pool_bytes, TransferConfig.time_to_live_s) == (256 << 20, 60.0)
    assert DEFAULT_ENGINE_ARGS["kv_cache_config"] == {"tokens_per_block": 32, "free_gpu_memory_fraction": 0.9}
