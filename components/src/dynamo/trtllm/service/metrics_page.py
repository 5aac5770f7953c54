"""This worker's part of Dynamo's metrics page (`DYN_SYSTEM_PORT`):
what the owners of the metrics give out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from dynamo.common.utils.prometheus import register_engine_metrics_callback
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.runtime import Endpoint
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dynamo.trtllm import metrics
from dynamo.trtllm.config import Role, WorkerConfig
from dynamo.trtllm.metrics import Counter, Metric, Readings, Series, merged
from dynamo.trtllm.stages import Distribution, Durations


class MetricsPage(Collector):
    """Shows the declared metrics of one role, of the parts that this worker has;
    values of one series are added."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._sources: list[Callable[[], Readings]] = []
        self._durations: list[Durations] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def add(self, *sources: Callable[[], Readings]) -> None:
        """Show what the `sources` return, asked anew each time that the page is read."""
        self._sources += sources

    def add_durations(self, durations: Durations) -> None:
        """Show what `durations` holds."""
        self._durations.append(durations)

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

    def collect(self) -> Iterator[Family]:
        yield from self._values()
        for durations in self._durations:
            yield from self._histograms(durations)

    def _values(self) -> Iterator[Family]:
        readings = merged(*(read() for read in self._sources))
        by_metric: dict[Metric, list[tuple[tuple[str, ...], float]]] = {}
        for key, value in readings.items():
            metric, labels = key if isinstance(key, Series) else (key, ())
            by_metric.setdefault(metric, []).append((labels, value))
        for metric in metrics.METRICS:
            if metric in by_metric and self._role in metric.roles:
                yield self._family(metric, sorted(by_metric[metric]))

    def _family(self, metric: Metric, values: list[tuple[tuple[str, ...], float]]) -> Family:
        kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for labels, value in values:
            family.add_metric(self._filled(metric, labels), value)
        return family

    def _histograms(self, durations: Durations) -> Iterator[Family]:
        families: dict[Metric, HistogramMetricFamily] = {}
        bounds = [*map(floatToGoString, metrics.BUCKETS_S), "+Inf"]
        for (metric, labels), found in sorted(durations.readings().items(), key=_by_declaration):
            if self._role not in metric.roles:
                continue
            if metric not in families:
                families[metric] = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            buckets = list(zip(bounds, accumulate(found.counts), strict=True))
            families[metric].add_metric(self._filled(metric, labels), buckets, found.sum_s)
        yield from families.values()

    def _filled(self, metric: Metric, labels: tuple[str, ...]) -> list[str]:
        """`labels` with this worker's role at its place."""
        rest = iter(labels)
        return [self._role.value if name == metrics.ROLE else next(rest) for name in metric.labels]


def _by_declaration(item: tuple[Series, Distribution]) -> tuple[int, tuple[str, ...]]:
    """The order of the page."""
    series, _ = item
    return metrics.METRICS.index(series.metric), series.labels
