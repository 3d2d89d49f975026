"""A measurement as a file: workload, server, and the figures of each round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadout.benchmark.measure import METRICS, Figures, medians
from loadout.benchmark.workload import Workload
from loadout.types import ServerInfo

FORMAT = 1


class BadResult(Exception):
    """The file is not a measurement; the message says which field is wrong."""


@dataclass(frozen=True, slots=True)
class Result:
    """A measurement. Two measurements are comparable if their `conditions` are equal; `facts` are
    informative. All `rounds` have the same metrics."""

    conditions: dict[str, Any]
    facts: dict[str, Any]
    rounds: list[Figures]

    @property
    def figures(self) -> Figures:
        """Returns the median of each metric over the rounds."""
        return medians(self.rounds)

    def to_json(self) -> str:
        """Returns the content of the measurement's file."""
        document = {
            "format": FORMAT,
            "conditions": self.conditions,
            "facts": self.facts,
            "medians": self.figures,
            "rounds": self.rounds,
        }
        return json.dumps(document, indent=1)


def conditions_of(
    workload: Workload, server: ServerInfo, adapters: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the conditions that the metrics depend on.

    Args:
        workload: The requests.
        server: The measured server.
        adapters: Properties of each adapter.
    """
    limits = server.limits
    return {
        "workload": asdict(workload),
        "adapters": [dict(adapter) for adapter in adapters],
        "server": {
            "base_model": server.base_model,
            "architecture": server.architecture,
            "dtype": server.dtype,
            "device": server.device,
            "kernels": server.kernels,
            "machine": server.machine,
            "max_sequences": limits.max_sequences,
            "max_batch_tokens": limits.max_batch_tokens,
            "max_loras": limits.max_loras,
        },
    }


def parse(text: str) -> Result:
    """Reads a measurement.

    Args:
        text: Text from `Result.to_json`.

    Raises:
        BadResult: The text is not a measurement.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadResult(f"is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadResult(f"is not a measurement of format {FORMAT}")
    conditions, facts = document.get("conditions"), document.get("facts")
    for name, value in (("conditions", conditions), ("facts", facts)):
        if not isinstance(value, dict):
            raise BadResult(f"has no {name}")
    rounds = document.get("rounds")
    if not isinstance(rounds, list) or not rounds:
        raise BadResult("has no rounds")
    assert isinstance(conditions, dict)
    assert isinstance(facts, dict)
    return Result(conditions, facts, [_figures(each, rounds[0]) for each in rounds])


def _figures(value: Any, first: Any) -> Figures:
    if not isinstance(value, dict) or not value or value.keys() != first.keys():
        raise BadResult("has rounds of different metrics")
    for name, figure in value.items():
        if name not in METRICS:
            raise BadResult(f"has an unknown metric {name!r}")
        is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
        if not is_number or not 0 < figure < float("inf"):
            raise BadResult(f"has {figure!r} for {name}")
    return {name: float(figure) for name, figure in value.items()}
