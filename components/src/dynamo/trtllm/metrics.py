"""What this worker shows on Dynamo's metrics page (`DYN_SYSTEM_PORT`), read from the parts at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dynamo.common.utils.prometheus import register_engine_metrics_callback
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.runtime import Endpoint
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo.trtllm.config import WorkerConfig
from dynamo.trtllm.frontend.endpoint import Egress

PREFIX = "dynamo_trtllm_"


class WorkerMetrics(Collector):
    """Requests by outcome, requests in flight, and every gauge that a source names (`*_total` are counters)."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self._sources: list[tuple[str, Callable[[], Mapping[str, float]]]] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def add_source(self, group: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show what `read` returns as `dynamo_trtllm_<group>_<name>`."""
        self._sources.append((group, read))

    def expose(self, endpoint: Endpoint, config: WorkerConfig) -> None:
        """Add these metrics to the endpoint's page, with Dynamo's own labels."""
        namespace, component, name = parse_endpoint(config.runtime.endpoint)
        register_engine_metrics_callback(
            endpoint,
            self.registry,
            namespace_name=namespace,
            component_name=component,
            endpoint_name=name,
            model_name=config.model.name,
        )

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(f"{PREFIX}requests", "Requests by how they ended.", labels=["outcome"])
        for outcome, count in sorted(self._egress.outcomes.items()):
            requests.add_metric([outcome], count)
        yield requests
        yield GaugeMetricFamily(f"{PREFIX}requests_in_flight", "Requests that have not ended.", value=self._egress.in_flight)
        for group, read in self._sources:
            for key, value in sorted(read().items()):
                name = f"{PREFIX}{group}_{key}"
                family = CounterMetricFamily if key.endswith("_total") else GaugeMetricFamily
                yield family(name, f"{key.replace('_', ' ')} ({group})", value=value)
