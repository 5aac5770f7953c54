"""The Kubernetes manifests: against the published schema,
and against this project's own command line and configurations."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from dynamo.trtllm.config import Modality, Role, WorkerConfig, default_endpoint
from dynamo.trtllm.utils.trtllm_utils import parse_args
from environment import clean_environment
from multinode.graph_deployment import Component, GraphDeployment
from processes.topologies import TOPOLOGIES

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "launch" / "kubernetes"
TYPES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.ENCODE: "worker", Role.AGGREGATED: "worker"}
WITHOUT_SUFFIX = {"DYN_NAMESPACE": "team-a-graph"}
WITH_SUFFIX = {**WITHOUT_SUFFIX, "DYN_NAMESPACE_WORKER_SUFFIX": "1a2b3c4d"}

__all__ = ["clean_environment"]


def load(topology: str) -> GraphDeployment:
    return GraphDeployment.model_validate(yaml.safe_load((MANIFESTS / f"{topology}.yaml").read_text()))


def command_line(component: Component, stub: Path, environment: dict[str, str]) -> list[str]:
    """The arguments that the worker's module gets in a pod with this environment,
    by running the command on a stand-in."""
    stub.mkdir(exist_ok=True)
    python = stub / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    command = [*component.main.command, *component.main.args]
    path = f"{stub}:{os.environ['PATH']}"
    done = subprocess.run(
        command, env={**environment, "PATH": path}, capture_output=True, text=True, check=True, timeout=60
    )
    words = done.stdout.split("\0")[:-1]
    assert words[:2] == ["-m", "dynamo.trtllm"]
    return words[2:]


def workers(
    topology: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, WorkerConfig]:
    """The configuration of each worker of a manifest, by its name,
    as our own parser reads it in this checkout."""
    monkeypatch.chdir(ROOT)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = {}
    for component in load(topology).spec.components:
        if component.type != "frontend":
            assert component.main.working_dir == "/opt/dynamo-trtllm"
            found[component.name] = parse_args(command_line(component, tmp_path / "stub", environment))
    return found


def test_there_is_one_manifest_for_each_topology() -> None:
    assert sorted(path.stem for path in MANIFESTS.glob("*.yaml")) == sorted(TOPOLOGIES)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_it_fits_the_schema_and_has_one_frontend(topology: str) -> None:
    components = load(topology).spec.components
    assert [component.type for component in components].count("frontend") == 1
    assert len({component.main.image for component in components}) == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_its_workers_are_those_of_the_topology_with_one_model_and_their_own_configurations(
    topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = workers(topology, WITHOUT_SUFFIX, tmp_path, monkeypatch)
    components = {component.name: component for component in load(topology).spec.components}
    assert [config.role.value for config in found.values()] == list(TOPOLOGIES[topology])
    assert len({(config.model.path, config.model.served_names) for config in found.values()}) == 1
    for name, config in found.items():
        assert components[name].type == TYPES[config.role]
        assert config.model.modality is Modality.MULTIMODAL
        assert {origin for origin in config.engine.origins.values() if origin.startswith("file ")} == {
            f"file {config.role.value}.yaml"
        }
        resources = components[name].main.resources
        assert resources is not None
        gpus = config.engine.args.get("tensor_parallel_size", 1) * config.engine.args.get(
            "pipeline_parallel_size", 1
        )
        assert resources.limits["nvidia.com/gpu"] == str(gpus)


@pytest.mark.parametrize("environment", [WITHOUT_SUFFIX, WITH_SUFFIX], ids=["no suffix", "suffix"])
@pytest.mark.parametrize("topology", ["disagg_e_pd", "epd_disagg"])
def test_the_encode_worker_is_called_where_it_serves_in_every_generation_of_workers(
    topology: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = workers(topology, environment, tmp_path, monkeypatch)
    namespace = "-".join(environment.values())
    assert found["Encode"].runtime.endpoint == default_endpoint(Role.ENCODE, namespace)
    callers = {
        name: config.peers.encode_endpoint for name, config in found.items() if config.role is not Role.ENCODE
    }
    caller = "Worker" if topology == "disagg_e_pd" else "Prefill"
    assert callers == {**dict.fromkeys(callers), caller: found["Encode"].runtime.endpoint}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "nvidia.com/v1"),
        (("spec", "services"), {}),
        (("spec", "components", 1, "componentType"), "worker"),
        (("spec", "components", 1, "type"), "encode"),
        (("spec", "components", 1, "replicas"), "1"),
        (("spec", "components", 1, "name"), "frontend"),
        (("spec", "components", 0, "podTemplate", "spec", "containers", 0, "image"), "registry/image:latest"),
        (("spec", "env", 0, "value"), 60000),
        (("metadata", "name"), "a-name-that-is-too-long-for-the-pods-of-grove"),
    ],
)
def test_the_schema_refuses_what_the_cluster_would_refuse(path: tuple[Any, ...], value: Any) -> None:
    manifest = yaml.safe_load((MANIFESTS / "agg.yaml").read_text())
    target = manifest
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValidationError):
        GraphDeployment.model_validate(manifest)
