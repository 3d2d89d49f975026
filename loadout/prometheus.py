"""Reads a Prometheus endpoint of a service, as any scraper would."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadout.errors import NotFound, Unavailable

TIMEOUT_S = 5.0


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
        """Sum of the samples of `name` whose labels include `labels`; 0 if there are none."""
        return sum(sample.value for sample in self.select(name, **labels))

    def one(self, name: str, **labels: str) -> float:
        """The value of the only such sample. Raises NotFound unless there is exactly one."""
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
            return parse(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Unavailable(f"no metrics at {address}: {error}", code="UNAVAILABLE") from error
