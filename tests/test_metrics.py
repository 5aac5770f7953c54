"""The declarations of all metrics, against Prometheus' rules, Dynamo's names and README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo import prometheus_names as theirs
from dynamo.trtllm import metrics
from dynamo.trtllm.metrics import METRICS, Counter, Gauge, Metric

README = Path(__file__).parent.parent / "README.md"


def name_of(metric: Metric) -> str:
    return metric.name


def test_names_are_declared_once() -> None:
    assert len(METRICS) > 30
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=name_of)
def test_a_metric_is_named_by_prometheus_rules_and_explained(metric: Metric) -> None:
    assert re.fullmatch(r"dynamo_(trtllm|component)_[a-z0-9_]+[a-z]", metric.name)
    assert metric.name.endswith("_total") == isinstance(metric, Counter)
    for unit in ("bytes", "seconds"):
        assert (metric.name.removesuffix("_total").endswith(f"_{unit}")) == (metric.unit == unit)
    assert re.fullmatch(r"[A-Z].+\.", metric.help)
    assert metric.roles
    assert isinstance(metric, (Counter, Gauge, metrics.Histogram))


def test_what_dynamo_has_a_name_for_has_dynamos_name() -> None:
    component, ours = theirs.name_prefix.COMPONENT, "dynamo_trtllm"
    assert metrics.TOTAL_BLOCKS.name == f"{component}_{theirs.kvstats.TOTAL_BLOCKS}"
    assert metrics.CACHE_USAGE.name == f"{component}_{theirs.kvstats.GPU_CACHE_USAGE_PERCENT}"
    assert metrics.CACHE_HIT_RATE.name == f"{component}_{theirs.kvstats.KV_CACHE_HIT_RATE}"
    assert metrics.CACHE_HIT_RATE.labels == (theirs.labels.DP_RANK,)
    assert metrics.MODEL_LOAD_TIME.name == f"{component}_{theirs.model_info.LOAD_TIME_SECONDS}"
    assert metrics.REQUESTS.name == f"{ours}_{theirs.work_handler.REQUESTS_TOTAL}"
    assert metrics.INFLIGHT_REQUESTS.name == f"{ours}_{theirs.work_handler.INFLIGHT_REQUESTS}"
    assert metrics.REQUEST_DURATION.name == f"{ours}_{theirs.work_handler.REQUEST_DURATION_SECONDS}"
    assert metrics.TIME_TO_FIRST_TOKEN.name == f"{ours}_{theirs.frontend_service.TIME_TO_FIRST_TOKEN_SECONDS}"
    assert metrics.STAGE_DURATION.name == f"{ours}_{theirs.frontend_perf.STAGE_DURATION_SECONDS}"
    assert metrics.ENGINE_OUTPUT_TOKENS.name == f"{ours}_engine_{theirs.frontend_service.OUTPUT_TOKENS_TOTAL}"
    assert metrics.ENGINE_QUEUED.name == f"{ours}_engine_{theirs.frontend_service.QUEUED_REQUESTS}"
    assert metrics.ENGINE_ACTIVE.name == f"{ours}_engine_{theirs.frontend_service.ACTIVE_REQUESTS}"


def test_the_readmes_tables_of_metrics_are_the_declarations() -> None:
    assert metrics.with_tables(README.read_text()) == README.read_text(), (
        "python -m dynamo.trtllm.metrics README.md writes the tables"
    )


def test_the_tables_hold_every_metric_and_every_stage() -> None:
    named = re.findall(r"^\| `([a-z_]+)` \|", README.read_text(), re.MULTILINE)
    assert {metric.name for metric in METRICS} <= set(named)
    assert {stage.value for stage in metrics.STAGES} <= set(named)
