"""What answers tell clients and proxies that choose replicas: how busy this server is, and whether
a refused call may go elsewhere.

The format of the load is ORCA's (Open Request Cost Aggregation) as text, which Envoy reads, too.
"""

from __future__ import annotations

LOAD_HEADER = "endpoint-load-metrics"

REFUSED_HEADER = "x-loadout-refused"
"""In answers to calls that this replica has refused and another one may take: the reason. Proxies
see no details of a status, and its code is also that of what failed after a long wait."""


def load_report(num_requests: int, max_sequences: int, max_queue: int) -> str:
    """The value of LOAD_HEADER. `num_requests` are running and waiting ones together; the
    utilization is 1 when as many run as may at once, and more when some wait."""
    return (
        f"TEXT application_utilization={num_requests / max_sequences:.4f}"
        f",named_metrics.num_requests={num_requests}"
        f",named_metrics.max_sequences={max_sequences}"
        f",named_metrics.max_queue={max_queue}"
    )
