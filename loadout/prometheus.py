"""Reads a service's Prometheus endpoint, as any scraper would."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from loadout.errors import NotFound, Unavailable

TIMEOUT_S = 5.0
MAX_BYTES = 32 << 20
"""A thousand times the size of our services' answers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a metric."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The samples of one scrape. Names of counters end with `_total`."""

    samples: tuple[Sample, ...]

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of matching samples, 0 if there are none.

        Args:
            name: Name of the samples.
            **labels: Labels that the samples must have.
        """
        return sum(sample.value for sample in self.select(name, **labels))

    def one(self, name: str, **labels: str) -> float:
        """Returns the value of the only matching sample.

        Args:
            name: Name of the sample.
            **labels: Labels that the sample must have.

        Raises:
            NotFound: There is not exactly one matching sample.
        """
        found = self.select(name, **labels)
        if len(found) != 1:
            raise NotFound(f"{len(found)} metrics match {name} {labels}, not one", code="NOT_FOUND")
        return found[0].value

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """Returns all matching samples.

        Args:
            name: Name of the samples.
            **labels: Labels that the samples must have.
        """
        return tuple(
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def quantile(share: float, now: Metrics, before: Metrics, name: str) -> float | None:
    """Returns a quantile of a histogram's observations between two scrapes.

    It is interpolated within its bucket, as in Prometheus.

    Args:
        share: The quantile, 0 to 1.
        now: The later scrape.
        before: The earlier scrape.
        name: Name of the histogram, without "_bucket".

    Returns:
        The quantile in the histogram's unit, or None if there were no observations.
    """
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
    """Parses metrics in Prometheus' text format.

    Args:
        text: Body of a scrape.

    Returns:
        Its samples.

    Raises:
        ValueError: The text is not in this format.
    """
    families = text_string_to_metric_families(text)
    return Metrics(
        tuple(
            Sample(sample.name, dict(sample.labels), sample.value)
            for family in families
            for sample in family.samples
        )
    )


def scrape(address: str) -> Metrics:
    """Reads the metrics of a service.

    Args:
        address: Metrics address of the service, "host:port".

    Returns:
        The samples of http://`address`/metrics.

    Raises:
        Unavailable: Nothing answers there, or not with metrics.
    """
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
            f"no metrics at {address}: {reason}; is it the --metrics-listen of a running service?",
            code="UNAVAILABLE",
        ) from error
