"""Reads a Prometheus endpoint of a service, as any scraper would."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from loadout.errors import NotFound, Unavailable

TIMEOUT_S = 5.0
MAX_BYTES = 32 << 20
"""A thousand times what our services answer."""


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape. Counters are named with their `_total`."""

    samples: tuple[Sample, ...]

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples of `name` whose labels include `labels`; 0 without any."""
        return sum(sample.value for sample in self.select(name, **labels))

    def one(self, name: str, **labels: str) -> float:
        """Returns the only such value. Raises NotFound if there is not exactly one."""
        found = self.select(name, **labels)
        if len(found) != 1:
            raise NotFound(f"{len(found)} metrics are {name} {labels}", code="NOT_FOUND")
        return found[0].value

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        return tuple(
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def quantile(share: float, now: Metrics, before: Metrics, name: str) -> float | None:
    """Returns a quantile of a histogram, in seconds, of the observations between two scrapes,
    interpolated within its bucket as Prometheus does. None: there were none."""
    counts: dict[float, float] = {}
    for sign, metrics in ((1, now), (-1, before)):
        for sample in metrics.select(f"{name}_bucket"):
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sign * sample.value
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    wanted, low, below = share * counts[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if bound == float("inf"):
                return low
            within = counts[bound] - below
            return low + (bound - low) * ((wanted - below) / within if within else 1.0)
        low, below = bound, counts[bound]
    return low


def parse(text: str) -> Metrics:
    families = text_string_to_metric_families(text)
    return Metrics(
        tuple(
            Sample(sample.name, dict(sample.labels), sample.value)
            for family in families
            for sample in family.samples
        )
    )


def scrape(address: str) -> Metrics:
    """Reads http://`address`/metrics. Raises Unavailable."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return parse(text.decode())
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise Unavailable(
            f"no metrics at {address}: {reason}; is it a running service's --metrics-listen?",
            code="UNAVAILABLE",
        ) from error
