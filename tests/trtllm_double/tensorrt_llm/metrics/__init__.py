"""`MetricsCollector` (tensorrt_llm/metrics): Prometheus metrics of requests, named `trtllm_*`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MetricsCollector:
    """Counts finished requests. The real one has more metrics; callers only create it and hand results to
    it."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter

        self.labels = dict(labels)
        self.counter_request_success = Counter(
            "trtllm_request_success_total",
            "Count of successfully processed requests.",
            [*self.labels, "finished_reason"],
        )

    def log_request_metrics_dict(self, metrics_dict: Mapping[str, Any]) -> None:
        if metrics_dict:
            reason = str(metrics_dict.get("finished_reason", "unknown"))
            self.counter_request_success.labels(**self.labels, finished_reason=reason).inc(1)

    log_metrics_dict = log_request_metrics_dict
