"""The alerts' thresholds, which panels show."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models

GOOD, BAD = "green", "red"


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold: bad above `value`, or below it if `is_floor`. `alert` is the name of the alert
    with this number in its expression, or ""."""

    value: float
    alert: str = ""
    is_floor: bool = False

    def thresholds(self) -> builders.ThresholdsConfig:
        below, above = (BAD, GOOD) if self.is_floor else (GOOD, BAD)
        steps = [models.Threshold(color=below), models.Threshold(color=above, value=self.value)]
        return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def unlimited() -> builders.ThresholdsConfig:
    """Returns a threshold that no value exceeds; by default Grafana shows values over 80 in red."""
    steps = [models.Threshold(color=GOOD)]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


ANY = Limit(1)
FAILED_GENERATIONS = Limit(0.05, "LoadoutInferenceErrors")
QUEUE = Limit(8, "LoadoutQueueGrows")
ENGINE_SILENT = Limit(60, "LoadoutEngineSilent")
PREEMPTIONS = Limit(0.1, "LoadoutKvPagesExhausted")
LOAD = Limit(2.5, "LoadoutColdLoadsSlow")
THRASH = Limit(0.1, "LoadoutThrash")
PINNED = Limit(0.5, "LoadoutPinsCrowdOut")
FAILED_STORE_CALLS = Limit(0.05, "LoadoutStoreErrors")
FREE_VOLUME = Limit(0.1, "LoadoutStoreVolumeFull", is_floor=True)
