"""Defines metrics, and the registry that makes and exports them.

A metric's key is its name without the service's prefix, and the whole name where others chose it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from servicekit.telemetry.histogram import HistogramState

Labels = TypeVar("Labels", bound=tuple[str, ...])
"""Label values, in the definition's order."""

# Otherwise each counter and histogram has a further series: when it was created.
prometheus_client.disable_created_metrics()


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
    Kind.SUMMARY: SummaryMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Definition:
    """Defines a metric. `name` is without the suffix that Prometheus adds to counters. `bounds_s`
    are the buckets of a histogram that is counted in its registry; a histogram that is read at
    every scrape brings its own."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds_s: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


@dataclass(frozen=True, slots=True)
class Namespace:
    """Defines metrics whose names share a prefix."""

    prefix: str = ""

    def counter(self, name: str, help_text: str, *labels: str) -> Definition:
        return Definition(self.prefix + name, Kind.COUNTER, help_text, labels)

    def gauge(self, name: str, help_text: str, *labels: str) -> Definition:
        return Definition(self.prefix + name, Kind.GAUGE, help_text, labels)

    def histogram(
        self, name: str, help_text: str, *labels: str, bounds_s: tuple[float, ...] = ()
    ) -> Definition:
        return Definition(self.prefix + name, Kind.HISTOGRAM, help_text, labels, bounds_s)

    def summary(self, name: str, help_text: str, *labels: str) -> Definition:
        return Definition(self.prefix + name, Kind.SUMMARY, help_text, labels)


_PLAIN = Namespace()

PROCESS = (
    _PLAIN.counter("process_cpu_seconds", "CPU time of the process that serves the metrics."),
    _PLAIN.gauge("process_resident_memory_bytes", "Resident memory of the process."),
    _PLAIN.gauge("process_virtual_memory_bytes", "Virtual memory of the process."),
    _PLAIN.gauge("process_start_time_seconds", "Start time of the process, as unix time."),
    _PLAIN.gauge("process_open_fds", "Open file descriptors of the process."),
    _PLAIN.gauge("process_max_fds", "Limit of open file descriptors of the process."),
)
"""The metrics that every MetricRegistry exports of its process."""


FILES_REFUSED = "files_refused"


def define_reloads(namespace: Namespace) -> Definition:
    return namespace.gauge(
        FILES_REFUSED,
        "1 while the service cannot use the changed files of this setting and keeps "
        "their previous contents; else 0.",
        "setting",
    )


class Definitions(Mapping[str, Definition]):
    """Holds a service's definitions by key, and by the sections of their documentation."""

    def __init__(self, prefix: str, sections: Mapping[str, Sequence[Definition]]) -> None:
        self.prefix = prefix
        self.sections = sections
        self._by_key = {
            definition.name.removeprefix(prefix): definition
            for section in sections.values()
            for definition in section
        }

    def __getitem__(self, key: str) -> Definition:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def family(self, key: str) -> Any:
        """Returns an empty family of prometheus_client."""
        found = self[key]
        return _FAMILIES[found.kind](found.name, found.help, labels=found.labels)

    def sample(self, key: str, value: float, *labels: str) -> Metric:
        """Returns a family of one sample."""
        return self.samples(key, {labels: value})

    def samples(self, key: str, values: Mapping[Labels, float]) -> Metric:
        """Returns a family with a sample for each tuple of label values."""
        made = self.family(key)
        for labels, value in values.items():
            made.add_metric(labels, float(value))
        return made

    def histograms(self, key: str, states: Mapping[Labels, HistogramState]) -> Metric:
        """Returns a family with a histogram for each tuple of label values."""
        made = self.family(key)
        for labels, state in states.items():
            bounds = [*map(floatToGoString, state.bounds), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(state.counts)), strict=True))
            made.add_metric(labels, buckets, state.sum_seconds)
        return made


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a value of the metric `key`; `labels` are label values."""

    key: str
    value: float
    labels: tuple[str, ...] = ()


class ScrapeCollector(Collector):
    """Yields families at each scrape, and none when it is registered."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class MetricRegistry(CollectorRegistry):
    """Makes a service's metrics from its definitions, and exports the process's metrics."""

    def __init__(self, definitions: Definitions) -> None:
        super().__init__()
        self._definitions = definitions
        ProcessCollector(registry=self)

    def counter(self, key: str) -> Counter:
        found = self._definitions[key]
        return Counter(found.name, found.help, found.labels, registry=self)

    def gauge(self, key: str) -> Gauge:
        found = self._definitions[key]
        return Gauge(found.name, found.help, found.labels, registry=self)

    def histogram(self, key: str) -> Histogram:
        found = self._definitions[key]
        assert found.bounds_s, f"{key} is defined without buckets"
        return Histogram(
            found.name, found.help, found.labels, buckets=found.bounds_s, registry=self
        )

    def collect_families(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Exports the families that `collect` returns, called at every scrape in its thread."""
        self.register(ScrapeCollector(collect))

    def collect_samples(self, read: Callable[[], Iterable[Sample]]) -> None:
        """Exports the samples that `read` returns, called at every scrape in its thread."""

        def collect() -> Iterable[Metric]:
            by_key: dict[str, dict[tuple[str, ...], float]] = {}
            for sample in read():
                by_key.setdefault(sample.key, {})[sample.labels] = sample.value
            return [self._definitions.samples(key, values) for key, values in by_key.items()]

        self.collect_families(collect)
