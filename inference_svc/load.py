"""How busy this server is, as every answer tells it: for clients and proxies that choose replicas.

The format is ORCA's (Open Request Cost Aggregation) as text, which Envoy reads, too.
"""

from __future__ import annotations

LOAD_HEADER = "endpoint-load-metrics"


def load_report(num_requests: int, max_sequences: int, max_queue: int) -> str:
    """The value of LOAD_HEADER. `num_requests` are running and waiting ones together; the
    utilization is 1 when as many run as may at once, and more when some wait."""
    return (
        f"TEXT application_utilization={num_requests / max_sequences:.4f}"
        f",named_metrics.num_requests={num_requests}"
        f",named_metrics.max_sequences={max_sequences}"
        f",named_metrics.max_queue={max_queue}"
    )
