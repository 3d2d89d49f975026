"""The store's replicas as metrics: `loadout_inference_store_*`, read when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_svc.replicas import Replicas

MAX_LABELS = 32
"""Replicas shown by address; what more there are is shown together."""
REST = "others"


class ReplicaCollector(Collector):
    """Shows the replicas that there are now: addresses of the past are no labels for ever."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        healthy: Counter[str] = Counter()
        known: Counter[str] = Counter()
        pulls: Counter[tuple[str, str]] = Counter()
        pulled_bytes: Counter[str] = Counter()
        for index, status in enumerate(self._replicas.statuses()):
            label = status.address if index < MAX_LABELS else REST
            known[label] += 1
            healthy[label] += status.is_in
            pulled_bytes[label] += status.pulled_bytes
            for result, count in status.pulls.items():
                pulls[label, result] += count
        yield _family(
            GaugeMetricFamily,
            "store_replicas_healthy",
            "Replicas of the store that are asked: 1, or 0 while it is passed over.",
            {(label,): healthy[label] for label in known},
            "replica",
        )
        yield _family(
            CounterMetricFamily,
            "store_pulls",
            "Image streams from a replica that ended.",
            pulls,
            "replica",
            "result",
        )
        yield _family(
            CounterMetricFamily,
            "store_pulled_bytes",
            "Bytes of images from a replica.",
            {(label,): pulled_bytes[label] for label in known},
            "replica",
        )
        yield CounterMetricFamily(
            "loadout_inference_store_failovers",
            "Pulls and questions that went on at another replica.",
            value=self._replicas.num_failovers,
        )


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_text: str,
    values: dict[tuple[str, ...], int] | Counter[tuple[str, str]],
    *labels: str,
) -> Metric:
    family = kind(f"loadout_inference_{name}", help_text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
