"""The table of the demo's results, and the hit rates from the services' metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from loadout.demo.adapters import source_of
from loadout.demo.jobs import JOBS, Job
from loadout.demo.traffic import Answer
from loadout.prometheus import Metrics

MIN_EXACT_MATCH = 0.95


@dataclass(frozen=True, slots=True)
class JobResult:
    """`exact_match` is a share; an answer counts only if it is right to the last letter."""

    job: Job
    num_requests: int
    exact_match: float
    median_first_token_s: float

    @property
    def is_good(self) -> bool:
        return self.exact_match >= MIN_EXACT_MATCH


@dataclass(frozen=True, slots=True)
class HitRate:
    """Lookups of one tier, as its service counted them."""

    name: str
    hits: int
    misses: int

    def __str__(self) -> str:
        total = self.hits + self.misses
        rate = f"{self.hits / total:.0%}" if total else "no lookups"
        return f"{self.name} {rate} ({self.hits} of {total})"


def by_job(answers: Sequence[Answer]) -> list[JobResult]:
    """Returns one result per job that had requests, in the jobs' order."""
    results = []
    for job in JOBS:
        own = [answer for answer in answers if answer.task.job is job]
        if own:
            exact = sum(answer.is_exact for answer in own) / len(own)
            first = median(answer.first_token_s for answer in own)
            results.append(JobResult(job, len(own), exact, first))
    return results


def hit_rates(store: Metrics, inference: Metrics) -> list[HitRate]:
    """Returns the hit rates of the store's memory and disk tiers, and of the inference service's
    slots."""
    tiers = [
        _hit_rate(f"store {tier}", store, "loadout_store_tier", tier=tier)
        for tier in ("memory", "disk")
    ]
    return [*tiers, _hit_rate("slots", inference, "loadout_inference_tier", tier="device")]


def _hit_rate(name: str, metrics: Metrics, prefix: str, **labels: str) -> HitRate:
    hits = metrics.one(f"{prefix}_hits_total", **labels)
    misses = metrics.one(f"{prefix}_misses_total", **labels)
    return HitRate(name, int(hits), int(misses))


def table(results: Sequence[JobResult]) -> Table:
    drawn = Table(title="Loadout demo", title_justify="left", title_style="bold")
    for column in ("job", "adapter", "rank", "source", "requests", "exact match", "first token"):
        right = column in ("rank", "requests", "exact match", "first token")
        drawn.add_column(column, justify="right" if right else "left")
    for result in results:
        job = result.job
        drawn.add_row(
            job.title,
            job.name if job.adapter else "none",
            str(job.adapter.rank) if job.adapter else "",
            source_of(job).value if job.adapter else "",
            str(result.num_requests),
            f"{result.exact_match:.1%}",
            f"{result.median_first_token_s * 1000:.0f} ms",
            style="" if result.is_good else "red",
        )
    return drawn
