"""The store's replicas as metrics: `loadout_inference_store_*`, read when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from inference_svc.metrics.definitions import family, sample
from inference_svc.store.replicas import Replicas

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
            healthy[label] += status.is_healthy
            pulled_bytes[label] += status.pulled_bytes
            for result, count in status.pulls.items():
                pulls[label, result] += count
        yield _family("store_replicas_healthy", (((label,), healthy[label]) for label in known))
        yield _family("store_pulls", pulls.items())
        yield _family("store_pulled_bytes", (((label,), pulled_bytes[label]) for label in known))
        yield sample("store_failovers", self._replicas.num_failovers)


def _family(key: str, values: Iterable[tuple[tuple[str, ...], int]]) -> Metric:
    made = family(key)
    for labels, value in values:
        made.add_metric(labels, value)
    return made
