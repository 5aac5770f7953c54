"""One command line: the worker's configuration, and the flags that fill no part of the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.trtllm.config import WorkerConfig
from dynamo.trtllm.flag import flag
from dynamo.trtllm.roles import WITH_KV_CACHE
from dynamo.trtllm.values import FILE, GIGABYTES, JSON_OBJECT, SWITCH, TEXT, choice


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `--check` looks at beside the configuration itself."""

    against: Path | None = flag(
        "--against",
        FILE,
        None,
        "With --check: engine configuration of the other side to compare with.",
        in_environment=False,
    )
    """The other side of a prefill and decode pair."""
    engine_report: bool = flag(
        "--engine-report",
        SWITCH,
        False,
        "With --check: print the installed TensorRT-LLM's signatures beside the record.",
        in_environment=False,
    )
    live: bool = flag("--live", SWITCH, False, "With --check: ask the running peers.", in_environment=False)
    gpu_memory_gb: float | None = flag(
        "--gpu-memory-gb",
        GIGABYTES,
        None,
        "With --check: memory of one GPU; left out, the driver is asked.",
        in_environment=False,
    )


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Flags that fill no part of the worker by themselves: `utils/trtllm_utils.py` makes values of them.

    None: not said.
    """

    enable_multimodal: bool | None = flag(
        "--enable-multimodal", SWITCH, None, "The same as --modality multimodal.", group="Model"
    )
    extra_engine_args: Path | None = flag(
        "--extra-engine-args", FILE, None, "YAML file of engine arguments under TensorRT-LLM's names."
    )
    override_engine_args: Mapping[str, Any] | None = flag(
        "--override-engine-args",
        JSON_OBJECT,
        None,
        "JSON object of engine arguments that beat every other source; changes only the keys it names. "
        "--trtllm.GROUP.KEY VALUE says one of them at a time.",
    )
    publish_events_and_metrics: bool | None = flag(
        "--publish-events-and-metrics",
        SWITCH,
        None,
        "The same as --publish-kv-events with --publish-metrics.",
        roles=WITH_KV_CACHE,
    )
    check: bool | None = flag(
        "--check",
        SWITCH,
        None,
        "Check the configuration without loading weights, print the plan and every fault, and end.",
        in_environment=False,
        group="Check",
    )
    store_kv: str | None = flag(
        "--store-kv",
        choice("etcd", "file", "mem"),
        None,
        "The same as --discovery-backend.",
        in_environment=False,
        group="Older flags",
    )
    use_nixl_connect: bool | None = flag(
        "--use-nixl-connect",
        SWITCH,
        None,
        "Does nothing any more.",
        in_environment=False,
        group="Older flags",
        no_op="it does nothing: transfers always go through NIXL",
    )
    migration_limit: str | None = flag(
        "--migration-limit",
        TEXT,
        None,
        "Does nothing any more: it is a flag of the frontend now.",
        in_environment=False,
        group="Older flags",
        no_op="it does nothing here: give it to the frontend",
    )


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One command line: the worker to run, or to check without running it. `notes` are lines for the log."""

    config: WorkerConfig
    check: CheckOptions | None = None
    notes: tuple[str, ...] = ()
