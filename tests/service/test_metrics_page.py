"""The worker's metrics page: declared metrics, of the role and of the parts that the worker has."""

from __future__ import annotations

import re
from time import perf_counter

import pytest
from prometheus_client import generate_latest

from dynamo.trtllm import metrics
from dynamo.trtllm.config import Role
from dynamo.trtllm.metrics import Counter
from dynamo.trtllm.service.metrics_page import MetricsPage
from dynamo.trtllm.stages import Durations, RequestTimes


def lines(page: MetricsPage) -> list[str]:
    """The page without its comments."""
    return [line for line in generate_latest(page.registry).decode().splitlines() if not line.startswith("#")]


def test_the_page_shows_what_its_sources_give_in_the_order_of_the_declarations() -> None:
    page = MetricsPage(Role.PREFILL)
    page.add(
        lambda: {metrics.TRANSFER_OFFERS: 6, metrics.MEDIA_CACHE_BYTES: 5},
        lambda: {
            metrics.REQUESTS.of("failed"): 1,
            metrics.REQUESTS.of("completed"): 2,
            metrics.INFLIGHT_REQUESTS: 3,
        },
    )
    assert lines(page) == [
        'dynamo_trtllm_requests_total{outcome="completed"} 2.0',
        'dynamo_trtllm_requests_total{outcome="failed"} 1.0',
        "dynamo_trtllm_inflight_requests 3.0",
        "dynamo_trtllm_media_cache_current_bytes 5.0",
        "dynamo_trtllm_transfer_offers_total 6.0",
    ]


def test_each_metric_has_its_help_and_type() -> None:
    page = MetricsPage(Role.DECODE)
    page.add(lambda: {metrics.PREFILL_RETRIES: 1, metrics.ENGINE_QUEUED: 2})
    text = generate_latest(page.registry).decode()
    assert "# HELP dynamo_trtllm_prefill_retries_total Requests prefilled again because" in text
    assert "# TYPE dynamo_trtllm_prefill_retries_total counter" in text
    assert "# TYPE dynamo_trtllm_engine_queued_requests gauge" in text


@pytest.mark.parametrize(
    ("role", "shown"),
    [(Role.AGGREGATED, []), (Role.PREFILL, ["dynamo_trtllm_transfer_offers_total 0.0"]), (Role.DECODE, [])],
)
def test_a_role_shows_no_metric_of_another_one(role: Role, shown: list[str]) -> None:
    page = MetricsPage(role)
    page.add(lambda: {metrics.TRANSFER_OFFERS: 0})
    assert lines(page) == shown


def test_values_of_two_parts_for_the_same_series_are_added() -> None:
    page = MetricsPage(Role.AGGREGATED)
    page.add(lambda: {metrics.MEDIA_DECODING.of("small"): 2, metrics.MEDIA_CACHE_ENTRIES: 1})
    page.add(lambda: {metrics.MEDIA_DECODING.of("small"): 3, metrics.MEDIA_DECODING.of("large"): 4})
    assert lines(page) == [
        "dynamo_trtllm_media_cache_entries 1.0",
        'dynamo_trtllm_media_decoding_images{size="large"} 4.0',
        'dynamo_trtllm_media_decoding_images{size="small"} 5.0',
    ]


def test_the_page_is_read_anew_each_time() -> None:
    page, counted = MetricsPage(Role.ENCODE), iter((1, 2))
    page.add(lambda: {metrics.INFLIGHT_REQUESTS: next(counted)})
    assert [lines(page), lines(page)] == [
        ["dynamo_trtllm_inflight_requests 1.0"],
        ["dynamo_trtllm_inflight_requests 2.0"],
    ]


def test_a_new_metric_is_its_declaration_and_the_line_that_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Counter(
        "dynamo_trtllm_tries_total", "tries", "Tries of something new.", (Role.DECODE,), ("how", metrics.ROLE)
    )
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, new))
    page = MetricsPage(Role.DECODE)
    page.add(lambda: {new.of("twice"): 7})
    assert lines(page) == ['dynamo_trtllm_tries_total{how="twice",role="decode"} 7.0']
    row = "| `dynamo_trtllm_tries_total` | counter | tries | how, role | decode | Tries of something new. |"
    assert list(metrics.table())[-1] == row


@pytest.mark.parametrize("role", list(Role))
def test_durations_are_histograms_with_the_workers_role(role: Role) -> None:
    durations = Durations()
    times = RequestTimes(perf_counter())
    times.had_first_output()
    durations.take(times, "completed")
    page = MetricsPage(role)
    page.add_durations(durations)
    shown = lines(page)
    label = f'outcome="completed",role="{role.value}"'
    stage = f'outcome="completed",role="{role.value}",stage="queue"'
    assert f"dynamo_trtllm_request_duration_seconds_count{{{label}}} 1.0" in shown
    assert f'dynamo_trtllm_stage_duration_seconds_bucket{{le="+Inf",{stage}}} 1.0' in shown
    assert f"dynamo_trtllm_stage_duration_seconds_count{{{stage}}} 1.0" in shown
    bounds = re.findall(rf'stage_duration_seconds_bucket{{le="([^"]+)",{stage}}}', "\n".join(shown))
    assert [float(bound) for bound in bounds] == [*metrics.BUCKETS_S, float("inf")]
    assert (f"dynamo_trtllm_time_to_first_token_seconds_count{{{label}}} 1.0" in shown) == (
        role is not Role.ENCODE
    )
