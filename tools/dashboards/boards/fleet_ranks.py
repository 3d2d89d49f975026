"""Panels of the fleet overview: the processes that compute a model together, of servers that have
several."""

from __future__ import annotations

from tools.dashboards.panels import Panel, Query, lines
from tools.dashboards.queries import INFERENCE, REPLICA, WHICH


def panels() -> list[Panel]:
    by = f"{REPLICA}, rank"
    which = f"{WHICH}, rank {{{{rank}}}}"
    step_s, exchange_s = (
        INFERENCE.rate(f"rank_{name}_seconds_total", by) for name in ("step", "exchange")
    )
    return [
        lines(
            "Ranks: computing",
            "Share of time in which each process of --tensor-parallel or --pipeline-parallel "
            "computes, without exchanges. A line above the others of its stage: that process has "
            "less of its processors than they have.",
            "percentunit",
            Query(f"{step_s} - {exchange_s}", which),
            maximum=1,
        ),
        lines(
            "Ranks: waiting for others",
            "Share of a step in exchanges with the other processes. The slowest process of a stage "
            "waits least. Stages also wait while others compute.",
            "percentunit",
            Query(f"{exchange_s} / ({step_s} > 0)", which),
            maximum=1,
        ),
        lines(
            "Time of a rank's step",
            "Mean time of a step, by process.",
            "s",
            Query(f"{step_s} / ({INFERENCE.rate('rank_steps_total', by)} > 0)", which),
        ),
        lines(
            "Resident memory of ranks",
            "Each process has a part of the weights, and pages and an arena of its own.",
            "bytes",
            Query(INFERENCE.sum("rank_resident_bytes", by), which),
        ),
        lines(
            "Ranks that answer",
            "1 while a process answers rank 0. After 30 seconds of silence the server ends.",
            "short",
            Query(INFERENCE.sum("rank_up", by), which),
            maximum=1,
        ),
        lines(
            "Bytes pulled by ranks",
            "Each process pulls its part of each adapter.",
            "binBps",
            Query(INFERENCE.rate("rank_pulled_bytes_total", by), which),
        ),
    ]
