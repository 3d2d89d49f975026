"""The store's replicas as metrics: `loadout_inference_store_*`, read at every scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from inference_svc.metrics.definitions import DEFINITIONS
from inference_svc.store.replicas import Replicas

MAX_LABELS = 32
"""Replicas shown by address; further ones are shown together."""
REST = "others"


def replica_metrics(replicas: Replicas) -> Iterator[Metric]:
    """Yields the families of the current replicas only, so that labels of former addresses end."""
    healthy: Counter[str] = Counter()
    known: Counter[str] = Counter()
    pulls: Counter[tuple[str, str]] = Counter()
    pulled_bytes: Counter[str] = Counter()
    for index, status in enumerate(replicas.statuses()):
        label = status.address if index < MAX_LABELS else REST
        known[label] += 1
        healthy[label] += status.is_healthy
        pulled_bytes[label] += status.pulled_bytes
        for result, count in status.pulls.items():
            pulls[label, result] += count
    yield DEFINITIONS.samples(
        "store_replicas_healthy", {(label,): healthy[label] for label in known}
    )
    yield DEFINITIONS.samples("store_pulls", pulls)
    yield DEFINITIONS.samples(
        "store_shared_pulls", {(how,): count for how, count in replicas.shares().items()}
    )
    yield DEFINITIONS.samples(
        "store_pulled_bytes", {(label,): pulled_bytes[label] for label in known}
    )
    yield DEFINITIONS.sample("store_failovers", replicas.num_failovers)
