"""Response headers for clients and proxies that choose replicas: how busy this server is, and
whether a refused call may go to another one.

The format of the load is ORCA's (Open Request Cost Aggregation) as text, which Envoy reads, too.
"""

from __future__ import annotations

LOAD_HEADER = "endpoint-load-metrics"

REFUSED_HEADER = "x-loadout-refused"
"""The reason, in responses to calls that this replica has refused and another one may take. Proxies
see no status details, and calls that failed after a long wait have the same code."""


def load_report(num_requests: int, max_sequences: int, max_queue: int) -> str:
    """Returns the value of LOAD_HEADER. `num_requests` counts running and waiting ones; the
    utilization is 1 when `max_sequences` run, and more when some wait."""
    return (
        f"TEXT application_utilization={num_requests / max_sequences:.4f}"
        f",named_metrics.num_requests={num_requests}"
        f",named_metrics.max_sequences={max_sequences}"
        f",named_metrics.max_queue={max_queue}"
    )
